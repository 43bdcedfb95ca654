//! Grouped GEMMs: consecutive segments of rows, each multiplied by its own matrix. A segment is the tokens of one MoE expert.
//!
//! Segment e is the `counts[e]` rows from `offsets[e]`. Both are i32 on the device, so the host need not know them. Rows in no
//! segment are not read; a GEMM that writes rows writes zeros there.

pub(crate) mod bias;
pub(crate) mod fp8;

use crate::checks::dtypes;
use bias::GroupedBias;
use ferrotron_tensor::{DType, Error, Result, Stream, Tensor, shape_error};
use fp8::{Fp8GroupedGemm, Fp8GroupedWgrad};

/// Segments of N rows, one per expert.
#[derive(Clone, Copy, Debug)]
pub struct Segments<'a> {
    /// i32 `[E + 1]`: first row of each segment; the last entry is the end of all.
    pub offsets: &'a Tensor,
    /// i32 `[E]`: rows of each segment.
    pub counts: &'a Tensor,
}

/// `y[r] = x[r]·op(w[e]) (+ bias[e])` for the rows r of segment e; `x [N, k]`, `y [N, n]`, `bias [E, n]`.
#[derive(Clone, Copy)]
pub struct GroupedGemm<'a> {
    /// `[N, k]`, bf16 or f32
    pub x: &'a Tensor,
    /// `[E, n, k]`, used transposed (fprop), or `[E, k, n]` with `as_stored` (dgrad).
    pub w: &'a Tensor,
    /// Whether `w` is `[E, k, n]`.
    pub as_stored: bool,
    /// Segments of the rows.
    pub segments: Segments<'a>,
    /// `[E, n]`, of x's type.
    pub bias: Option<&'a Tensor>,
    /// `[N, n]`, of x's type
    pub y: &'a Tensor,
}

/// `dw[e] (+)= Σ_r dy[r]ᵀ·x[r]` over segment e; `dy [N, n]`, `x [N, k]`, `dw` f32 `[E, n, k]`.
/// A segment without rows contributes nothing: its `dw` is zero unless it accumulates.
#[derive(Clone, Copy)]
pub struct GroupedWgrad<'a> {
    /// `[N, n]`
    pub dy: &'a Tensor,
    /// `[N, k]`
    pub x: &'a Tensor,
    /// Segments of the rows.
    pub segments: Segments<'a>,
    /// `[E, n, k]`, and whether to accumulate into it.
    pub dw: (&'a Tensor, bool),
}

/// Grouped GEMM kernels.
pub trait GroupedGemmKernels {
    /// See [`GroupedGemm`].
    fn grouped_gemm(&self, s: &Stream, g: &GroupedGemm) -> Result<()>;

    /// See [`GroupedWgrad`].
    fn grouped_wgrad(&self, s: &Stream, g: &GroupedWgrad) -> Result<()>;

    /// See [`Fp8GroupedGemm`].
    fn fp8_grouped_gemm(&self, s: &Stream, g: &Fp8GroupedGemm) -> Result<()>;

    /// See [`Fp8GroupedWgrad`].
    fn fp8_grouped_wgrad(&self, s: &Stream, g: &Fp8GroupedWgrad) -> Result<()>;

    /// `y[r] += weights[r]·bias[e]` for the rows r of each segment e; `y [N, n]`. Rows in no segment are neither read nor
    /// written.
    fn grouped_bias(&self, s: &Stream, b: &GroupedBias, y: &Tensor) -> Result<()>;

    /// Gradients of [`GroupedGemmKernels::grouped_bias`]: `dbias` f32 `[E, n] (+)= Σ_r weights[r]·dy[r]` (the flag says whether
    /// to accumulate), `dweights` f32 `[N] += <dy[r], bias[e]>`. With weights of 1 it is the bias gradient of [`GroupedGemm`].
    /// A segment without rows adds nothing: its `dbias` is zero unless it accumulates.
    fn grouped_bias_backward(
        &self,
        s: &Stream,
        b: &GroupedBias,
        dy: &Tensor,
        dbias: (&Tensor, bool),
        dweights: Option<&Tensor>,
    ) -> Result<()>;
}

/// Largest number of segments: the CUDA kernels keep their offsets in a table of this size.
pub(crate) const MOST: usize = 1024;

/// Strides of a stack of matrices with contiguous rows, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Steps {
    pub(crate) matrix: usize,
    pub(crate) row: usize,
}

