//! LayerNorm and RMSNorm. Arithmetic in f32; rows are the last axis.

use crate::checks::{dtypes, rows_of};
use crate::cpu::rows::Rows;
use ferrotron_tensor::{DType, Result, Stream, Tensor, shape_error};

/// Which norm, and its constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm {
    /// LayerNorm: subtract the mean. RMSNorm: do not.
    pub subtract_mean: bool,
    /// Added to the variance (or mean square).
    pub eps: f32,
    /// The gain is `1 + gamma`.
    pub zero_centred: bool,
}

/// `y = (x - mean)·rstd·gain + beta` over the last axis. `x`, `y` may be strided `[rows, h]` or
/// `[rows, heads, d]` views with contiguous last axis.
pub struct NormForward<'a> {
    /// Input.
    pub x: &'a Tensor,
    /// `[h]`
    pub gamma: &'a Tensor,
    /// `[h]`, LayerNorm only.
    pub beta: Option<&'a Tensor>,
    /// Output, of the shape of `x`.
    pub y: &'a Tensor,
    /// f32, one per row; LayerNorm only.
    pub mean: Option<&'a Tensor>,
    /// f32, one per row: `1/sqrt(var + eps)`.
    pub rstd: &'a Tensor,
}

/// With ŷ = (x − mean)·rstd and dŷ = dy·gain:
/// `dx = rstd·(dŷ − mean(dŷ) − ŷ·mean(dŷ·ŷ)) (+ residual)`; RMSNorm has no `mean(dŷ)` term.
pub struct NormBackward<'a> {
    /// Input of the forward pass.
    pub x: &'a Tensor,
    /// `[h]`
    pub gamma: &'a Tensor,
    /// From the forward pass.
    pub mean: Option<&'a Tensor>,
    /// From the forward pass.
    pub rstd: &'a Tensor,
    /// Gradient of the output.
    pub dy: &'a Tensor,
    /// Gradient that reaches `x` by another way, added to `dx`.
    pub residual: Option<&'a Tensor>,
    /// Gradient of the input.
    pub dx: &'a Tensor,
    /// f32 `[parts, h]`, parts as [`NormKernels::norm_partials`] says: `Σ dy·ŷ` is the sum of its rows.
    pub dgamma: &'a Tensor,
    /// The same of `Σ dy`.
    pub dbeta: Option<&'a Tensor>,
}

fn check_kind(op: &'static str, norm: Norm, has_mean: bool, has_beta: bool) -> Result<()> {
    if norm.subtract_mean != has_mean || norm.subtract_mean != has_beta {
        return shape_error(op, "LayerNorm has a mean and a bias, RMSNorm neither");
    }
    Ok(())
}

/// Weights and statistics: so many elements of a type, without gaps.
fn check_vectors(op: &'static str, dtype: DType, len: usize, vectors: &[&Tensor]) -> Result<()> {
    dtypes(op, dtype, vectors)?;
    match vectors.iter().find(|t| t.numel() != len || !t.is_contiguous()) {
        None => Ok(()),
        Some(t) => shape_error(op, format!("{t:?} must be contiguous and hold {len} elements")),
    }
}

impl NormForward<'_> {
    /// The checks every home makes of weights, statistics and types, for rows that it has found.
    pub(crate) fn check(&self, op: &'static str, norm: Norm, rows: usize, width: usize) -> Result<()> {
        check_kind(op, norm, self.mean.is_some(), self.beta.is_some())?;
        dtypes(op, self.x.dtype(), &[self.y])?;
        check_vectors(op, self.x.dtype(), width, &[self.gamma, self.beta.unwrap_or(self.gamma)])?;
        check_vectors(op, DType::F32, rows, &[self.rstd, self.mean.unwrap_or(self.rstd)])
    }
}

impl NormBackward<'_> {
    /// The rows of `x`, `dy` and `dx` (and of the residual, which lies like `dx`), after the checks every home makes.
    /// `parts` tells the partial sums of a gain from rows and width.
    pub(crate) fn check(
        &self,
        op: &'static str,
        norm: Norm,
        parts: impl FnOnce(usize, usize) -> usize,
    ) -> Result<[Rows; 3]> {
        check_kind(op, norm, self.mean.is_some(), self.dbeta.is_some())?;
        let residual = self.residual.unwrap_or(self.dx);
        let [x, dy, dx, _] = rows_of(op, [self.x, self.dy, self.dx, residual])?;
        if residual.strides() != self.dx.strides() {
            return shape_error(op, "the residual gradient must be laid out like dx");
        }
        dtypes(op, self.x.dtype(), &[self.dy, self.dx, residual])?;
        check_vectors(op, self.x.dtype(), x.width, &[self.gamma])?;
        check_vectors(op, DType::F32, x.count(), &[self.rstd, self.mean.unwrap_or(self.rstd)])?;
        let sums = parts(x.count(), x.width) * x.width;
        check_vectors(op, DType::F32, sums, &[self.dgamma, self.dbeta.unwrap_or(self.dgamma)])?;
        Ok([x, dy, dx])
    }
}

/// Norms over the last axis.
pub trait NormKernels: super::ElementwiseKernels {
    /// See [`NormForward`].
    fn norm_forward(&self, s: &Stream, norm: Norm, n: &NormForward) -> Result<()>;

    /// Partial sums that [`NormBackward`] leaves of the gradient of a gain, for so many rows of type `dtype`. Whoever
    /// gathers gradients adds them up with [`column_sum`](super::ElementwiseKernels::column_sum), which it needs anyway
    /// to add to what is there.
    fn norm_partials(&self, dtype: DType, rows: usize, width: usize) -> usize;

    /// See [`NormBackward`].
    fn norm_backward(&self, s: &Stream, norm: Norm, n: &NormBackward) -> Result<()>;

    /// `sum = n.x + residual`, then the norm of `sum`. One pass where a device has it.
    fn add_norm_forward(
        &self,
        s: &Stream,
        norm: Norm,
        residual: &Tensor,
        sum: &Tensor,
        n: &NormForward,
    ) -> Result<()> {
        self.add(s, n.x, residual, sum)?;
        self.norm_forward(s, norm, &NormForward { x: sum, ..*n })
    }
}
