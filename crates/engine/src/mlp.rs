//! The feed-forward block: up, non-linearity (gated or not), down.

use crate::{Declarations, Linear, LinearSaved, Pass, Saved, SavedTensor, Split, WeightGrad};
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

/// Inputs of the three steps.
pub struct MlpSaved {
    down: Option<LinearSaved>,
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
    /// Drops the block's input, which the caller can make again.
    pub fn forget_input(&mut self) {
        self.up.forget();
    }

    /// Puts the input back.
    pub fn remember_input(&mut self, x: &Tensor) {
        self.up.remember(x);
    }
}

impl Mlp {
    /// Declares `<name>.gate` (where gated), `<name>.up` and `<name>.down`. `std_out` is for `down`.
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

    /// `[tokens, hidden] → [tokens, hidden]`
    pub fn forward(&self, p: &Pass, x: &Tensor) -> Result<(Tensor, MlpSaved)> {
        let (h, a, up) = if self.gated {
            let (h, up) = self.up.forward_or_again(p, x, p.recompute.norm)?;
            let a = self.activate(p, &h)?;
            (h, a, up)
        } else {
            self.up.forward_then(p, self.act, x)?
        };
        let (y, down) = self.down.forward_or_again(p, &a, p.recompute.activation)?;
        let down = (!p.recompute.activation).then_some(down);
        Ok((y, MlpSaved { down, h: SavedTensor::activation(&h), up }))
    }

    fn activate(&self, p: &Pass, h: &Tensor) -> Result<Tensor> {
        let a = p.empty(&[h.shape()[0], self.ffn])?;
        p.rank.kernels.act_forward(&p.rank.compute, self.act, self.gated, h, &a)?;
        Ok(a)
    }

    /// Gradient of the input.
    pub fn backward(&self, p: &Pass, saved: MlpSaved, dy: &Tensor) -> Result<(Tensor, WeightGrad)> {
        let down = match saved.down {
            Some(down) => down,
            None => LinearSaved::of(&self.activate(p, &saved.h)?),
        };
        let (dh, down_grad) = if self.gated {
            let (da, grad) = self.down.backward(p, down, dy)?;
            let dh = p.empty(saved.h.shape())?;
            p.rank.kernels.act_backward(&p.rank.compute, self.act, true, &saved.h, &da, &dh)?;
            (dh, grad)
        } else {
            self.down.backward_through(p, down, self.act, &saved.h, dy)?
        };
        let (dx, up_grad) = self.up.backward(p, saved.up, &dh)?;
        Ok((dx, down_grad.and(up_grad)))
    }
}
