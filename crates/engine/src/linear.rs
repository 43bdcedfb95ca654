//! `y = x·Wᵀ + b`

use crate::{Declarations, Init, ParamId, Part, Pass, Saved, SavedTensor, Split, WeightGrad};
use ferrotron_kernels::Gemm;
use ferrotron_tensor::{Result, Tensor, shape_error};

/// A linear map `[tokens, in] → [tokens, out]`, weight `[out, in]`, made of one or more logical matrices
/// stacked along `out`.
pub struct Linear {
    weight: ParamId,
    bias: Option<ParamId>,
    out: usize,
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
        // A row-parallel bias is added once, after the sum over ranks: every rank has all of it.
        let bias_split = if split == Split::Columns { Split::Replicated } else { split };
        let biases = outputs
            .iter()
            .map(|(name, out)| part(&format!("{name}.bias"), vec![*out], Init::Constant(0.0), bias_split));
        let bias = if bias { Some(d.declare(biases.collect())?) } else { None };
        Ok(Linear { weight, bias, out: outputs.iter().map(|o| o.1).sum() })
    }

    /// `[tokens, in] → [tokens, out]`
    pub fn forward(&self, p: &Pass, x: &Tensor) -> Result<(Tensor, LinearSaved)> {
        let y = p.empty(&[x.shape()[0], self.out])?;
        let g = Gemm {
            a: x,
            trans_a: false,
            b: p.params.get(self.weight),
            trans_b: true,
            bias: self.bias.map(|b| p.params.get(b)),
            accumulate: false,
            c: &y,
        };
        p.rank.kernels.gemm(&p.rank.compute, &g)?;
        Ok((y, LinearSaved::of(x)))
    }

    /// `dx = dy·W`; later `dW = dyᵀ·x`, `db = Σ dy`.
    pub fn backward(&self, p: &Pass, saved: LinearSaved, dy: &Tensor) -> Result<(Tensor, WeightGrad)> {
        let w = p.params.get(self.weight);
        let dx = p.empty(&[dy.shape()[0], w.shape()[1]])?;
        let g = Gemm { a: dy, trans_a: false, b: w, trans_b: false, bias: None, accumulate: false, c: &dx };
        p.rank.kernels.gemm(&p.rank.compute, &g)?;
        let Some(x) = saved.x else {
            return shape_error("linear backward", "its input was dropped and not made again");
        };
        let mut grads = WeightGrad::product(self.weight, dy, &x);
        if let Some(bias) = self.bias {
            grads = grads.and(WeightGrad::columns(bias, dy));
        }
        Ok((dx, grads))
    }
}
