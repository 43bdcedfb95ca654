//! Communication volume of a training step: counted while it runs, and predicted from the model's description.
//!
//! All numbers are bytes that one rank sends, by the formulas of ring algorithms: of a tensor of B bytes over n ranks,
//! (n−1)/n·B for an all-gather or reduce-scatter and 2(n−1)/n·B for an all-reduce; point-to-point messages are as long
//! as they are. What layers send in a micro-batch is in [`ModelDescription`]; what a step sends besides:
//!
//! - Gradients of replicated weights are all-reduced over the tensor-parallel group (experts: expert tensor parallel);
//!   gradients of key heads that some ranks share are all-gathered.
//! - Buckets of gradients are all-reduced over the replicas; with ZeRO-1 reduce-scattered and the weights all-gathered,
//!   with ZeRO-2 and 3 reduce-scattered after every micro-batch. With ZeRO-3 passes gather the weights, as often as
//!   `unit_gathers` counts, and HSDP all-reduces gradient shards. Buckets of matrices that replicas own whole go to their
//!   owners. FP8 weights with one scale are gathered in FP8.
//! - A parameter of the first and the last pipeline stage is all-reduced between the two.
//! - FP8: amax of the weights (current scaling) or of every operand (delayed scaling).
//! - MoE counters; token counts, losses and the gradient norm, in f64.

use super::MoeLayers;
use super::unit_gathers::unit_gathers;
use crate::Result;
use crate::model::description::{Collective, Group, ModelDescription, Pass, StepShape};
use crate::optimizer::{TpMode, UpdateRule};
use ferrotron_comm::{Communicator, OpKind, Volume};
use ferrotron_engine::data_parallel::{Bucket, BucketSplit, Placement, Span};
use ferrotron_engine::moe::{AuxLossKind, Dispatcher, RoutingMethod};
use ferrotron_engine::quant::{Method, Role};
use ferrotron_engine::{GroupRank, ParamSpec, Part, Rank};
use ferrotron_tensor::DType;
use std::collections::BTreeMap;
use std::ops::Range;

/// Bytes by group.
pub type ByGroup = BTreeMap<&'static str, u64>;

/// Bytes a rank has sent, by group and kind of operation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    groups: Vec<(&'static str, Volume)>,
}

impl Traffic {
    /// Everything so far, on the groups of a rank and on the whole world.
    pub fn of(rank: &Rank) -> Traffic {
        let world = rank.world.all();
        let all = Group::ALL.map(|group| (group.name(), group.communicator(rank).unwrap_or(&world)));
        // A group that is the same as another is that one, and counted there.
        let own = |(name, group): &(&'static str, &Communicator)| group.name() == *name;
        Traffic { groups: all.into_iter().filter(own).map(|(name, g)| (name, g.volume())).collect() }
    }

    /// Adds it once more to the groups of a rank: what a replayed CUDA graph sends.
    pub fn add_replayed(&self, rank: &Rank) {
        for group in Group::ALL {
            let sent = self.groups.iter().find(|(name, _)| *name == group.name());
            let Some((_, volume)) = sent.filter(|(_, v)| *v != Volume::default()) else { continue };
            match group.communicator(rank) {
                Some(communicator) => communicator.add_replayed(volume),
                None => rank.world.all().add_replayed(volume),
            }
        }
    }

    /// Bytes sent since `earlier`.
    pub fn since(&self, earlier: &Traffic) -> Traffic {
        let pairs = self.groups.iter().zip(&earlier.groups);
        Traffic { groups: pairs.map(|((name, now), (_, then))| (*name, now.since(then))).collect() }
    }

    /// Bytes of every group that sent any.
    pub fn by_group(&self) -> ByGroup {
        self.groups.iter().map(|(name, v)| (*name, v.total())).filter(|(_, bytes)| *bytes > 0).collect()
    }

    /// The same by kind of operation, `{"tp": {"all-gather": 4096}}`.
    pub fn by_kind(&self) -> BTreeMap<String, BTreeMap<String, u64>> {
        let kinds = |v: &Volume| -> BTreeMap<String, u64> {
            let all = OpKind::ALL.iter().map(|k| (k.name().to_string(), v.bytes(*k)));
            all.filter(|(_, bytes)| *bytes > 0).collect()
        };
        let all = self.groups.iter().map(|(name, v)| (name.to_string(), kinds(v)));
        all.filter(|(_, kinds)| !kinds.is_empty()).collect()
    }

    /// Bytes altogether.
    pub fn total(&self) -> u64 {
        self.groups.iter().map(|(_, v)| v.total()).sum()
    }
}

/// Gradients of replicated weights below this size are all-reduced together.
const SMALL: usize = 1 << 16;

/// Bytes this rank sends in a step, by process group. Groups that send nothing are absent.
pub fn step_volume(shape: &StepShape) -> Result<ByGroup> {
    let description = ModelDescription::new(shape)?;
    let mut out = ByGroup::new();
    let mut add = |c: &Collective, times: u64| {
        if c.bytes > 0 {
            *out.entry(shape.ranks.name(c.group)).or_default() += times * c.bytes;
        }
    };
    description.collectives().for_each(|c| add(c, shape.micro_batches as u64));
    step_collectives(shape, &description.params)?.iter().for_each(|c| add(c, 1));
    Ok(out)
}

/// The collectives of a step that belong to no layer.
pub fn step_collectives(shape: &StepShape, params: &[ParamSpec]) -> Result<Vec<Collective>> {
    let plan = shape.param_layout(params).plan(params, shape.shard_sizes());
    let gathers = if shape.zero_stage() > 2 { unit_gathers(shape, params)? } else { Vec::new() };
    let mut step = StepVolume { shape, params, gathers, out: Vec::new() };
    step.amax();
    for bucket in plan.buckets() {
        step.bucket(bucket);
    }
    step.moe_counters();
    // Token counts, and whether there is padding, over dp; losses and the squared gradient norm over all ranks.
    let losses = 8 * (1 + shape.model.mtp_depth());
    for (group, bytes) in [(Group::Dp, losses + 8), (Group::Control, losses), (Group::World, 8)] {
        step.all_reduce(group, bytes);
    }
    Ok(step.out)
}

struct StepVolume<'a> {
    shape: &'a StepShape,
    params: &'a [ParamSpec],
    /// ZeRO-3: all-gathers of every unit.
    gathers: Vec<u64>,
    out: Vec<Collective>,
}

