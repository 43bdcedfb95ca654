//! `y = x·Wᵀ + b`

use crate::measured::Wanted;
use crate::overlap::{Arriving, Factor, weight_product};
use crate::precision::{Eight, Role, SavedSide, Side};
use crate::{Declarations, Init, Measured, ParamId, Part, Pass, Saved, SavedTensor, Split, WeightGrad};
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
    pub(crate) partial: bool,
    /// Not split?
    local: bool,
    /// Which of its products have narrow factors.
    eight: Option<Eight>,
    /// Its input is kept by somebody else anyway: a narrow copy is made in backward.
    pub(crate) keeps_input: bool,
    /// Outputs are a multiple of this in products, the last of them zeros.
    pub(crate) even: usize,
}

/// The input, unless its owner can make it again.
pub struct LinearSaved {
    pub(crate) x: Option<SavedTensor>,
    /// The input as a factor of the weight gradient, in its stead.
    pub(crate) narrow: Option<SavedSide>,
    /// Its largest magnitude, agreed on by ranks, where backward narrows it again. It outlives the input: who makes that
    /// again makes the same bits.
    pub(crate) amax: Option<SavedTensor>,
}

impl LinearSaved {
    /// From an input.
    pub(crate) fn of(x: &Tensor) -> LinearSaved {
        LinearSaved { x: Some(SavedTensor::activation(x)), narrow: None, amax: None }
    }

    /// Drops the input.
    pub(crate) fn forget(&mut self) {
        (self.x, self.narrow) = (None, None);
    }

    /// Puts the input back.
    pub(crate) fn remember(&mut self, x: &Tensor) {
        (self.x, self.narrow) = (Some(SavedTensor::activation(x)), None);
    }

    /// Was the input dropped?
    pub(crate) fn is_forgotten(&self) -> bool {
        self.x.is_none() && self.narrow.is_none()
    }

    pub(crate) fn input(self) -> Result<SavedTensor> {
        let dropped = || "its input was dropped and not made again";
        self.x.map_or_else(|| shape_error("linear backward", dropped()), Ok)
    }
}

