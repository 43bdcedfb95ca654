//! `y = x·Wᵀ + b`

use crate::quant::{GemmOperand, LinearQuant, Role, SavedOperand};
use crate::tensor_parallel::{InFlight, WeightOperand, wgrad_gemm};
use crate::with_amax::GradExtras;
use crate::{
    Declarations, Init, ParamId, Part, Saved, SavedTensor, Split, StepContext, WeightGrad, WithAmax,
};
use ferrotron_kernels::{Act, Gemm, LinearAct, LinearActBackward};
use ferrotron_tensor::{Result, Tensor, shape_error};

/// A linear map `[tokens, in] → [tokens, out]`, weight `[out, in]`, made of one or more logical matrices
/// stacked along `out`.
///
/// Over tensor-parallel ranks it is split by rows (each rank makes its outputs of all tokens: its input is gathered)
/// or by columns (each rank has its part of every sum: partial outputs are summed to the rank that holds the token).
/// Replicated, each rank maps the tokens it holds and nothing moves; its weight gradient is of those tokens, and summed
/// with those of the other ranks like that of a norm.
pub struct Linear {
    pub(crate) weight: ParamId,
    pub(crate) bias: Option<ParamId>,
    out: usize,
    /// Split by columns?
    pub(crate) row_parallel: bool,
    /// Not split?
    replicated: bool,
    /// Which of its products have narrow factors.
    quant: Option<LinearQuant>,
    /// Its input is kept by somebody else anyway: a narrow copy is made in backward.
    pub(crate) input_saved_by_caller: bool,
    /// Outputs are a multiple of this in products, the last of them zeros.
    pub(crate) pad_outputs_to: usize,
}

/// The input, unless its owner can make it again.
pub struct LinearSaved {
    pub(crate) x: Option<SavedTensor>,
    /// The input as a factor of the weight gradient, in its stead.
    pub(crate) quantized: Option<SavedOperand>,
    /// Its largest magnitude, agreed on by ranks, where backward narrows it again. It outlives the input: who makes that
    /// again makes the same bits.
    pub(crate) amax: Option<SavedTensor>,
}

impl LinearSaved {
    /// From an input.
    pub(crate) fn of(x: &Tensor) -> LinearSaved {
        LinearSaved { x: Some(SavedTensor::activation(x)), quantized: None, amax: None }
    }

    /// Drops the input.
    pub(crate) fn drop_input(&mut self) {
        (self.x, self.quantized) = (None, None);
    }

    /// Puts the input back.
    pub(crate) fn restore_input(&mut self, x: &Tensor) {
        (self.x, self.quantized) = (Some(SavedTensor::activation(x)), None);
    }

    /// Was the input dropped?
    pub(crate) fn is_input_dropped(&self) -> bool {
        self.x.is_none() && self.quantized.is_none()
    }

    pub(crate) fn input(self) -> Result<SavedTensor> {
        let dropped = || "its input was dropped and not made again";
        self.x.map_or_else(|| shape_error("linear backward", dropped()), Ok)
    }
}

impl Saved for LinearSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        self.x.tensors(f);
        self.quantized.tensors(f);
        self.amax.tensors(f);
    }
}

impl Linear {
    /// Declares a map from `input` channels to the stacked `outputs` (logical name, channels). Weights are
    /// `<name>.weight`, biases `<name>.bias`.
    pub fn declare(
        d: &mut Declarations,
        input: usize,
        outputs: &[(String, usize)],
        bias: bool,
        split: Split,
        std: f32,
    ) -> Result<Linear> {
        let part = |name: &str, shape, init, split| Part { name: name.into(), shape, init, split };
        let weights = outputs
            .iter()
            .map(|(name, out)| part(&format!("{name}.weight"), vec![*out, input], Init::Normal(std), split));
        let weight = d.declare(weights.collect())?;
        // A bias of partial sums is added once, after the sum over ranks: every rank has all of it.
        let row_parallel = matches!(split, Split::Columns { .. });
        let bias_split = if row_parallel { Split::Replicated } else { split };
        let biases = outputs
            .iter()
            .map(|(name, out)| part(&format!("{name}.bias"), vec![*out], Init::Constant(0.0), bias_split));
        let bias = if bias { Some(d.declare(biases.collect())?) } else { None };
        let out = d.spec(weight).shape[0];
        let quant = d.quantize_linear(weight, outputs);
        let replicated = split == Split::Replicated;
        Ok(Linear {
            weight,
            bias,
            out,
            row_parallel,
            replicated,
            quant,
            input_saved_by_caller: false,
            pad_outputs_to: 1,
        })
    }

