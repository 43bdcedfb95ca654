//! Gradient reduction over the ranks that share weights or data, overlapped with backward.

use super::host_shards::{on_device, to_device};
use super::{FlatBuffer, GradBuffer, ParamShard, Placement, gather_from_optimizer, group_rank};
use crate::{ParamId, Rank};
use ferrotron_comm::{InFlight, ReduceOp};
use ferrotron_tensor::{Category, DType, Error, Result, Stream, Tensor};

#[cfg(test)]
#[path = "grad_reduce_tests.rs"]
mod tests;

/// Name of the reductions over data-parallel ranks.
pub(super) const LABEL: &str = "gradients";
/// Gradients of replicated weights below this size are all-reduced together.
const SMALL: usize = 1 << 16;

impl Rank {
    /// Stream for data-parallel communication, ordered after the work enqueued on the compute stream so far.
    pub fn dp_comm_stream(&self) -> Result<&Stream> {
        if !self.overlaps_dp_comm() {
            return Ok(&self.compute);
        }
        self.comm_stream.wait(&self.compute.record()?)?;
        Ok(&self.comm_stream)
    }

    /// Stream of data-parallel communication: the compute stream where nothing overlaps.
    fn dp_stream(&self) -> &Stream {
        if self.overlaps_dp_comm() { &self.comm_stream } else { &self.compute }
    }

    /// Whether data-parallel communication runs on another stream than computation.
    pub fn overlaps_dp_comm(&self) -> bool {
        self.overlap && self.dp_cp_group.size().max(self.expert_dp_group.size()) > 1
    }
}

impl GradBuffer {
    /// Starts the reductions of complete buckets; with `all`, of all remaining ones. Every rank reduces the same buckets in
    /// the same order, whatever is ready first and whether or not anything was written.
    pub(crate) fn reduce_ready(&mut self, rank: &Rank, all: bool) -> Result<()> {
        let (buckets, rounds) = (self.buckets.len(), self.rounds());
        while self.started < buckets * rounds {
            let (round, bucket) = (self.started / buckets, self.started % buckets);
            if self.plan.buckets()[bucket].frozen {
                self.started += 1;
                continue;
            }
            let needed = if rounds > 1 { round + 1 } else { self.micro_batches.unwrap_or(1) };
            if !all && !self.is_complete(bucket, needed) {
                break;
            }
            self.reduce_bucket(rank, bucket, round)?;
            self.started += 1;
        }
        Ok(())
    }

    /// Reduces one bucket: over tensor-parallel ranks that hold the same weights, then over the data-parallel group.
    fn reduce_bucket(&mut self, rank: &Rank, bucket: usize, round: usize) -> Result<()> {
        if self.accumulates_on_host() {
            return self.reduce_accumulated(rank, bucket);
        }
        let sharded = !self.scheme.grad.is_full_size();
        let whole = self.whole(rank, bucket)?;
        self.complete(rank, bucket, sharded)?;
        self.reduce_over_tp(rank, bucket, &whole)?;
        let replicas = rank.dp_group(self.plan.buckets()[bucket].experts);
        let (me, streams) = (group_rank(replicas), (&rank.compute, rank.dp_stream()));
        let own = FlatBuffer::of(&self.plan, bucket, Placement::Partial, &whole);
        if !sharded {
            let to = own.view_as(self.scheme.optimizer, me)?;
            let reduction = InFlight::launch(streams, (), Vec::new(), |s, ()| {
                own.redistribute(rank, replicas, &to, s, LABEL)
            })?;
            self.in_flight.push_back((0, reduction));
            return Ok(());
        }
        if self.link.is_some() {
            return self.reduce_to_host(rank, (bucket, round), own);
        }
        let shard = match &self.buckets[bucket].shard {
            Some(shard) => shard.clone(),
            None => {
                let kind = (DType::F32, Category::Gradients);
                let new = FlatBuffer::empty(&self.plan, bucket, self.scheme.grad, me, kind, &rank.compute)?;
                self.buckets[bucket].shard.insert(new.memory().clone()).clone()
            }
        };
        self.buckets[bucket].whole = None;
        let bytes = whole.numel() * DType::F32.size();
        let reduction = InFlight::launch(streams, (), vec![whole], |s, ()| match round {
            0 => {
                let to = FlatBuffer::of(&self.plan, bucket, self.scheme.grad, &shard);
                own.redistribute(rank, replicas, &to, s, LABEL)
            }
            _ => {
                // Into this rank's shard of this round's own memory, never onto what is accumulated into.
                let to = own.view_as(self.scheme.grad, me)?;
                own.redistribute(rank, replicas, &to, s, LABEL)?;
                rank.kernels.add_assign(s, &shard, to.memory())
            }
        })?;
        self.hold_back(rank, (bytes, reduction))
    }

