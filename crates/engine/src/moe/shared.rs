//! The expert that every token goes to: an MLP, whose output a gate may weight.

use super::MoeShape;
use super::own::{OwnLinear, OwnSaved};
use crate::{Declarations, Measured, Mlp, MlpSaved, Pass, Saved, SavedTensor, WeightGrad};
use ferrotron_kernels::{Choice, Routing, Score};
use ferrotron_tensor::{Category, DType, Result, Tensor};

/// `σ(g·x)·mlp(x)`, or `mlp(x)`.
pub struct Shared {
    mlp: Mlp,
    gate: Option<OwnLinear>,
}

/// What backward needs.
pub struct SharedSaved {
    mlp: MlpSaved,
    gate: Option<GateSaved>,
}

struct GateSaved {
    map: OwnSaved,
    logits: SavedTensor,
    /// f32 `[rows, 1]`
    probs: SavedTensor,
    y: SavedTensor,
    /// i32 `[rows, 1]`: zeros, and 0, 1, 2, ...
    zeros: Tensor,
    own: Tensor,
}

impl Saved for SharedSaved {
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
const GATE: Routing = Routing { score: Score::Sigmoid, groups: None, scale: 1.0 };

impl Shared {
    pub(super) fn declare(d: &mut Declarations, name: &str, c: &MoeShape, ffn: usize) -> Result<Shared> {
        let mlp = Mlp::declare(d, name, c.hidden, ffn, c.act, c.gated, false, c.std.0, c.std.1)?;
        let gate = match c.shared_gate {
            false => None,
            true => Some(OwnLinear::declare(d, &format!("{name}_gate"), c.hidden, 1, c.std.0)?),
        };
        Ok(Shared { mlp, gate })
    }

    pub(super) fn measures_input(&self, p: &Pass) -> bool {
        self.mlp.measures_input(p)
    }

    /// `[rows, hidden] → [rows, hidden]`
    pub(super) fn forward(&self, p: &Pass, x: &Measured) -> Result<(Tensor, SharedSaved)> {
        let (k, s) = (&p.rank.kernels, &p.rank.compute);
        let (y, mlp) = self.mlp.forward(p, x)?;
        let Some(gate) = &self.gate else { return Ok((y, SharedSaved { mlp, gate: None })) };
        let t = y.shape()[0];
        let (logits, map) = gate.forward(p, &x.values)?;
        let zeros = s.zeros(&[t, 1], DType::I32, Category::Activations)?;
        let own = s.upload(&(0..t as i32).collect::<Vec<_>>(), &[t, 1], Category::Activations)?;
        let probs = p.rank.activation(&[t, 1], DType::F32)?;
        k.route(s, GATE, Choice::Given, &logits, &zeros, &probs)?;
        let out = p.empty(y.shape())?;
        k.sum_rows(s, &y, &own, Some(&probs), &out)?;
        let gate = GateSaved {
            map,
            logits: SavedTensor::small(&logits),
            probs: SavedTensor::small(&probs),
            y: SavedTensor::activation(&y),
            zeros,
            own,
        };
        Ok((out, SharedSaved { mlp, gate: Some(gate) }))
    }

    /// Gradient of the input.
    pub(super) fn backward(&self, p: &Pass, saved: SharedSaved, dy: &Tensor) -> Result<(Tensor, WeightGrad)> {
        let (k, s) = (&p.rank.kernels, &p.rank.compute);
        let (Some(gate), Some(g)) = (&self.gate, saved.gate) else {
            return self.mlp.backward(p, saved.mlp, dy);
        };
        let dprobs = p.rank.activation(g.probs.shape(), DType::F32)?;
        k.row_products(s, &g.y, &g.own, dy, &dprobs)?;
        let inner = p.empty(dy.shape())?;
        k.sum_rows(s, dy, &g.own, Some(&g.probs), &inner)?;
        let (dx, grads) = self.mlp.backward(p, saved.mlp, &inner)?;
        let dlogits = p.rank.activation(g.logits.shape(), g.logits.dtype())?;
        k.route_backward(s, GATE, &g.logits, &g.zeros, &dprobs, &dlogits)?;
        let (d, of_gate) = gate.backward(p, g.map, &dlogits)?;
        k.add_assign(s, &dx, &d)?;
        Ok((dx, grads.and(of_gate)))
    }
}
