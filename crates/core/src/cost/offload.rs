//! What offloading takes off the device, for the memory estimate.

use super::MemoryEstimate;
use crate::Result;
use crate::config::{OptimizerCompute, Resolved};
use crate::model::description::{
    Block, LayerDescription, Lifetime, ModelDescription, SavedTensor, StepShape,
};
use ferrotron_engine::Module;
use ferrotron_engine::offload::{ChunkProfile, LayerProfile, OffloadChoice, OffloadPlan};

/// Of a device's memory: allocations are rounded up and fragment, so a little must stay free.
pub(super) const USABLE_PERCENT: usize = 95;

/// What is offloaded.
#[derive(Clone, Debug)]
pub(super) struct OffloadSettings {
    /// Activations.
    pub(super) activations: Option<OffloadChoice>,
    /// Smaller tensors stay.
    min_bytes: usize,
    /// Fraction of the optimizer state.
    pub(super) optimizer: f64,
    /// What updates it.
    pub(super) optimizer_compute: OptimizerCompute,
}

/// Stored activations of the layers of one micro-batch, all chunks of a rank together.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct OffloadedActivations {
    /// Bytes that move.
    pub(super) moved: usize,
    /// Bytes by which the pass that runs is lower at its peak.
    pub(super) reduction: usize,
}

impl OffloadSettings {
    pub(super) fn of(r: &Resolved) -> OffloadSettings {
        let c = &r.config.offload;
        OffloadSettings {
            activations: c.activations.choice(),
            min_bytes: c.min_bytes.0 as usize,
            optimizer: c.optimizer,
            optimizer_compute: c.optimizer_compute,
        }
    }

    /// What leaves the device of the layers of a rank.
    pub(super) fn activations(&self, shape: &StepShape, model: &ModelDescription) -> OffloadedActivations {
        let mut out = OffloadedActivations::default();
        let Some(choice) = &self.activations else { return out };
        for stage in &shape.stages {
            let chunk = self.chunk(choice, &stage.layers, shape, model);
            let plan = match choice {
                OffloadChoice::Layers(count) => OffloadPlan::first(*count, chunk.layers.len()),
                OffloadChoice::Auto { layers, .. } => OffloadPlan::first(*layers, chunk.layers.len()),
                OffloadChoice::Modules(_) => OffloadPlan::streamed(chunk.layers.len()),
            };
            out.moved += chunk.all_moved(&plan);
            out.reduction += chunk.movable() - chunk.peak(&plan);
        }
        out
    }

    /// The layers of a chunk with the allocations that can move.
    fn chunk(
        &self,
        choice: &OffloadChoice,
        layers: &std::ops::Range<usize>,
        shape: &StepShape,
        model: &ModelDescription,
    ) -> ChunkProfile {
        let wanted = |t: &SavedTensor| match choice {
            OffloadChoice::Modules(list) => {
                let of = modules(t, shape);
                !of.is_empty() && of.iter().all(|m| list.contains(m))
            }
            _ => true,
        };
        let moves = |t: &&SavedTensor| {
            t.lifetime == Lifetime::Stored && !is_small(&t.name) && t.bytes() >= self.min_bytes && wanted(t)
        };
        let profile = |l: &LayerDescription| LayerProfile {
            allocations: l.saved.iter().filter(moves).map(SavedTensor::bytes).collect(),
            ..LayerProfile::default()
        };
        let of = |i: usize| model.layers.iter().find(|l| l.name == format!("layers.{i}"));
        ChunkProfile { layers: layers.clone().filter_map(of).map(profile).collect(), output: 0.0 }
    }
}

impl MemoryEstimate {
    /// What `offload.activations = "auto"` must move for a step of stage `stage` to fit in `capacity` bytes, as bytes of a
    /// micro-batch and as the least number of layers that moves so much. All but the last layers, if that is not enough.
    pub(crate) fn needed_offload(&self, stage: usize, capacity: usize) -> Result<(usize, usize)> {
        let Some(shape) = self.stages.get(stage) else { return Ok((0, 0)) };
        let with = |layers: usize| -> Result<usize> {
            let mut estimate = self.clone();
            estimate.offload.activations = Some(OffloadChoice::Layers(layers));
            Ok(estimate.stage(shape)?.total())
        };
        let usable = capacity / 100 * USABLE_PERCENT;
        let needed = with(0)?.saturating_sub(usable);
        let most = shape.stages.iter().map(|s| s.layers.len()).max().unwrap_or(0).saturating_sub(1);
        for layers in 0..most {
            if with(layers)? <= usable {
                return Ok((needed, layers));
            }
        }
        Ok((needed, most))
    }
}

/// The modules whose backward reads a saved tensor of a layer.
fn modules(t: &SavedTensor, shape: &StepShape) -> &'static [Module] {
    const NAMES: [(&str, &[Module]); 15] = [
        ("normed_attn", &[Module::QkvLinear]),
        ("attn.heads_by_heads", &[Module::CoreAttn]),
        ("attn.heads", &[Module::AttnProj, Module::CoreAttn]),
        ("attn.compressed", &[Module::QkvLinear]),
        ("attn.normed_q.", &[Module::QkvLinear]),
        ("attn.normed_kv", &[Module::QkvLinear]),
        ("attn.", &[Module::CoreAttn]),
        ("mlp_norm.x", &[Module::MlpNorm]),
        ("mlp.h", &[Module::MlpAct]),
        ("shared.h", &[Module::MlpAct]),
        ("mlp.activation", &[Module::Fc2]),
        ("shared.activation", &[Module::Fc2]),
        ("experts.h", &[Module::MoeAct]),
        ("experts.x", &[Module::ExpertFc1]),
        ("experts.activation", &[Module::ExpertFc2]),
    ];
    let name = t.name.as_str();
    match name {
        "input" if shape.recompute.layer => &[Module::LayerInput],
        "input" => &[Module::AttnNorm],
        "attn.normed_q" => &[Module::QkvLinear],
        "normed_mlp" if t.block == Block::Moe && has_shared_expert(shape) => &[Module::Fc1, Module::Router],
        "normed_mlp" if t.block == Block::Moe => &[Module::Router],
        _ if name.starts_with("normed_mlp") => &[Module::Fc1],
        _ => NAMES.iter().find(|(prefix, _)| name.starts_with(prefix)).map_or(&[], |(_, of)| of),
    }
}

fn has_shared_expert(shape: &StepShape) -> bool {
    shape.model.moe.as_ref().is_some_and(|m| m.shared_ffn.is_some())
}

/// Statistics, routing and scales stay on the device whatever their size.
fn is_small(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or(name);
    matches!(last, "rstd" | "mean" | "logits" | "topk" | "probs" | "scales" | "z_loss")
        || name.starts_with("moe.aux_weights")
}