    /// Keeps the memory of a reduction until its end, and no more of them than the budget allows.
    pub(super) fn hold_back(&mut self, rank: &Rank, reduction: (usize, InFlight<()>)) -> Result<()> {
        self.in_flight.push_back(reduction);
        // One is always in flight, however large.
        while self.in_flight.len() > 1 && self.in_flight.iter().map(|r| r.0).sum::<usize>() > self.comm_unit {
            self.wait_for_oldest(rank)?;
        }
        Ok(())
    }

    fn wait_for_oldest(&mut self, rank: &Rank) -> Result<()> {
        self.in_flight.pop_front().map_or(Ok(()), |(_, oldest)| oldest.wait(&rank.compute))
    }

    /// Sums over the tensor-parallel ranks that hold the same weights but saw other tokens or heads.
    pub(super) fn reduce_over_tp(&self, rank: &Rank, bucket: usize, whole: &Tensor) -> Result<()> {
        let tp_group = rank.tp_group(self.plan.buckets()[bucket].experts);
        let (here, s) = (group_rank(tp_group), &rank.compute);
        if here.size == 1 {
            return Ok(());
        }
        const LABEL: &str = "gradients of replicated weights";
        let (mut small, mut large) = (Vec::new(), Vec::new());
        for span in &self.plan.buckets()[bucket].spans {
            for (part, _, r) in self.specs[span.param.0].held() {
                let share = whole.narrow(0, span.range.start + r.start, r.len())?;
                let holders = part.holders(here);
                if holders.len() == here.size && share.numel() < SMALL {
                    small.push(share);
                } else if holders.len() == here.size {
                    large.push(share);
                } else if part.shared(here.size) {
                    // Groups of ranks share KV heads: each sums the gradients of its own group.
                    let n = share.numel();
                    let all = Tensor::empty(s, &[here.size, n], DType::F32, Category::Communication)?;
                    tp_group.all_gather(s, &share, &all, "gradients of shared heads")?;
                    s.zero(&share)?;
                    for holder in holders {
                        rank.kernels.add_assign(s, &share, &all.select(0, holder)?)?;
                    }
                }
            }
        }
        let large: Vec<_> = large.iter().map(|share| (share, LABEL)).collect();
        tp_group.all_reduce_coalesced(s, &large, ReduceOp::Sum)?;
        if small.is_empty() {
            return Ok(());
        }
        let sizes: Vec<usize> = small.iter().map(Tensor::numel).collect();
        let joint = Tensor::empty(s, &[sizes.iter().sum()], DType::F32, Category::Communication)?;
        let place_of = |i: usize| joint.narrow(0, sizes[..i].iter().sum(), sizes[i]);
        small.iter().enumerate().try_for_each(|(i, share)| s.copy(share, &place_of(i)?))?;
        tp_group.all_reduce(s, &joint, ReduceOp::Sum, LABEL)?;
        small.iter().enumerate().try_for_each(|(i, share)| s.copy(&place_of(i)?, share))
    }

    /// Ends the reductions of a step. Afterwards every rank has the global batch's gradient of what its optimizer updates,
    /// with the same bits on every rank that holds a weight.
    pub fn reduce(&mut self, rank: &Rank) -> Result<()> {
        self.reduce_ready(rank, true)?;
        while !self.in_flight.is_empty() {
            self.wait_for_oldest(rank)?;
        }
        // HSDP: the sum over the ranks that hold the same shard, of other data; on each of them, or of its piece.
        let trained = |b: &usize| !self.plan.buckets()[*b].frozen;
        for bucket in (0..self.buckets.len()).filter(trained) {
            let replicas = rank.shard_replica_group(self.plan.buckets()[bucket].experts);
            if replicas.size() > 1 {
                on_device(&rank.compute, &self.shard(rank, bucket)?, |memory| {
                    let shard = self.outer_shard(rank, bucket, memory);
                    let to = shard.view_as(self.scheme.outer_optimizer, group_rank(replicas))?;
                    shard.redistribute(rank, replicas, &to, &rank.compute, "gradients of replicated shards")
                })?;
            }
        }
        // A tied parameter is alone in its bucket, so that first and last stage have the same shard.
        for bucket in (0..self.buckets.len()).filter(trained) {
            if self.plan.buckets()[bucket].tied_across_stages {
                let part = self.local(rank, bucket)?;
                on_device(&rank.compute, &part, |part| {
                    let (s, label) = (&rank.compute, "gradient of tied embeddings");
                    Ok(rank.embedding_group.all_reduce(s, part, ReduceOp::Sum, label)?)
                })?;
            }
        }
        Ok(())
    }

