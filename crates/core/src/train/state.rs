//! From recipe to trainer, and between trainer and checkpoint.

use super::base_model::SavedAdapters;
use super::best_eval::BestEval;
use super::checkpoint_parts::{OwnParts, items};
use super::gemm_choices::GemmTable;
use super::record::RunRecord;
use super::skipped_samples::SkippedSamples;
use super::step_runner::{Progress, Schedules};
use super::{Trainer, fp8_scales, line_moments, moe_state};
use crate::checkpoint::{Loaded, Snapshot};
use crate::config::{self, Resolved};
use crate::model::{ModelConfig, logical_specs};
use crate::optimizer::SavedLossScale;
use crate::schedule::{self, BatchSchedule, LrSchedule, Rampup, WdSchedule};
use crate::tensorfile::to_f32;
use crate::{Error, Result};
use ferrotron_engine::moe::RoutingMethod;
use ferrotron_tensor::{DType, HostBuffer};
use serde::{Deserialize, Serialize};

fn decay(d: config::Decay) -> schedule::Decay {
    match d {
        config::Decay::Constant => schedule::Decay::Constant,
        config::Decay::Linear => schedule::Decay::Linear,
        config::Decay::Cosine => schedule::Decay::Cosine,
        config::Decay::InverseSqrt => schedule::Decay::InverseSquareRoot,
        config::Decay::Wsd => schedule::Decay::Wsd,
    }
}

fn wsd(d: config::WsdStyle) -> schedule::WsdDecay {
    match d {
        config::WsdStyle::Linear => schedule::WsdDecay::Linear,
        config::WsdStyle::Cosine => schedule::WsdDecay::Cosine,
        config::WsdStyle::Exponential => schedule::WsdDecay::Exponential,
        config::WsdStyle::MinusSqrt => schedule::WsdDecay::MinusSqrt,
    }
}

fn increase(d: config::WeightDecayStyle) -> schedule::WdIncrease {
    match d {
        config::WeightDecayStyle::Constant => schedule::WdIncrease::Constant,
        config::WeightDecayStyle::Linear => schedule::WdIncrease::Linear,
        config::WeightDecayStyle::Cosine => schedule::WdIncrease::Cosine,
    }
}

/// Learning rate, weight decay and batch size over the samples of the run.
pub(super) fn schedules(r: &Resolved) -> Result<Schedules> {
    let (c, p) = (&r.config, &r.plan);
    let lr = LrSchedule {
        max: c.optimizer.lr,
        min: p.min_lr,
        init: c.schedule.init_lr,
        warmup: p.warmup_samples,
        decay: p.decay_samples,
        style: decay(c.schedule.decay),
        wsd: p.wsd_samples,
        wsd_style: wsd(c.schedule.wsd_style),
    };
    let wd = WdSchedule {
        start: c.optimizer.weight_decay,
        end: p.weight_decay_end,
        samples: p.weight_decay_samples,
        style: increase(c.schedule.weight_decay_style),
    };
    let rampup = c.train.ramp.map(|[start, increment, samples]| Rampup { start, increment, samples });
    let micro = p.micro_batch as u64;
    let batches = BatchSchedule { rampup, ..BatchSchedule::constant(c.train.global_batch as u64, micro) };
    lr.check()?;
    wd.check()?;
    batches.check()?;
    Ok(Schedules { lr, weight_decay: wd, batch: batches })
}

/// Metadata of a checkpoint. No time, host or path: equal runs give equal bytes.
#[derive(Debug, Serialize, Deserialize)]
struct State {
    /// Samples consumed: the data position.
    samples: u64,
    tokens: u64,
    optimizer_steps: u64,
    /// By which the schedules lag behind the data; absent where no step was skipped, and in checkpoints of earlier versions,
    /// whose schedules did not.
    #[serde(default, skip_serializing_if = "SkippedSamples::is_empty")]
    skipped: SkippedSamples,
    /// Random state is a seed and the counters above: every draw is a function of them.
    seed: u64,
    model: ModelConfig,
    lr: LrSchedule,
    weight_decay: WdSchedule,
    batch: BatchSchedule,
    /// Steps under delayed scaling, its calibration included.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    scaled_steps: Option<u64>,
    /// What delayed scales map an amax to, of inputs and weights, and of gradients; none in checkpoints of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    scaled_to: Option<[f32; 2]>,
    /// Loss scale of f16 training.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    loss_scale: Option<SavedLossScale>,
    /// Configuration and data; none in checkpoints of earlier versions and of trainers without a run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    run: Option<RunRecord>,
    /// Algorithms of the GEMMs, which decide the last bits; none on the CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    gemms: Option<GemmTable>,
    /// The base model, where only adapters are saved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    adapters: Option<SavedAdapters>,
    /// The best evaluation, where the run goes by it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    best: Option<BestEval>,
}

