//! The MLP: up-projection, activation (gated or not), down-projection.

use crate::{
    Declarations, Linear, LinearSaved, Saved, SavedTensor, Split, StepContext, WeightGrad, WithAmax,
};
use ferrotron_kernels::Act;
use ferrotron_tensor::{Result, Tensor};

/// `down(act(gate(x))·up(x))`, or `down(act(up(x)))` without a gate.
pub struct Mlp {
    up: Linear,
    down: Linear,
    act: Act,
    gated: bool,
    ffn: usize,
}

/// Activations that backward needs.
pub struct MlpSaved {
    down: LinearSaved,
    h: SavedTensor,
    up: LinearSaved,
}

impl Saved for MlpSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        self.down.tensors(f);
        f(&mut self.h);
        self.up.tensors(f);
    }
}

impl MlpSaved {
    /// Drops the block's input; the caller recomputes it before backward.
    pub fn drop_input(&mut self) {
        self.up.drop_input();
    }

    /// Restores the recomputed input.
    pub fn restore_input(&mut self, x: &Tensor) {
        self.up.restore_input(x);
    }
}

impl Mlp {
    /// Declares `<name>.gate` (where gated), `<name>.up` and `<name>.down`. `std_out` is the initial standard deviation of
    /// `down`.
    #[allow(clippy::too_many_arguments)]
    pub fn declare(
        d: &mut Declarations,
        name: &str,
        hidden: usize,
        ffn: usize,
        act: Act,
        gated: bool,
        bias: bool,
        std: f32,
        std_out: f32,
    ) -> Result<Mlp> {
        let mut outputs = vec![(format!("{name}.up"), ffn)];
        if gated {
            outputs.insert(0, (format!("{name}.gate"), ffn));
        }
        let up = Linear::declare(d, hidden, &outputs, bias, Split::Rows { unit: 1 }, std)?;
        let down = Linear::declare(
            d,
            ffn,
            &[(format!("{name}.down"), hidden)],
            bias,
            Split::Columns { unit: 1 },
            std_out,
        )?;
        let ffn = up.outputs() / if gated { 2 } else { 1 };
        Ok(Mlp { up, down, act, gated, ffn })
    }

    /// Whether the producer of its input should also compute the input's amax (for FP8 quantization).
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

    /// Returns the input gradient `[tokens, hidden]` and the deferred weight gradients.
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
            self.down.backward_act(p, down, self.act, &saved.h, dy, extras)?
        };
        let (dx, up_grad) = self.up.backward(p, saved.up, &dh)?;
        Ok((dx, down_grad.and(up_grad)))
    }
}
