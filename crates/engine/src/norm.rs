//! LayerNorm and RMSNorm as modules.

use crate::{
    Declarations, Init, ParamId, Part, Saved, SavedTensor, Split, StepContext, WeightGrad, WithAmax,
};
use ferrotron_kernels::{Norm, NormBackward, NormForward, ResidualAdd};
use ferrotron_tensor::{DType, Result, Tensor};

/// A norm over the last axis with learned gain (and bias, for LayerNorm).
pub struct NormLayer {
    norm: Norm,
    gamma: ParamId,
    beta: Option<ParamId>,
    width: usize,
}

/// Input and statistics that backward needs.
pub struct NormSaved {
    x: SavedTensor,
    mean: Option<SavedTensor>,
    rstd: SavedTensor,
}

impl Saved for NormSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        f(&mut self.x);
        self.mean.tensors(f);
        f(&mut self.rstd);
    }
}

/// Hidden states `x + more` `[tokens, hidden]`. A layer leaves its last residual addition to the next norm, which fuses it.
pub struct HiddenStates {
    /// The residual stream.
    pub x: Tensor,
    /// The branch output that is not added yet.
    pub pending: Option<Tensor>,
}

impl HiddenStates {
    /// Hidden states without a pending addition.
    pub fn of(x: Tensor) -> HiddenStates {
        HiddenStates { x, pending: None }
    }

    /// Performs the pending addition.
    pub fn sum(self, p: &StepContext) -> Result<Tensor> {
        let Some(pending) = self.pending else { return Ok(self.x) };
        let y = p.empty(self.x.shape())?;
        p.rank.kernels.add(&p.rank.compute, &self.x, &pending, &y)?;
        Ok(y)
    }
}

impl NormLayer {
    /// Declares `<name>.weight` and, for LayerNorm, `<name>.bias`.
    pub fn declare(d: &mut Declarations, name: &str, width: usize, norm: Norm) -> Result<NormLayer> {
        let gain = if norm.zero_centred { 0.0 } else { 1.0 };
        let mut vector = |kind: &str, value| {
            d.declare(vec![Part {
                name: format!("{name}.{kind}"),
                shape: vec![width],
                init: Init::Constant(value),
                split: Split::Replicated,
            }])
        };
        let gamma = vector("weight", gain)?;
        let beta = if norm.subtract_mean { Some(vector("bias", 0.0)?) } else { None };
        Ok(NormLayer { norm, gamma, beta, width })
    }

    /// Normalizes `x [tokens, h]`, or each head of a `[tokens, heads, d]` view, into `y` of that shape.
    pub fn forward_into(&self, p: &StepContext, x: &Tensor, y: &Tensor) -> Result<NormSaved> {
        self.run(p, x, y, |k, s, n| k.norm_forward(s, self.norm, n))
    }

    /// Normalizes `x`.
    pub fn forward(&self, p: &StepContext, x: &Tensor) -> Result<(Tensor, NormSaved)> {
        let y = p.empty(x.shape())?;
        let saved = self.forward_into(p, x, &y)?;
        Ok((y, saved))
    }

    /// Normalizes `x [tokens, h]`; `measure` also computes the output's amax.
    pub fn forward_with_amax(
        &self,
        p: &StepContext,
        x: &Tensor,
        measure: bool,
    ) -> Result<(WithAmax, NormSaved)> {
        let mut y = WithAmax::from(&p.empty(x.shape())?);
        y.amax = measure.then(|| p.zero_amax()).transpose()?;
        let saved = self.run(p, x, &y.values, |k, s, n| match &y.amax {
            Some(amax) => k.norm_forward_amax(s, self.norm, n, amax),
            None => k.norm_forward(s, self.norm, n),
        })?;
        Ok((y, saved))
    }