impl Saved for LinearSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        self.x.tensors(f);
        self.narrow.tensors(f);
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
        let partial = matches!(split, Split::Columns { .. });
        let bias_split = if partial { Split::Replicated } else { split };
        let biases = outputs
            .iter()
            .map(|(name, out)| part(&format!("{name}.bias"), vec![*out], Init::Constant(0.0), bias_split));
        let bias = if bias { Some(d.declare(biases.collect())?) } else { None };
        let out = d.spec(weight).shape[0];
        let eight = d.narrow(weight, outputs);
        let local = split == Split::Replicated;
        Ok(Linear { weight, bias, out, partial, local, eight, keeps_input: false, even: 1 })
    }

    /// The map to `out` channels of a weight that somebody else declared, split by rows.
    pub(crate) fn of_rows(weight: ParamId, out: usize, eight: Eight, even: usize) -> Linear {
        let (bias, partial, local, keeps_input) = (None, false, false, false);
        Linear { weight, bias, out, partial, local, eight: Some(eight), keeps_input, even }
    }

    /// Has it nothing to do with other ranks?
    pub(crate) fn alone(&self, p: &Pass) -> bool {
        self.local || p.rank.tp.size() == 1
    }

    /// Its input is kept by the caller, whatever the precision.
    pub(crate) fn with_input_kept(self) -> Linear {
        Linear { keeps_input: true, ..self }
    }

    /// Channels of the output that this rank makes.
    pub fn outputs(&self) -> usize {
        self.out
    }

    /// `[tokens, in] → [tokens, out]`; of the rows this rank holds, the side that faces the residual stream.
    pub fn forward(&self, p: &Pass, x: impl Into<Measured>) -> Result<(Tensor, LinearSaved)> {
        self.forward_or_again(p, &x.into(), false)
    }

    /// Does it need the largest magnitude of its input, now or in backward?
    pub(crate) fn measures_input(&self, p: &Pass) -> bool {
        self.eight.is_some_and(|e| e.recipe.measures() && (e.output || (p.train && e.weight_grad)))
    }

    /// What it needs of the gradient of its output besides the values. Who reads them to narrow them has their sums.
    pub(crate) fn wanted_of_gradient(&self) -> Wanted {
        let reads = self.eight.filter(|e| e.input_grad || e.weight_grad);
        Wanted {
            amax: reads.is_some_and(|e| e.recipe.measures()),
            sums: self.bias.is_some() && reads.is_none(),
        }
    }

    /// [`Linear::forward`]; with `again` its input will be made again for backward, by who drops what was saved here.
    pub(crate) fn forward_or_again(
        &self,
        p: &Pass,
        x: &Measured,
        again: bool,
    ) -> Result<(Tensor, LinearSaved)> {
        let plain = || -> Result<bool> {
            Ok(p.collects(self.weight, Role::Input, &x.values)?
                && p.collects(self.weight, Role::Weight, p.weight(self.weight)?)?)
        };
        if let Some(e) = self.eight
            && !plain()?
        {
            let (y, saved) = self.forward_narrow(p, e, x, again)?;
            if let Some(bias) = self.bias.filter(|_| self.partial && !self.alone(p)) {
                add_bias(p, p.weight(bias)?, &y)?;
            }
            return Ok((y, saved));
        }
        let x = &x.values;
        let saved = LinearSaved::of(x);
        let (w, bias) = (p.weight(self.weight)?, self.bias.map(|b| p.weight(b)).transpose()?);
        let (x, f) = (&Side::rows_of(x), &Factor::output(w, bias));
        if self.alone(p) {
            return Ok((p.product(x, f)?, saved));
        }
        if !self.partial {
            return Ok((p.product_of_all_rows(x, f, false, "input of a layer")?.0, saved));
        }
        let y = p.sum_of_products(x, &Factor { bias: None, ..f.clone() }, "output of a layer")?;
        if let Some(bias) = bias {
            add_bias(p, bias, &y)?;
        }
        Ok((y, saved))
    }

    /// [`Linear::forward`] and the plain non-linearity of its output: `h [tokens, out]` and `act(h)`, measured or not.
    pub(crate) fn forward_then(
        &self,
        p: &Pass,
        act: Act,
        x: &Measured,
        measure: bool,
    ) -> Result<(Tensor, Measured, LinearSaved)> {
        let (k, s) = (&p.rank.kernels, &p.rank.compute);
        // Where the output is made again from `h` it must be made from `h` here, too.
        if p.rank.tp.size() > 1 || p.recompute.activation || self.eight.is_some() || measure {
            let (h, saved) = self.forward_or_again(p, x, p.recompute.norm)?;
            let y = p.act_forward(act, false, &h, self.out, measure)?;
            return Ok((h, y, saved));
        }
        let x = &x.values;
        let (w, bias) = (p.weight(self.weight)?, self.bias.map(|b| p.weight(b)).transpose()?);
        let shape = [x.shape()[0], self.out];
        let (h, y) = (p.empty(&shape)?, p.empty(&shape)?);
        k.linear_act_forward(s, &LinearAct { act, x, w, bias, h: &h, y: &y })?;
        Ok((h, Measured::from(&y), LinearSaved::of(x)))
    }

    /// [`Linear::backward`], and back through the plain non-linearity of `h` that made its input.
    pub(crate) fn backward_through(
        &self,
        p: &Pass,
        saved: LinearSaved,
        act: Act,
        h: &Tensor,
        dy: &Tensor,
        wanted: Wanted,
    ) -> Result<(Measured, WeightGrad)> {
        if p.rank.tp.size() > 1 || self.eight.is_some() || wanted.amax {
            let (da, grads) = self.backward(p, saved, dy)?;
            return Ok((p.act_backward(act, false, h, &da, wanted)?, grads));
        }
        let x = saved.input()?;
        let w = p.weight(self.weight)?;
        let mut dh = Measured::from(&p.empty(h.shape())?);
        dh.sums = wanted.sums.then(|| p.act_sums(h)).transpose()?;
        let f = LinearActBackward { act, dy, w, h, dh: &dh.values, sums: dh.sums.as_ref() };
        p.rank.kernels.linear_act_backward(&p.rank.compute, &f)?;
        Ok((dh, self.grads(&Measured::from(dy), Arriving::here(Side::rows_of(&x)))))
    }

    /// `dx = dy·W`; later `dW = dyᵀ·x`, `db = Σ dy`.
    pub fn backward(
        &self,
        p: &Pass,
        saved: LinearSaved,
        dy: impl Into<Measured>,
    ) -> Result<(Tensor, WeightGrad)> {
        let dy = &dy.into();
        if let Some(e) = self.eight
            && !p.collects(self.weight, Role::Gradient, &dy.values)?
        {
            return self.backward_narrow(p, e, saved, dy);
        }
        let x = saved.input()?;
        let f = &Factor::input_grad(p.weight(self.weight)?);
        let rows = &Side::rows_of(&dy.values);
        if self.partial {
            let (dx, all) = p.product_of_all_rows(rows, f, true, "gradient of a layer's output")?;
            let Some(all) = all.filter(|_| p.rank.tp.size() > 1) else {
                return Ok((dx, self.grads(dy, Arriving::here(Side::rows_of(&x)))));
            };
            let weight = WeightGrad::product(self.weight, all.memory(), &x);
            return Ok((dx, weight.and(self.bias_grad(dy))));
        }
        if self.alone(p) {
            return Ok((p.product(rows, f)?, self.grads(dy, Arriving::here(Side::rows_of(&x)))));
        }
        // The input gradient first: it is waited for.
        let dx = p.sum_of_products(rows, f, "gradient of a layer's input")?;
        let x = p.arriving_rows(&Side::rows_of(&x), "input of a layer, again")?;
        Ok((dx, self.grads(dy, x)))
    }

    /// `dW = dyᵀ·x`, `db = Σ dy`
    fn grads(&self, dy: &Measured, x: Arriving) -> WeightGrad {
        match (self.bias, &dy.sums, x.there()) {
            (Some(bias), None, Some(x)) => WeightGrad::linear(self.weight, bias, &dy.values, x),
            _ => weight_product(self.weight, &dy.values, x).and(self.bias_grad(dy)),
        }
    }

    /// `db = Σ dy`, of the sums where they are there.
    pub(crate) fn bias_grad(&self, dy: &Measured) -> WeightGrad {
        let columns = |bias| WeightGrad::columns(bias, dy.sums.as_ref().unwrap_or(&dy.values));
        self.bias.map(columns).unwrap_or_default()
    }
}

/// Adds a bias to every row: a product over nothing, onto what is there.
fn add_bias(p: &Pass, bias: &Tensor, y: &Tensor) -> Result<()> {
    let [rows, out] = [y.shape()[0], y.shape()[1]];
    let (a, b) = (p.empty(&[rows, 0])?, p.empty(&[out, 0])?);
    let g = Gemm { a: &a, trans_a: false, b: &b, trans_b: true, bias: Some(bias), accumulate: true, c: y };
    p.rank.kernels.gemm(&p.rank.compute, &g)
}
