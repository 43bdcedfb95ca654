//! How much memory a step needs.

mod advice;
mod params;
#[cfg(test)]
mod tests;

use super::state;
use crate::config::{MasterDtype, OptimizerKind, PipelineSchedule, Resolved, StateDtype};
use crate::model::ModelConfig;
pub(super) use advice::advise;
use ferrotron_engine::Recompute;
use ferrotron_tensor::DType;
pub(crate) use params::fp8_weight_counts;
use params::{ByExpert, parameters};

/// What decides the memory of a step.
#[derive(Clone, Debug)]
pub struct MemoryEstimate {
    model: ModelConfig,
    seq: usize,
    /// Sequences of a pass.
    pub micro_batch: usize,
    dtype: DType,
    /// Weights of the model that are bytes.
    fp8_params: ByExpert,
    /// Bytes of an element of what linear maps keep of their inputs.
    input_bytes: usize,
    /// Bytes of what is made of a logit's gradient for products.
    logit_grad_bytes: usize,
    /// How moments are kept, and how many there are.
    pub moments: (StateDtype, usize),
    /// How master weights are kept.
    pub master: MasterDtype,
    /// What backward computes again.
    pub recompute: Recompute,
    /// How many times as much is kept as in plain 1F1B: a fraction.
    in_flight: (usize, usize),
    /// Ranks that share the layers, their products, the tokens of a pass, and optimizer state.
    shards: Shards,
}

/// Over how many ranks things are divided.
#[derive(Clone, Copy, Debug)]
struct Shards {
    layers: usize,
    products: usize,
    experts: usize,
    tokens: usize,
    /// Ranks that divide optimizer state and gradients: of experts, and of all else.
    optimizer: ByExpert,
    gradients: ByExpert,
}

impl MemoryEstimate {
    /// That of a recipe.
    pub fn of(r: &Resolved) -> MemoryEstimate {
        let (o, p) = (&r.config.optimizer, &r.config.parallel);
        let each = p.etp.unwrap_or(p.tp) * p.ep;
        let copies = |from: usize| match p.zero >= from {
            true => ByExpert { experts: (p.tp * p.cp * p.dp / each.max(1)).max(1), others: p.cp * p.dp },
            false => ByExpert { experts: 1, others: 1 },
        };
        let shards = Shards {
            layers: p.pp,
            products: p.tp,
            experts: each.max(1),
            tokens: p.cp * p.tp,
            optimizer: copies(1),
            gradients: copies(2),
        };
        MemoryEstimate {
            shards,
            model: r.model.clone(),
            seq: r.plan.seq_len,
            micro_batch: r.plan.micro_batch,
            dtype: r.config.precision.dtype.dtype(),
            fp8_params: fp8_weight_counts(&r.model, &r.policy()),
            input_bytes: match r.policy().recipe {
                Some(recipe) if !recipe.emulated() => 1,
                _ => r.config.precision.dtype.dtype().size(),
            },
            logit_grad_bytes: match r.policy().of(&["head"]) {
                // Rounded numbers, or bytes, of each way it is used.
                Some(e) if e.recipe.emulated() => 2 * r.config.precision.dtype.dtype().size(),
                Some(_) => 2,
                None => 0,
            },
            moments: (o.state_dtype, if o.kind == OptimizerKind::Sgd { 1 } else { 2 }),
            master: o.master_dtype,
            recompute: state::recompute(&r.config.train.recompute),
            // Of 1/(P·v) of the layers each, 2P + (v−1)·P micro-batches instead of some P·v.
            in_flight: if p.schedule == PipelineSchedule::Paired { (p.vp + 1, p.vp) } else { (1, 1) },
        }
    }

    /// Bytes of optimizer state for each parameter, before ranks divide it: master and moments. Weights in f32 are
    /// their own masters.
    pub fn optimizer_bytes(&self) -> f64 {
        let master = match (self.dtype, self.master) {
            (DType::F32, _) => 0.0,
            (_, MasterDtype::F32) => 4.0,
            (_, MasterDtype::Remainder) => 2.0,
        };
        master + self.moments.1 as f64 * self.moments.0.bytes()
    }

