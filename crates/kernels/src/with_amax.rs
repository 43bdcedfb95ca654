//! Kernels whose result is quantized next, with its largest magnitude taken on the way: one pass over memory less.

use crate::{
    Act, ActivationKernels, Norm, NormForward, NormKernels, QuantKernels, WeightedActivationKernels,
};
use ferrotron_tensor::{Result, Stream, Tensor};

/// A tensor without gaps as a matrix, its rows kept.
pub(crate) fn as_matrix(t: &Tensor) -> Result<Tensor> {
    let width = t.shape().last().copied().unwrap_or(1);
    t.view(&[t.numel().checked_div(width).unwrap_or(0), width])
}

/// Each is what its namesake does; then `amax[0] = max(amax[0], max |result|)`, of the result as it is stored. `amax`
/// f32 `[1]`. The results are the namesake's bits, and the magnitude is [`QuantKernels::amax`]'s.
pub trait WithAmaxKernels:
    NormKernels + ActivationKernels + QuantKernels + WeightedActivationKernels
{
    /// The magnitude of `n.y`, a matrix.
    fn norm_forward_amax(&self, s: &Stream, norm: Norm, n: &NormForward, amax: &Tensor) -> Result<()> {
        self.norm_forward(s, norm, n)?;
        self.amax(s, n.y, amax)
    }

    /// The magnitude of `n.y`, a matrix.
    fn add_norm_forward_amax(
        &self,
        s: &Stream,
        norm: Norm,
        residual: &Tensor,
        sum: &Tensor,
        n: &NormForward,
        amax: &Tensor,
    ) -> Result<()> {
        self.add_norm_forward(s, norm, residual, sum, n)?;
        self.amax(s, n.y, amax)
    }

    /// The magnitude of `y`.
    fn act_forward_amax(
        &self,
        s: &Stream,
        act: Act,
        gated: bool,
        x: &Tensor,
        y: &Tensor,
        amax: &Tensor,
    ) -> Result<()> {
        self.act_forward(s, act, gated, x, y)?;
        self.amax(s, &as_matrix(y)?, amax)
    }

    /// The magnitude of `dx`.
    #[allow(clippy::too_many_arguments)]
    fn act_backward_amax(
        &self,
        s: &Stream,
        act: Act,
        gated: bool,
        x: &Tensor,
        dy: &Tensor,
        dx: &Tensor,
        amax: &Tensor,
    ) -> Result<()> {
        self.act_backward(s, act, gated, x, dy, dx)?;
        self.amax(s, &as_matrix(dx)?, amax)
    }

    /// The magnitude of `y`.
    fn weighted_act_amax(
        &self,
        s: &Stream,
        act: Act,
        gated: bool,
        x: &Tensor,
        p: &Tensor,
        y: &Tensor,
        amax: &Tensor,
    ) -> Result<()> {
        self.weighted_act(s, act, gated, x, p, y)?;
        self.amax(s, y, amax)
    }

    /// The magnitude of `dx`.
    fn weighted_act_backward_amax(
        &self,
        s: &Stream,
        act: Act,
        gated: bool,
        x: &Tensor,
        p: &Tensor,
        live: &Tensor,
        dy: &Tensor,
        dx: &Tensor,
        dp: &Tensor,
        amax: &Tensor,
    ) -> Result<()> {
        self.weighted_act_backward(s, act, gated, x, p, live, dy, dx, dp)?;
        self.amax(s, dx, amax)
    }
}
