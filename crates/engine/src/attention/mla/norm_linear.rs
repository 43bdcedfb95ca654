//! Norm of a latent vector and its up-projection to heads.

use crate::{
    Declarations, Linear, LinearSaved, NormLayer, NormSaved, Saved, SavedTensor, StepContext, WeightGrad,
};
use ferrotron_kernels::Norm;
use ferrotron_tensor::{Result, Tensor};

/// `W·norm(x)`
pub(super) struct NormLinear {
    norm: NormLayer,
    up: Linear,
}

pub(super) struct NormLinearSaved {
    up: LinearSaved,
    norm: NormSaved,
}

impl Saved for NormLinearSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        self.up.tensors(f);
        self.norm.tensors(f);
    }
}

impl NormLinear {
    /// Declares the norm `name` of width `width` before the projection `up`.
    pub(super) fn declare(
        d: &mut Declarations,
        (name, width, norm): (&str, usize, Norm),
        up: impl FnOnce(&mut Declarations) -> Result<Linear>,
    ) -> Result<NormLinear> {
        Ok(NormLinear { norm: NormLayer::declare(d, name, width, norm)?, up: up(d)? })
    }

    /// `x [tokens/tp, width]` (this rank's sequence shard) → this rank's output features of all tokens.
    pub(super) fn forward(&self, p: &StepContext, x: &Tensor) -> Result<(Tensor, NormLinearSaved)> {
        let (normed, norm) = self.norm.forward_with_amax(p, x, self.up.needs_input_amax(p))?;
        let (y, mut up) = self.up.forward_recomputable(p, &normed, p.recompute.norm)?;
        if p.recompute.norm {
            up.drop_input();
        }
        Ok((y, NormLinearSaved { up, norm }))
    }

    /// Writes the gradient of `x` into `dx`.
    pub(super) fn backward_into(
        &self,
        p: &StepContext,
        saved: NormLinearSaved,
        dy: &Tensor,
        dx: &Tensor,
    ) -> Result<WeightGrad> {
        let NormLinearSaved { mut up, norm } = saved;
        if up.is_input_dropped() {
            up.restore_input(&self.norm.recompute(p, &norm, false)?.values);
        }
        let (d, grads) = self.up.backward(p, up, dy)?;
        Ok(grads.and(self.norm.backward_into(p, norm, &d, None, dx)?))
    }
}
