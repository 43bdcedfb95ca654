//! Mixture of experts: from the `[moe]` section to an architecture and to how it is trained, and what is refused.

use super::resolve::Derivations;
use super::{DispatcherType, DropPolicy, MoeSection, Recipe, Resolved, RouterPrecision};
use crate::error::Result;
use crate::model::ModelConfig;
use crate::model::moe_config::{MoeConfig, ScoreKind};
use ferrotron_engine::moe::{
    AuxLossKind, Capacity, Dispatcher, ForcedRouting, MoeTraining, RouterDtype, RoutingMethod,
};

/// Default coefficient of an auxiliary loss.
const COEFFICIENT: f64 = 0.01;

/// A word of `moe.balance`.
pub(super) enum BalancingWord {
    Loss(AuxLossKind),
    Sinkhorn,
    Quantile,
}

pub(super) fn balancing_word(word: &str) -> Option<BalancingWord> {
    Some(match word {
        "aux" => BalancingWord::Loss(AuxLossKind::Batch),
        "seq_aux" => BalancingWord::Loss(AuxLossKind::Sequence),
        "global_aux" => BalancingWord::Loss(AuxLossKind::Global),
        "sinkhorn" => BalancingWord::Sinkhorn,
        "quantile" => BalancingWord::Quantile,
        _ => return None,
    })
}

impl Recipe {
    /// Applies the keys of `[moe]` to an architecture.
    pub(super) fn apply_moe(&self, c: &mut ModelConfig, derived: &mut Derivations) -> Result<()> {
        let m = &self.config.moe;
        if c.moe.is_none() {
            let Some(experts) = m.experts else { return self.reject_moe_keys() };
            let ffn = m.ffn.unwrap_or_else(|| derived.add("moe.ffn", c.ffn, "as model.ffn"));
            let topk = m.topk.unwrap_or_else(|| derived.add("moe.topk", 2, "neither a preset nor this says"));
            c.moe = Some(MoeConfig::plain(experts, topk, ffn));
        }
        let Some(moe) = &mut c.moe else { return Ok(()) };
        put(&mut moe.experts, m.experts);
        put(&mut moe.topk, m.topk);
        put(&mut moe.ffn, m.ffn);
        put(&mut moe.score, m.score_function);
        put(&mut moe.pre_softmax, m.pre_softmax);
        put(&mut moe.scale, m.route_scale.map(|x| x as f32));
        put(&mut moe.expert_bias, m.expert_bias);
        put(&mut moe.router_bias, m.router_bias);
        put(&mut moe.bias, m.bias);
        put(&mut moe.shared_gate, m.shared_gate);
        let sinkhorn = m.balance.0.iter().any(|word| word == "sinkhorn");
        if sinkhorn && self.config.model.hf.is_none() {
            self.derive_sinkhorn(moe, derived);
        }
        if self.config.model.hf.is_none() && moe.router_is_constant() {
            let what = "1 with a softmax over the chosen expert is always 1, and the router learns nothing; set \
                        moe.pre_softmax = true";
            return self.refuse("moe.topk", what);
        }
        moe.groups = m.groups.or(moe.groups);
        moe.latent = m.latent.or(moe.latent);
        moe.shared_ffn = m.shared_ffn.or(moe.shared_ffn);
        if m.layer_freq.is_some() || m.dense_layers.is_some() {
            let (every, dense) = (m.layer_freq.unwrap_or(1), m.dense_layers.clone().unwrap_or_default());
            if every == 0 {
                return self.refuse("moe.layer_freq", "must be at least 1, which means every layer");
            }
            let layers = c.layers.min(super::model::MAX_LAYERS);
            if let Some(far) = dense.iter().find(|i| **i >= layers) {
                return self.refuse(
                    "moe.dense_layers",
                    format!("there is no layer {far}; the last is {}", layers - 1),
                );
            }
            moe.layers = (0..layers).map(|i| i % every == 0 && !dense.contains(&i)).collect();
        }
        moe.layers.truncate(c.layers);
        // All of them is the empty list.
        if moe.layers.iter().all(|is_moe| *is_moe) {
            moe.layers.clear();
        }
        Ok(())
    }

    /// Sinkhorn computes the probabilities of the experts by functions of its own. The architecture names them, for whoever uses
    /// the model.
    fn derive_sinkhorn(&self, moe: &mut MoeConfig, derived: &mut Derivations) {
        let m = &self.config.moe;
        let (score, pre_softmax) = sinkhorn_scores(moe.topk);
        if m.score_function.is_none() && moe.score != score {
            moe.score =
                derived.add("moe.score_function", score, "sinkhorn weights the experts of a token by it");
        }
        if m.pre_softmax.is_none() && pre_softmax && !moe.pre_softmax {
            let reason = "sinkhorn weights the experts of a token by a softmax over all";
            moe.pre_softmax = derived.add("moe.pre_softmax", true, reason);
        }
    }