    /// The map to `out` channels of a weight that somebody else declared, split by rows.
    pub(crate) fn column_parallel(
        weight: ParamId,
        out: usize,
        quant: LinearQuant,
        pad_outputs_to: usize,
    ) -> Linear {
        let (bias, row_parallel, replicated, input_saved_by_caller) = (None, false, false, false);
        Linear {
            weight,
            bias,
            out,
            row_parallel,
            replicated,
            quant: Some(quant),
            input_saved_by_caller,
            pad_outputs_to,
        }
    }

    /// Has it nothing to do with other ranks?
    pub(crate) fn is_local(&self, p: &StepContext) -> bool {
        self.replicated || p.rank.tp.size() == 1
    }

    /// Its input is kept by the caller, whatever the precision.
    pub(crate) fn with_input_saved_by_caller(self) -> Linear {
        Linear { input_saved_by_caller: true, ..self }
    }

    /// Channels of the output that this rank makes.
    pub fn outputs(&self) -> usize {
        self.out
    }

    /// `[tokens, in] → [tokens, out]`; of the rows this rank holds, the side that faces the residual stream.
    pub fn forward(&self, p: &StepContext, x: impl Into<WithAmax>) -> Result<(Tensor, LinearSaved)> {
        self.forward_recomputable(p, &x.into(), false)
    }

    /// Does it need the largest magnitude of its input, now or in backward?
    pub(crate) fn needs_input_amax(&self, p: &StepContext) -> bool {
        self.quant.is_some_and(|e| e.recipe.measures() && (e.fprop || (p.train && e.wgrad)))
    }

    /// What it needs of the gradient of its output besides the values. Who reads them to narrow them has their sums.
    pub(crate) fn grad_extras(&self) -> GradExtras {
        let reads = self.quant.filter(|e| e.dgrad || e.wgrad);
        GradExtras {
            amax: reads.is_some_and(|e| e.recipe.measures()),
            sums: self.bias.is_some() && reads.is_none(),
        }
    }

    /// [`Linear::forward`]; with `input_recomputed` its input will be made again for backward, by who drops what was saved here.
    pub(crate) fn forward_recomputable(
        &self,
        p: &StepContext,
        x: &WithAmax,
        input_recomputed: bool,
    ) -> Result<(Tensor, LinearSaved)> {
        let plain = || -> Result<bool> {
            Ok(p.calibrates(self.weight, Role::Input, &x.values)?
                && p.calibrates(self.weight, Role::Weight, p.weight(self.weight)?)?)
        };
        if let Some(e) = self.quant
            && !plain()?
        {
            let (y, saved) = self.forward_fp8(p, e, x, input_recomputed)?;
            if let Some(bias) = self.bias.filter(|_| self.row_parallel && !self.is_local(p)) {
                add_bias_rows(p, p.weight(bias)?, &y)?;
            }
            return Ok((y, saved));
        }
        let x = &x.values;
        let saved = LinearSaved::of(x);
        let (w, bias) = (p.weight(self.weight)?, self.bias.map(|b| p.weight(b)).transpose()?);
        let (x, f) = (&GemmOperand::rowwise(x), &WeightOperand::fprop(w, bias));
        if self.is_local(p) {
            return Ok((p.gemm(x, f)?, saved));
        }
        if !self.row_parallel {
            return Ok((p.all_gather_gemm(x, f, false, "input of a layer")?.0, saved));
        }
        let y = p.gemm_reduce_scatter(x, &WeightOperand { bias: None, ..f.clone() }, "output of a layer")?;
        if let Some(bias) = bias {
            add_bias_rows(p, bias, &y)?;
        }
        Ok((y, saved))
    }

    /// [`Linear::forward`] and the plain non-linearity of its output: `h [tokens, out]` and `act(h)`, measured or not.
    pub(crate) fn forward_act(
        &self,
        p: &StepContext,
        act: Act,
        x: &WithAmax,
        measure: bool,
    ) -> Result<(Tensor, WithAmax, LinearSaved)> {
        let (k, s) = (&p.rank.kernels, &p.rank.compute);
        // Where the output is made again from `h` it must be made from `h` here, too.
        if p.rank.tp.size() > 1 || p.recompute.activation || self.quant.is_some() || measure {
            let (h, saved) = self.forward_recomputable(p, x, p.recompute.norm)?;
            let y = p.act_forward(act, false, &h, self.out, measure)?;
            return Ok((h, y, saved));
        }
        let x = &x.values;
        let (w, bias) = (p.weight(self.weight)?, self.bias.map(|b| p.weight(b)).transpose()?);
        let shape = [x.shape()[0], self.out];
        let (h, y) = (p.empty(&shape)?, p.empty(&shape)?);
        k.linear_act_forward(s, &LinearAct { act, x, w, bias, h: &h, y: &y })?;
        Ok((h, WithAmax::from(&y), LinearSaved::of(x)))
    }