/// Bytes of an all-gather of a bucket's weights.
struct GatheredBytes {
    /// In the compute dtype.
    weights: u64,
    /// FP8-resident ones as FP8.
    fp8: u64,
    /// Block-scaled FP8-resident ones in the compute dtype, each without padding: they are quantized afterwards.
    values: u64,
}

impl StepVolume<'_> {
    fn send(&mut self, group: Group, kind: OpKind, bytes: u64) {
        if bytes > 0 && self.shape.ranks.size(group) > 1 {
            self.out.push(Collective { group, kind, bytes, pass: Pass::Backward });
        }
    }

    fn all_reduce(&mut self, group: Group, bytes: usize) {
        let n = self.shape.ranks.size(group) as u64;
        self.send(group, OpKind::AllReduce, 2 * (n - 1) * bytes as u64 / n);
    }

    /// Amax all-reduces once a step.
    fn amax(&mut self) {
        let ranks = &self.shape.ranks;
        let quantized: Vec<_> = self.params.iter().filter_map(|p| p.quant.map(|q| (p, q))).collect();
        let Some((_, first)) = quantized.first() else { return };
        match first.recipe.method {
            Method::Delayed { .. } => {
                let bytes = 4 * Role::ALL.len() * quantized.len();
                self.all_reduce(Group::DpCp, bytes);
                self.all_reduce(Group::Tp, bytes);
            }
            Method::Current => {
                let used = |q: &ferrotron_engine::quant::LinearQuant| q.fprop || q.dgrad;
                let dense = quantized.iter().filter(|(p, q)| !p.experts && used(q)).count();
                let sharded = self.shape.zero_stage() > 0;
                if sharded {
                    self.all_reduce(Group::DpCp, 4 * dense);
                }
                self.all_reduce(Group::Tp, 4 * dense);
                // FP8-resident experts are measured together after the optimizer's step.
                let resident = quantized.iter().filter(|(p, _)| p.experts && p.fp8_resident());
                let mut resident: usize = resident.map(|(p, _)| p.matrices).sum();
                // A rank with all of an expert's master weights measures them while it quantizes.
                if self.shape.optimizer_places()[1].size == 1 && ranks.etp.size == 1 {
                    resident = 0;
                }
                if sharded {
                    self.all_reduce(Group::ExpertDp, 4 * resident);
                }
                self.all_reduce(Group::Etp, 4 * resident);
                // The amax of other experts is all-reduced when they are quantized.
                let experts: Vec<usize> = quantized
                    .iter()
                    .filter(|(p, q)| p.experts && used(q) && !p.fp8_resident())
                    .map(|(p, _)| p.matrices)
                    .collect();
                experts.into_iter().for_each(|n| self.all_reduce(Group::Etp, 4 * n));
            }
            _ => {}
        }
    }

    /// A bucket of gradients: over ranks that hold the same weights, then over the replicas; and its weights back.
    fn bucket(&mut self, bucket: &Bucket) {
        let (ranks, kind) = (&self.shape.ranks, usize::from(bucket.experts));
        let [tp, replicas, group, instances] = match bucket.experts {
            false => [Group::Tp, Group::DpCp, Group::Fsdp, Group::FsdpReplicas],
            true => [Group::Etp, Group::ExpertDp, Group::ExpertFsdp, Group::ExpertFsdpReplicas],
        };
        let here = if bucket.experts { ranks.etp } else { ranks.tp };
        let (shards, zero) = (ranks.shards[kind], self.shape.zero_stage());
        let rounds = if zero > 1 { self.shape.micro_batches } else { 1 };
        for _ in 0..rounds {
            self.over_tp(bucket, tp, here);
        }
        let shard = bucket.held(Placement::Flat, shards).len();
        if zero == 0 {
            self.all_reduce(replicas, 4 * bucket.len);
        } else {
            // Whole parameters go to their owners, who sum them; equal shards are summed on the way.
            let (kind, others) = match &bucket.owned {
                Some(_) => (OpKind::AllToAll, bucket.len - shard),
                None => (OpKind::ReduceScatter, (shards.size - 1) * shard),
            };
            self.send(group, kind, (others * 4 * rounds) as u64);
            let held = |rank| bucket.held(Placement::Flat, GroupRank { rank, ..shards });
            let sent = self.gathered_weights(bucket, shards, &held);
            let unit = bucket.spans.first().map_or(0, |s| self.params[s.param.0].unit.0);
            let bytes = match self.gathers.get(unit) {
                // Block-scaled weights are quantized from gathered values, and then gathered as FP8 by passes.
                Some(times) => times * (sent.weights + sent.fp8) + sent.values,
                None if sent.values > 0 => sent.weights + sent.values,
                None => sent.weights + sent.fp8,
            };
            self.send(group, OpKind::AllGather, bytes);
        }
        let place = self.shape.optimizer_places()[kind];
        self.muon(bucket, tp, here, if zero > 0 { Some(place) } else { None });
        let own = bucket.held(Placement::Flat, place).len();
        if self.shape.sharding().outer_optimizer.is_full_size() {
            self.all_reduce(instances, 4 * shard);
        } else {
            // HFSDP: gradients of a shard go to the groups that update its pieces, and updated weights come back.
            let outer = ranks.shard_replicas[kind];
            let (kind, others) = match &bucket.owned {
                Some(_) => (OpKind::AllToAll, shard - own),
                None => (OpKind::ReduceScatter, (outer.size - 1) * own),
            };
            self.send(instances, kind, 4 * others as u64);
            let held = |rank| {
                let place = self.shape.sharding().optimizer_place(shards, GroupRank { rank, ..outer });
                bucket.held(Placement::Flat, place)
            };
            let sent = self.gathered_weights(bucket, outer, &held);
            let fp8 = if sent.values > 0 { sent.values } else { sent.fp8 };
            self.send(instances, OpKind::AllGather, sent.weights + fp8);
        }
        if bucket.tied_across_stages {
            self.all_reduce(Group::Embedding, 4 * if zero > 0 { own } else { bucket.len });
        }
    }

    /// Matrices that tensor-parallel ranks orthogonalize together, of those that this replica owns.
    fn muon(&mut self, bucket: &Bucket, group: Group, here: GroupRank, owner: Option<GroupRank>) {
        let (shape, params) = (self.shape, self.params);
        for span in &bucket.spans {
            let spec = &params[span.param.0];
            let mine = owner.map_or(0..bucket.len, |place| bucket.held(Placement::Flat, place));
            let rule = shape.options.groups.rules().get(spec.group.index).map(|r| &r.rule);
            let Some(UpdateRule::Muon(rule)) = rule.filter(|_| spec.group.whole) else { continue };
            if here.size == 1 || !mine.contains(&span.range.start) {
                continue;
            }
            for which in rule.matrices(spec) {
                let parts = &spec.parts[which];
                let held = |rank: usize| -> usize {
                    let shard = |p: &Part| p.cut(GroupRank { rank, ..here }).shape(&p.shape);
                    parts.iter().map(|p| shard(p).iter().product::<usize>()).sum()
                };
                match rule.tp_mode_of(parts, here) {
                    TpMode::Whole | TpMode::Blockwise => {}
                    TpMode::Distributed => {
                        let side = parts[0].shape[1 - parts[0].cut(here).axis];
                        self.all_reduce(group, 8);
                        (0..rule.steps).for_each(|_| self.all_reduce(group, 4 * side * side));
                    }
                    TpMode::Duplicated => {
                        let others = (0..here.size).filter(|r| *r != (here.rank + 1) % here.size);
                        let sent: usize = others.map(held).sum();
                        self.send(group, OpKind::AllGather, 4 * sent as u64);
                    }
                }
            }
        }
    }

    /// Gradients of weights that several tensor-parallel ranks hold.
    fn over_tp(&mut self, bucket: &Bucket, group: Group, here: GroupRank) {
        if here.size == 1 {
            return;
        }
        let (mut small, params) = (0, self.params);
        for span in &bucket.spans {
            for (part, _, held) in params[span.param.0].held() {
                let everywhere = part.holders(here).len() == here.size;
                if everywhere && held.len() < SMALL {
                    small += held.len();
                } else if everywhere {
                    self.all_reduce(group, 4 * held.len());
                } else if part.shared(here.size) {
                    self.send(group, OpKind::AllGather, ((here.size - 1) * 4 * held.len()) as u64);
                }
            }
        }
        self.all_reduce(group, 4 * small);
    }

    /// All-gathering weights of a bucket, of which rank r of a group holds `held(r)`: everything but the shard of the next
    /// rank is sent.
    fn gathered_weights(
        &self,
        bucket: &Bucket,
        here: GroupRank,
        held: &dyn Fn(usize) -> Range<usize>,
    ) -> GatheredBytes {
        let n = here.size;
        let size = self.shape.dtype.size();
        let split = BucketSplit::new(bucket, |id| self.params[id.0].fp8_resident());
        let others = (0..n).filter(|r| *r != (here.rank + 1) % n);
        let sum = |f: &dyn Fn(&Range<usize>) -> usize| others.clone().map(|r| f(&held(r))).sum::<usize>();
        let inside = |span: &Span, r: &Range<usize>| {
            span.range.end.min(r.end).saturating_sub(span.range.start.max(r.start)) * size
        };
        let block_scaled = |span: &Span| match self.params[span.param.0].quant {
            Some(q) if q.fp8_resident && !q.recipe.per_tensor() => sum(&|r| inside(span, r)),
            _ => 0,
        };
        let values: usize = bucket.spans.iter().map(block_scaled).sum();
        let [weights, fp8] = [sum(&|r| split.rest(r).len()) * size, sum(&|r| split.separate(r).len())];
        GatheredBytes { weights: weights as u64, fp8: fp8 as u64, values: values as u64 }
    }

    /// Tokens per expert, losses, z-loss and dropped tokens of all MoE layers of this rank.
    fn moe_counters(&mut self) {
        let MoeLayers { count, experts } = MoeLayers::of(self.shape);
        if count == 0 {
            return;
        }
        let training = self.shape.options.moe_training.clone();
        let sizes = [
            count * experts * DType::I64.size(),
            count * AuxLossKind::ALL.len() * DType::F32.size(),
            count * 2 * DType::F64.size(),
            count * DType::I64.size(),
        ];
        for bytes in sizes {
            self.all_reduce(Group::TpDpCp, bytes);
        }
        if matches!(training.routing_method, RoutingMethod::Quantiles { .. }) {
            self.all_reduce(Group::DpCp, count * experts * DType::F32.size());
        }
        if training.dispatcher == Dispatcher::AllGather {
            // Ranks exchange their numbers of rows in every micro-batch.
            let others = self.shape.ranks.size(Group::EtpEp) - 1;
            let bytes = (others * 8 * self.shape.micro_batches) as u64;
            self.send(Group::EtpEp, OpKind::AllGatherBytes, bytes);
        }
    }
}
