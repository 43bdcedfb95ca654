//! The MLP block: up-projection, activation function (gated or not), down-projection.

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
pub struct MlpSaved {
    down: LinearSaved,
    h: SavedTensor,
    up: LinearSaved,
}

impl Saved for MlpSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        self.modules(&mut |_, t| f(t));
    }

    fn modules(&mut self, f: &mut dyn FnMut(Module, &mut SavedTensor)) {
        self.down.tensors(&mut |t| f(Module::Fc2, t));
        f(Module::MlpAct, &mut self.h);
        self.up.tensors(&mut |t| f(Module::Fc1, t));
    }
}

impl MlpSaved {
    /// Drops the block's input; the caller recomputes it.
    pub fn drop_input(&mut self) {
        self.up.drop_input();
    }

    /// Restores a recomputed input.
    pub fn restore_input(&mut self, x: &Tensor) {
        self.up.restore_input(x);
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

    /// `[tokens, hidden] → [tokens, hidden]`
    pub fn forward(&self, p: &StepContext, x: impl Into<WithAmax>) -> Result<(Tensor, MlpSaved)> {
        let (x, measure) = (x.into(), self.down.needs_input_amax(p));
        let (h, a, up) = if self.gated {
            let (h, up) = self.up.forward_recomputable(p, &x, p.recompute.norm)?;
            let a = p.act_forward(self.act, true, &h, self.ffn, measure)?;
            (h, a, up)
        } else {
            self.up.forward_act(p, self.act, &x, measure)?
        };
        let (y, mut down) = self.down.forward_recomputable(p, &a, p.recompute.activation)?;
        if p.recompute.activation {
            down.drop_input();
        }
        Ok((y, MlpSaved { down, h: SavedTensor::activation(&h), up }))
    }

    /// Gradient of the input.
    pub fn backward(&self, p: &StepContext, saved: MlpSaved, dy: &Tensor) -> Result<(Tensor, WeightGrad)> {
        let mut down = saved.down;
        if down.is_input_dropped() {
            down.restore_input(&p.act_forward(self.act, self.gated, &saved.h, self.ffn, false)?.values);
        }
        let extras = self.up.grad_extras();
        let (dh, down_grad) = if self.gated {
            let (da, grad) = self.down.backward(p, down, dy)?;
            (p.act_backward(self.act, true, &saved.h, &da, extras)?, grad)
        } else {
            self.down.backward_act(p, down, (self.act, &saved.h), dy, extras)?
        };
        let (dx, up_grad) = self.up.backward(p, saved.up, &dh)?;
        Ok((dx, down_grad.and(up_grad)))
    }
}