/// Strides of `[matrices, rows, columns]` or `[rows, columns]`.
pub(crate) fn steps(op: &'static str, t: &Tensor) -> Result<Steps> {
    let refuse = || shape_error(op, format!("{t:?}: rows must be contiguous and not overlap"));
    let (shape, strides) = (t.shape(), t.strides());
    let [.., rows, cols] = *shape else { return refuse() };
    let [.., row, step] = *strides else { return refuse() };
    if (step != 1 && cols > 1) || (row < cols && rows > 1) {
        return refuse();
    }
    // The stride of an axis of size 1 is arbitrary.
    let row = if rows > 1 { row } else { cols };
    let matrix = match (shape, strides) {
        ([e, _, _], [matrix, _, _]) if *e > 1 => *matrix,
        _ => row * rows,
    };
    Ok(Steps { matrix, row })
}

impl Segments<'_> {
    /// Checks offsets and counts; returns the number of segments.
    pub(crate) fn check(&self, op: &'static str) -> Result<usize> {
        dtypes(op, DType::I32, &[self.offsets, self.counts])?;
        let e = self.counts.numel();
        let whole = self.offsets.is_contiguous() && self.counts.is_contiguous();
        if self.counts.shape() != [e] || self.offsets.shape() != [e + 1] || !whole {
            let what = format!("offsets {:?} [E + 1], counts {:?} [E]", self.offsets, self.counts);
            return shape_error(op, what);
        }
        if e > MOST {
            return shape_error(op, format!("{e} segments are more than the largest number, {MOST}"));
        }
        Ok(e)
    }
}

/// Sizes and strides of a grouped GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GroupedSizes {
    /// E.
    pub(crate) segments: usize,
    /// N.
    pub(crate) rows: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) x: Steps,
    /// Of the weights or their gradient.
    pub(crate) w: Steps,
    /// Of the output or its gradient.
    pub(crate) y: Steps,
}

impl GroupedGemm<'_> {
    /// Profile label.
    pub(crate) fn name(&self) -> &'static str {
        if self.as_stored { "grouped (input gradient)" } else { "grouped (output)" }
    }

    /// Checks shapes, strides and types; returns the sizes.
    pub(crate) fn sizes(&self) -> Result<GroupedSizes> {
        let op = self.name();
        let segments = self.segments.check(op)?;
        let dtype = self.x.dtype();
        if !matches!(dtype, DType::F32 | DType::BF16) {
            return Err(Error::DType { op, found: dtype, wanted: DType::BF16 });
        }
        dtypes(op, dtype, &[self.w, self.y])?;
        dtypes(op, dtype, self.bias.as_slice())?;
        let fits = match (self.x.shape(), self.w.shape(), self.y.shape()) {
            (&[rows, k], &[e, a, b], &[rows2, n]) => {
                let stored = if self.as_stored { [k, n] } else { [n, k] };
                (rows == rows2 && e == segments && [a, b] == stored).then_some((rows, n, k))
            }
            _ => None,
        };
        let bias_ok = |n| self.bias.is_none_or(|b| b.shape() == [segments, n] && b.is_contiguous());
        let Some((rows, n, k)) = fits.filter(|f| bias_ok(f.1)) else {
            let shape = |t: &Tensor| t.shape().to_vec();
            let (x, w, y, bias) = (shape(self.x), shape(self.w), shape(self.y), self.bias.map(shape));
            return shape_error(op, format!("{x:?}·{w:?} + {bias:?} -> {y:?} in {segments} segments"));
        };
        let [x, w, y] = [steps(op, self.x)?, steps(op, self.w)?, steps(op, self.y)?];
        Ok(GroupedSizes { segments, rows, n, k, x, w, y })
    }
}

impl GroupedWgrad<'_> {
    pub(crate) const NAME: &'static str = "grouped (weight gradient)";

    /// Checks shapes, strides and types; returns the sizes.
    pub(crate) fn sizes(&self) -> Result<GroupedSizes> {
        let op = Self::NAME;
        let segments = self.segments.check(op)?;
        let dtype = self.x.dtype();
        if !matches!(dtype, DType::F32 | DType::BF16) {
            return Err(Error::DType { op, found: dtype, wanted: DType::BF16 });
        }
        dtypes(op, dtype, &[self.dy])?;
        dtypes(op, DType::F32, &[self.dw.0])?;
        match (self.dy.shape(), self.x.shape(), self.dw.0.shape()) {
            (&[rows, n], &[rows2, k], &[e, n2, k2]) if rows == rows2 && (e, n2, k2) == (segments, n, k) => {
                let [x, w, y] = [steps(op, self.x)?, steps(op, self.dw.0)?, steps(op, self.dy)?];
                Ok(GroupedSizes { segments, rows, n, k, x, w, y })
            }
            (dy, x, dw) => shape_error(op, format!("{dy:?}ᵀ·{x:?} -> {dw:?} in {segments} segments")),
        }
    }
}
