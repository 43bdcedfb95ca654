//! The shared expert: an MLP that every token goes through, optionally weighted by a sigmoid gate.

use super::MoeShape;
use crate::{
    Declarations, Linear, LinearSaved, Mlp, MlpConfig, MlpSaved, Module, Saved, SavedTensor, StepContext,
    WeightGrad, WithAmax,
};
use ferrotron_kernels::{ExpertSelection, Route, RouteBackward, RouterParams, ScoreFunction};
use ferrotron_tensor::{Category, DType, Result, Tensor};

/// `σ(g·x)·mlp(x)`, or `mlp(x)` without a gate.
pub struct SharedExpert {
    mlp: Mlp,
    gate: Option<Linear>,
}

/// What backward needs.
pub struct SharedExpertSaved {
    mlp: MlpSaved,
    gate: Option<GateSaved>,
}

struct GateSaved {
    linear: LinearSaved,
    logits: SavedTensor,
    /// f32 `[rows, 1]`: the gate.
    probs: SavedTensor,
    y: SavedTensor,
    /// i32 `[rows, 1]`: expert 0 for every row, and the row indices.
    expert_zero: Tensor,
    row_index: Tensor,
}

impl Saved for SharedExpertSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        self.modules(&mut |_, t| f(t));
    }

    fn modules(&mut self, f: &mut dyn FnMut(Module, &mut SavedTensor)) {
        if let Some(g) = &mut self.gate {
            f(Module::Fc2, &mut g.y);
            f(Module::Router, &mut g.probs);
            f(Module::Router, &mut g.logits);
            g.linear.tensors(&mut |t| f(Module::Fc1, t));
        }
        self.mlp.modules(f);
    }
}

/// The gate is a sigmoid router with one expert.
const GATE: RouterParams =
    RouterParams { score: ScoreFunction::Sigmoid, normalize: false, groups: None, scale: 1.0 };

impl SharedExpert {
    pub(super) fn declare(
        d: &mut Declarations,
        name: &str,
        c: &MoeShape,
        ffn: usize,
    ) -> Result<SharedExpert> {
        let config = MlpConfig { hidden: c.hidden, ffn, act: c.act, gated: c.gated, bias: false, std: c.std };
        let mlp = Mlp::declare(d, name, config)?;
        let gate = match c.shared_gate {
            false => None,
            true => Some(Linear::declare_replicated(d, &format!("{name}_gate"), c.hidden, 1, c.std.0)?),
        };
        Ok(SharedExpert { mlp, gate })
    }

    pub(super) fn needs_input_amax(&self, p: &StepContext) -> bool {
        self.mlp.needs_input_amax(p)
    }

    /// `[tokens, hidden] → [tokens, hidden]`
    pub(super) fn forward(&self, p: &StepContext, x: &WithAmax) -> Result<(Tensor, SharedExpertSaved)> {
        let (k, s) = (&p.rank.kernels, &p.rank.compute);
        let (y, mlp) = self.mlp.forward(p, x)?;
        let Some(gate) = &self.gate else { return Ok((y, SharedExpertSaved { mlp, gate: None })) };
        let t = y.shape()[0];
        let (logits, linear) = gate.forward(p, &x.values)?;
        let expert_zero = s.zeros(&[t, 1], DType::I32, Category::Activations)?;
        let row_index = p.rank.activation(&[t, 1], DType::I32)?;
        k.iota(s, &row_index)?;
        let probs = p.rank.activation(&[t, 1], DType::F32)?;
        k.route(
            s,
            &Route {
                params: GATE,
                selection: ExpertSelection::Given,
                logits: &logits,
                index: &expert_zero,
                probs: &probs,
            },
        )?;
        let out = p.empty(y.shape())?;
        k.moe_unpermute(s, &y, &row_index, Some(&probs), &out)?;
        let gate = GateSaved {
            linear,
            logits: SavedTensor::small(&logits),
            probs: SavedTensor::small(&probs),
            y: SavedTensor::activation(&y),
            expert_zero,
            row_index,
        };
        Ok((out, SharedExpertSaved { mlp, gate: Some(gate) }))
    }

    /// Gradient of the input.
    pub(super) fn backward(
        &self,
        p: &StepContext,
        saved: SharedExpertSaved,
        dy: &Tensor,
    ) -> Result<(Tensor, WeightGrad)> {
        let (k, s) = (&p.rank.kernels, &p.rank.compute);
        let (Some(gate), Some(g)) = (&self.gate, saved.gate) else {
            return self.mlp.backward(p, saved.mlp, dy);
        };
        let dprobs = p.rank.activation(g.probs.shape(), DType::F32)?;
        k.moe_unpermute_dprobs(s, &g.y, &g.row_index, dy, &dprobs)?;
        let inner = p.empty(dy.shape())?;
        k.moe_unpermute(s, dy, &g.row_index, Some(&g.probs), &inner)?;
        let (dx, grads) = self.mlp.backward(p, saved.mlp, &inner)?;
        let dlogits = p.rank.activation(g.logits.shape(), g.logits.dtype())?;
        k.route_backward(
            s,
            &RouteBackward {
                params: GATE,
                logits: &g.logits,
                index: &g.expert_zero,
                dprobs: &dprobs,
                dlogits: &dlogits,
            },
        )?;
        let (d, gate_grads) = gate.backward(p, g.linear, &dlogits)?;
        k.add_assign(s, &dx, &d)?;
        Ok((dx, grads.and(gate_grads)))
    }
}
