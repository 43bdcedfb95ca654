//! A norm of narrow rows and the map of its output to heads.

use crate::{Declarations, Linear, LinearSaved, NormLayer, NormSaved, Pass, Saved, SavedTensor, WeightGrad};
use ferrotron_kernels::Norm;
use ferrotron_tensor::{Result, Tensor};

/// `W·norm(x)`
pub(super) struct Normed {
    norm: NormLayer,
    up: Linear,
}

pub(super) struct NormedSaved {
    up: LinearSaved,
    norm: NormSaved,
}

impl Saved for NormedSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        self.up.tensors(f);
        self.norm.tensors(f);
    }
}

impl Normed {
    /// Declares the norm `name` of rows of `width` before the map `up`.
    pub(super) fn declare(
        d: &mut Declarations,
        (name, width, norm): (&str, usize, Norm),
        up: impl FnOnce(&mut Declarations) -> Result<Linear>,
    ) -> Result<Normed> {
        Ok(Normed { norm: NormLayer::declare(d, name, width, norm)?, up: up(d)? })
    }

    /// Of the rows `x [tokens, width]` this rank holds, its outputs of all rows.
    pub(super) fn forward(&self, p: &Pass, x: &Tensor) -> Result<(Tensor, NormedSaved)> {
        let (normed, norm) = self.norm.forward_measured(p, x, self.up.measures_input(p))?;
        let (y, mut up) = self.up.forward_or_again(p, &normed, p.recompute.norm)?;
        if p.recompute.norm {
            up.forget();
        }
        Ok((y, NormedSaved { up, norm }))
    }

    /// The gradient of `x` into `dx`.
    pub(super) fn backward_into(
        &self,
        p: &Pass,
        saved: NormedSaved,
        dy: &Tensor,
        dx: &Tensor,
    ) -> Result<WeightGrad> {
        let NormedSaved { mut up, norm } = saved;
        if up.is_forgotten() {
            up.remember(&self.norm.again(p, &norm, false)?.values);
        }
        let (d, grads) = self.up.backward(p, up, dy)?;
        Ok(grads.and(self.norm.backward_into(p, norm, &d, None, dx)?))
    }
}
