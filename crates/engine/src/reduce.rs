//! Gradients of a step summed over the ranks that share weights or data, and whole tensors from the shares of ranks.

use crate::attention::Layout;
use crate::data_parallel::{FlatBuffer, ParamShard, Placement, group_rank};
use crate::grad::InFlight;
use crate::{GradBuffer, GroupRank, ParamId, Part, Rank, Tokens};
use ferrotron_comm::ReduceOp;
use ferrotron_tensor::{Category, DType, Element, Error, Result, Stream, Tensor};

impl Rank {
    /// This rank's place among those that share every layer.
    pub fn place(&self) -> GroupRank {
        GroupRank { rank: self.tp.rank(), size: self.tp.size() }
    }

    /// Which tokens of a batch this rank has.
    pub fn tokens(&self, layout: &Layout) -> Result<Tokens> {
        let cp = GroupRank { rank: self.cp.rank(), size: self.cp.size() };
        Tokens::new(layout, cp, self.tp.size())
    }

    /// A logical tensor whole, from what every rank holds of it, on every rank. `held` is row-major, each element
    /// being `size` values: 1, or its bytes. `experts`: those that share experts have it, not those that share layers.
    pub fn gather_tensor<T: Element>(
        &self,
        experts: bool,
        part: &Part,
        size: usize,
        held: &[T],
    ) -> Result<Vec<T>> {
        let tp_group = self.tp_group(experts);
        if tp_group.size() == 1 {
            return Ok(held.to_vec());
        }
        let all = tp_group.all_gather_bytes(bytemuck::cast_slice(held), "a whole tensor")?;
        let shape: Vec<usize> = part.shape.iter().copied().chain([size]).collect();
        let mut whole = vec![T::zeroed(); shape.iter().product()];
        for (rank, bytes) in all.iter().enumerate() {
            let values: Vec<T> =
                bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect();
            part.cut(GroupRank { rank, size: tp_group.size() }).put(&shape, &values, &mut whole);
        }
        Ok(whole)
    }
}

#[cfg(test)]
mod tests;

/// Buckets that are summed beside computation at once, where their memory is given back afterwards.
const IN_FLIGHT: usize = 2;
/// Gradients of replicated weights below this size are summed together.
const SMALL: usize = 1 << 16;

impl Rank {
    /// Where communication with copies of this rank goes, after the work given to the compute stream so far.
    pub fn dp_comm_stream(&self) -> Result<&Stream> {
        if !self.overlaps_dp_comm() {
            return Ok(&self.compute);
        }
        self.comm_stream.wait(&self.compute.record()?)?;
        Ok(&self.comm_stream)
    }

    /// Is that another stream than the compute stream?
    pub fn overlaps_dp_comm(&self) -> bool {
        self.overlap && self.dp_cp_group.size().max(self.expert_dp_group.size()) > 1
    }
}

impl GradBuffer {
    /// Begins the sums over ranks of buckets that are complete, all remaining ones with `all`. They come in one order
    /// on every rank, whatever is ready first, and as many on every rank, whether or not anything was written.
    pub(crate) fn reduce_ready(&mut self, rank: &Rank, all: bool) -> Result<()> {
        let (buckets, rounds) = (self.buckets.len(), self.rounds());
        while self.begun < buckets * rounds {
            let (round, bucket) = (self.begun / buckets, self.begun % buckets);
            let needed = if rounds > 1 { round + 1 } else { self.micro_batches.unwrap_or(1) };
            let complete =
                |b: usize| self.plan.buckets()[b].spans.iter().all(|s| self.arrived(s.param, needed));
            if !all && !complete(bucket) {
                break;
            }
            self.reduce_bucket(rank, bucket, round)?;
            self.begun += 1;
        }
        Ok(())
    }

    /// One bucket: summed over ranks that hold the same weights but saw other tokens or heads, then over copies.
    fn reduce_bucket(&mut self, rank: &Rank, bucket: usize, round: usize) -> Result<()> {
        const LABEL: &str = "gradients";
        let divided = !self.scheme.grad.is_full_size();
        let whole = self.whole(rank, bucket)?;
        self.complete(rank, bucket, divided)?;
        self.reduce_over_tp(rank, bucket, &whole)?;
        let copies = rank.dp_group(self.plan.buckets()[bucket].experts);
        let me = group_rank(copies);
        let own = FlatBuffer::of(&self.plan, bucket, Placement::Partial, &whole);
        if !divided {
            let to = own.view_as(self.scheme.optimizer, me)?;
            own.redistribute(rank, copies, &to, rank.dp_comm_stream()?, LABEL)?;
            if rank.overlaps_dp_comm() {
                self.in_flight.push_back(InFlight { done: rank.comm_stream.record()?, _memory: None });
            }
            return Ok(());
        }
        let part = match &self.buckets[bucket].part {
            Some(part) => part.clone(),
            None => {
                let kind = (DType::F32, Category::Gradients);
                let new = FlatBuffer::empty(&self.plan, bucket, self.scheme.grad, me, kind, &rank.compute)?;
                self.buckets[bucket].part.insert(new.memory().clone()).clone()
            }
        };
        let s = rank.dp_comm_stream()?;
        if round == 0 {
            let to = FlatBuffer::of(&self.plan, bucket, self.scheme.grad, &part);
            own.redistribute(rank, copies, &to, s, LABEL)?;
        } else {
            // Into its own place in the memory of this round, never onto what is to be added to.
            let to = own.view_as(self.scheme.grad, me)?;
            own.redistribute(rank, copies, &to, s, LABEL)?;
            rank.kernels.add_assign(s, &part, to.memory())?;
        }
        self.buckets[bucket].whole = None;
        if rank.overlaps_dp_comm() {
            self.in_flight.push_back(InFlight { done: rank.comm_stream.record()?, _memory: Some(whole) });
            while self.in_flight.len() > IN_FLIGHT {
                self.wait_for_oldest(rank)?;
            }
        }
        Ok(())
    }

