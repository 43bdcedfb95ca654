//! Memory of a training step, on the pipeline stage that needs most.
//!
//! Parameters, gradients and optimizer state are the lengths of the buckets that training allocates. Activations are
//! the saved tensors of the micro-batches in flight. The workspace is what the moment that needs most computes beside
//! them (`pass_peak.rs`). Muon's updates are computed after the activations are freed.

use super::offload::OffloadSettings;
use super::pass_peak::{Moment, PassMoments};
use crate::Result;
use crate::config::{MasterDtype, OptimizerCompute, PipelineSchedule, Resolved, StateDtype};
use crate::model::description::{ModelDescription, StepShape};
use crate::optimizer::{UpdateRule, buckets_on_host, muon_workspace_bytes, staged_bytes, streamed_bytes};
use ferrotron_engine::data_parallel::{Bucket, BucketPlan, BucketSplit, Placement};
use ferrotron_engine::{GroupRank, ParamId, ParamSpec};
use ferrotron_tensor::DType;
use serde::Serialize;
use std::collections::VecDeque;

/// Inputs of the memory estimate of a step.
#[derive(Clone, Debug)]
pub struct MemoryEstimate {
    /// The step on one rank of every pipeline stage.
    pub(super) stages: Vec<StepShape>,
    /// Dtype of all moments; none: as the parameter groups say.
    pub(super) moments: Option<StateDtype>,
    pub(super) master: MasterDtype,
    pub(super) schedule: PipelineSchedule,
    pub(super) offload: OffloadSettings,
}

/// Bytes on one rank, by category.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryBytes {
    /// Weights in the compute dtype or FP8.
    pub parameters: usize,
    /// f32 gradients.
    pub gradients: usize,
    /// Master weights and moments.
    pub optimizer: usize,
    /// Tensors saved for backward, of the micro-batches in flight when the loss is computed.
    pub activations: usize,
    /// What the loss or the backward of one layer needs beyond that, whichever is more: recomputed tensors and gradients of
    /// activations, less what is freed by then; and FP8 copies of weights.
    pub workspace: usize,
    /// What the optimizer's step computes and frees again: updates of Muon and the stacks of its Newton–Schulz iterations.
    /// Activations are freed before.
    pub update: usize,
    /// Offloaded to host memory: counted in none of the others.
    pub host: usize,
}

impl MemoryBytes {
    /// Bytes that stay allocated over a step.
    pub fn static_bytes(&self) -> usize {
        self.parameters + self.gradients + self.optimizer
    }

    /// The peak of a step on the device: in its passes, or in the optimizer's step.
    pub fn total(&self) -> usize {
        self.static_bytes() + (self.activations + self.workspace).max(self.update)
    }
}

impl MemoryEstimate {
    /// The memory of a recipe's steps.
    pub fn of(r: &Resolved) -> Result<MemoryEstimate> {
        Ok(MemoryEstimate::of_shapes(r, StepShape::of_stages(r)?))
    }

    /// The memory of a recipe's steps of other shapes, one for every pipeline stage.
    pub(crate) fn of_shapes(r: &Resolved, stages: Vec<StepShape>) -> MemoryEstimate {
        let o = &r.config.optimizer;
        MemoryEstimate {
            stages,
            moments: None,
            master: o.master_dtype,
            schedule: r.config.parallel.schedule,
            offload: OffloadSettings::of(r),
        }
    }

    /// Bytes of master weight and moments of a parameter that no group selects, before ZeRO shards them. f32 weights are
    /// their own masters.
    pub fn optimizer_bytes(&self) -> f64 {
        self.stages.first().map_or(0.0, |shape| self.bytes_in(shape, 0))
    }

    /// The same of a parameter in a bucket of some storage.
    fn bytes_in(&self, shape: &StepShape, storage: usize) -> f64 {
        let rule = shape.options.groups.rules().get(storage);
        let master = match (shape.dtype, self.master) {
            (DType::F32, _) => 0.0,
            _ if rule.is_some_and(|r| r.base) => 0.0,
            (_, MasterDtype::F32) => 4.0,
            (_, MasterDtype::Remainder) => 2.0,
        };
        master + rule.map_or(0.0, |r| r.moment_bytes_as(self.moments))
    }

