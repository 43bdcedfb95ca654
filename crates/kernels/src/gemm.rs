//! GEMMs, and the fused kernels of a linear layer.

pub(crate) mod batched;
pub(crate) mod choices;
pub(crate) mod linear;

use crate::{ActivationKernels, Fp8Gemm};
use batched::BatchedGemm;
use choices::{GemmChoice, GemmLibrary, NewChoices};
use ferrotron_tensor::{Category, DType, Error, Result, Stream, Tensor, shape_error};
use linear::{LinearAct, LinearActBackward, LinearWgrad};

/// `c = op(a)·op(b) (+ bias) (+ c)`, with `op(a) [m, k]`, `op(b) [k, n]`, `c [m, n]`, `bias [n]`.
///
/// Matrices are row-major with any row stride. `a`, `b` and `bias` have one type (f32, bf16 or f16), `c` that type or f32.
/// Accumulation is in f32.
pub struct Gemm<'a> {
    /// Left operand, `[m, k]`, or `[k, m]` with `trans_a`.
    pub a: &'a Tensor,
    /// Use `aᵀ`.
    pub trans_a: bool,
    /// Right operand, `[k, n]`, or `[n, k]` with `trans_b`.
    pub b: &'a Tensor,
    /// Use `bᵀ`.
    pub trans_b: bool,
    /// Added to every row.
    pub bias: Option<&'a Tensor>,
    /// Add to what `c` holds instead of overwriting it.
    pub accumulate: bool,
    /// Output, `[m, n]`.
    pub c: &'a Tensor,
}

/// Sizes and row strides of a GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GemmSizes {
    /// Rows of the output.
    pub m: usize,
    /// Columns of the output.
    pub n: usize,
    /// Length of the contraction.
    pub k: usize,
    /// Row stride of `a` as stored.
    pub lda: usize,
    /// Row stride of `b` as stored.
    pub ldb: usize,
    /// Row stride of `c`.
    pub ldc: usize,
}

impl Gemm<'_> {
    /// Profile label: which of a linear layer's three GEMMs (fprop, dgrad, wgrad) it is.
    pub(crate) fn name(&self) -> &'static str {
        match (self.trans_a, self.trans_b) {
            (false, true) => "gemm (output)",
            (false, false) => "gemm (input gradient)",
            (true, false) => "gemm (weight gradient)",
            (true, true) => "gemm (both transposed)",
        }
    }

    /// Checks shapes, strides and types; returns the sizes.
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
                    "{:?}{} · {:?}{} + {:?} -> {:?}: the contracted sizes must agree and rows must be contiguous",
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

/// GEMM kernels. A fused kernel's default is the composition of its parts, which defines its result.
pub trait GemmKernels: ActivationKernels {
    /// See [`Gemm`].
    fn gemm(&self, s: &Stream, g: &Gemm) -> Result<()>;

    /// [`GemmKernels::gemm`] with `accumulate`, whose product may be rounded to the type of `c` before it is added: two
    /// roundings of 16-bit results instead of one, for a library call instead of a slow kernel.
    fn gemm_add(&self, s: &Stream, g: &Gemm) -> Result<()> {
        self.gemm(s, g)
    }

    /// See [`Fp8Gemm`].
    fn fp8_gemm(&self, s: &Stream, g: &Fp8Gemm) -> Result<()>;

    /// See [`BatchedGemm`].
    fn gemm_batched(&self, s: &Stream, g: &BatchedGemm) -> Result<()> {
        let (count, _) = g.sizes()?;
        (0..count).try_for_each(|i| g.with(i, |g| self.gemm(s, g)))
    }

    /// See [`LinearAct`].
    fn linear_act_forward(&self, s: &Stream, f: &LinearAct) -> Result<()> {
        self.gemm(s, &f.gemm(f.h))?;
        self.act_forward(s, &f.activation())
    }

    /// See [`LinearActBackward`].
    fn linear_act_backward(&self, s: &Stream, f: &LinearActBackward) -> Result<()> {
        let dy = Tensor::empty(s, f.h.shape(), f.h.dtype(), Category::Activations)?;
        self.gemm(s, &f.gemm(&dy))?;
        match f.dbias {
            Some(dbias) => self.act_backward_dbias(s, &f.activation(&dy), dbias),
            None => self.act_backward(s, &f.activation(&dy)),
        }
    }

    /// See [`LinearWgrad`].
    fn linear_wgrad(&self, s: &Stream, f: &LinearWgrad) -> Result<()> {
        self.gemm(s, &f.gemm(f.dw.0))?;
        self.column_sum(s, f.dy, f.db.1, f.db.0)
    }

    /// What the choice of algorithms depends on besides the GEMM; none where there is nothing to choose.
    fn gemm_library(&self) -> Option<GemmLibrary> {
        None
    }

    /// Uses these choices from now on, and no others made before.
    fn use_gemm_choices(&self, _choices: &[GemmChoice], _new: NewChoices) {}

    /// Whether choices were made since [`GemmKernels::take_gemm_choices`].
    fn has_new_gemm_choices(&self) -> bool {
        false
    }

    /// Takes the choices made since the last call, in the order of their making.
    fn take_gemm_choices(&self) -> Vec<GemmChoice> {
        Vec::new()
    }
}
