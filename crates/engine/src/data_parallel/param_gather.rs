//! All-gather of updated weights over the data-parallel ranks, overlapped with the next forward pass.

use super::host_shards::on_device;
use super::units::UnitLayout;
use super::{Bucket, FlatBuffer, ParamShard, Placement, ShardingStrategy, group_rank};
use crate::{GroupRank, ParamId, ParamSpec, Params, Rank, StepState};
use ferrotron_comm::Communicator;
use ferrotron_tensor::{Event, Result, Stream, Tensor};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

const LABEL: &str = "weights";

/// The optimizer's f32 master weights as this rank holds them.
#[derive(Clone, Copy)]
pub struct MasterShards<'a> {
    /// Placements of the optimizer state.
    pub scheme: ShardingStrategy,
    /// This rank's shard of each parameter.
    pub shards: &'a [ParamShard],
    /// f32 values of each shard, flat.
    pub values: &'a [Tensor],
}

/// Buckets whose all-gather is still running, with its end.
pub(crate) struct PendingGathers(Mutex<Vec<Option<Event>>>);

impl PendingGathers {
    pub(crate) fn new(buckets: usize) -> PendingGathers {
        PendingGathers(Mutex::new(vec![None; buckets]))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Option<Event>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Params {
    /// Ranges of buckets in the order in which an optimizer updates and gathers them. Several, where gathers overlap
    /// computation: a part of the model is gathered while the next one is updated, and the last, which is the smallest, while
    /// the next forward pass computes the first. Scales of FP8 weights are computed after all are updated: there is one range.
    pub fn update_order(&self, rank: &Rank, state: &StepState, placement: Placement) -> Vec<Range<usize>> {
        let all = 0..self.plan().buckets().len();
        let one = placement == Placement::Replicate
            || self.units.is_some()
            || !rank.overlaps_dp_comm()
            || state.quant().is_some();
        if one {
            return vec![all];
        }
        self.plan().update_parts()
    }

    /// All-gathers the weights of frozen base models, which no step changes. Collective over the data-parallel ranks.
    pub fn sync_base(&self, rank: &Rank, scheme: &ShardingStrategy) -> Result<()> {
        let all = self.plan().buckets().iter().enumerate();
        let base = all.filter(|(_, b)| self.is_base(b)).map(|(i, _)| i).collect::<Vec<_>>();
        self.all_gather_buckets(rank, scheme, &base)
    }

    /// Whether a bucket holds weights of a frozen base model.
    fn is_base(&self, bucket: &Bucket) -> bool {
        bucket.spans.first().is_some_and(|s| self.specs()[s.param.0].group.base)
    }

    /// Publishes updated weights of some buckets: quantizes FP8-resident ones from `masters` and all-gathers in forward
    /// order. Passes wait for a bucket at its first use. Sharded weights are gathered by the passes; before, their pieces from
    /// the groups that share a shard's optimizer state (HFSDP). `precomputed`: the optimizer's step has filled
    /// [`Params::precomputed`]. Collective over the data-parallel ranks.
    pub fn sync_params(
        &self,
        rank: &Rank,
        state: &StepState,
        masters: &MasterShards,
        (buckets, precomputed): (Range<usize>, bool),
    ) -> Result<()> {
        let trained = |s: &ParamSpec| s.quant.is_some() && !s.group.base;
        if let Some(quant) = state.quant().filter(|_| self.specs().iter().any(trained)) {
            quant.weights_changed();
            self.quantize_params(rank, quant, masters, precomputed)?;
        }
        let changed = |b: &usize| !self.is_base(&self.plan().buckets()[*b]);
        let buckets: Vec<usize> = buckets.rev().filter(changed).collect();
        self.all_gather_buckets(rank, &masters.scheme, &buckets)
    }

    /// All-gathers buckets in that order; passes wait for one at its first use.
    fn all_gather_buckets(&self, rank: &Rank, scheme: &ShardingStrategy, buckets: &[usize]) -> Result<()> {
        let hybrid = !scheme.outer_optimizer.is_full_size();
        if scheme.optimizer.is_full_size() || (self.units.is_some() && !hybrid) || buckets.is_empty() {
            return Ok(());
        }
        let s = rank.dp_comm_stream()?;
        self.host_weights().map_or(Ok(()), |link| link.wait_weights(s))?;
        for &bucket in buckets {
            match hybrid {
                true => self.all_gather_shard(rank, bucket, scheme, s)?,
                false => self.all_gather_bucket(rank, bucket, scheme.optimizer, s)?,
            }
            if rank.overlaps_dp_comm() {
                self.pending.lock()[bucket] = Some(s.record()?);
            }
        }
        if let Some(link) = self.host_weights() {
            link.weights_stored(s.record()?);
        }
        Ok(())
    }

    /// Makes the compute stream wait for all weights: before anything but a pass of the model uses or changes them. Sharded
    /// weights are gathered anew after this.
    pub fn wait_params(&self, rank: &Rank) -> Result<()> {
        self.units.as_ref().map_or(Ok(()), |units| units.invalidate(rank))?;
        self.host_weights().map_or(Ok(()), |link| link.wait_weights(&rank.compute))?;
        self.pending.lock().iter_mut().filter_map(Option::take).try_for_each(|done| rank.compute.wait(&done))
    }

    /// Makes the compute stream wait for the bucket of a weight.
    pub(crate) fn wait_weight(&self, rank: &Rank, id: ParamId) -> Result<()> {
        let pending = self.pending.lock()[self.plan().slot(id).0].take();
        pending.map_or(Ok(()), |done| rank.compute.wait(&done))
    }

    /// All-gathers a bucket in place from its shards under `placement`. FP8-resident weights are gathered as FP8 where
    /// each rank quantized its own shard.
    fn all_gather_bucket(&self, rank: &Rank, bucket: usize, placement: Placement, s: &Stream) -> Result<()> {
        let (split, layout) = (&self.splits[bucket], &self.plan().buckets()[bucket]);
        let group = rank.dp_group(layout.experts);
        if split.is_uniform() {
            let all = self.bucket(bucket)?;
            return all.view_as(placement, group_rank(group))?.redistribute(rank, group, &all, s, LABEL);
        }
        let held = |rank| layout.held(placement, GroupRank { rank, size: group.size() });
        self.all_gather_split(bucket, group, &held, s)
    }

    /// All-gathers this rank's shard of a bucket in place from the pieces of the groups that hold the same shards.
    fn all_gather_shard(
        &self,
        rank: &Rank,
        bucket: usize,
        scheme: &ShardingStrategy,
        s: &Stream,
    ) -> Result<()> {
        let layout = &self.plan().buckets()[bucket];
        let group = rank.shard_replica_group(layout.experts);
        let (inner, outer) = (group_rank(rank.dp_group(layout.experts)), group_rank(group));
        if self.splits[bucket].is_uniform() {
            return on_device(s, &self.buckets[bucket], |memory| {
                let all = FlatBuffer::of_shard(self.plan(), bucket, inner, Placement::Replicate, memory);
                let own = all.view_as(scheme.outer_optimizer, outer)?;
                own.redistribute(rank, group, &all, s, LABEL)
            });
        }
        let held = |rank| {
            let place = scheme.optimizer_place(inner, GroupRank { rank, ..outer });
            layout.held(scheme.optimizer, place)
        };
        self.all_gather_split(bucket, group, &held, s)
    }

    /// All-gathers in place what this rank has of a bucket of which some parameters are FP8-resident; rank r of the group
    /// has `held(r)` of it.
    fn all_gather_split(
        &self,
        bucket: usize,
        group: &Communicator,
        held: &dyn Fn(usize) -> Range<usize>,
        s: &Stream,
    ) -> Result<()> {
        let split = &self.splits[bucket];
        let gather = |memory: &Tensor, part: &dyn Fn(usize) -> Range<usize>| {
            let counts: Vec<usize> = (0..group.size()).map(|r| part(r).len()).collect();
            let mine = part(group.rank());
            on_device(s, memory, |memory| {
                let mine = memory.narrow(0, mine.start - part(0).start, mine.len())?;
                Ok(group.all_gather_v(s, &mine, memory, &counts, LABEL)?)
            })
        };
        gather(&self.buckets[bucket], &|r| split.rest(&held(r)))?;
        if let Some(fp8) = self.fp8_params().gathered_memory(bucket)? {
            gather(&fp8, &|r| split.separate(&held(r)))?;
        }
        Ok(())
    }

    /// All-gathers the buckets of a unit from their shards into the memory of a slot, after the work given to the compute
    /// stream so far; shards in host memory are copied to their place in the slot first. Returns the end of it where it
    /// overlaps computation.
    pub(crate) fn all_gather_unit(
        &self,
        rank: &Rank,
        unit: &UnitLayout,
        slot: &[Tensor; 2],
    ) -> Result<Option<Event>> {
        let s = rank.dp_comm_stream()?;
        let from_host = self.host_weights().map(|link| link.fetch_weights(rank)).transpose()?;
        let mut gathers = false;
        for (bucket, ranges) in &unit.buckets {
            let (split, layout) = (&self.splits[*bucket], &self.plan().buckets()[*bucket]);
            let group = rank.dp_group(layout.experts);
            let held = |rank| layout.held(self.placement(), GroupRank { rank, size: group.size() });
            let [fp8, rest] = [0, 1].map(|k| slot[k].narrow(0, ranges[k].start, ranges[k].len()));
            let (fp8, rest) = (fp8?.as_bytes()?, rest?);
            let mut mine = self.buckets[*bucket].clone();
            let mut mine_fp8 = match split.is_uniform() {
                true => None,
                false => Some(self.fp8_params().bucket(*bucket).as_bytes()?),
            };
            if let Some(h) = from_host {
                let here = held(group.rank());
                mine = copy_to(h, &mine, &rest, split.rest(&here))?;
                mine_fp8 = mine_fp8.map(|from| copy_to(h, &from, &fp8, split.separate(&here))).transpose()?;
                if group.size() == 1 {
                    continue;
                }
                s.wait(&h.record()?)?;
                gathers = true;
            }
            let Some(mine_fp8) = mine_fp8 else {
                let all = FlatBuffer::of(self.plan(), *bucket, Placement::Replicate, &rest);
                let mine = FlatBuffer::of(self.plan(), *bucket, self.placement(), &mine);
                mine.redistribute(rank, group, &all, s, LABEL)?;
                continue;
            };
            let counts = |part: &dyn Fn(&Range<usize>) -> Range<usize>| -> Vec<usize> {
                (0..group.size()).map(|r| part(&held(r)).len()).collect()
            };
            group.all_gather_v(s, &mine, &rest, &counts(&|r| split.rest(r)), LABEL)?;
            group.all_gather_v(s, &mine_fp8, &fp8, &counts(&|r| split.separate(r)), LABEL)?;
        }
        match from_host {
            Some(h) if !gathers => return h.record().map(Some),
            Some(h) => s.wait(&h.record()?)?,
            None => {}
        }
        if rank.overlaps_dp_comm() { s.record().map(Some) } else { Ok(None) }
    }
}

/// Copies a shard to its place `range` of a buffer, and returns that.
fn copy_to(s: &Stream, shard: &Tensor, all: &Tensor, range: Range<usize>) -> Result<Tensor> {
    let place = all.narrow(0, range.start, range.len())?;
    if !range.is_empty() {
        s.copy(shard, &place)?;
    }
    Ok(place)
}
