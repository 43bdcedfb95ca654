//! MoE metrics of a step, from the device's counters to the log.
//!
//! Over all MoE layers: `load_balancing_loss`, `seq_load_balancing_loss` and `global_load_balancing_loss` (without their
//! coefficients; 1 for balanced routing) and `z_loss` are means; `imbalance` (most loaded expert over the mean),
//! `min_load` (least loaded over the mean) and `entropy` (of tokens per expert, over ln E) are those of the worst layer;
//! `dead_experts` and `dropped` are sums. Of one layer: `moe/<name>_layer_<i>`. As in Megatron Core, MTP layers are
//! numbered after the decoder's.

use super::gather;
use super::model_state::ModelState;
use crate::model::{Decoder, moe_layer_index};
use crate::{Error, Result};
use ferrotron_engine::Rank;
use ferrotron_engine::moe::{AuxLossKind, MoeCounters, MoeLayerSpec, MoeTraining};
use ferrotron_tensor::Stream;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Metrics of a step by event key.
pub type StepMetrics = BTreeMap<String, Value>;

/// Metrics that `moe.log` selects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct MoeLogOptions {
    losses: bool,
    imbalance: bool,
    entropy: bool,
    dropped: bool,
    loads: bool,
    per_layer: bool,
}

impl MoeLogOptions {
    /// From the words of the key, which were validated.
    fn of(words: &[String]) -> MoeLogOptions {
        let has = |word: &str| words.iter().any(|w| w == word || w == "all");
        MoeLogOptions {
            losses: has("losses"),
            imbalance: has("imbalance"),
            entropy: has("entropy"),
            dropped: has("dropped"),
            loads: has("loads"),
            per_layer: has("per_layer"),
        }
    }
}

/// Counts of one MoE layer over all tokens of a step, as sent between stages. Floats are bit patterns, because
/// JSON has no NaN.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct MoeLayerCounts {
    /// Index of the layer; MTP layers follow the decoder's.
    layer: usize,
    /// Tokens routed to each expert `[E]`.
    load: Vec<i64>,
    /// Auxiliary losses in the order of [`AuxLossKind::ALL`], times their coefficients.
    losses: Vec<u32>,
    /// Sum of squared logsumexp of the router's logits, and number of tokens.
    z: [u64; 2],
    /// Tokens dropped for lack of capacity.
    dropped: i64,
}

/// Copies the counters of a stage's MoE layers to the host.
fn read(
    s: &Stream,
    specs: &[MoeLayerSpec],
    c: &MoeCounters,
    decoder_layers: usize,
) -> Result<Vec<MoeLayerCounts>> {
    let (load, losses) = (s.download::<i64>(&c.tokens_per_expert)?, s.download::<f32>(&c.losses)?);
    let (z, dropped) = (s.download::<f64>(&c.z)?, s.download::<i64>(&c.dropped)?);
    let width = |all: usize| all / specs.len().max(1);
    let layer = |(i, spec): (usize, &MoeLayerSpec)| MoeLayerCounts {
        layer: moe_layer_index(&spec.name, decoder_layers),
        load: load[i * width(load.len())..][..spec.experts].to_vec(),
        losses: losses[i * width(losses.len())..][..AuxLossKind::ALL.len()]
            .iter()
            .map(|x| x.to_bits())
            .collect(),
        z: [z[2 * i].to_bits(), z[2 * i + 1].to_bits()],
        dropped: dropped[i],
    };
    Ok(specs.iter().enumerate().map(layer).collect())
}

/// The hook that reads MoE counters after a step, for `moe.log`.
pub(super) struct MoeMetrics {
    options: MoeLogOptions,
    /// Counts of this stage's layers in the last ended step.
    counts: Vec<MoeLayerCounts>,
}

impl MoeMetrics {
    /// `words` are those of `moe.log`.
    pub(super) fn new(words: &[String]) -> MoeMetrics {
        MoeMetrics { options: MoeLogOptions::of(words), counts: Vec::new() }
    }

