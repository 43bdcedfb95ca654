//! Matrix products.

use ferrotron_tensor::{DType, Error, Result, Stream, Tensor, shape_error};

/// `c = op(a)·op(b) (+ bias) (+ c)`, with `op(a) [m, k]`, `op(b) [k, n]`, `c [m, n]`, `bias [n]`.
///
/// Matrices are row-major with any row stride. `a` and `b` have one type (f32 or bf16), `bias` the same, `c`
/// that type or f32. Sums are kept in f32.
pub struct Gemm<'a> {
    /// Left factor, `[m, k]`, or `[k, m]` with `trans_a`.
    pub a: &'a Tensor,
    /// Use `aᵀ`.
    pub trans_a: bool,
    /// Right factor, `[k, n]`, or `[n, k]` with `trans_b`.
    pub b: &'a Tensor,
    /// Use `bᵀ`.
    pub trans_b: bool,
    /// Added to every row.
    pub bias: Option<&'a Tensor>,
    /// Add to what `c` holds instead of overwriting it.
    pub accumulate: bool,
    /// The result.
    pub c: &'a Tensor,
}

/// Sizes and row strides of a checked product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GemmSizes {
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// Length of the sums.
    pub k: usize,
    /// Row stride of `a` as stored.
    pub lda: usize,
    /// Row stride of `b` as stored.
    pub ldb: usize,
    /// Row stride of `c`.
    pub ldc: usize,
}

impl Gemm<'_> {
    /// What it is for in a linear layer, so that profiles tell the three products apart.
    pub(crate) fn name(&self) -> &'static str {
        match (self.trans_a, self.trans_b) {
            (false, true) => "gemm (output)",
            (false, false) => "gemm (input gradient)",
            (true, false) => "gemm (weight gradient)",
            (true, true) => "gemm (both transposed)",
        }
    }

    /// Checks shapes, strides and types.
    pub fn sizes(&self) -> Result<GemmSizes> {
        let flip = |t: &Tensor, trans: bool| match (t.shape(), trans) {
            ([r, c], false) => Some((*r, *c)),
            ([r, c], true) => Some((*c, *r)),
            _ => None,
        };
        let (a, b, c) = (flip(self.a, self.trans_a), flip(self.b, self.trans_b), flip(self.c, false));
        let fits = match (a, b, c) {
            (Some((m, k)), Some((k2, n)), Some(c)) if k == k2 && c == (m, n) => Some((m, n, k)),
            _ => None,
        };
        let rows_ok = [self.a, self.b, self.c].iter().all(|t| match (t.shape(), t.strides()) {
            ([_, cols], [_, step]) => *step == 1 || *cols <= 1 || t.numel() <= 1,
            _ => false,
        });
        let bias_ok = |n: usize| self.bias.is_none_or(|t| t.shape() == [n] && t.is_contiguous());
        let Some((m, n, k)) = fits.filter(|f| rows_ok && bias_ok(f.1)) else {
            return shape_error(
                "gemm",
                format!(
                    "{:?}{} · {:?}{} + {:?} -> {:?}: the inner sizes must agree and rows be contiguous",
                    self.a.shape(),
                    if self.trans_a { "ᵀ" } else { "" },
                    self.b.shape(),
                    if self.trans_b { "ᵀ" } else { "" },
                    self.bias.map(|t| t.shape().to_vec()),
                    self.c.shape()
                ),
            );
        };
        let dtype = self.a.dtype();
        for (t, also) in [(Some(self.b), dtype), (self.bias, dtype), (Some(self.c), DType::F32)] {
            if let Some(t) = t.filter(|t| t.dtype() != dtype && t.dtype() != also) {
                return Err(Error::DType { op: "gemm", found: t.dtype(), wanted: dtype });
            }
        }
        let ld = |t: &Tensor| t.strides()[0].max(t.shape()[1]);
        Ok(GemmSizes { m, n, k, lda: ld(self.a), ldb: ld(self.b), ldc: ld(self.c) })
    }
}

/// Matrix products.
pub trait GemmKernels {
    /// See [`Gemm`].
    fn gemm(&self, s: &Stream, g: &Gemm) -> Result<()>;
}
