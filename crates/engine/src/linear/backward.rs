//! Backward of a linear: dgrad now, wgrad when the returned [`WeightGrad`] runs.

use super::{Linear, LinearSaved};
use crate::error::missing_activation;
use crate::quant::{GemmOperand, Role};
use crate::tensor_parallel::{WeightOperand, wgrad_gemm};
use crate::with_amax::GradExtras;
use crate::{StepContext, WeightGrad, WithAmax};
use ferrotron_comm::InFlight;
use ferrotron_kernels::{Act, LinearActBackward};
use ferrotron_tensor::{Result, Tensor};

impl Linear {
    /// dgrad `dx = dy·W` now; wgrad `dW = dyᵀ·x` and `db = Σ dy` when the returned [`WeightGrad`] runs.
    pub fn backward(
        &self,
        p: &StepContext,
        saved: LinearSaved,
        dy: impl Into<WithAmax>,
    ) -> Result<(Tensor, WeightGrad)> {
        let dy = &dy.into();
        let Some(adapter) = &self.adapter else { return self.backward_base(p, saved, dy) };
        let (Some(x), Some(h)) = (saved.x.clone(), saved.adapter.clone()) else {
            return missing_activation("LoRA", "input");
        };
        let mut saved = saved;
        let (dy, m_grad) = match saved.unscaled.take() {
            None => (dy.clone(), WeightGrad::default()),
            Some(unscaled) => {
                let (values, m_grad) = adapter.rescale_backward(p, &unscaled, &dy.values)?;
                // The bias was added after: its gradient sums the gradient as it came.
                let sums = self.bias.map(|_| dy.sums.as_ref().unwrap_or(&dy.values).clone());
                (WithAmax { values, amax: None, sums }, m_grad)
            }
        };
        let dy = &dy;
        let (dx, grads) = self.backward_base(p, saved, dy)?;
        let adapter_grads = adapter.backward(p, (&x, &h), &dy.values, &dx)?;
        Ok((dx, grads.and(adapter_grads).and(m_grad)))
    }

    /// dgrad and wgrad of the weight, without the adapters' part.
    fn backward_base(
        &self,
        p: &StepContext,
        saved: LinearSaved,
        dy: &WithAmax,
    ) -> Result<(Tensor, WeightGrad)> {
        if let Some(e) = self.quant(p)
            && !p.calibrates(self.weight, Role::Gradient, &dy.values)?
        {
            return self.backward_fp8(p, e, saved, dy);
        }
        let f = &WeightOperand::dgrad(&*p.weight(self.weight)?);
        let rows = &GemmOperand::rowwise(&dy.values);
        if p.is_frozen(self.weight) {
            let dx = match (self.is_local(p), self.row_parallel) {
                (true, _) => p.gemm(rows, f)?,
                (false, true) => p.all_gather_gemm(rows, f, false, "gradient of a layer's output")?.0,
                (false, false) => p.gemm_reduce_scatter(rows, f, "gradient of a layer's input")?,
            };
            return Ok((dx, self.bias_grad(dy)));
        }
        let x = saved.input()?;
        if self.row_parallel {
            let (dx, all) = p.all_gather_gemm(rows, f, true, "gradient of a layer's output")?;
            let Some(all) = all.filter(|_| p.rank.tp.size() > 1) else {
                return Ok((dx, self.grads(dy, InFlight::ready(GemmOperand::rowwise(&x)))));
            };
            let weight = WeightGrad::gemm(self.weight, all.memory(), &x);
            return Ok((dx, weight.and(self.bias_grad(dy))));
        }
        if self.is_local(p) {
            return Ok((p.gemm(rows, f)?, self.grads(dy, InFlight::ready(GemmOperand::rowwise(&x)))));
        }
        // dgrad first: the previous module waits for it.
        let dx = p.gemm_reduce_scatter(rows, f, "gradient of a layer's input")?;
        let x = p.begin_all_gather(&GemmOperand::rowwise(&x), "input of a layer, again")?;
        Ok((dx, self.grads(dy, x)))
    }

    /// [`Linear::backward`], and back through the activation function `act(h)` that produced its input.
    pub(crate) fn backward_act(
        &self,
        p: &StepContext,
        saved: LinearSaved,
        (act, h): (Act, &Tensor),
        dy: &Tensor,
        extras: GradExtras,
    ) -> Result<(WithAmax, WeightGrad)> {
        let fused = self.quant.is_none() && self.adapter.is_none() && !p.is_frozen(self.weight);
        if p.rank.tp.size() > 1 || !fused || extras.amax {
            let (da, grads) = self.backward(p, saved, dy)?;
            return Ok((p.act_backward(act, false, h, &da, extras)?, grads));
        }
        let x = saved.input()?;
        let w = p.weight(self.weight)?;
        let mut dh = WithAmax::from(&p.empty(h.shape())?);
        dh.sums = extras.sums.then(|| p.act_sums(h)).transpose()?;
        let f = LinearActBackward { act, dy, w: &w, h, dh: &dh.values, dbias: dh.sums.as_ref() };
        p.rank.kernels.linear_act_backward(&p.rank.compute, &f)?;
        Ok((dh, self.grads(&WithAmax::from(dy), InFlight::ready(GemmOperand::rowwise(&x)))))
    }

    /// `dW = dyᵀ·x`, `db = Σ dy`
    fn grads(&self, dy: &WithAmax, x: InFlight<GemmOperand>) -> WeightGrad {
        match (self.bias, &dy.sums, x.if_ready()) {
            (Some(bias), None, Some(x)) => WeightGrad::linear(self.weight, bias, &dy.values, x.memory()),
            _ => wgrad_gemm(self.weight, &dy.values, x).and(self.bias_grad(dy)),
        }
    }

    /// `db = Σ dy`, from partial column sums where they were computed already.
    pub(crate) fn bias_grad(&self, dy: &WithAmax) -> WeightGrad {
        let columns = |bias| WeightGrad::column_sums(bias, dy.sums.as_ref().unwrap_or(&dy.values));
        self.bias.map(columns).unwrap_or_default()
    }
}
