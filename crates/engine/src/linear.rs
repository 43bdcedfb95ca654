//! `y = x·Wᵀ + b`

use crate::overlap::{Factor, weight_product};
use crate::{Declarations, Init, ParamId, Part, Pass, Saved, SavedTensor, Split, WeightGrad};
use ferrotron_kernels::Gemm;
use ferrotron_tensor::{Result, Tensor, shape_error};

/// A linear map `[tokens, in] → [tokens, out]`, weight `[out, in]`, made of one or more logical matrices
/// stacked along `out`.
///
/// Over tensor-parallel ranks it is split by rows (each rank makes its outputs of all tokens: its input is gathered)
/// or by columns (each rank has its part of every sum: partial outputs are summed to the rank that holds the token).
pub struct Linear {
    weight: ParamId,
    bias: Option<ParamId>,
    out: usize,
    /// Split by columns?
    partial: bool,
}

/// The input, unless its owner can make it again.
pub struct LinearSaved {
    pub(crate) x: Option<SavedTensor>,
}

impl LinearSaved {
    /// From an input.
    pub(crate) fn of(x: &Tensor) -> LinearSaved {
        LinearSaved { x: Some(SavedTensor::activation(x)) }
    }
}

impl Saved for LinearSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        self.x.tensors(f);
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
        Ok(Linear { weight, bias, out, partial })
    }

    /// Channels of the output that this rank makes.
    pub fn outputs(&self) -> usize {
        self.out
    }

    /// `[tokens, in] → [tokens, out]`; of the rows this rank holds, the side that faces the residual stream.
    pub fn forward(&self, p: &Pass, x: &Tensor) -> Result<(Tensor, LinearSaved)> {
        let saved = LinearSaved::of(x);
        let (w, bias) = (p.weight(self.weight)?, self.bias.map(|b| p.weight(b)).transpose()?);
        let f = Factor { w, trans: true, bias };
        if p.rank.tp.size() == 1 {
            return Ok((p.product(x, f)?, saved));
        }
        if !self.partial {
            return Ok((p.product_of_all_rows(x, f, false, "input of a layer")?.0, saved));
        }
        let y = p.sum_of_products(x, Factor { bias: None, ..f }, "output of a layer")?;
        if let Some(bias) = bias {
            add_bias(p, bias, &y)?;
        }
        Ok((y, saved))
    }

    /// `dx = dy·W`; later `dW = dyᵀ·x`, `db = Σ dy`.
    pub fn backward(&self, p: &Pass, saved: LinearSaved, dy: &Tensor) -> Result<(Tensor, WeightGrad)> {
        let Some(x) = saved.x else {
            return shape_error("linear backward", "its input was dropped and not made again");
        };
        let f = Factor { w: p.weight(self.weight)?, trans: false, bias: None };
        let (dx, mut grads) = if self.partial {
            let (dx, all) = p.product_of_all_rows(dy, f, true, "gradient of a layer's output")?;
            (dx, WeightGrad::product(self.weight, all.as_ref().unwrap_or(dy), &x))
        } else {
            // The input gradient first: it is waited for.
            let dx = p.sum_of_products(dy, f, "gradient of a layer's input")?;
            let x = p.arriving_rows(&x, "input of a layer, again")?;
            (dx, weight_product(self.weight, dy, x))
        };
        if let Some(bias) = self.bias {
            grads = grads.and(WeightGrad::columns(bias, dy));
        }
        Ok((dx, grads))
    }
}

/// Adds a bias to every row: a product over nothing, onto what is there.
fn add_bias(p: &Pass, bias: &Tensor, y: &Tensor) -> Result<()> {
    let [rows, out] = [y.shape()[0], y.shape()[1]];
    let (a, b) = (p.empty(&[rows, 0])?, p.empty(&[out, 0])?);
    let g = Gemm { a: &a, trans_a: false, b: &b, trans_b: true, bias: Some(bias), accumulate: true, c: y };
    p.rank.kernels.gemm(&p.rank.compute, &g)
}