    /// Refuses an architecture whose probabilities are not those that Sinkhorn trains with: used after the training, it would be
    /// another model.
    pub(super) fn check_sinkhorn(&self, moe: &MoeConfig) -> Result<()> {
        let (score, pre_softmax) = sinkhorn_scores(moe.topk);
        if moe.score == score && (moe.pre_softmax || !pre_softmax) {
            return Ok(());
        }
        let set = match pre_softmax {
            true => {
                "several experts of a token by a softmax over all; set moe.score_function = \"softmax\" and moe.pre_softmax = true"
            }
            false => "the only expert of a token by a sigmoid; set moe.score_function = \"sigmoid\"",
        };
        let key = match (self.config.model.hf.is_some(), moe.score == score) {
            (true, _) => "moe.balance",
            (false, true) => "moe.pre_softmax",
            (false, false) => "moe.score_function",
        };
        self.refuse(key, format!("sinkhorn weights {set}, or use other balancing"))
    }

    /// Refuses keys of `[moe]` without experts.
    fn reject_moe_keys(&self) -> Result<()> {
        let default = super::Config::default();
        let set = super::KEYS
            .iter()
            .filter(|k| k.section == "moe")
            .find(|k| self.config.get("moe", k.name) != default.get("moe", k.name));
        match set {
            None => Ok(()),
            Some(key) => self.refuse(key.key, "there are no experts; set moe.experts as well"),
        }
    }
}

/// Score function of the probabilities under Sinkhorn, and whether they are a softmax over all experts, as in Megatron Core.
fn sinkhorn_scores(topk: usize) -> (ScoreKind, bool) {
    if topk == 1 { (ScoreKind::Sigmoid, false) } else { (ScoreKind::Softmax, true) }
}

/// The `[moe]` section of an architecture, as far as keys go.
pub(super) fn section(from: &MoeSection, c: &ModelConfig) -> MoeSection {
    let Some(m) = &c.moe else { return from.clone() };
    let dense: Vec<usize> = (0..c.layers).filter(|i| !m.is_moe_layer(*i)).collect();
    MoeSection {
        experts: Some(m.experts),
        topk: Some(m.topk),
        ffn: Some(m.ffn),
        layer_freq: Some(1),
        dense_layers: Some(dense).filter(|d| !d.is_empty()),
        score_function: Some(m.score),
        pre_softmax: Some(m.pre_softmax),
        groups: m.groups,
        route_scale: Some(m.scale.to_string().parse().unwrap_or(f64::from(m.scale))),
        expert_bias: Some(m.expert_bias),
        router_bias: Some(m.router_bias),
        bias: Some(m.bias),
        latent: m.latent,
        shared_ffn: m.shared_ffn,
        shared_gate: Some(m.shared_gate),
        ..from.clone()
    }
}

fn put<T>(place: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *place = value;
    }
}

impl Resolved {
    /// How MoE layers are trained. Invalid keys were refused before.
    pub fn moe_training(&self) -> MoeTraining {
        training(&self.config.moe)
    }
}

fn training(m: &MoeSection) -> MoeTraining {
    let mut routing_method = RoutingMethod::Scores;
    let mut balance = Vec::new();
    for word in &m.balance.0 {
        match balancing_word(word) {
            Some(BalancingWord::Loss(kind)) => {
                let weight = m.coefficients.get(balance.len()).copied().unwrap_or(COEFFICIENT);
                balance.push((kind, weight as f32));
            }
            Some(BalancingWord::Sinkhorn) => routing_method = RoutingMethod::Sinkhorn,
            Some(BalancingWord::Quantile) => {
                routing_method = RoutingMethod::Quantiles { keep: m.quantile_keep as f32 }
            }
            None => {}
        }
    }
    MoeTraining {
        balance,
        global_over_dp: m.global_over_dp,
        routing_method,
        z_loss: m.z_loss as f32,
        jitter: m.jitter as f32,
        router_dtype: match m.router_dtype {
            RouterPrecision::Model => RouterDtype::Model,
            RouterPrecision::F32 => RouterDtype::F32,
            RouterPrecision::F64 => RouterDtype::F64,
        },
        capacity: m.capacity.map(|factor| Capacity {
            factor,
            by_probability: m.drop_policy == DropPolicy::Probable,
            pad: m.pad_to_capacity,
            per_rank: m.capacity_per_rank,
        }),
        bias_rate: m.bias_rate as f32,
        forced_routing: m
            .force_balance
            .map(|x| if x == 0.0 { ForcedRouting::Even } else { ForcedRouting::Biased(x as f32) }),
        dispatcher: match m.dispatcher {
            DispatcherType::AllToAll => Dispatcher::AllToAll,
            DispatcherType::AllGather => Dispatcher::AllGather,
        },
    }
}
