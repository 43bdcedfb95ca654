//! The expert that every token goes to: an MLP, whose output a gate may weight.

use super::MoeShape;
use super::replicated_linear::{ReplicatedLinear, ReplicatedSaved};
use crate::{Declarations, Mlp, MlpSaved, Saved, SavedTensor, StepContext, WeightGrad, WithAmax};
use ferrotron_kernels::{ExpertChoice, Route, RouteBackward, RouterParams, ScoreFunction};
use ferrotron_tensor::{Category, DType, Result, Tensor};

/// `σ(g·x)·mlp(x)`, or `mlp(x)`.
pub struct SharedExpert {
    mlp: Mlp,
    gate: Option<ReplicatedLinear>,
}

/// What backward needs.
pub struct SharedExpertSaved {
    mlp: MlpSaved,
    gate: Option<GateSaved>,
}

struct GateSaved {
    map: ReplicatedSaved,
    logits: SavedTensor,
    /// f32 `[rows, 1]`
    probs: SavedTensor,
    y: SavedTensor,
    /// i32 `[rows, 1]`: zeros, and 0, 1, 2, ...
    zeros: Tensor,
    own: Tensor,
}

impl Saved for SharedExpertSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        if let Some(g) = &mut self.gate {
            f(&mut g.y);
            f(&mut g.probs);
            f(&mut g.logits);
            g.map.tensors(f);
        }
        self.mlp.tensors(f);
    }
}

/// A gate is a router with one expert.
const GATE: RouterParams = RouterParams { score: ScoreFunction::Sigmoid, groups: None, scale: 1.0 };

impl SharedExpert {
    pub(super) fn declare(
        d: &mut Declarations,
        name: &str,
        c: &MoeShape,
        ffn: usize,
    ) -> Result<SharedExpert> {
        let mlp = Mlp::declare(d, name, c.hidden, ffn, c.act, c.gated, false, c.std.0, c.std.1)?;
        let gate = match c.shared_gate {
            false => None,
            true => Some(ReplicatedLinear::declare(d, &format!("{name}_gate"), c.hidden, 1, c.std.0)?),
        };
        Ok(SharedExpert { mlp, gate })
    }

    pub(super) fn needs_input_amax(&self, p: &StepContext) -> bool {
        self.mlp.needs_input_amax(p)
    }

    /// `[rows, hidden] → [rows, hidden]`
    pub(super) fn forward(&self, p: &StepContext, x: &WithAmax) -> Result<(Tensor, SharedExpertSaved)> {
        let (k, s) = (&p.rank.kernels, &p.rank.compute);
        let (y, mlp) = self.mlp.forward(p, x)?;
        let Some(gate) = &self.gate else { return Ok((y, SharedExpertSaved { mlp, gate: None })) };
        let t = y.shape()[0];
        let (logits, map) = gate.forward(p, &x.values)?;
        let zeros = s.zeros(&[t, 1], DType::I32, Category::Activations)?;
        let own = s.upload(&(0..t as i32).collect::<Vec<_>>(), &[t, 1], Category::Activations)?;
        let probs = p.rank.activation(&[t, 1], DType::F32)?;
        k.route(
            s,
            &Route {
                params: GATE,
                choice: ExpertChoice::Given,
                logits: &logits,
                index: &zeros,
                probs: &probs,
            },
        )?;
        let out = p.empty(y.shape())?;
        k.moe_unpermute(s, &y, &own, Some(&probs), &out)?;
        let gate = GateSaved {
            map,
            logits: SavedTensor::small(&logits),
            probs: SavedTensor::small(&probs),
            y: SavedTensor::activation(&y),
            zeros,
            own,
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
        k.moe_unpermute_dprobs(s, &g.y, &g.own, dy, &dprobs)?;
        let inner = p.empty(dy.shape())?;
        k.moe_unpermute(s, dy, &g.own, Some(&g.probs), &inner)?;
        let (dx, grads) = self.mlp.backward(p, saved.mlp, &inner)?;
        let dlogits = p.rank.activation(g.logits.shape(), g.logits.dtype())?;
        k.route_backward(
            s,
            &RouteBackward {
                params: GATE,
                logits: &g.logits,
                index: &g.zeros,
                dprobs: &dprobs,
                dlogits: &dlogits,
            },
        )?;
        let (d, of_gate) = gate.backward(p, g.map, &dlogits)?;
        k.add_assign(s, &dx, &d)?;
        Ok((dx, grads.and(of_gate)))
    }
}