    /// Fused residual addition and norm: `r = x + residual`, `y = norm(r)`, in one pass over memory where the device has
    /// that kernel. Returns (y, r); `measure` also computes the amax of y.
    pub fn add_forward(
        &self,
        p: &StepContext,
        x: &Tensor,
        residual: &Tensor,
        measure: bool,
    ) -> Result<(WithAmax, Tensor, NormSaved)> {
        let (mut y, sum) = (WithAmax::from(&p.empty(x.shape())?), p.empty(x.shape())?);
        y.amax = measure.then(|| p.zero_amax()).transpose()?;
        let mut saved = self.run(p, x, &y.values, |k, s, n| match &y.amax {
            Some(amax) => {
                k.add_norm_forward_amax(s, self.norm, &ResidualAdd { residual, sum: &sum }, n, amax)
            }
            None => k.add_norm_forward(s, self.norm, &ResidualAdd { residual, sum: &sum }, n),
        })?;
        saved.x = SavedTensor::activation(&sum);
        Ok((y, sum, saved))
    }

    /// The same for hidden states whose residual addition may be pending.
    pub fn forward_pending(
        &self,
        p: &StepContext,
        x: HiddenStates,
        measure: bool,
    ) -> Result<(WithAmax, Tensor, NormSaved)> {
        match x.pending {
            Some(pending) => self.add_forward(p, &pending, &x.x, measure),
            None => self.forward_with_amax(p, &x.x, measure).map(|(y, saved)| (y, x.x, saved)),
        }
    }

    /// Recomputes the output from the saved input and statistics.
    pub fn recompute(&self, p: &StepContext, saved: &NormSaved, measure: bool) -> Result<WithAmax> {
        Ok(self.forward_with_amax(p, &saved.x, measure)?.0)
    }

    fn run(
        &self,
        p: &StepContext,
        x: &Tensor,
        y: &Tensor,
        kernel: impl FnOnce(
            &dyn ferrotron_kernels::Kernels,
            &ferrotron_tensor::Stream,
            &NormForward,
        ) -> Result<()>,
    ) -> Result<NormSaved> {
        let rows = [x.numel() / self.width.max(1)];
        let rstd = p.rank.activation(&rows, DType::F32)?;
        let mean = self.beta.map(|_| p.rank.activation(&rows, DType::F32)).transpose()?;
        let (gamma, beta) = (p.weight(self.gamma)?, self.beta.map(|b| p.weight(b)).transpose()?);
        let n = NormForward { x, gamma: &gamma, beta: beta.as_deref(), y, mean: mean.as_ref(), rstd: &rstd };
        kernel(&*p.rank.kernels, &p.rank.compute, &n)?;
        Ok(NormSaved {
            x: SavedTensor::activation(x),
            mean: mean.as_ref().map(SavedTensor::small),
            rstd: SavedTensor::small(&rstd),
        })
    }

    /// Returns the input gradient plus `residual` (the gradient of the residual branch).
    pub fn backward(
        &self,
        p: &StepContext,
        saved: NormSaved,
        dy: &Tensor,
        residual: Option<&Tensor>,
    ) -> Result<(Tensor, WeightGrad)> {
        let dx = p.empty(saved.x.shape())?;
        let grads = self.backward_into(p, saved, dy, residual, &dx)?;
        Ok((dx, grads))
    }

    /// The same, into a buffer of the caller.
    pub fn backward_into(
        &self,
        p: &StepContext,
        saved: NormSaved,
        dy: &Tensor,
        residual: Option<&Tensor>,
        dx: &Tensor,
    ) -> Result<WeightGrad> {
        let parts = p.rank.kernels.norm_partials(dx.dtype(), dx.numel() / self.width.max(1), self.width);
        let sums = || p.rank.activation(&[parts, self.width], DType::F32);
        let (dgamma, dbeta) = (sums()?, self.beta.map(|_| sums()).transpose()?);
        let n = NormBackward {
            x: &saved.x,
            gamma: &*p.weight(self.gamma)?,
            mean: saved.mean.as_deref(),
            rstd: &saved.rstd,
            dy,
            residual,
            dx,
            dgamma: &dgamma,
            dbeta: dbeta.as_ref(),
        };
        p.rank.kernels.norm_backward(&p.rank.compute, self.norm, &n)?;
        let grads = WeightGrad::column_sums(self.gamma, &dgamma);
        Ok(match (self.beta, dbeta) {
            (Some(id), Some(g)) => grads.and(WeightGrad::column_sums(id, &g)),
            _ => grads,
        })
    }
}
