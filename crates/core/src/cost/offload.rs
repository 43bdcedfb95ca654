//! What offloading takes off the device, for the memory estimate.

use super::MemoryEstimate;
use crate::Result;
use crate::config::{Derived, OffloadedState, OptimizerCompute, Resolved};
use crate::model::description::{
    Block, LayerDescription, Lifetime, ModelDescription, SavedTensor, StepShape,
};
use ferrotron_engine::Module;
use ferrotron_engine::offload::{ChunkProfile, LayerProfile, Link, OffloadChoice, OffloadPlan};
use ferrotron_tensor::format_bytes;
use std::borrow::Cow;

/// Of a device's memory: allocations are rounded up and fragment, so a little must stay free.
pub(crate) const USABLE_PERCENT: usize = 95;

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
            optimizer: c.optimizer.fraction(),
            optimizer_compute: c.optimizer_compute,
        }
    }

    /// What leaves the device of the layers of a rank.
    pub(super) fn activations(&self, shape: &StepShape, model: &ModelDescription) -> OffloadedActivations {
        let mut out = OffloadedActivations::default();
        let Some(choice) = &self.activations else { return out };
        for stage in &shape.stages {
            let chunk = self.chunk(choice, &stage.layers, shape, model);
            let plan = plan_of(choice, chunk.layers.len());
            out.moved += chunk.all_moved(&plan);
            out.reduction += chunk.movable() - chunk.peak(&plan);
        }
        out
    }

    /// Seconds that computation of one micro-batch waits for copies, where a layer takes `seconds` forward and backward, and the
    /// output `output`. What `auto` moves beyond its least is free.
    pub(super) fn stall(
        &self,
        shape: &StepShape,
        model: &ModelDescription,
        seconds: &dyn Fn(&LayerDescription) -> [f64; 2],
        output: f64,
        link: Link,
    ) -> f64 {
        let Some(choice) = &self.activations else { return 0.0 };
        let mut stall = 0.0;
        for stage in &shape.stages {
            let mut chunk = self.chunk(choice, &stage.layers, shape, model);
            let of = |i: usize| model.layers.iter().find(|l| l.name == format!("layers.{i}"));
            for (layer, times) in
                chunk.layers.iter_mut().zip(stage.layers.clone().filter_map(of).map(seconds))
            {
                [layer.forward, layer.backward] = times;
            }
            chunk.output = if stage.loss { output } else { 0.0 };
            stall += chunk.run(&plan_of(choice, chunk.layers.len()), link).stall;
        }
        stall
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

fn plan_of(choice: &OffloadChoice, layers: usize) -> OffloadPlan {
    match choice {
        OffloadChoice::Layers(count) => OffloadPlan::first(*count, layers),
        OffloadChoice::Auto { layers: least, .. } => OffloadPlan::first(*least, layers),
        OffloadChoice::Modules(_) => OffloadPlan::streamed(layers),
    }
}

impl MemoryEstimate {
    /// Seconds that one micro-batch of a stage waits for offloaded activations, as [`OffloadSettings::stall`] has it.
    pub(crate) fn offload_stall(
        &self,
        shape: &StepShape,
        seconds: &dyn Fn(&StepShape, &LayerDescription) -> [f64; 2],
        link: Link,
    ) -> Result<f64> {
        if self.offload.activations.is_none() {
            return Ok(0.0);
        }
        let model = ModelDescription::new(shape)?;
        let of_layer = |l: &LayerDescription| seconds(shape, l);
        let rest =
            model.layers.iter().filter(|l| !l.name.starts_with("layers.") && !l.name.starts_with("embed"));
        let output: f64 = rest.map(|l| of_layer(l).iter().sum::<f64>()).sum();
        Ok(self.offload.stall(shape, &model, &of_layer, output, link))
    }

    /// Fraction of the optimizer's state in host memory.
    pub(crate) fn offloaded_state(&self) -> f64 {
        self.offload.optimizer
    }

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

/// Fractions of the optimizer state that "auto" chooses from: multiples of one of so many.
const FRACTIONS: u32 = 64;

/// The fraction of the optimizer state that `offload.optimizer = "auto"` has in host memory, the same on all ranks, with its
/// reason: the least with which a step of every stage fits in the `memory` of a device, if that is known. None without "auto".
fn chosen_state_offload(r: &Resolved, memory: Option<usize>) -> Result<Option<(f64, String)>> {
    if r.config.offload.optimizer != OffloadedState::Auto {
        return Ok(None);
    }
    let Some(capacity) = memory else {
        return Ok(Some((0.0, "the memory of this device is not known, so all of it stays there".into())));
    };
    let mut estimate = MemoryEstimate::of(r)?;
    let mut with = |steps: u32| {
        estimate.offload.optimizer = f64::from(steps) / f64::from(FRACTIONS);
        estimate.largest()
    };
    let usable = capacity / 100 * USABLE_PERCENT;
    let [without, of] = [with(0)?.total(), capacity].map(format_bytes);
    let needs = format!("a step needs about {without} of {of} with all of it on the device");
    if with(0)?.total() <= usable {
        return Ok(Some((0.0, format!("{needs}, which fits"))));
    }
    if with(FRACTIONS)?.total() > usable {
        let least = format_bytes(with(FRACTIONS)?.total());
        return Ok(Some((1.0, format!("{needs}, and still {least} with all of it in host memory"))));
    }
    // More of it in host memory never needs more on the device.
    let (mut too_few, mut enough) = (0, FRACTIONS);
    while enough - too_few > 1 {
        let middle = (too_few + enough) / 2;
        *if with(middle)?.total() <= usable { &mut enough } else { &mut too_few } = middle;
    }
    let bytes = with(enough)?;
    let [total, host] = [bytes.total(), bytes.host].map(format_bytes);
    let reason = format!("{needs}, {total} with {host} in host memory");
    Ok(Some((f64::from(enough) / f64::from(FRACTIONS), reason)))
}

/// What `offload.optimizer = "auto"` becomes on devices of `memory` bytes, if that is known.
pub fn derived_state_offload(r: &Resolved, memory: Option<usize>) -> Result<Option<Derived>> {
    let chosen = chosen_state_offload(r, memory)?;
    Ok(chosen.map(|(fraction, reason)| Derived {
        key: "offload.optimizer",
        value: fraction.to_string(),
        reason,
    }))
}

/// The recipe with that choice made.
pub fn with_state_offload(r: &Resolved, memory: Option<usize>) -> Result<Cow<'_, Resolved>> {
    let Some((fraction, _)) = chosen_state_offload(r, memory)? else { return Ok(Cow::Borrowed(r)) };
    let mut chosen = r.clone();
    chosen.config.offload.optimizer = OffloadedState::Fraction(fraction);
    Ok(Cow::Owned(chosen))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::workload;

    fn recipe(set: &[&str]) -> Resolved {
        let mut recipe = workload("llama-1b").unwrap();
        set.iter().for_each(|s| recipe.set(s).unwrap());
        recipe.resolve(None).unwrap()
    }

    fn total(r: &Resolved) -> usize {
        MemoryEstimate::of(r).unwrap().largest().unwrap().total()
    }

    #[test]
    fn state_leaves_the_device_as_far_as_a_step_needs() {
        for layout in [&[][..], &["parallel.pp=2"], &["parallel.dp=2", "parallel.zero=1"]] {
            let with = |fraction: String| {
                let set = format!("offload.optimizer={fraction}");
                recipe(&[layout, &["train.micro_batch=1", "train.global_batch=8", &set]].concat())
            };
            let (none, all) = (total(&with("0".into())), total(&with("1".into())));
            assert!(all < none / 10 * 9, "{layout:?}: {all} of {none}");
            let auto = with("auto".into());
            let chosen = |usable: usize| {
                let memory = usable / USABLE_PERCENT * 100 + 200;
                let derived = derived_state_offload(&auto, Some(memory)).unwrap().unwrap();
                let chosen = with_state_offload(&auto, Some(memory)).unwrap().into_owned();
                let fraction = chosen.config.offload.optimizer.fraction();
                assert_eq!((derived.key, derived.value), ("offload.optimizer", fraction.to_string()));
                (fraction, total(&chosen), derived.reason)
            };
            let (fraction, _, reason) = chosen(none);
            assert!(fraction == 0.0 && reason.ends_with("on the device, which fits"), "{reason}");
            let (fraction, needed, reason) = chosen(all - (all >> 3));
            assert!(fraction == 1.0 && needed == all && reason.contains("and still"), "{reason}");
            for usable in [all, all + (none - all) / 3, none - (none >> 5)] {
                let (fraction, needed, reason) = chosen(usable);
                assert!(
                    fraction > 0.0 && needed <= usable + 300,
                    "{layout:?}, {usable}: {fraction}, {needed}"
                );
                assert!(reason.contains("in host memory"), "{reason}");
                let less = total(&with(format!("{}", fraction - 1.0 / 64.0)));
                assert!(less > usable, "{layout:?}, {usable}: {fraction} is more than is needed");
            }
        }
    }

    #[test]
    fn without_known_memory_state_stays() {
        let auto = recipe(&["offload.optimizer=auto"]);
        let derived = derived_state_offload(&auto, None).unwrap().unwrap();
        assert_eq!(derived.value, "0");
        assert!(derived.reason.contains("is not known"), "{}", derived.reason);
        assert!(derived_state_offload(&recipe(&["offload.optimizer=0.5"]), Some(1)).unwrap().is_none());
    }
}
