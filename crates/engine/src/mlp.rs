//! The MLP block: up-projection, activation function (gated or not), down-projection.

use crate::error::missing_activation;
use crate::weight_grad::WeightGradSums;
use crate::{
    Declarations, Linear, LinearSaved, Module, Saved, SavedTensor, Split, StepContext, WeightGrad, WithAmax,
};
use ferrotron_kernels::Act;
use ferrotron_tensor::{Result, Tensor};

/// Sizes and options of an MLP.
#[derive(Clone, Copy, Debug)]
pub struct MlpConfig {
    /// Hidden size (h).
    pub hidden: usize,
    /// Intermediate size (f); of each half where gated.
    pub ffn: usize,
    /// Activation function.
    pub act: Act,
    /// Gated (GLU).
    pub gated: bool,
    /// Biases of both linears.
    pub bias: bool,
    /// Standard deviation of initial weights, and of the output projection's.
    pub std: (f32, f32),
}

/// MLP: `down(act(gate(x))·up(x))`, or `down(act(up(x)))` without a gate. `up` (and `gate`) are column-parallel, `down` is
/// row-parallel.
pub struct Mlp {
    up: Linear,
    down: Linear,
    act: Act,
    gated: bool,
    ffn: usize,
}

/// What [`Mlp::backward`] needs.
#[expect(clippy::large_enum_variant, reason = "handles of a few words, once a layer")]
pub enum MlpSaved {
    /// Inputs of both linears and of the activation function.
    Whole {
        /// Of the down-projection.
        down: LinearSaved,
        /// Output of the up-projection.
        h: SavedTensor,
        /// Of the up-projection.
        up: LinearSaved,
    },
    /// The input alone: backward recomputes the rest, chunk by chunk.
    Chunks {
        /// `[tokens, hidden]`; none where the caller recomputes it.
        x: Option<SavedTensor>,
        /// Its amax, where it was measured.
        amax: Option<SavedTensor>,
    },
}

impl Saved for MlpSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        self.modules(&mut |_, t| f(t));
    }

    fn modules(&mut self, f: &mut dyn FnMut(Module, &mut SavedTensor)) {
        match self {
            MlpSaved::Whole { down, h, up } => {
                down.tensors(&mut |t| f(Module::Fc2, t));
                f(Module::MlpAct, h);
                up.tensors(&mut |t| f(Module::Fc1, t));
            }
            MlpSaved::Chunks { x, amax } => [x, amax].into_iter().flatten().for_each(|t| f(Module::Fc1, t)),
        }
    }
}

impl MlpSaved {
    /// Drops the block's input; the caller recomputes it.
    pub fn drop_input(&mut self) {
        match self {
            MlpSaved::Whole { up, .. } => up.drop_input(),
            MlpSaved::Chunks { x, .. } => *x = None,
        }
    }

    /// Restores a recomputed input.
    pub fn restore_input(&mut self, input: &Tensor) {
        match self {
            MlpSaved::Whole { up, .. } => up.restore_input(input),
            MlpSaved::Chunks { x, .. } => *x = Some(SavedTensor::activation(input)),
        }
    }
}

impl Mlp {
    /// Declares `<name>.gate` (where gated), `<name>.up` and `<name>.down`.
    pub fn declare(d: &mut Declarations, name: &str, c: MlpConfig) -> Result<Mlp> {
        let MlpConfig { hidden, ffn, act, gated, bias, std } = c;
        let mut outputs = vec![(format!("{name}.up"), ffn)];
        if gated {
            outputs.insert(0, (format!("{name}.gate"), ffn));
        }
        let up = Linear::declare(d, hidden, &outputs, bias, Split::Rows { unit: 1 }, std.0)?;
        let down = [(format!("{name}.down"), hidden)];
        let down = Linear::declare(d, ffn, &down, bias, Split::Columns { unit: 1 }, std.1)?;
        let ffn = up.outputs() / if gated { 2 } else { 1 };
        Ok(Mlp { up, down, act, gated, ffn })
    }

    /// Whether the caller should pass the amax of the input along with it.
    pub fn needs_input_amax(&self, p: &StepContext) -> bool {
        self.up.needs_input_amax(p)
    }

    /// `[tokens, hidden] → [tokens, hidden]`, in chunks of tokens where [`StepContext::mlp_chunk`] says so.
    pub fn forward(&self, p: &StepContext, x: impl Into<WithAmax>) -> Result<(Tensor, MlpSaved)> {
        let x = x.into();
        let Some(chunk) = p.mlp_chunk.filter(|chunk| x.values.shape()[0] > *chunk) else {
            let (a, h, up) = self.up_forward(p, &x)?;
            let (y, mut down) = self.down.forward_recomputable(p, &a, p.recompute.activation)?;
            if p.recompute.activation {
                down.drop_input();
            }
            return Ok((y, MlpSaved::Whole { down, h: SavedTensor::activation(&h), up }));
        };
        let y = p.empty(x.values.shape())?;
        for (start, len) in chunks(y.shape()[0], chunk) {
            let (a, _, _) = self.up_forward(p, &rows(&x, start, len)?)?;
            p.rank.compute.copy(&self.down.forward(p, &a)?.0, &y.narrow(0, start, len)?)?;
        }
        Ok((y, saved_input(&x)))
    }