    /// Copies the counters of an ended step to the host; `s` has waited for the step.
    pub(super) fn read(
        &mut self,
        s: &Stream,
        model: &ModelState,
        counters: Option<&MoeCounters>,
    ) -> Result<()> {
        if let (Some(counters), Some(moe)) = (counters, model.step_state.moe()) {
            self.counts = read(s, moe.specs(), counters, model.decoder.config().layers)?;
        }
        Ok(())
    }

    /// Takes the metrics of the last ended step, gathered over pipeline stages; nothing without MoE layers. Every rank
    /// calls it.
    pub(super) fn take(&mut self, rank: &Rank, decoder: &Decoder) -> Result<StepMetrics> {
        if decoder.config().moe.is_none() {
            return Ok(StepMetrics::new());
        }
        let broken = |e: serde_json::Error| Error::Invalid(format!("MoE counters of other stages: {e}"));
        let mut all = std::mem::take(&mut self.counts);
        if rank.pp.size() > 1 {
            let mine = serde_json::to_vec(&all).map_err(broken)?;
            all.clear();
            for stage in gather::all_gather_stages(rank, &mine)? {
                all.extend(serde_json::from_slice::<Vec<MoeLayerCounts>>(&stage).map_err(broken)?);
            }
        }
        // The chunks of a stage are not consecutive layers.
        all.sort_by_key(|m| m.layer);
        Ok(named(&all, decoder.moe_training(), rank.dp.size(), self.options))
    }
}

/// The metrics of MoE layers in layer order, trained on `dp` data-parallel ranks.
fn named(all: &[MoeLayerCounts], training: &MoeTraining, dp: usize, options: MoeLogOptions) -> StepMetrics {
    let mut out = StepMetrics::new();
    if all.is_empty() {
        return out;
    }
    let mean = |x: &[f64]| x.iter().sum::<f64>() / x.len() as f64;
    let most = |x: &[f64]| x.iter().copied().fold(f64::NAN, f64::max);
    let least = |x: &[f64]| x.iter().copied().fold(f64::NAN, f64::min);
    let mut put = |name: &str, of: &dyn Fn(&MoeLayerCounts) -> f64, over: &dyn Fn(&[f64]) -> f64| {
        let values: Vec<f64> = all.iter().map(of).collect();
        out.insert(name.into(), json!(over(&values)));
        for (m, x) in all.iter().zip(values).filter(|_| options.per_layer) {
            out.insert(format!("moe/{name}_layer_{}", m.layer), json!(x));
        }
    };
    if options.losses {
        for (i, kind) in AuxLossKind::ALL.iter().enumerate() {
            let weights = training.balance.iter().filter(|(k, _)| k == kind);
            let coefficient: f64 = weights.clone().map(|(_, c)| f64::from(*c)).sum();
            // Megatron Core divides the gradient by the data-parallel size; the logged loss is the undivided one.
            let undo = if *kind == AuxLossKind::Global && training.global_over_dp { dp as f64 } else { 1.0 };
            if weights.count() > 0 {
                let of = |m: &MoeLayerCounts| f64::from(f32::from_bits(m.losses[i])) * undo / coefficient;
                put(kind.name(), &of, &mean);
            }
        }
        if training.z_loss > 0.0 {
            put("z_loss", &|m| f64::from_bits(m.z[0]) / f64::from_bits(m.z[1]), &mean);
        }
    }
    if options.imbalance {
        put("imbalance", &|m| relative_to_mean(&m.load, i64::max), &most);
        put("min_load", &|m| relative_to_mean(&m.load, i64::min), &least);
    }
    if options.entropy {
        put("entropy", &|m| entropy(&m.load), &least);
    }
    let mut count = |name: &str, of: &dyn Fn(&MoeLayerCounts) -> i64| {
        out.insert(name.into(), json!(all.iter().map(of).sum::<i64>()));
        for m in all.iter().filter(|_| options.per_layer) {
            out.insert(format!("moe/{name}_layer_{}", m.layer), json!(of(m)));
        }
    };
    if options.imbalance {
        count("dead_experts", &|m| m.load.iter().filter(|n| **n == 0).count() as i64);
    }
    if options.dropped {
        count("dropped", &|m| m.dropped);
    }
    if options.loads {
        out.extend(all.iter().map(|m| (format!("moe/load_layer_{}", m.layer), json!(m.load))));
    }
    out
}