    /// Bytes per parameter that stay allocated over a step, as a sentence.
    pub fn bytes_per_parameter(&self) -> Result<String> {
        let (mut elements, mut bytes, mut gradients, mut state) = (0, 0, 0, 0.0);
        for shape in &self.stages {
            let size = |p: &ParamSpec| if p.fp8_resident() { 1 } else { shape.dtype.size() };
            for p in ModelDescription::params(shape)? {
                elements += p.numel();
                bytes += p.numel() * size(&p);
                gradients += if p.group.frozen { 0 } else { 4 * p.numel() };
                state += p.numel() as f64 * self.bytes_in(shape, p.group.storage);
            }
        }
        let each = |x: f64| x / elements.max(1) as f64;
        let [weight, gradient, state] = [bytes as f64, gradients as f64, state].map(each);
        let short = |x: f64| format!("{x:.2}").trim_end_matches('0').trim_end_matches('.').to_string();
        let [total, weight, gradient, state] =
            [weight + gradient + state, weight, gradient, state].map(short);
        Ok(format!(
            "{total} bytes per parameter: weight {weight}, gradient {gradient}, optimizer state {state}"
        ))
    }

    /// Bytes by category on the stage that needs most.
    pub fn largest(&self) -> Result<MemoryBytes> {
        let all = self.stages.iter().map(|s| self.stage(s)).collect::<Result<Vec<_>>>()?;
        Ok(all.into_iter().max_by_key(MemoryBytes::total).unwrap_or_default())
    }

    /// Bytes by category on one rank of a stage.
    pub fn stage(&self, shape: &StepShape) -> Result<MemoryBytes> {
        let description = ModelDescription::new(shape)?;
        let (replicas, zero) = (shape.shard_sizes(), shape.zero_stage());
        let layout = shape.param_layout(&description.params);
        let plan = layout.plan(&description.params, replicas);
        let owners = shape.optimizer_places().map(|place| place.size);
        // Of the rank that holds most, where they hold whole parameters.
        let shard = |b: &Bucket, sizes: [usize; 2]| {
            let size = sizes[usize::from(b.experts)];
            let held = |rank| b.held(Placement::Flat, GroupRank { rank, size }).len();
            (0..size).map(held).max().unwrap_or(0)
        };
        let sharded = |from: usize, b: &Bucket, sizes| if zero >= from { shard(b, sizes) } else { b.len };
        let mut out = MemoryBytes::default();
        let mut states = Vec::with_capacity(plan.buckets().len());
        for bucket in plan.buckets() {
            let split = BucketSplit::new(bucket, |id| description.params[id.0].fp8_resident());
            let all = 0..bucket.len;
            let place = GroupRank { rank: 0, size: replicas[usize::from(bucket.experts)] };
            let held = if zero >= 3 { bucket.held(Placement::Flat, place) } else { all };
            let [fp8, rest] = [split.separate(&held).len(), split.rest(&held).len()];
            let weights = if shape.host.weights { &mut out.host } else { &mut out.parameters };
            *weights += fp8 + rest * shape.dtype.size();
            let gradients = if shape.host.gradients { &mut out.host } else { &mut out.gradients };
            *gradients += if bucket.frozen { 0 } else { 4 * sharded(2, bucket, replicas) };
            let elements = sharded(1, bucket, owners);
            states.push((self.bytes_in(shape, bucket.storage), elements));
        }
        out.parameters += layout.gathered_bytes(&description.params, replicas, shape.dtype);
        if zero >= 2 || shape.host.gradients {
            let added = |b: &Bucket| if zero >= 2 { 4 * shard(b, replicas) } else { 0 };
            let in_flight = GradientsInFlight {
                comm_unit: layout.comm_unit,
                loads: shape.host.gradients && shape.micro_batches > 1,
                added: &added,
                ahead: zero < 2 && shape.overlap,
            };
            out.gradients += in_flight.most(&plan, &description.params);
        }
        let state = |(each, elements): &(f64, usize)| (each * *elements as f64) as usize;
        let on_host = buckets_on_host(states.iter().map(state), self.offload.optimizer);
        for (state, on_host) in states.iter().map(state).zip(&on_host) {
            *if *on_host { &mut out.host } else { &mut out.optimizer } += state;
        }
        let longest = states.iter().map(|(_, elements)| *elements).max().unwrap_or(0);
        let widest = states.iter().map(|(each, _)| *each).fold(0.0, f64::max);
        // Slots of either executor; "auto" begins with both. The device updates where weights or gradients are on the host, too.
        let compute =
            if shape.host.any() { OptimizerCompute::Device } else { self.offload.optimizer_compute };
        let streamed = [
            (on_host.contains(&true) && compute != OptimizerCompute::Cpu, widest),
            (shape.host.weights, shape.dtype.size() as f64),
            (shape.host.gradients, DType::F32.size() as f64),
        ];
        let each = streamed.iter().filter(|(moves, _)| *moves).map(|(_, bytes)| bytes).sum();
        out.optimizer += streamed_bytes(longest, each);
        if on_host.contains(&true) && compute != OptimizerCompute::Device {
            out.host += staged_bytes(longest);
        }
        out.update = muon_update(shape, &description.params, &plan)?;
        self.passes(shape, &description, &mut out)?;
        Ok(out)
    }

