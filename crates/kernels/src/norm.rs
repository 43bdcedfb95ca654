//! LayerNorm and RMSNorm. Arithmetic in f32; rows are the last axis.

use ferrotron_tensor::{Result, Stream, Tensor};

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
    /// f32 `[h]`: `Σ dy·ŷ`.
    pub dgamma: &'a Tensor,
    /// f32 `[h]`: `Σ dy`.
    pub dbeta: Option<&'a Tensor>,
    /// Add to `dgamma` and `dbeta` instead of overwriting them.
    pub accumulate: bool,
}

/// Norms over the last axis.
pub trait NormKernels: super::ElementwiseKernels {
    /// See [`NormForward`].
    fn norm_forward(&self, s: &Stream, norm: Norm, n: &NormForward) -> Result<()>;

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
