//! Backward of the experts: dgrad now, wgrad when the returned [`WeightGrad`] runs.

use super::{Experts, ExpertsSaved, RowScales, segments};
use crate::quant::{
    GemmOperand, GemmOptions, LinearGemm, LinearQuant, Orientations, QuantInput, Role, WgradOperand,
};
use crate::{ParamId, StepContext, WeightGrad, WithAmax};
use ferrotron_kernels::{GroupedBias, RowMap, WeightedActBackward};
use ferrotron_tensor::{Category, DType, Result, Tensor};

impl Experts {
    /// Gradients of the sorted rows and of the probabilities f32 `[N]`, from output gradients in arrival order.
    pub(crate) fn backward(
        &self,
        p: &StepContext,
        saved: ExpertsSaved,
        (dy, scales): (Tensor, RowScales),
    ) -> Result<(Tensor, Tensor, WeightGrad)> {
        let (k, s, [up, down]) = (&p.rank.kernels, &p.rank.compute, self.quant(p));
        let ExpertsSaved { a, amax, h, x, sorted, probs, map, adapters, unscaled } = saved;
        let ([up_hidden, down_hidden], [up_unscaled, down_unscaled]) = (adapters, unscaled);
        let (n, segments) = (map.source.numel(), segments(&map));
        let orientations = |e: Option<LinearQuant>| Orientations {
            rows: e.is_some_and(|e| e.dgrad),
            cols: e.is_some_and(|e| e.wgrad),
        };
        let at_once = if self.is_dora(1) { Orientations::NONE } else { orientations(down) };
        let (mut rows, mut dy_cols, dy) =
            self.sorted(p, (self.down, Role::Gradient), (dy, &scales, &map), at_once)?;
        let mut grads = WeightGrad::default();
        let mut unscaled_dy = dy.clone();
        if let Some((scaled, grad)) = self.rescale_backward(p, (1, down), (down_unscaled, &dy, &map))? {
            let input = QuantInput::with_amax(&scaled.values, scaled.amax.as_ref());
            let quantized = p.quantize(self.down, Role::Gradient, input, orientations(down))?;
            rows = quantized.rows.unwrap_or_else(|| GemmOperand::rowwise(&scaled.values));
            let operand = quantized.cols.unwrap_or_else(|| GemmOperand::columnwise(&scaled.values));
            dy_cols = WgradOperand { operand, sorted: true };
            (unscaled_dy, grads) = (scaled.values, grad);
        }
        // Needed for the gradients of a bias and of adapters only.
        let dy = Some(dy).filter(|_| self.down_bias.is_some());
        let unscaled_dy = Some(unscaled_dy).filter(|_| self.adapters[1].is_some());
        let a = match a {
            Some(a) => a.operand(),
            None => {
                let a = self.activate(p, &h, &probs, false)?.values;
                let orientations = Orientations { rows: false, ..orientations(down) };
                let quantized = p.quantize(
                    self.down,
                    Role::Input,
                    QuantInput::with_amax(&a, amax.as_deref()),
                    orientations,
                )?;
                quantized.cols.unwrap_or_else(|| GemmOperand::columnwise(&a))
            }
        };
        let how = GemmOptions { product: LinearGemm::Dgrad, bias: None, accumulate: false, fast: false };
        let da = p.empty(&[n, self.ffn])?;
        let (w, _) = self.factor(p, (self.down, down), [self.width, self.ffn], LinearGemm::Dgrad)?;
        rows.grouped_gemm(p.rank, &w, segments, how, &da)?;
        drop((rows, w));
        if let (Some(adapter), Some(hidden), Some(dy)) = (&self.adapters[1], &down_hidden, &unscaled_dy) {
            let x = WgradOperand { operand: a.clone(), sorted: true };
            grads = grads.and(adapter.backward(p, (x, hidden, &map), dy, &da)?);
        }
        let (dh, dp) = (p.empty(h.shape())?, p.rank.activation(&[n], DType::F32)?);
        let gradients = WeightedActBackward {
            act: self.act,
            gated: self.gated,
            x: &h,
            probs: &probs,
            source: &map.source,
            dy: &da,
            dx: &dh,
            dprobs: &dp,
        };
        let amax = match up.is_some_and(|e| e.recipe.measures() && (e.dgrad || e.wgrad)) {
            false => {
                k.weighted_act_backward(s, &gradients)?;
                None
            }
            true => {
                let amax = p.zero_amax()?;
                k.weighted_act_backward_amax(s, &gradients, &amax)?;
                let dh = WithAmax { values: dh.clone(), amax: Some(amax), sums: None };
                Some(p.reduced_amax_over(&p.rank.etp, &dh)?)
            }
        };
        drop((da, h));
        let a = WgradOperand { operand: a, sorted: true };
        grads = grads.and(self.weight_grad(p, self.down, [self.width, self.ffn], (dy_cols, a), &map));
        let bias = self.bias(p, self.down_bias, self.width)?.filter(|_| p.rank.etp.rank() == 0);
        if let Some((bias, dy)) = bias.zip(dy) {
            // The bias gradient is stored later, that of the probabilities is needed now.
            let sums = Tensor::empty(s, &[self.count, self.width], DType::F32, Category::Workspace)?;
            let b = GroupedBias { segments, bias: &bias, weights: Some(&probs) };
            k.grouped_bias_backward(s, &b, &dy, (&sums, false), Some(&dp))?;
            grads = grads.and(self.down_bias.map(|id| WeightGrad::computed(id, sums)).unwrap_or_default());
        } else if let Some(id) = self.down_bias {
            grads = grads.and(WeightGrad::deferred(id, |rank, grad, accumulate| {
                if accumulate { Ok(()) } else { rank.compute.zero(grad) }
            }));
        }
        if let Some(bias) = self.bias(p, self.up_bias, self.inner())? {
            let sums = Tensor::empty(s, &[self.count, self.inner()], DType::F32, Category::Workspace)?;
            let b = GroupedBias { segments, bias: &bias, weights: None };
            k.grouped_bias_backward(s, &b, &dh, (&sums, false), None)?;
            grads = grads.and(self.up_bias.map(|id| WeightGrad::computed(id, sums)).unwrap_or_default());
        }
        let (mut dh, mut amax) = (dh, amax);
        if let Some((scaled, grad)) = self.rescale_backward(p, (0, up), (up_unscaled, &dh, &map))? {
            (dh, amax, grads) = (scaled.values, scaled.amax, grads.and(grad));
        }
        p.calibrates(self.up, Role::Gradient, &dh)?;
        let quantized =
            p.quantize(self.up, Role::Gradient, QuantInput::with_amax(&dh, amax.as_ref()), orientations(up))?;
        let rows = quantized.rows.unwrap_or_else(|| GemmOperand::rowwise(&dh));
        let dx = p.empty(&[n, self.width])?;
        let (w, _) = self.factor(p, (self.up, up), [self.inner(), self.width], LinearGemm::Dgrad)?;
        rows.grouped_gemm(p.rank, &w, segments, how, &dx)?;
        let x = WgradOperand { operand: x.operand(), sorted };
        if let (Some(adapter), Some(hidden)) = (&self.adapters[0], &up_hidden) {
            grads = grads.and(adapter.backward(p, (x.clone(), hidden, &map), &dh, &dx)?);
        }
        let dh = WgradOperand {
            operand: quantized.cols.unwrap_or_else(|| GemmOperand::columnwise(&dh)),
            sorted: true,
        };
        grads = grads.and(self.weight_grad(p, self.up, [self.inner(), self.width], (dh, x), &map));
        Ok((dx, dp, grads))
    }

    /// `dW_e = Σ dyᵀ·x` over the rows of each expert; `shape` is that of one expert's W.
    fn weight_grad(
        &self,
        p: &StepContext,
        id: ParamId,
        shape: [usize; 2],
        (dy, x): (WgradOperand, WgradOperand),
        map: &RowMap,
    ) -> WeightGrad {
        if p.is_frozen(id) {
            return WeightGrad::default();
        }
        let (count, map) = (self.count, map.clone());
        WeightGrad::deferred(id, move |rank, grad, accumulate| {
            let dw = grad.view(&[count, shape[0], shape[1]])?;
            dy.gradient(rank, &x, &map, (&dw, accumulate))
        })
    }
}
