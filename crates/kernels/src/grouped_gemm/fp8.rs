//! Grouped GEMMs of FP8 operands.

use super::{GroupedSizes, Segments, Steps, steps};
use crate::checks::dtypes;
use crate::quant::{Fp8Tensor, ScalingMode};
use ferrotron_tensor::{DType, Error, Result, Tensor, shape_error};

/// FP8 grouped GEMM: `y[r] = x[r]·w[e]ᵀ` for the rows r of segment e, zeros for rows in no segment. For dgrad `x` is the output
/// gradient and `w` the transposed weights.
///
/// At most one operand is E5M2. Scaling is per tensor for `x` and per matrix for `w`, or [`ScalingMode::Block1x128`] for `x` and
/// [`ScalingMode::Block128x128`] for `w` (as one matrix `[E·n, k]`).
#[derive(Clone, Copy, Debug)]
pub struct Fp8GroupedGemm<'a> {
    /// `[N, k]`
    pub x: &'a Fp8Tensor,
    /// `[E·n, k]`. With [`ScalingMode::PerTensor`] its scales are f32 `[E]`.
    pub w: &'a Fp8Tensor,
    /// Segments of the rows.
    pub segments: Segments<'a>,
    /// `[N, n]` bf16
    pub y: &'a Tensor,
    /// Allow fast FP8 accumulation in the tensor cores' reduced-precision accumulators; ignored with block scaling.
    pub fast: bool,
    /// Profile label, such as `grouped (output, fp8)`.
    pub name: &'static str,
}

/// FP8 grouped wgrad: `dw[e] (+)= Σ_c dy[:, c]·x[:, c]ᵀ` over the columns c of segment e. This is [`crate::GroupedWgrad`] of
/// transposed operands, which are contracted along their last axis.
///
/// Segments start at multiples of 128, and the columns between a segment's end and the next multiple of 128 are zero. At most
/// one operand is E5M2. Scaling is per tensor, or [`ScalingMode::Block1x128`] for both.
#[derive(Clone, Copy, Debug)]
pub struct Fp8GroupedWgrad<'a> {
    /// `[n, N]`
    pub dy: &'a Fp8Tensor,
    /// `[k, N]`
    pub x: &'a Fp8Tensor,
    /// Segments of the columns.
    pub segments: Segments<'a>,
    /// f32 `[E, n, k]`, and whether to accumulate into it.
    pub dw: (&'a Tensor, bool),
    /// Allow fast FP8 accumulation in the tensor cores' reduced-precision accumulators; ignored with block scaling.
    pub fast: bool,
}

/// Checks that at most one operand is E5M2, as tensor cores require.
fn formats(op: &'static str, a: &Fp8Tensor, b: &Fp8Tensor) -> Result<()> {
    if a.data.dtype() == DType::E5M2 && b.data.dtype() == DType::E5M2 {
        return shape_error(
            op,
            "both operands are E5M2, which tensor cores do not multiply; quantize one of them to E4M3",
        );
    }
    Ok(())
}

impl Fp8GroupedGemm<'_> {
    /// Checks shapes, types and scales; returns the sizes.
    pub(crate) fn sizes(&self) -> Result<GroupedSizes> {
        let (op, x, w) = (self.name, self.x, self.w);
        let segments = self.segments.check(op)?;
        let (&[rows, n], k) = (&[x.rows(), self.y.shape().last().copied().unwrap_or(0)], x.cols);
        x.check(op, [rows, k])?;
        match (x.scaling, w.scaling) {
            (ScalingMode::Block1x128, ScalingMode::Block128x128) => w.check(op, [segments * n, k])?,
            (ScalingMode::PerTensor, ScalingMode::PerTensor) => {
                // Check the data as one matrix with one scale; there are E scales.
                let one = Tensor::narrow(&w.scale_inv, 0, 0, w.scale_inv.numel().min(1));
                if w.scale_inv.shape() != [segments] || !w.scale_inv.is_contiguous() {
                    return shape_error(op, format!("scales {:?} of {segments} matrices", w.scale_inv));
                }
                if segments > 0 {
                    Fp8Tensor { scale_inv: one?, ..w.clone() }.check(op, [segments * n, k])?;
                }
            }
            (a, b) => {
                return shape_error(
                    op,
                    format!("x is scaled by {a:?} and w by {b:?}, which do not go together"),
                );
            }
        }
        formats(op, x, w)?;
        if self.y.dtype() != DType::BF16 {
            return Err(Error::DType { op, found: self.y.dtype(), wanted: DType::BF16 });
        }
        if self.y.shape() != [rows, n] {
            return shape_error(op, format!("[{rows}, {k}]·[{segments}·{n}, {k}]ᵀ into {:?}", self.y));
        }
        let width = x.data.shape()[1];
        let bytes = Steps { matrix: n * width, row: width };
        Ok(GroupedSizes { segments, rows, n, k, x: bytes, w: bytes, y: steps(op, self.y)? })
    }
}

impl Fp8GroupedWgrad<'_> {
    pub(crate) const NAME: &'static str = "grouped (weight gradient, fp8)";

    /// Checks shapes, types and scales; returns the sizes.
    pub(crate) fn sizes(&self) -> Result<GroupedSizes> {
        let (op, dy, x) = (Self::NAME, self.dy, self.x);
        let segments = self.segments.check(op)?;
        let (n, k, rows) = (dy.rows(), x.rows(), x.cols);
        dy.check(op, [n, rows])?;
        x.check(op, [k, rows])?;
        if dy.scaling != x.scaling || x.scaling == ScalingMode::Block128x128 {
            let what = format!(
                "dy is scaled by {:?} and x by {:?}; both must be per tensor or Block1x128",
                dy.scaling, x.scaling
            );
            return shape_error(op, what);
        }
        formats(op, dy, x)?;
        dtypes(op, DType::F32, &[self.dw.0])?;
        if self.dw.0.shape() != [segments, n, k] {
            return shape_error(op, format!("[{n}, {rows}]·[{k}, {rows}]ᵀ into {:?}", self.dw.0));
        }
        let width = x.data.shape()[1];
        let bytes = Steps { matrix: 0, row: width };
        Ok(GroupedSizes { segments, rows, n, k, x: bytes, w: steps(op, self.dw.0)?, y: bytes })
    }
}