    /// The gradients of a bucket that the optimizer of this rank uses.
    fn local(&self, rank: &Rank, bucket: usize) -> Result<Tensor> {
        if self.scheme.outer_optimizer.is_full_size() {
            return self.shard(rank, bucket);
        }
        let outer = group_rank(rank.shard_replica_group(self.plan.buckets()[bucket].experts));
        let shard = self.outer_shard(rank, bucket, &self.shard(rank, bucket)?);
        let piece = shard.view_as(self.scheme.outer_optimizer, outer)?;
        Ok(piece.memory().clone())
    }

    /// This rank's shard of a bucket as a partial sum over the groups that hold the same shards.
    fn outer_shard(&self, rank: &Rank, bucket: usize, memory: &Tensor) -> FlatBuffer {
        let inner = group_rank(rank.dp_group(self.plan.buckets()[bucket].experts));
        FlatBuffer::of_shard(&self.plan, bucket, inner, Placement::Partial, memory)
    }

    /// The gradients of a bucket that the optimizer of this rank uses, where they are in host memory.
    pub fn on_host(&self, rank: &Rank, bucket: usize) -> Result<Option<Tensor>> {
        self.link.is_some().then(|| self.local(rank, bucket)).transpose()
    }

    /// This rank's shard of the gradients of a bucket, reduced over the ranks that shard them.
    fn shard(&self, rank: &Rank, bucket: usize) -> Result<Tensor> {
        let memory = &self.buckets[bucket];
        match (&memory.whole, &memory.shard) {
            (_, Some(shard)) => Ok(shard.clone()),
            (Some(whole), None) => {
                let own = FlatBuffer::of(&self.plan, bucket, Placement::Partial, whole);
                let copies = rank.dp_group(self.plan.buckets()[bucket].experts);
                Ok(own.view_as(self.scheme.optimizer, group_rank(copies))?.memory().clone())
            }
            (None, None) => {
                let what = "no backward pass has run yet".into();
                Err(Error::Unsupported { op: "gradient", what })
            }
        }
    }

    /// This rank's shard of a parameter's reduced gradient, flat.
    pub fn piece(&self, rank: &Rank, id: ParamId) -> Result<(ParamShard, Tensor)> {
        let place = self.scheme.optimizer_place_of(rank, self.specs[id.0].experts);
        let piece = self.plan.piece(id, self.scheme.optimizer, place);
        let local =
            self.local(rank, piece.bucket)?.narrow(0, piece.local_range.start, piece.local_range.len())?;
        Ok((piece, local))
    }

    /// The gradients that this rank contributes to the gradient norm: every element of the model is counted by exactly one
    /// rank of the world.
    pub fn norm_shards(&self, rank: &Rank) -> Result<Vec<Tensor>> {
        let mut out = Vec::new();
        let whole = self.scheme.optimizer.is_full_size();
        for (i, spec) in self.specs.iter().enumerate().filter(|(_, s)| !s.mirror && !s.group.frozen) {
            let replicated = self.scheme.outer_optimizer.is_full_size();
            let copy = replicated && rank.shard_replica_group(spec.experts).rank() > 0;
            if copy || (whole && rank.dp_group(spec.experts).rank() > 0) {
                continue;
            }
            let here = group_rank(rank.tp_group(spec.experts));
            let (piece, values) = self.piece(rank, ParamId(i))?;
            for (part, _, r) in spec.held() {
                let (start, end) = (r.start.max(piece.param_range.start), r.end.min(piece.param_range.end));
                if start < end && part.holders(here).start == here.rank {
                    out.push(values.narrow(0, start - piece.param_range.start, end - start)?);
                }
            }
        }
        Ok(out)
    }

    /// All reduced gradients in order of declaration, all-gathered where sharded; zeros of frozen parameters. Collective over
    /// the data-parallel ranks.
    pub fn gathered(&self, rank: &Rank) -> Result<Vec<Tensor>> {
        let mut buckets = Vec::new();
        for bucket in 0..self.buckets.len() {
            let layout = &self.plan.buckets()[bucket];
            if layout.frozen {
                buckets.push(rank.compute.zeros(&[layout.len], DType::F32, Category::Workspace)?);
                continue;
            }
            let (at, mut mine) = ((&self.plan, bucket), self.local(rank, bucket)?);
            if !self.scheme.optimizer.is_full_size() {
                mine = to_device(&rank.compute, &mine)?;
            }
            buckets.push(gather_from_optimizer(rank, at, &self.scheme, &mine, "whole gradients")?);
        }
        let view = |(i, spec): (usize, &crate::ParamSpec)| {
            let (bucket, r) = self.plan.slot(ParamId(i));
            buckets[bucket].narrow(0, r.start, r.len())?.view(&spec.shape)
        };
        self.specs.iter().enumerate().map(view).collect()
    }
}
