//! What the mixtures of a step counted, from the device to the log.
//!
//! Of the whole step, under the names that other systems use: `load_balancing_loss`, `seq_load_balancing_loss`,
//! `global_load_balancing_loss` (without their coefficients, 1 where loads are even) and `z_loss`, means over mixtures;
//! `imbalance` (most loaded expert over the mean), `min_load` (least loaded over the mean) and `entropy` (of the load, over
//! ln E) of the worst mixture; `dead_experts` and `dropped`, sums. Of one layer: `moe/<name>_layer_<i>`.

use super::{Trainer, gather};
use crate::{Error, Result};
use ferrotron_engine::moe::{AuxLossKind, MoeCounters, MoeLayerSpec, MoeTraining};
use ferrotron_tensor::Stream;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Numbers of a step by name.
pub type StepMetrics = BTreeMap<String, Value>;

/// What is written of each logged step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct MoeLogOptions {
    losses: bool,
    imbalance: bool,
    entropy: bool,
    dropped: bool,
    loads: bool,
    per_layer: bool,
}

impl MoeLogOptions {
    /// Of the words of `moe.log`, which were checked.
    pub(super) fn of(words: &[String]) -> MoeLogOptions {
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

/// What one mixture counted, of all tokens of a step, as it travels. Floats are bits: JSON has no NaN.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct MoeLayerCounts {
    layer: usize,
    /// Choices of each expert `[E]`.
    load: Vec<i64>,
    /// In the order of [`AuxLossKind::ALL`], with their factors.
    losses: Vec<u32>,
    /// Squares of logsumexp, and rows.
    z: [u64; 2],
    dropped: i64,
}

/// MoeCounters of the mixtures of a stage on the host. Waits for what `s` waits for.
pub(super) fn read(s: &Stream, specs: &[MoeLayerSpec], c: &MoeCounters) -> Result<Vec<MoeLayerCounts>> {
    let (load, losses) = (s.download::<i64>(&c.tokens_per_expert)?, s.download::<f32>(&c.losses)?);
    let (z, dropped) = (s.download::<f64>(&c.z)?, s.download::<i64>(&c.dropped)?);
    let width = |all: usize| all / specs.len().max(1);
    let mixture = |(i, spec): (usize, &MoeLayerSpec)| MoeLayerCounts {
        layer: layer(&spec.name),
        load: load[i * width(load.len())..][..spec.experts].to_vec(),
        losses: losses[i * width(losses.len())..][..AuxLossKind::ALL.len()]
            .iter()
            .map(|x| x.to_bits())
            .collect(),
        z: [z[2 * i].to_bits(), z[2 * i + 1].to_bits()],
        dropped: dropped[i],
    };
    Ok(specs.iter().enumerate().map(mixture).collect())
}

/// 3 of `layers.3.moe`.
fn layer(name: &str) -> usize {
    name.split('.').find_map(|part| part.parse().ok()).unwrap_or(0)
}

impl Trainer {
    /// What the mixtures of the step that was ended last counted, by name: what `moe.log` asks for. Nothing without
    /// mixtures. Every rank calls it, those of stages without mixtures too.
    pub fn take_moe_metrics(&mut self) -> Result<StepMetrics> {
        if self.decoder.config().moe.is_none() {
            return Ok(StepMetrics::new());
        }
        let broken = |e: serde_json::Error| Error::Invalid(format!("what stages say of loads: {e}"));
        let mut all = std::mem::take(&mut self.moe_counts);
        if self.rank.pp.size() > 1 {
            let mine = serde_json::to_vec(&all).map_err(broken)?;
            all.clear();
            for stage in gather::all_gather_stages(&self.rank, &mine)? {
                all.extend(serde_json::from_slice::<Vec<MoeLayerCounts>>(&stage).map_err(broken)?);
            }
        }
        // Chunks of a stage are not neighbours.
        all.sort_by_key(|m| m.layer);
        Ok(named(&all, self.decoder.moe_training(), self.rank.dp.size(), self.moe_log))
    }
}

/// The numbers of some mixtures in the order of layers, trained on `dp` data-parallel ranks.
fn named(all: &[MoeLayerCounts], how: &MoeTraining, dp: usize, wanted: MoeLogOptions) -> StepMetrics {
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
        for (m, x) in all.iter().zip(values).filter(|_| wanted.per_layer) {
            out.insert(format!("moe/{name}_layer_{}", m.layer), json!(x));
        }
    };
    if wanted.losses {
        for (i, kind) in AuxLossKind::ALL.iter().enumerate() {
            let weights = how.balance.iter().filter(|(k, _)| k == kind);
            let coefficient: f64 = weights.clone().map(|(_, c)| f64::from(*c)).sum();
            // What is divided by the ranks is the gradient; the loss is that of all of them.
            let undo = if *kind == AuxLossKind::Global && how.global_over_dp { dp as f64 } else { 1.0 };
            if weights.count() > 0 {
                let of = |m: &MoeLayerCounts| f64::from(f32::from_bits(m.losses[i])) * undo / coefficient;
                put(kind.name(), &of, &mean);
            }
        }
        if how.z_loss > 0.0 {
            put("z_loss", &|m| f64::from_bits(m.z[0]) / f64::from_bits(m.z[1]), &mean);
        }
    }
    if wanted.imbalance {
        put("imbalance", &|m| relative_to_mean(&m.load, i64::max), &most);
        put("min_load", &|m| relative_to_mean(&m.load, i64::min), &least);
    }
    if wanted.entropy {
        put("entropy", &|m| entropy(&m.load), &least);
    }
    let mut count = |name: &str, of: &dyn Fn(&MoeLayerCounts) -> i64| {
        out.insert(name.into(), json!(all.iter().map(of).sum::<i64>()));
        for m in all.iter().filter(|_| wanted.per_layer) {
            out.insert(format!("moe/{name}_layer_{}", m.layer), json!(of(m)));
        }
    };
    if wanted.imbalance {
        count("dead_experts", &|m| m.load.iter().filter(|n| **n == 0).count() as i64);
    }
    if wanted.dropped {
        count("dropped", &|m| m.dropped);
    }
    if wanted.loads {
        out.extend(all.iter().map(|m| (format!("moe/load_layer_{}", m.layer), json!(m.load))));
    }
    out
}

