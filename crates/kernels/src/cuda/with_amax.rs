//! Largest magnitudes of bf16 results, taken where they are made. Other types are measured afterwards.

use super::CudaKernels;
use crate::quant::check::{matrix, one};
use crate::with_amax::as_matrix;
use crate::{Act, ActivationKernels, Norm, NormForward, NormKernels, QuantKernels, WithAmaxKernels};
use ferrotron_tensor::{DType, Result, Stream, Tensor};

impl WithAmaxKernels for CudaKernels {
    fn norm_forward_amax(&self, s: &Stream, norm: Norm, n: &NormForward, amax: &Tensor) -> Result<()> {
        matrix("norm_forward", n.y)?;
        one("norm_forward", amax)?;
        if n.y.dtype() != DType::BF16 {
            self.norm_forward(s, norm, n)?;
            return self.amax(s, n.y, amax);
        }
        self.norm(s, norm, n, Some(amax))
    }

    fn add_norm_forward_amax(
        &self,
        s: &Stream,
        norm: Norm,
        residual: &Tensor,
        sum: &Tensor,
        n: &NormForward,
        amax: &Tensor,
    ) -> Result<()> {
        matrix("add_norm_forward", n.y)?;
        one("add_norm_forward", amax)?;
        if n.y.dtype() != DType::BF16 {
            self.add_norm_forward(s, norm, residual, sum, n)?;
            return self.amax(s, n.y, amax);
        }
        self.add_norm(s, norm, [residual, sum], n, Some(amax))
    }

    fn act_forward_amax(
        &self,
        s: &Stream,
        act: Act,
        gated: bool,
        x: &Tensor,
        y: &Tensor,
        amax: &Tensor,
    ) -> Result<()> {
        one("act_forward", amax)?;
        if y.dtype() != DType::BF16 {
            self.act_forward(s, act, gated, x, y)?;
            return self.amax(s, &as_matrix(y)?, amax);
        }
        self.act(s, (act, gated), x, y, Some(amax))
    }

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
        one("act_backward", amax)?;
        if dx.dtype() != DType::BF16 {
            self.act_backward(s, act, gated, x, dy, dx)?;
            return self.amax(s, &as_matrix(dx)?, amax);
        }
        self.act_slope(s, (act, gated), [x, dy, dx], Some(amax))
    }

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
        one("weighted_act", amax)?;
        self.weighted(s, (act, gated), [x, p, y], Some(amax))
    }

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
        one("weighted_act_backward", amax)?;
        self.weighted_slope(s, (act, gated), [x, p, live, dy], [dx, dp], Some(amax))
    }
}