    /// Bytes of a parameter that stay over a step, in words.
    pub fn bytes_per_parameter(&self) -> String {
        let (all, state) = (parameters(&self.model), self.optimizer_bytes());
        let bytes = self.weights(all.experts, self.fp8_params.experts)
            + self.weights(all.others, self.fp8_params.others);
        let weight = bytes as f64 / all.sum().max(1) as f64;
        let short = |x: f64| format!("{x:.2}").trim_end_matches('0').trim_end_matches('.').to_string();
        let [total, weight, state] = [weight + 4.0 + state, weight, state].map(short);
        format!("{total} bytes per parameter: weight {weight}, gradient 4, optimizer state {state}")
    }

    /// Bytes of weights of which some are bytes.
    fn weights(&self, parameters: usize, stored: usize) -> usize {
        parameters * self.dtype.size() - stored * (self.dtype.size() - 1)
    }

    /// Bytes that stay over a step on one rank: weight, f32 gradient, master and moments of its parameters. Where the
    /// weight is its own master, other ranks' parts of it are here too.
    pub fn static_bytes(&self) -> usize {
        let (s, all) = (&self.shards, parameters(&self.model));
        let of = |parameters: usize, stored: usize, ranks: usize, optimizer: usize, gradients: usize| {
            let (mine, ranks) = (parameters / (s.layers * ranks), s.layers * ranks);
            let state = self.optimizer_bytes() * (mine / optimizer) as f64;
            self.weights(parameters, stored) / ranks + mine * 4 / gradients + state as usize
        };
        of(all.others, self.fp8_params.others, s.products, s.optimizer.others, s.gradients.others)
            + of(all.experts, self.fp8_params.experts, s.experts, s.optimizer.experts, s.gradients.experts)
    }

    /// Bytes a pass keeps at its fullest: when the loss has been taken and backward begins.
    pub fn activation_bytes(&self) -> usize {
        let m = &self.model;
        let size = self.dtype.size();
        let h = m.hidden;
        let normed = |n: usize| if self.recompute.norm { 0 } else { n };
        // The residual stream twice, then what each block keeps of its own.
        let (qkv, narrow) = attention_operands(m);
        let heads = qkv + m.heads * m.value_dim();
        let attention = match self.recompute.attention {
            true => 0,
            false => heads * size + normed(h + narrow) * self.input_bytes + 4 * m.heads,
        };
        // Of two maps around a non-linearity; experts have a row of each token for every choice, sorted.
        let act = |f: usize| if self.recompute.activation { 0 } else { f };
        let maps = |f: usize, input: usize| {
            f * if m.gated { 2 } else { 1 } * size + (act(f) + input) * self.input_bytes
        };
        let mlp = |i: usize| match m.moe_layer(i) {
            _ if self.recompute.mlp => 0,
            None => maps(m.ffn, normed(h)),
            Some(x) => {
                let shared = x.shared_ffn.map_or(0, |f| maps(f, 0));
                x.topk * maps(x.ffn, x.latent.unwrap_or(h)) + shared + normed(h) * size + x.experts * 4
            }
        };
        let post = if m.post_norms { 2 * h } else { 0 };
        let whole = |i: usize| (2 * h + post) * size + attention + mlp(i);
        let (depth, all) = (m.mtp_depth(), m.layers + m.mtp_depth());
        let layers: usize = match self.recompute.layer {
            true => all * h * size + (0..all).map(whole).max().unwrap_or(0),
            false => (0..all).map(whole).sum(),
        };
        // Of each prediction further ahead: its embedding, both halves of what is joined, its output, its logits.
        let further = depth * (m.vocab + 5 * h) * size;
        // Logits become their own gradient; a few rows of the residual stream are in flight. The first stage of a
        // pipeline holds as many micro-batches as there are stages: what it has fewer of in layers it has more of in these.
        let row = layers + further + m.vocab * (size + self.logit_grad_bytes) + 4 * h * size;
        self.micro_batch * self.seq / self.shards.tokens * row * self.in_flight.0 / self.in_flight.1
    }

    fn total_bytes(&self) -> usize {
        self.static_bytes() + self.activation_bytes()
    }
}

/// Elements that attention keeps of a token to make q, k and v from, and outputs of norms between its maps.
fn attention_operands(m: &ModelConfig) -> (usize, usize) {
    let (q, kv) = (m.heads * m.head_dim, m.kv_heads * m.head_dim);
    match &m.mla {
        None => (q + 2 * kv + if m.qk_norm { q + kv } else { 0 }, 0),
        Some(l) => {
            let narrow = l.q_lora_rank.unwrap_or(0) + l.kv_lora_rank;
            (q + m.heads * (l.nope_dim + l.v_dim) + narrow + l.rope_dim, narrow)
        }
    }
}