/// The most or the least of some loads over their mean; no number where there are none.
fn relative_to_mean(load: &[i64], pick: fn(i64, i64) -> i64) -> f64 {
    let (sum, picked) = (load.iter().sum::<i64>(), load.iter().copied().reduce(pick).unwrap_or(0));
    picked as f64 * load.len() as f64 / sum as f64
}

/// `-Σ p·ln p / ln E` of the shares p of loads: 1 where they are even, 0 where one expert has all.
fn entropy(load: &[i64]) -> f64 {
    let sum = load.iter().sum::<i64>() as f64;
    let shares = load.iter().filter(|n| **n > 0).map(|n| *n as f64 / sum);
    let bits: f64 = shares.map(|p| -p * p.ln()).sum();
    match load.len() {
        _ if sum == 0.0 => f64::NAN,
        1 => 1.0,
        e => bits / (e as f64).ln(),
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
    fn numbers_of_a_step_are_those_worked_out_by_hand() {
        let all =
            [counted(1, [4, 4, 4, 4], 0.25, [8.0, 4.0], 0), counted(3, [8, 0, 4, 4], 0.75, [6.0, 1.0], 5)];
        let balance = vec![(AuxLossKind::Batch, 0.5), (AuxLossKind::Global, 0.25)];
        let how = MoeTraining { balance, global_over_dp: true, z_loss: 0.1, ..MoeTraining::default() };
        let n = named(&all, &how, 2, words(&["all"]));
        let is = |name: &str, x: f64| {
            let got = n[name].as_f64().unwrap();
            assert!((got - x).abs() < 1e-12, "{name}: {got} instead of {x}");
        };
        is("load_balancing_loss", 1.0);
        is("moe/load_balancing_loss_layer_3", 1.5);
        // 0.25 and 0.75 of a gradient that counts half.
        is("global_load_balancing_loss", 4.0);
        assert!(!n.contains_key("seq_load_balancing_loss"), "nobody asked for it");
        is("z_loss", 4.0);
        is("imbalance", 2.0);
        is("moe/imbalance_layer_1", 1.0);
        is("min_load", 0.0);
        is("dead_experts", 1.0);
        // Shares 1/2, 1/4, 1/4: one and a half bits of two.
        is("entropy", 0.75);
        is("moe/entropy_layer_1", 1.0);
        is("dropped", 5.0);
        assert_eq!(n["moe/load_layer_3"], json!([8, 0, 4, 4]));
    }

    #[test]
    fn what_is_not_asked_for_is_not_there_and_no_tokens_are_no_number() {
        let all = [counted(0, [0; 4], 0.0, [0.0; 2], 0)];
        let how = MoeTraining { z_loss: 1.0, ..MoeTraining::default() };
        let keys = |list: &[&str]| named(&all, &how, 1, words(list)).into_keys().collect::<Vec<_>>();
        assert_eq!(keys(&[]), [""; 0]);
        assert_eq!(keys(&["losses", "imbalance"]), ["dead_experts", "imbalance", "min_load", "z_loss"]);
        assert_eq!(keys(&["loads"]), ["moe/load_layer_0"]);
        assert_eq!(keys(&["dropped", "per_layer"]), ["dropped", "moe/dropped_layer_0"]);
        let n = named(&all, &how, 1, words(&["all"]));
        assert!(n["imbalance"].is_null() && n["entropy"].is_null() && n["z_loss"].is_null());
        assert_eq!(named(&[], &how, 1, words(&["all"])), StepMetrics::new());
        assert_eq!((layer("layers.12.moe"), layer("moe")), (12, 0));
    }
}
