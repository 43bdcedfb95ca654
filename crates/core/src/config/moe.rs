//! Mixture of experts: from the `[moe]` section to an architecture and to how it is trained, and what is refused.

use super::resolve::Derivations;
use super::{
    DispatcherType, DropPolicy, MoeSection, Packing, PipelineSchedule, QuantRecipe, Recipe, Resolved,
    RouterPrecision,
};
use crate::error::Result;
use crate::model::ModelConfig;
use crate::model::moe_config::{MoeConfig, ScoreKind};
use ferrotron_engine::moe::{
    AuxLossKind, Capacity, Dispatcher, ForcedRouting, MoeTraining, RouterDtype, RoutingMethod,
};

/// Default coefficient of an auxiliary loss.
const COEFFICIENT: f64 = 0.01;

/// The words of `moe.log`.
const LOGGED: [&str; 7] = ["losses", "imbalance", "entropy", "dropped", "loads", "per_layer", "all"];

/// A word of `moe.balance`.
enum BalancingWord {
    Loss(AuxLossKind),
    Sinkhorn,
    Quantile,
}

fn balancing_word(word: &str) -> Option<BalancingWord> {
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
        if self.config.model.hf.is_none()
            && sinkhorn
            && m.score_function.is_none()
            && moe.router_is_constant()
        {
            // Sinkhorn weights a single expert by a sigmoid in training. The architecture says so, for whoever uses the model.
            let reason = "sinkhorn weights the only expert of a token by it";
            moe.score = derived.add("moe.score_function", ScoreKind::Sigmoid, reason);
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

    /// Refuses combinations that cannot work.
    pub(super) fn check_moe(&self, r: &Resolved) -> Result<()> {
        let m = &self.config.moe;
        self.check_paired(r)?;
        let Some(moe) = &r.model.moe else { return Ok(()) };
        let mut losses = 0;
        let mut choosers = 0;
        for word in &m.balance.0 {
            match balancing_word(word) {
                Some(BalancingWord::Loss(_)) => losses += 1,
                Some(_) => choosers += 1,
                None if word == "none" => {}
                None => {
                    let what = format!("{word:?} is none of aux, seq_aux, global_aux, sinkhorn, quantile");
                    return self.refuse("moe.balance", what);
                }
            }
        }
        if !m.coefficients.is_empty() && m.coefficients.len() != losses {
            let what =
                format!("{} numbers for {losses} losses of moe.balance; give as many", m.coefficients.len());
            return self.refuse("moe.coefficients", what);
        }
        if choosers > 0 && m.balance.0.len() > 1 {
            return self.refuse("moe.balance", "sinkhorn and quantile cannot be combined with anything else");
        }
        if let Some(word) = m.log.0.iter().find(|w| !LOGGED.contains(&w.as_str())) {
            return self.refuse("moe.log", format!("{word:?} is none of {}", LOGGED.join(", ")));
        }
        let training = r.moe_training();
        if matches!(training.routing_method, RoutingMethod::Quantiles { .. }) {
            let p = &r.config.parallel;
            let documents = r.config.data.reset_at_documents || r.config.data.packing != Packing::None;
            if p.cp > 1 && documents {
                let what = "quantile needs micro-batches of equal length, and parallel.cp pads every document; leave one of them \
                            out";
                return self.refuse("moe.balance", what);
            }
            // Padding rows are routed too: sequences are padded for cp, and the rows of a rank for tp.
            let seq = if p.cp > 1 { r.plan.seq_len.next_multiple_of(2 * p.cp) } else { r.plan.seq_len };
            let tokens = (r.plan.micro_batch * seq / p.cp).next_multiple_of(p.tp) * p.cp;
            if moe.groups.is_some() {
                return self
                    .refuse("moe.balance", "quantile does not support expert groups; leave moe.groups out");
            }
            if moe.topk >= moe.experts {
                let what = format!(
                    "quantile needs fewer experts per token than the {}; lower moe.topk",
                    moe.experts
                );
                return self.refuse("moe.balance", what);
            }
            if !(tokens * moe.topk).is_multiple_of(moe.experts) {
                let what = format!(
                    "quantile needs tokens x topk = {tokens}·{} of a micro-batch to be a multiple of the {} experts; change \
                     train.micro_batch",
                    moe.topk, moe.experts
                );
                return self.refuse("moe.balance", what);
            }
            if !(0.0..1.0).contains(&m.quantile_keep) {
                return self.refuse("moe.quantile_keep", "must be at least 0 and below 1");
            }
        }
        if r.config.data.packing == Packing::PaddingFree {
            if matches!(training.routing_method, RoutingMethod::Quantiles { .. }) {
                let what = "quantile needs micro-batches of equal length; use data.packing = \"documents\", or other balancing";
                return self.refuse("moe.balance", what);
            }
            if m.pad_to_capacity {
                let what = "with data.packing = \"padding_free\" micro-batches differ in length, and so would the capacities of the \
                            ranks that exchange tokens; leave one of them out";
                return self.refuse("moe.pad_to_capacity", what);
            }
        }
        if choosers > 0 && moe.expert_bias {
            return self.refuse(
                "moe.expert_bias",
                "is not supported with sinkhorn and quantile; leave one of them out",
            );
        }
        if training.capacity.is_some() && choosers > 0 {
            return self.refuse(
                "moe.capacity",
                "goes with the losses of moe.balance or none, not with sinkhorn and quantile",
            );
        }
        if m.capacity.is_some_and(|c| c <= 0.0) {
            return self.refuse("moe.capacity", "must be above 0; leave it out for dropless routing");
        }
        if m.pad_to_capacity && m.capacity.is_none() {
            return self.refuse("moe.pad_to_capacity", "pads to a capacity; set moe.capacity");
        }
        let needs_capacity = [
            ("moe.capacity_per_rank", m.capacity_per_rank),
            ("moe.drop_policy", m.drop_policy != MoeSection::default().drop_policy),
        ];
        if let Some((key, _)) = needs_capacity.into_iter().find(|(_, on)| *on && m.capacity.is_none()) {
            return self.refuse(key, "no token is dropped without a capacity; set moe.capacity as well");
        }
        for (key, x) in [("moe.z_loss", m.z_loss), ("moe.jitter", m.jitter), ("moe.bias_rate", m.bias_rate)] {
            if x < 0.0 {
                return self.refuse(key, "must be 0 or more");
            }
        }
        if m.jitter >= 1.0 {
            return self.refuse("moe.jitter", "must be below 1");
        }
        if m.force_balance.is_some_and(|x| x < 0.0) {
            return self.refuse("moe.force_balance", "must be 0 or more: the spread of tokens per expert");
        }
        if matches!(r.config.precision.recipe, QuantRecipe::Mxfp8 | QuantRecipe::Nvfp4) {
            return self.refuse(
                "precision.recipe",
                "experts have FP8 or bf16 grouped GEMMs; use fp8-current, fp8-delayed, fp8-block or none",
            );
        }
        Ok(())
    }
}

impl Recipe {
    /// Refuses the paired schedule where there is no expert communication to hide.
    fn check_paired(&self, r: &Resolved) -> Result<()> {
        let layout = r.config.parallel.layout();
        let what = if self.config.parallel.schedule != PipelineSchedule::Paired {
            return Ok(());
        } else if r.model.moe.is_none() || layout.ep * layout.etp() == 1 {
            "overlaps the expert all-to-all, and there is none here; set parallel.ep to 2 or more, or use \"1f1b\""
        } else if self.config.moe.dispatcher == DispatcherType::AllGather {
            "overlaps the all-to-all dispatcher; leave moe.dispatcher out, or use \"1f1b\""
        } else {
            return Ok(());
        };
        self.refuse("parallel.schedule", format!("\"paired\" {what}"))
    }
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