/// What a checkpoint says of the run that wrote it, before it is restored.
#[derive(Deserialize)]
pub(super) struct Origin {
    /// Samples consumed.
    pub(super) samples: u64,
    #[serde(default)]
    pub(super) skipped: SkippedSamples,
    /// The schedule of its learning rate.
    pub(super) lr: LrSchedule,
    #[serde(default)]
    pub(super) run: Option<RunRecord>,
    #[serde(default)]
    pub(super) gemms: Option<GemmTable>,
}

/// The origin of a checkpoint; none if it holds no run or its state is unreadable, which [`restore`] reports.
pub(super) fn origin(loaded: &Loaded) -> Option<Origin> {
    serde_json::from_value(loaded.state().clone()).ok()
}

/// The state of a checkpoint.
pub(super) fn state(t: &Trainer) -> Result<serde_json::Value> {
    let (schedules, delayed) = (&t.runner.schedules, t.runner.delayed_scaling);
    let state = State {
        samples: t.samples(),
        tokens: t.tokens(),
        optimizer_steps: t.optimizer.steps(&t.rank)?,
        skipped: t.runner.skipped.clone(),
        seed: t.rank.seed,
        model: t.model.decoder.config().clone(),
        lr: schedules.lr.clone(),
        weight_decay: schedules.weight_decay.clone(),
        batch: schedules.batch.clone(),
        scaled_steps: delayed.enabled.then_some(delayed.steps),
        scaled_to: fp8_scales::scaled_to(t),
        loss_scale: t.optimizer.loss_scale().map(|s| s.saved(&t.rank)).transpose()?,
        run: t.record.clone(),
        gemms: t.gemms.clone(),
        adapters: t.model.adapters.clone(),
        best: t.best,
    };
    serde_json::to_value(state).map_err(|e| Error::Invalid(format!("checkpoint state: {e}")))
}

/// What this rank saves, copied to the host.
pub(super) fn snapshot(t: &Trainer) -> Result<Snapshot> {
    let own = OwnParts::of(t)?;
    let buffer = HostBuffer::new(t.rank.device(), own.staged_bytes(t))?;
    let (staged, copied) = own.stage(t, buffer)?;
    t.rank.compute.wait(&copied)?;
    Ok(Snapshot { step: t.step(), state: state(t)?, items: items(staged)? })
}

/// The state of a checkpoint that holds a model's weights and nothing of a run.
pub fn weights_only(model: &ModelConfig) -> Result<serde_json::Value> {
    let model = serde_json::to_value(model).map_err(|e| Error::Invalid(format!("checkpoint state: {e}")))?;
    Ok(serde_json::json!({ WEIGHTS_ONLY: true, "model": model }))
}

/// The architecture a checkpoint's state describes, of a run or of weights alone.
pub fn model_of(loaded: &Loaded) -> Result<ModelConfig> {
    let model = loaded.state().get("model").cloned().unwrap_or_default();
    let model: ModelConfig = serde_json::from_value(model).map_err(|e| {
        Error::damaged(loaded.path(), format!("its state describes no model this version knows: {e}"))
    })?;
    model.validate().map_err(|e| Error::damaged(loaded.path(), e.to_string()))?;
    Ok(model)
}

const WEIGHTS_ONLY: &str = "weights_only";

/// Refuses adapters of another base model, or of a run that trained all of it, and the reverse.
fn check_base(t: &Trainer, state: &State, loaded: &Loaded) -> Result<()> {
    let (saved, now) = (&state.adapters, &t.model.adapters);
    let digest = |a: &SavedAdapters| a.base.as_ref().map(|b| b.digest.clone());
    let what = match (saved, now) {
        (Some(saved), Some(now)) if digest(saved) != digest(now) => {
            "its adapters belong to another base model; set model.hf to that one"
        }
        (Some(_), None) => "it holds adapters alone; set lora.rank as in its run",
        (None, Some(_)) => {
            "it holds a whole model, without adapters; start from it with --set model.hf=ITS-FOLDER and another --out"
        }
        _ => return Ok(()),
    };
    Err(Error::damaged(loaded.path(), what))
}

/// Whether a checkpoint's model is that of the run. Under Sinkhorn the probabilities do not follow the architecture, and older
/// versions saved one that says otherwise; the run goes on as it was, and its next checkpoint says what it trains.
fn is_same_model(t: &Trainer, saved: &ModelConfig) -> bool {
    let (mut saved, now) = (saved.clone(), t.model.decoder.config());
    let sinkhorn = t.model.options.moe_training.routing_method == RoutingMethod::Sinkhorn;
    if let (true, Some(saved), Some(now)) = (sinkhorn, &mut saved.moe, &now.moe) {
        (saved.score, saved.pre_softmax) = (now.score, now.pre_softmax);
    }
    saved == *now
}

