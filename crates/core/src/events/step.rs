//! Events of a training step and of an evaluation.

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// An optimizer step was made.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Its number, from 1.
    pub step: u64,
    /// Mean loss over the step's tokens, in nats. Not a number is written as null.
    #[serde(deserialize_with = "or_nan")]
    pub loss: f64,
    /// Tokens trained on since the run began, this step included.
    pub tokens: u64,
    /// Epochs of the training data so far: `tokens` over the tokens of one epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<f64>,
    /// Learning rate of the step.
    pub lr: f64,
    /// Global gradient norm before clipping.
    #[serde(deserialize_with = "or_nan")]
    pub grad_norm: f64,
    /// Loss scale of f16 training; loss and norm are unscaled. Where the norm is not finite the step was skipped, and the
    /// scale may fall.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// Elements of the reduced gradient that are zero, where `train.log_num_zeros` is set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_zeros: Option<u64>,
    /// Sequences in the step.
    #[serde(default)]
    pub batch: u64,
    /// Wall-clock seconds of the step.
    #[serde(default)]
    pub seconds: f64,
    /// Tokens per second.
    #[serde(default)]
    pub tokens_per_s: f64,
    /// Model TFLOP per second.
    #[serde(default)]
    pub tflops: f64,
    /// Peak bytes of tensors so far, on the device of rank 0.
    #[serde(default)]
    pub memory: u64,
    /// Peak bytes reserved from that device for tensors so far.
    #[serde(default)]
    pub reserved: u64,
    /// Peak bytes of tensors so far by category (`parameters`, `gradients`, …), on the device of rank 0. Categories peak at
    /// different times, so they need not add up to `memory`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub memory_peaks: BTreeMap<String, u64>,
    /// Bytes that rank 0 sent in the step, by group and collective: `{"tp": {"all-gather": 4096}}`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sent: BTreeMap<String, BTreeMap<String, u64>>,
    /// Further metrics by name, flattened into the line: expert load (`imbalance`), energy (`energy_j`).
    #[serde(flatten)]
    pub more: BTreeMap<String, Value>,
    /// Other mean losses of the step, in nats: `{"mtp_1 loss": 5.2}` of the first MTP depth.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "all_or_nan")]
    pub losses: BTreeMap<String, f64>,
}

/// An evaluation on validation data.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Eval {
    /// Steps made before.
    pub step: u64,
    /// Mean loss over its tokens, in nats.
    #[serde(deserialize_with = "or_nan")]
    pub loss: f64,
    /// Tokens evaluated.
    pub tokens: u64,
    /// Mean loss on each member of a blend; `loss` is their weighted mean. Empty for one dataset.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "all_or_nan")]
    pub members: BTreeMap<String, f64>,
}

/// JSON has no NaN and no infinity; both are written as null.
pub(super) fn or_nan<'de, D: Deserializer<'de>>(d: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(d)?.unwrap_or(f64::NAN))
}

fn all_or_nan<'de, D: Deserializer<'de>>(d: D) -> Result<BTreeMap<String, f64>, D::Error> {
    let all = BTreeMap::<String, Option<f64>>::deserialize(d)?;
    Ok(all.into_iter().map(|(name, x)| (name, x.unwrap_or(f64::NAN))).collect())
}