    /// Activations and workspace at the moment of the passes that needs most.
    fn passes(&self, shape: &StepShape, model: &ModelDescription, out: &mut MemoryBytes) -> Result<()> {
        let (moments, (held, chunks)) = (PassMoments::new(shape, model)?, self.in_flight(shape));
        let [layers, output] = moments.stored();
        // The backward of a micro-batch follows its loss at once, so that one alone holds logits.
        let stored = layers * held / chunks + output;
        // Of passes that wait for their backward everything that moves is away; the one that runs holds more.
        let offloaded = self.offload.activations(shape, model);
        let vp = shape.stages.len().max(1);
        let waiting = (offloaded.moved * held / chunks).saturating_sub(offloaded.moved / vp);
        let stored = stored.saturating_sub(waiting + offloaded.reduction / vp);
        out.host += offloaded.moved * held / chunks;
        // What a moment needs beyond everything saved.
        let beyond = |m: Moment| {
            // Layers behind the one that runs make room for those that are copied back.
            let freed = if offloaded.moved > 0 { m.freed.min(output) } else { m.freed };
            m.workspace.saturating_sub(freed)
        };
        let most = moments.loss().into_iter().chain(moments.layers()).map(beyond).max();
        out.activations = stored;
        out.workspace = most.unwrap_or(0) + moments.fp8_weights();
        Ok(())
    }

    /// Micro-batches whose activations a rank holds at most, as a fraction: chunk passes over model chunks.
    fn in_flight(&self, shape: &StepShape) -> (usize, usize) {
        let (pp, vp) = (shape.ranks.pp, shape.stages.len().max(1));
        // Deferred weight gradients hold as much on every rank as the first one has in flight.
        let behind = match self.schedule {
            PipelineSchedule::ZeroBubble => pp.size,
            _ => pp.size - pp.rank,
        };
        let passes = match vp {
            1 => behind.min(shape.micro_batches),
            _ => (2 * (behind - 1) + (vp - 1) * pp.size + 1).min(shape.micro_batches * vp),
        };
        match self.schedule {
            // Forward of one micro-batch beside backward of another: one more chunk in flight for every vp.
            PipelineSchedule::Paired => (passes * (vp + 1), vp * vp),
            _ => (passes, vp),
        }
    }
}

