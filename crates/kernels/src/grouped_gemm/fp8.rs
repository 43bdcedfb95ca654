//! Products of segments of eight-bit rows, each with a matrix of its own.

use super::{GroupedSizes, Segments, Steps, steps};
use crate::checks::dtypes;
use crate::quant::{Fp8Tensor, ScalingMode};
use ferrotron_tensor::{DType, Error, Result, Tensor, shape_error};

/// `y[r] = x[r]·w[e]ᵀ` for the rows r of segment e, both in bytes and contracted along their last axis; rows in no segment
/// become zeros. For a gradient of the input `x` is that of the output and `w` the weights turned.
///
/// At most one factor is in E5M2. Scales are one for all of x and one for each of the matrices, or those of 128 along k
/// ([`ScalingMode::Block1x128`]) and of tiles ([`ScalingMode::Block128x128`], of `[E·n, k]` as one matrix).
#[derive(Clone, Copy, Debug)]
pub struct Fp8GroupedGemm<'a> {
    /// `[N, k]`
    pub x: &'a Fp8Tensor,
    /// `[E·n, k]`. With [`ScalingMode::PerTensor`] its scales are f32 `[E]`.
    pub w: &'a Fp8Tensor,
    /// Whose rows.
    pub segments: Segments<'a>,
    /// `[N, n]` bf16
    pub y: &'a Tensor,
    /// Sums may be kept in the matrix unit's narrow registers; with scales of blocks they never are.
    pub fast: bool,
    /// What it is in a layer, for profiles: such as `grouped (output, fp8)`.
    pub name: &'static str,
}

/// `dw[e] (+)= Σ_c dy[:, c]·x[:, c]ᵀ` over the columns c of segment e: what [`crate::GroupedWgrad`] is, of factors turned so
/// that they are contracted along their last axis.
///
/// Segments start at multiples of 128, and up to the next multiple of 128 behind a segment's columns there are zeros. At most
/// one factor is in E5M2. Scales are one for each factor, or those of 128 columns ([`ScalingMode::Block1x128`]) of both.
#[derive(Clone, Copy, Debug)]
pub struct Fp8GroupedWgrad<'a> {
    /// `[n, N]`
    pub dy: &'a Fp8Tensor,
    /// `[k, N]`
    pub x: &'a Fp8Tensor,
    /// Whose columns.
    pub segments: Segments<'a>,
    /// f32 `[E, n, k]`, and whether to add to what it holds.
    pub dw: (&'a Tensor, bool),
    /// Sums may be kept in the matrix unit's narrow registers; with scales of blocks they never are.
    pub fast: bool,
}

/// Is one of them in E4M3?
fn formats(op: &'static str, a: &Fp8Tensor, b: &Fp8Tensor) -> Result<()> {
    if a.data.dtype() == DType::E5M2 && b.data.dtype() == DType::E5M2 {
        return shape_error(op, "both factors in e5m2: no matrix unit takes that; have one of them in e4m3");
    }
    Ok(())
}

impl Fp8GroupedGemm<'_> {
    /// Checks shapes, types and scales.
    pub(crate) fn sizes(&self) -> Result<GroupedSizes> {
        let (op, x, w) = (self.name, self.x, self.w);
        let segments = self.segments.check(op)?;
        let (&[rows, n], k) = (&[x.rows(), self.y.shape().last().copied().unwrap_or(0)], x.cols);
        x.check(op, [rows, k])?;
        match (x.scaling, w.scaling) {
            (ScalingMode::Block1x128, ScalingMode::Block128x128) => w.check(op, [segments * n, k])?,
            (ScalingMode::PerTensor, ScalingMode::PerTensor) => {
                // As a matrix of one scale, of which there are E.
                let one = Tensor::narrow(&w.scale_inv, 0, 0, w.scale_inv.numel().min(1));
                if w.scale_inv.shape() != [segments] || !w.scale_inv.is_contiguous() {
                    return shape_error(op, format!("scales {:?} of {segments} matrices", w.scale_inv));
                }
                if segments > 0 {
                    Fp8Tensor { scale_inv: one?, ..w.clone() }.check(op, [segments * n, k])?;
                }
            }
            (a, b) => return shape_error(op, format!("x scaled by {a:?}, w by {b:?}: scale both alike")),
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

    /// Checks shapes, types and scales.
    pub(crate) fn sizes(&self) -> Result<GroupedSizes> {
        let (op, dy, x) = (Self::NAME, self.dy, self.x);
        let segments = self.segments.check(op)?;
        let (n, k, rows) = (dy.rows(), x.rows(), x.cols);
        dy.check(op, [n, rows])?;
        x.check(op, [k, rows])?;
        if dy.scaling != x.scaling || x.scaling == ScalingMode::Block128x128 {
            let what = format!(
                "dy scaled by {:?}, x by {:?}: both by rows, or with one scale",
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