pub(super) fn restore(t: &mut Trainer, loaded: &Loaded) -> Result<()> {
    if loaded.state().get(WEIGHTS_ONLY).is_some() {
        let what = "holds weights only, no run to resume; move it out of here and start a run from it with --set model.hf=ITS-FOLDER";
        return Err(Error::damaged(loaded.path(), what));
    }
    let state: State = serde_json::from_value(loaded.state().clone()).map_err(|e| {
        Error::damaged(loaded.path(), format!("its state is not what this version writes: {e}"))
    })?;
    if !is_same_model(t, &state.model) || state.seed != t.rank.seed {
        return Err(Error::damaged(
            loaded.path(),
            "it belongs to a run with another model or seed; choose another --out folder, or go back to that recipe",
        ));
    }
    check_base(t, &state, loaded)?;
    let states = t.optimizer.states();
    // Check names, shapes and dtypes before anything is changed. Moments may have been stored in another dtype: checkpoints
    // hold exact values, which are rounded to this run's dtype.
    let groups = t.optimizer.groups();
    let specs = logical_specs(t.model.decoder.config(), &t.model.options)?;
    let parts: Vec<_> = specs.iter().flat_map(|s| &s.parts).collect();
    let dtype = |state: &crate::optimizer::OptimizerState, name: &str, saved: DType| {
        let found = loaded.get(name).and_then(|t| t.dtype.native()).filter(|_| !state.is_masters());
        found.filter(|d| matches!(d, DType::F32 | DType::BF16)).unwrap_or(saved)
    };
    let name = |state: &crate::optimizer::OptimizerState, part: &str| format!("{}/{part}", state.name());
    let mut expected: Vec<(DType, String, &[usize])> = Vec::new();
    for state in &states {
        for spec in &specs {
            // As this run would save it; none where the group of the parameter has no such state.
            let Some(saved) = groups.saved(state, spec) else { continue };
            for p in &spec.parts {
                let name = name(state, &p.name);
                expected.push((dtype(state, &name, saved), name, &p.shape));
            }
        }
    }
    let lines = line_moments::expected(groups, &specs);
    expected.extend(lines.iter().map(|(name, shape)| (DType::F32, name.clone(), shape.as_slice())));
    let names = parts.iter().map(|p| p.name.as_str()).collect();
    let found = fp8_scales::check(loaded, &names)?;
    let tables = moe_state::found(loaded, t.model.decoder.config());
    let found = found.iter().chain(&tables).map(|(n, s)| (*n, DType::F32, *s));
    loaded.check(expected.iter().map(|(d, n, s)| (n.as_str(), *d, *s)).chain(found))?;
    for state in states {
        for (i, (spec, piece)) in t.model.params.specs().iter().zip(t.optimizer.pieces()).enumerate() {
            if !state.covers(piece.bucket) {
                continue;
            }
            let mut values = Vec::with_capacity(piece.param_range.len());
            for (part, runs) in spec.runs(&piece.param_range) {
                let name = name(state, &part.name);
                let dtype = dtype(state, &name, state.saved(piece.bucket));
                let runs: Vec<_> =
                    runs.iter().map(|r| r.start * dtype.size()..r.end * dtype.size()).collect();
                values.extend(to_f32(dtype, &loaded.read_runs(&name, &runs)?)?);
            }
            t.optimizer.put(&t.rank, &t.model.params, state, i, &values)?;
        }
    }
    t.optimizer.set_steps(&t.rank, state.optimizer_steps)?;
    t.best = state.best;
    if let Some(scale) = t.optimizer.loss_scale() {
        let sound = |s: &SavedLossScale| s.scale.is_finite() && s.scale > 0.0;
        if state.loss_scale.is_some_and(|s| !sound(&s)) {
            return Err(Error::damaged(loaded.path(), "its loss scale is not above 0"));
        }
        scale.restore(&t.rank, state.loss_scale)?;
    }
    fp8_scales::restore(t, loaded, state.scaled_to)?;
    moe_state::restore(t, loaded)?;
    line_moments::restore(t, loaded)?;
    let delayed = &mut t.runner.delayed_scaling;
    delayed.steps = state.scaled_steps.filter(|_| delayed.enabled).unwrap_or(0);
    t.runner.progress = Progress { step: loaded.step(), samples: state.samples, tokens: state.tokens };
    t.runner.skipped = state.skipped;
    t.forget_split_sizes()?;
    // Last, because FP8 parameters are quantized with the restored scales.
    t.optimizer.sync_params(&t.rank, &t.model.params, &t.model.step_state)
}
