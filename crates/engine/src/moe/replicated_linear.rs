//! A linear map that every rank has whole and applies to its own rows.

use crate::{Declarations, Init, ParamId, Part, Saved, SavedTensor, Split, StepContext, WeightGrad};
use ferrotron_kernels::Gemm;
use ferrotron_tensor::{Result, Tensor};

/// `y = x·Wᵀ` on the rows of this rank; its gradient is summed over the ranks that share layers.
pub struct ReplicatedLinear {
    weight: ParamId,
}

/// The input.
pub struct ReplicatedSaved {
    x: SavedTensor,
}

impl Saved for ReplicatedSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        f(&mut self.x);
    }
}

impl ReplicatedLinear {
    /// Declares `<name>.weight` `[out, input]`, with initial values of standard deviation `std`.
    pub fn declare(
        d: &mut Declarations,
        name: &str,
        input: usize,
        out: usize,
        std: f32,
    ) -> Result<ReplicatedLinear> {
        let weight = d.declare(vec![Part {
            name: format!("{name}.weight"),
            shape: vec![out, input],
            init: Init::Normal(std),
            split: Split::Replicated,
        }])?;
        Ok(ReplicatedLinear { weight })
    }

    /// `[rows, in] → [rows, out]`
    pub fn forward(&self, p: &StepContext, x: &Tensor) -> Result<(Tensor, ReplicatedSaved)> {
        let w = p.weight(self.weight)?;
        let y = p.empty(&[x.shape()[0], w.shape()[0]])?;
        let g = Gemm { a: x, trans_a: false, b: w, trans_b: true, bias: None, accumulate: false, c: &y };
        p.rank.kernels.gemm(&p.rank.compute, &g)?;
        Ok((y, ReplicatedSaved { x: SavedTensor::activation(x) }))
    }

    /// `dx = dy·W`; later `dW = dyᵀ·x`.
    pub fn backward(
        &self,
        p: &StepContext,
        saved: ReplicatedSaved,
        dy: &Tensor,
    ) -> Result<(Tensor, WeightGrad)> {
        let dx = p.empty(saved.x.shape())?;
        let w = p.weight(self.weight)?;
        let g = Gemm { a: dy, trans_a: false, b: w, trans_b: false, bias: None, accumulate: false, c: &dx };
        p.rank.kernels.gemm(&p.rank.compute, &g)?;
        Ok((dx, WeightGrad::gemm(self.weight, dy, &saved.x)))
    }
}