    /// What [`Mlp::forward`] has saved, without its output: for backward.
    pub fn recompute(&self, p: &StepContext, x: impl Into<WithAmax>) -> Result<MlpSaved> {
        let x = x.into();
        match p.mlp_chunk {
            Some(chunk) if x.values.shape()[0] > chunk => Ok(saved_input(&x)),
            _ => self.recompute_chunk(p, &x),
        }
    }

    fn recompute_chunk(&self, p: &StepContext, x: &WithAmax) -> Result<MlpSaved> {
        let (a, h, up) = self.up_forward(p, x)?;
        let down = self.down.save_input(p, &a)?;
        Ok(MlpSaved::Whole { down, h: SavedTensor::activation(&h), up })
    }

    /// The input of the down-projection, and the output and saved input of the up-projection.
    fn up_forward(&self, p: &StepContext, x: &WithAmax) -> Result<(WithAmax, Tensor, LinearSaved)> {
        let measure = self.down.needs_input_amax(p);
        if self.gated {
            let (h, up) = self.up.forward_recomputable(p, x, p.recompute.norm)?;
            return Ok((p.act_forward(self.act, true, &h, self.ffn, measure)?, h, up));
        }
        let (h, a, up) = self.up.forward_act(p, self.act, x, measure)?;
        Ok((a, h, up))
    }

    /// Gradient of the input.
    pub fn backward(&self, p: &StepContext, saved: MlpSaved, dy: &Tensor) -> Result<(Tensor, WeightGrad)> {
        let (mut down, h, up) = match saved {
            MlpSaved::Whole { down, h, up } => (down, h, up),
            MlpSaved::Chunks { x, amax } => {
                let Some(x) = x else { return missing_activation("MLP", "input") };
                let amax = amax.map(|t| (*t).clone());
                return self.backward_chunks(p, &WithAmax { values: (*x).clone(), amax, sums: None }, dy);
            }
        };
        if down.is_input_dropped() {
            down.restore_input(&p.act_forward(self.act, self.gated, &h, self.ffn, false)?.values);
        }
        let extras = self.up.grad_extras();
        let (dh, down_grad) = if self.gated {
            let (da, grad) = self.down.backward(p, down, dy)?;
            (p.act_backward(self.act, true, &h, &da, extras)?, grad)
        } else {
            self.down.backward_act(p, down, (self.act, &h), dy, extras)?
        };
        drop(h);
        let (dx, up_grad) = self.up.backward(p, up, &dh)?;
        Ok((dx, down_grad.and(up_grad)))
    }

    /// Recomputation and backward of one chunk of tokens after another. Weight gradients are summed over the chunks first.
    fn backward_chunks(&self, p: &StepContext, x: &WithAmax, dy: &Tensor) -> Result<(Tensor, WeightGrad)> {
        // Nothing outlives a chunk, so that nothing inside it is worth dropping.
        let mut again = p.for_recompute(None);
        (again.recompute.norm, again.recompute.activation) = (false, false);
        let (dx, mut sums) = (p.empty(x.values.shape())?, WeightGradSums::default());
        for (start, len) in chunks(dy.shape()[0], p.mlp_chunk.unwrap_or(usize::MAX)) {
            let saved = self.recompute_chunk(&again, &rows(x, start, len)?)?;
            let (part, grads) = self.backward(p, saved, &dy.narrow(0, start, len)?)?;
            p.rank.compute.copy(&part, &dx.narrow(0, start, len)?)?;
            sums.add(p, grads)?;
        }
        Ok((dx, sums.into_weight_grad()))
    }
}

fn saved_input(x: &WithAmax) -> MlpSaved {
    let x_saved = Some(SavedTensor::activation(&x.values));
    MlpSaved::Chunks { x: x_saved, amax: x.amax.as_ref().map(SavedTensor::small) }
}

/// Rows `start..start + len`, with the amax of all of them.
fn rows(x: &WithAmax, start: usize, len: usize) -> Result<WithAmax> {
    Ok(WithAmax { values: x.values.narrow(0, start, len)?, amax: x.amax.clone(), sums: None })
}

fn chunks(tokens: usize, chunk: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..tokens).step_by(chunk).map(move |start| (start, chunk.min(tokens - start)))
}