/// The largest or smallest number of tokens per expert over the mean; NaN without tokens.
fn relative_to_mean(load: &[i64], pick: fn(i64, i64) -> i64) -> f64 {
    let (sum, picked) = (load.iter().sum::<i64>(), load.iter().copied().reduce(pick).unwrap_or(0));
    picked as f64 * load.len() as f64 / sum as f64
}

/// `-Σ p·ln p / ln E` for the shares p of tokens per expert: 1 if balanced, 0 if one expert has all tokens.
fn entropy(load: &[i64]) -> f64 {
    let sum = load.iter().sum::<i64>() as f64;
    let shares = load.iter().filter(|n| **n > 0).map(|n| *n as f64 / sum);
    let nats: f64 = shares.map(|p| -p * p.ln()).sum();
    match load.len() {
        _ if sum == 0.0 => f64::NAN,
        1 => 1.0,
        e => nats / (e as f64).ln(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(layer: usize, load: [i64; 4], loss: f32, z: [f64; 2], dropped: i64) -> MoeLayerCounts {
        let losses = [loss, 0.0, loss].map(f32::to_bits).to_vec();
        MoeLayerCounts { layer, load: load.into(), losses, z: z.map(f64::to_bits), dropped }
    }

    fn words(list: &[&str]) -> MoeLogOptions {
        MoeLogOptions::of(&list.iter().map(|w| w.to_string()).collect::<Vec<_>>())
    }

    #[test]
    fn metrics_match_values_worked_out_by_hand() {
        let all =
            [counted(1, [4, 4, 4, 4], 0.25, [8.0, 4.0], 0), counted(3, [8, 0, 4, 4], 0.75, [6.0, 1.0], 5)];
        let balance = vec![(AuxLossKind::Batch, 0.5), (AuxLossKind::Global, 0.25)];
        let training = MoeTraining { balance, global_over_dp: true, z_loss: 0.1, ..MoeTraining::default() };
        let n = named(&all, &training, 2, words(&["all"]));
        let is = |name: &str, x: f64| {
            let got = n[name].as_f64().unwrap();
            assert!((got - x).abs() < 1e-12, "{name}: {got} instead of {x}");
        };
        is("load_balancing_loss", 1.0);
        is("moe/load_balancing_loss_layer_3", 1.5);
        // 0.25 and 0.75 of a gradient that is divided by two ranks.
        is("global_load_balancing_loss", 4.0);
        assert!(!n.contains_key("seq_load_balancing_loss"), "the recipe does not use it");
        is("z_loss", 4.0);
        is("imbalance", 2.0);
        is("moe/imbalance_layer_1", 1.0);
        is("min_load", 0.0);
        is("dead_experts", 1.0);
        // Shares 1/2, 1/4, 1/4: 1.5 bits of 2.
        is("entropy", 0.75);
        is("moe/entropy_layer_1", 1.0);
        is("dropped", 5.0);
        assert_eq!(n["moe/load_layer_3"], json!([8, 0, 4, 4]));
    }

    #[test]
    fn only_requested_metrics_are_logged_and_no_tokens_give_nan() {
        let all = [counted(0, [0; 4], 0.0, [0.0; 2], 0)];
        let training = MoeTraining { z_loss: 1.0, ..MoeTraining::default() };
        let keys = |list: &[&str]| named(&all, &training, 1, words(list)).into_keys().collect::<Vec<_>>();
        assert_eq!(keys(&[]), [""; 0]);
        assert_eq!(keys(&["losses", "imbalance"]), ["dead_experts", "imbalance", "min_load", "z_loss"]);
        assert_eq!(keys(&["loads"]), ["moe/load_layer_0"]);
        assert_eq!(keys(&["dropped", "per_layer"]), ["dropped", "moe/dropped_layer_0"]);
        let n = named(&all, &training, 1, words(&["all"]));
        assert!(n["imbalance"].is_null() && n["entropy"].is_null() && n["z_loss"].is_null());
        assert_eq!(named(&[], &training, 1, words(&["all"])), StepMetrics::new());
    }
}
