//! What `[moe]` and the keys that go with it cannot be set to.

use super::moe::{BalancingWord, balancing_word};
use super::{
    DispatcherType, MoeSection, Packing, PipelineSchedule, QuantRecipe, Recipe, Resolved, RouterPrecision,
};
use crate::error::Result;
use crate::model::moe_config::MoeConfig;
use ferrotron_engine::moe::RoutingMethod;
use ferrotron_tensor::DType;

/// The words of `moe.log`.
const LOGGED: [&str; 7] = ["losses", "imbalance", "entropy", "dropped", "loads", "per_layer", "all"];

impl Recipe {
    /// Refuses combinations that cannot work.
    pub(super) fn check_moe(&self, r: &Resolved) -> Result<()> {
        let m = &self.config.moe;
        self.check_paired(r)?;
        let Some(moe) = &r.model.moe else { return Ok(()) };
        let routing_methods = self.check_balance()?;
        if let Some(word) = m.log.0.iter().find(|w| !LOGGED.contains(&w.as_str())) {
            return self.refuse("moe.log", format!("{word:?} is none of {}", LOGGED.join(", ")));
        }
        let routing_method = r.moe_training().routing_method;
        if routing_method == RoutingMethod::Sinkhorn {
            self.check_sinkhorn(moe)?;
        }
        let quantile = matches!(routing_method, RoutingMethod::Quantiles { .. });
        if quantile {
            self.check_quantile(r, moe)?;
        }
        self.check_equal_messages(r)?;
        if routing_methods > 0 && moe.expert_bias {
            return self.refuse(
                "moe.expert_bias",
                "is not supported with sinkhorn and quantile; leave one of them out",
            );
        }
        self.check_capacity(r, routing_methods > 0)?;
        for (key, x) in [("moe.z_loss", m.z_loss), ("moe.jitter", m.jitter), ("moe.bias_rate", m.bias_rate)] {
            if x < 0.0 {
                return self.refuse(key, "must be 0 or more");
            }
        }
        if m.jitter >= 1.0 {
            return self.refuse("moe.jitter", "must be below 1");
        }
        if !(0.0..=16.0).contains(&m.split_headroom) {
            let what =
                "must be from 0, with which the host reads the counts, to 16: a share of what was sent";
            return self.refuse("moe.split_headroom", what);
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

    /// Refuses invalid combinations of `moe.balance` and `moe.coefficients`. Returns the number of words that are routing
    /// methods instead of losses.
    fn check_balance(&self) -> Result<usize> {
        let m = &self.config.moe;
        let mut losses = 0;
        let mut routing_methods = 0;
        for word in &m.balance.0 {
            match balancing_word(word) {
                Some(BalancingWord::Loss(_)) => losses += 1,
                Some(_) => routing_methods += 1,
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
        if routing_methods > 0 && m.balance.0.len() > 1 {
            return self.refuse("moe.balance", "sinkhorn and quantile cannot be combined with anything else");
        }
        Ok(routing_methods)
    }

    /// Refuses what quantile balancing does not support.
    fn check_quantile(&self, r: &Resolved, moe: &MoeConfig) -> Result<()> {
        let m = &self.config.moe;
        let p = &r.config.parallel;
        if r.config.data.packing != Packing::None {
            let what = "quantile needs micro-batches of equal length without padding, which it would count; leave data.packing out, \
                        or use other balancing";
            return self.refuse("moe.balance", what);
        }
        if p.cp > 1 && r.config.data.reset_at_documents {
            let what = "quantile needs micro-batches of equal length, and parallel.cp pads every document; leave one of them \
                        out";
            return self.refuse("moe.balance", what);
        }
        // Padding rows are routed too: sequences are padded for cp, and the rows of a rank for tp.
        let seq = if p.cp > 1 { r.plan.seq_len.next_multiple_of(2 * p.cp) } else { r.plan.seq_len };
        let tokens = (r.plan.micro_batch * seq / p.cp).next_multiple_of(p.tp) * p.cp;
        if m.router_dtype == RouterPrecision::Model && r.config.precision.dtype.dtype() != DType::F32 {
            let what = "quantile compares f32 logits; leave it out, or use other balancing";
            return self.refuse("moe.router_dtype", what);
        }
        if moe.groups.is_some() {
            return self
                .refuse("moe.balance", "quantile does not support expert groups; leave moe.groups out");
        }
        if moe.topk >= moe.experts {
            let what =
                format!("quantile needs fewer experts per token than the {}; lower moe.topk", moe.experts);
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
        Ok(())
    }

    /// Refuses messages of a fixed size between ranks whose micro-batches differ in length.
    fn check_equal_messages(&self, r: &Resolved) -> Result<()> {
        let (m, layout, data) = (&self.config.moe, r.config.parallel.layout(), &r.config.data);
        if data.packing == Packing::PaddingFree && m.pad_to_capacity {
            let what = "with data.packing = \"padding_free\" micro-batches differ in length, and so would the capacities of the \
                        ranks that exchange tokens; leave one of them out";
            return self.refuse("moe.pad_to_capacity", what);
        }
        let documents = data.reset_at_documents || data.packing != Packing::None;
        let exchanges = layout.ep * layout.etp() > 1 && m.dispatcher == DispatcherType::AllToAll;
        if m.pad_to_capacity && m.capacity_per_rank && r.config.parallel.cp > 1 && documents && exchanges {
            let what = "needs micro-batches of equal length, and parallel.cp pads every document, so that the ranks that exchange \
                        tokens would have different capacities; leave one of them out";
            return self.refuse("moe.pad_to_capacity", what);
        }
        Ok(())
    }

    /// Refuses capacities that cannot be, and keys that do nothing without one.
    fn check_capacity(&self, r: &Resolved, has_routing_method: bool) -> Result<()> {
        let m = &self.config.moe;
        if r.moe_training().capacity.is_some() && has_routing_method {
            return self
                .refuse("moe.capacity", "is not supported with moe.balance = \"sinkhorn\" or \"quantile\"");
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
        Ok(())
    }

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