    fn wait_for_oldest(&mut self, rank: &Rank) -> Result<()> {
        self.in_flight.pop_front().map_or(Ok(()), |oldest| rank.compute.wait(&oldest.done))
    }

    /// Sums over the ranks that share layers, where they hold the same.
    fn reduce_over_tp(&self, rank: &Rank, bucket: usize, whole: &Tensor) -> Result<()> {
        let tp_group = rank.tp_group(self.plan.buckets()[bucket].experts);
        let (here, s) = (group_rank(tp_group), &rank.compute);
        if here.size == 1 {
            return Ok(());
        }
        let mut small = Vec::new();
        for span in &self.plan.buckets()[bucket].spans {
            for (part, _, r) in self.specs[span.param.0].held() {
                let share = whole.narrow(0, span.range.start + r.start, r.len())?;
                let holders = part.holders(here);
                if holders.len() == here.size && share.numel() < SMALL {
                    small.push(share);
                } else if holders.len() == here.size {
                    tp_group.all_reduce(s, &share, ReduceOp::Sum, "gradients of replicated weights")?;
                } else if part.shared(here.size) {
                    // Some ranks hold the same heads: each adds up those of its own.
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
        if small.is_empty() {
            return Ok(());
        }
        let sizes: Vec<usize> = small.iter().map(Tensor::numel).collect();
        let joint = Tensor::empty(s, &[sizes.iter().sum()], DType::F32, Category::Communication)?;
        let place_of = |i: usize| joint.narrow(0, sizes[..i].iter().sum(), sizes[i]);
        small.iter().enumerate().try_for_each(|(i, share)| s.copy(share, &place_of(i)?))?;
        tp_group.all_reduce(s, &joint, ReduceOp::Sum, "gradients of replicated weights")?;
        small.iter().enumerate().try_for_each(|(i, share)| s.copy(&place_of(i)?, share))
    }

    /// Ends the step's sums. Afterwards every rank has, of what its optimizer needs, the gradient of the whole batch:
    /// the same bits on every rank that holds a weight.
    pub fn reduce(&mut self, rank: &Rank) -> Result<()> {
        self.reduce_ready(rank, true)?;
        while !self.in_flight.is_empty() {
            self.wait_for_oldest(rank)?;
        }
        // The same part on both ends: a tied parameter is alone in its bucket.
        for bucket in 0..self.buckets.len() {
            if self.plan.buckets()[bucket].tied_across_stages {
                let part = self.local(rank, bucket)?;
                rank.embedding_group.all_reduce(
                    &rank.compute,
                    &part,
                    ReduceOp::Sum,
                    "gradient of tied embeddings",
                )?;
            }
        }
        Ok(())
    }

    /// What this rank has of the summed gradients of a bucket.
    fn local(&self, rank: &Rank, bucket: usize) -> Result<Tensor> {
        let memory = &self.buckets[bucket];
        match (&memory.whole, &memory.part) {
            (_, Some(part)) => Ok(part.clone()),
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

    /// What this rank has of a parameter's summed gradient, flat.
    pub fn piece(&self, rank: &Rank, id: ParamId) -> Result<(ParamShard, Tensor)> {
        let copies = rank.dp_group(self.specs[id.0].experts);
        let piece = self.plan.piece(id, self.scheme.optimizer, group_rank(copies));
        let local =
            self.local(rank, piece.bucket)?.narrow(0, piece.local_range.start, piece.local_range.len())?;
        Ok((piece, local))
    }

    /// The gradients that this rank counts in the norm: every element of the model is counted by one rank of the world.
    pub fn counted(&self, rank: &Rank) -> Result<Vec<Tensor>> {
        let mut out = Vec::new();
        let whole = self.scheme.optimizer.is_full_size();
        for (i, spec) in self.specs.iter().enumerate().filter(|(_, s)| !s.mirror) {
            if whole && rank.dp_group(spec.experts).rank() > 0 {
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

    /// All summed gradients in order of declaration, gathered where ranks divide them. Every copy calls it.
    pub fn gathered(&self, rank: &Rank) -> Result<Vec<Tensor>> {
        let s = &rank.compute;
        let mut buckets = Vec::new();
        for bucket in 0..self.buckets.len() {
            let mine = FlatBuffer::of(&self.plan, bucket, self.scheme.optimizer, &self.local(rank, bucket)?);
            if mine.placement() == Placement::Replicate {
                buckets.push(mine);
                continue;
            }
            let copies = rank.dp_group(self.plan.buckets()[bucket].experts);
            let kind = (DType::F32, Category::Workspace);
            let all =
                FlatBuffer::empty(&self.plan, bucket, Placement::Replicate, group_rank(copies), kind, s)?;
            mine.redistribute(rank, copies, &all, s, "whole gradients")?;
            buckets.push(all);
        }
        let view = |(i, spec): (usize, &crate::ParamSpec)| {
            let (bucket, r) = self.plan.slot(ParamId(i));
            buckets[bucket].memory().narrow(0, r.start, r.len())?.view(&spec.shape)
        };
        self.specs.iter().enumerate().map(view).collect()
    }
}