    /// [`Linear::backward`], and back through the plain non-linearity of `h` that made its input.
    pub(crate) fn backward_act(
        &self,
        p: &StepContext,
        saved: LinearSaved,
        act: Act,
        h: &Tensor,
        dy: &Tensor,
        extras: GradExtras,
    ) -> Result<(WithAmax, WeightGrad)> {
        if p.rank.tp.size() > 1 || self.quant.is_some() || extras.amax {
            let (da, grads) = self.backward(p, saved, dy)?;
            return Ok((p.act_backward(act, false, h, &da, extras)?, grads));
        }
        let x = saved.input()?;
        let w = p.weight(self.weight)?;
        let mut dh = WithAmax::from(&p.empty(h.shape())?);
        dh.sums = extras.sums.then(|| p.act_sums(h)).transpose()?;
        let f = LinearActBackward { act, dy, w, h, dh: &dh.values, dbias: dh.sums.as_ref() };
        p.rank.kernels.linear_act_backward(&p.rank.compute, &f)?;
        Ok((dh, self.grads(&WithAmax::from(dy), InFlight::ready_now(GemmOperand::rowwise(&x)))))
    }

    /// `dx = dy·W`; later `dW = dyᵀ·x`, `db = Σ dy`.
    pub fn backward(
        &self,
        p: &StepContext,
        saved: LinearSaved,
        dy: impl Into<WithAmax>,
    ) -> Result<(Tensor, WeightGrad)> {
        let dy = &dy.into();
        if let Some(e) = self.quant
            && !p.calibrates(self.weight, Role::Gradient, &dy.values)?
        {
            return self.backward_fp8(p, e, saved, dy);
        }
        let x = saved.input()?;
        let f = &WeightOperand::dgrad(p.weight(self.weight)?);
        let rows = &GemmOperand::rowwise(&dy.values);
        if self.row_parallel {
            let (dx, all) = p.all_gather_gemm(rows, f, true, "gradient of a layer's output")?;
            let Some(all) = all.filter(|_| p.rank.tp.size() > 1) else {
                return Ok((dx, self.grads(dy, InFlight::ready_now(GemmOperand::rowwise(&x)))));
            };
            let weight = WeightGrad::gemm(self.weight, all.memory(), &x);
            return Ok((dx, weight.and(self.bias_grad(dy))));
        }
        if self.is_local(p) {
            return Ok((p.gemm(rows, f)?, self.grads(dy, InFlight::ready_now(GemmOperand::rowwise(&x)))));
        }
        // The input gradient first: it is waited for.
        let dx = p.gemm_reduce_scatter(rows, f, "gradient of a layer's input")?;
        let x = p.begin_all_gather(&GemmOperand::rowwise(&x), "input of a layer, again")?;
        Ok((dx, self.grads(dy, x)))
    }

    /// `dW = dyᵀ·x`, `db = Σ dy`
    fn grads(&self, dy: &WithAmax, x: InFlight) -> WeightGrad {
        match (self.bias, &dy.sums, x.if_ready()) {
            (Some(bias), None, Some(x)) => WeightGrad::linear(self.weight, bias, &dy.values, x),
            _ => wgrad_gemm(self.weight, &dy.values, x).and(self.bias_grad(dy)),
        }
    }

    /// `db = Σ dy`, of the sums where they are there.
    pub(crate) fn bias_grad(&self, dy: &WithAmax) -> WeightGrad {
        let columns = |bias| WeightGrad::column_sums(bias, dy.sums.as_ref().unwrap_or(&dy.values));
        self.bias.map(columns).unwrap_or_default()
    }
}

/// Adds a bias to every row: a product over nothing, onto what is there.
fn add_bias_rows(p: &StepContext, bias: &Tensor, y: &Tensor) -> Result<()> {
    let [rows, out] = [y.shape()[0], y.shape()[1]];
    let (a, b) = (p.empty(&[rows, 0])?, p.empty(&[out, 0])?);
    let g = Gemm { a: &a, trans_a: false, b: &b, trans_b: true, bias: Some(bias), accumulate: true, c: y };
    p.rank.kernels.gemm(&p.rank.compute, &g)
}