/// Gradients that are whole on the device: of the bucket that backward writes, and of those being reduced or copied to the
/// host.
struct GradientsInFlight<'a> {
    /// Most bytes of those, but one.
    comm_unit: usize,
    /// Micro-batches after the first copy what is accumulated in host memory to the device.
    loads: bool,
    /// Bytes of it that a reduced bucket is added to.
    added: &'a dyn Fn(&Bucket) -> usize,
    /// It is copied into the bucket itself, that of the next bucket ahead.
    ahead: bool,
}

impl GradientsInFlight<'_> {
    /// Most bytes. A tied table is written first by the LM head and last by the embedding.
    fn most(&self, plan: &BucketPlan, params: &[ParamSpec]) -> usize {
        let tied = |b: &Bucket| {
            let again = |p: &ParamSpec| p.is_table() && p.uses > 1 && !p.tied_across_stages;
            !b.frozen && b.spans.iter().any(|s| again(&params[s.param.0]))
        };
        let bytes = |b: &Bucket| 4 * b.len;
        let tables: usize = plan.buckets().iter().filter(|b| tied(b)).map(bytes).sum();
        let mut in_flight: VecDeque<usize> = VecDeque::new();
        let mut most = tables;
        for loads in [false, true].into_iter().filter(|loads| !*loads || self.loads) {
            let mut whole = tables;
            most = most.max(whole + in_flight.iter().sum::<usize>());
            for (i, bucket) in plan.buckets().iter().enumerate().filter(|(_, b)| !b.frozen) {
                whole -= if tied(bucket) { bytes(bucket) } else { 0 };
                let next = plan.buckets().get(i + 1).filter(|b| loads && self.ahead && !tied(b) && !b.frozen);
                let held = whole + in_flight.iter().sum::<usize>() + bytes(bucket);
                most = most.max(held + next.map_or(0, bytes));
                let added = if loads { (self.added)(bucket) } else { 0 };
                most = most.max(held + added);
                in_flight.push_back(bytes(bucket) + added);
                while in_flight.len() > 1 && in_flight.iter().sum::<usize>() > self.comm_unit {
                    in_flight.pop_front();
                }
            }
        }
        most
    }
}

/// Workspace of Muon's step on the rank that needs most.
fn muon_update(shape: &StepShape, params: &[ParamSpec], plan: &BucketPlan) -> Result<usize> {
    let sizes = shape.optimizer_places().map(|place| place.size);
    let tp = [shape.ranks.tp, shape.ranks.etp];
    let sharded = shape.zero_stage() > 0;
    let owners = 0..if sharded { sizes[0].max(sizes[1]) } else { 1 };
    let owns = |owner: usize, id: usize| {
        let size = sizes[usize::from(params[id].experts)];
        let place = GroupRank { rank: owner % size, size };
        !sharded || !plan.piece(ParamId(id), Placement::Flat, place).param_range.is_empty()
    };
    // As the optimizer updates them: in parts, where gathers of updated weights overlap.
    let quantized = params.iter().any(|p| p.quant.is_some());
    let all = 0..plan.buckets().len();
    let order = match shape.zero_stage() {
        1 | 2 if shape.overlap && !quantized => plan.update_parts(),
        _ => std::iter::once(all).collect(),
    };
    let mut most = 0;
    for (index, group) in shape.options.groups.rules().iter().enumerate().filter(|(_, g)| !g.frozen) {
        let UpdateRule::Muon(rule) = &group.rule else { continue };
        for (owner, buckets) in owners.clone().flat_map(|owner| order.iter().map(move |b| (owner, b))) {
            let own = (0..params.len()).filter(|i| {
                let updated = buckets.contains(&plan.slot(ParamId(*i)).0);
                params[*i].group.index == index && updated && owns(owner, *i)
            });
            let own: Vec<&ParamSpec> = own.map(|i| &params[i]).collect();
            most = most.max(muon_workspace_bytes(rule, &own, |experts| tp[usize::from(experts)])?);
        }
    }
    Ok(most)
}

#[cfg(test)]
#[path = "memory_tests.rs"]
mod tests;
