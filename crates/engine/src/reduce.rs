//! Gradients of a step summed over the ranks that share weights or data, and whole tensors from the shares of ranks.

use crate::attention::Layout;
use crate::flat::{FlatBuffer, Piece, Placement, place};
use crate::grad::InFlight;
use crate::{GradBuffer, ParamId, Part, Place, Rank, Tokens};
use ferrotron_comm::Reduce;
use ferrotron_tensor::{Category, DType, Element, Error, Result, Stream, Tensor};

impl Rank {
    /// This rank's place among those that share every layer.
    pub fn place(&self) -> Place {
        Place { rank: self.tp.rank(), size: self.tp.size() }
    }

    /// Which tokens of a batch this rank has.
    pub fn tokens(&self, layout: &Layout) -> Result<Tokens> {
        let cp = Place { rank: self.cp.rank(), size: self.cp.size() };
        Tokens::new(layout, cp, self.tp.size())
    }

    /// A logical tensor whole, from what every rank holds of it, on every rank. `held` is row-major, each element
    /// being `size` values: 1, or its bytes. `experts`: those that share experts have it, not those that share layers.
    pub fn join<T: Element>(&self, experts: bool, part: &Part, size: usize, held: &[T]) -> Result<Vec<T>> {
        let sharers = self.sharers(experts);
        if sharers.size() == 1 {
            return Ok(held.to_vec());
        }
        let all = sharers.all_gather_bytes(bytemuck::cast_slice(held), "a whole tensor")?;
        let shape: Vec<usize> = part.shape.iter().copied().chain([size]).collect();
        let mut whole = vec![T::zeroed(); shape.iter().product()];
        for (rank, bytes) in all.iter().enumerate() {
            let values: Vec<T> =
                bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect();
            part.cut(Place { rank, size: sharers.size() }).put(&shape, &values, &mut whole);
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
    pub fn beside(&self) -> Result<&Stream> {
        if !self.beside_compute() {
            return Ok(&self.compute);
        }
        self.comm.wait(&self.compute.record()?)?;
        Ok(&self.comm)
    }

    /// Is that another stream than the compute stream?
    pub fn beside_compute(&self) -> bool {
        self.overlap && self.copies.size().max(self.expert_copies.size()) > 1
    }
}

impl GradBuffer {
    /// Begins the sums over ranks of buckets that are complete, all remaining ones with `all`. They come in one order
    /// on every rank, whatever is ready first, and as many on every rank, whether or not anything was written.
    pub(crate) fn sum_ready(&mut self, rank: &Rank, all: bool) -> Result<()> {
        let (buckets, rounds) = (self.buckets.len(), self.rounds());
        while self.begun < buckets * rounds {
            let (round, bucket) = (self.begun / buckets, self.begun % buckets);
            let needed = if rounds > 1 { round + 1 } else { self.micro_batches.unwrap_or(1) };
            let complete =
                |b: usize| self.plan.buckets()[b].spans.iter().all(|s| self.arrived(s.param, needed));
            if !all && !complete(bucket) {
                break;
            }
            self.sum(rank, bucket, round)?;
            self.begun += 1;
        }
        Ok(())
    }

    /// One bucket: summed over ranks that hold the same weights but saw other tokens or heads, then over copies.
    fn sum(&mut self, rank: &Rank, bucket: usize, round: usize) -> Result<()> {
        const LABEL: &str = "gradients";
        let divided = !self.scheme.grad.is_whole();
        let whole = self.whole(rank, bucket)?;
        self.complete(rank, bucket, divided)?;
        self.sum_shared(rank, bucket, &whole)?;
        let copies = rank.copies_of(self.plan.buckets()[bucket].experts);
        let me = place(copies);
        let own = FlatBuffer::of(&self.plan, bucket, Placement::Partial, &whole);
        if !divided {
            let to = own.seen_as(self.scheme.optimizer, me)?;
            own.redistribute(rank, copies, &to, rank.beside()?, LABEL)?;
            if rank.beside_compute() {
                self.in_flight.push_back(InFlight { done: rank.comm.record()?, _memory: None });
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
        let s = rank.beside()?;
        if round == 0 {
            let to = FlatBuffer::of(&self.plan, bucket, self.scheme.grad, &part);
            own.redistribute(rank, copies, &to, s, LABEL)?;
        } else {
            // Into its own place in the memory of this round, never onto what is to be added to.
            let to = own.seen_as(self.scheme.grad, me)?;
            own.redistribute(rank, copies, &to, s, LABEL)?;
            rank.kernels.add_assign(s, &part, to.memory())?;
        }
        self.buckets[bucket].whole = None;
        if rank.beside_compute() {
            self.in_flight.push_back(InFlight { done: rank.comm.record()?, _memory: Some(whole) });
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
    fn sum_shared(&self, rank: &Rank, bucket: usize, whole: &Tensor) -> Result<()> {
        let sharers = rank.sharers(self.plan.buckets()[bucket].experts);
        let (here, s) = (place(sharers), &rank.compute);
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
                    sharers.all_reduce(s, &share, Reduce::Sum, "gradients of replicated weights")?;
                } else if part.shared(here.size) {
                    // Some ranks hold the same heads: each adds up those of its own.
                    let n = share.numel();
                    let all = Tensor::empty(s, &[here.size, n], DType::F32, Category::Communication)?;
                    sharers.all_gather(s, &share, &all, "gradients of shared heads")?;
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
        sharers.all_reduce(s, &joint, Reduce::Sum, "gradients of replicated weights")?;
        small.iter().enumerate().try_for_each(|(i, share)| s.copy(&place_of(i)?, share))
    }

    /// Ends the step's sums. Afterwards every rank has, of what its optimizer needs, the gradient of the whole batch:
    /// the same bits on every rank that holds a weight.
    pub fn reduce(&mut self, rank: &Rank) -> Result<()> {
        self.sum_ready(rank, true)?;
        while !self.in_flight.is_empty() {
            self.wait_for_oldest(rank)?;
        }
        // The same part on both ends: a tied parameter is alone in its bucket.
        for bucket in 0..self.buckets.len() {
            if self.plan.buckets()[bucket].tied_over_ends {
                let part = self.local(rank, bucket)?;
                rank.ends.all_reduce(&rank.compute, &part, Reduce::Sum, "gradient of tied embeddings")?;
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
                let copies = rank.copies_of(self.plan.buckets()[bucket].experts);
                Ok(own.seen_as(self.scheme.optimizer, place(copies))?.memory().clone())
            }
            (None, None) => {
                let what = "no backward pass has run yet".into();
                Err(Error::Unsupported { op: "gradient", what })
            }
        }
    }

    /// What this rank has of a parameter's summed gradient, flat.
    pub fn piece(&self, rank: &Rank, id: ParamId) -> Result<(Piece, Tensor)> {
        let copies = rank.copies_of(self.specs[id.0].experts);
        let piece = self.plan.piece(id, self.scheme.optimizer, place(copies));
        let local = self.local(rank, piece.bucket)?.narrow(0, piece.local.start, piece.local.len())?;
        Ok((piece, local))
    }

    /// The gradients that this rank counts in the norm: every element of the model is counted by one rank of the world.
    pub fn counted(&self, rank: &Rank) -> Result<Vec<Tensor>> {
        let mut out = Vec::new();
        let whole = self.scheme.optimizer.is_whole();
        for (i, spec) in self.specs.iter().enumerate().filter(|(_, s)| !s.mirror) {
            if whole && rank.copies_of(spec.experts).rank() > 0 {
                continue;
            }
            let here = place(rank.sharers(spec.experts));
            let (piece, values) = self.piece(rank, ParamId(i))?;
            for (part, _, r) in spec.held() {
                let (start, end) = (r.start.max(piece.inside.start), r.end.min(piece.inside.end));
                if start < end && part.holders(here).start == here.rank {
                    out.push(values.narrow(0, start - piece.inside.start, end - start)?);
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
            let copies = rank.copies_of(self.plan.buckets()[bucket].experts);
            let kind = (DType::F32, Category::Workspace);
            let all = FlatBuffer::empty(&self.plan, bucket, Placement::Replicate, place(copies), kind, s)?;
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
