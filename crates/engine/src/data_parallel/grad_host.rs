//! Gradients that accumulate in host memory (`offload.gradients`), in the order and dtype in which they accumulate on the
//! device.
//!
//! Where gradients are sharded between micro-batches, a reduced shard of the first micro-batch is copied out; later ones are
//! added on the device to what is copied in, and copied out. On a single data-parallel rank GEMMs accumulate: what is
//! accumulated is copied into the bucket before its first write of a micro-batch, one bucket ahead, and out after its last.

use super::grad_reduce::LABEL;
use super::host_shards::HostEdge;
use super::{FlatBuffer, GradBuffer, HostLink, group_rank};
use crate::Rank;
use ferrotron_comm::InFlight;
use ferrotron_tensor::{Category, DType, Error, Result, Tensor};
use std::sync::Arc;

impl GradBuffer {
    /// Whether GEMMs accumulate into buckets that are in host memory between micro-batches.
    pub(super) fn accumulates_on_host(&self) -> bool {
        self.link.is_some() && self.scheme.grad.is_full_size()
    }

    fn link(&self) -> Result<Arc<HostLink>> {
        let missing = || Error::Unsupported { op: "gradient", what: "it is not in host memory".into() };
        self.link.clone().ok_or_else(missing)
    }

    /// This rank's shard of a bucket in host memory.
    fn host_shard(&mut self, rank: &Rank, bucket: usize, len: usize) -> Result<Tensor> {
        if let Some(shard) = &self.buckets[bucket].shard {
            return Ok(shard.clone());
        }
        let shard = Tensor::host(&rank.compute, &[len], DType::F32)?;
        Ok(self.buckets[bucket].shard.insert(shard).clone())
    }

    /// The memory of a bucket for use on the compute stream, if there is any: what is in host memory is copied in, and the
    /// next bucket ahead.
    pub(super) fn load_whole(&mut self, rank: &Rank, bucket: usize) -> Result<Option<Tensor>> {
        self.start_load(rank, bucket)?;
        if let Some(loaded) = self.buckets[bucket].loaded.take() {
            self.link()?.order(HostEdge::Loaded, &rank.compute, &loaded)?;
            if rank.overlap && bucket + 1 < self.buckets.len() {
                self.start_load(rank, bucket + 1)?;
            }
        }
        Ok(self.buckets[bucket].whole.clone())
    }

    /// Starts to copy what a bucket has accumulated in this step to the device, unless it is there or complete.
    fn start_load(&mut self, rank: &Rank, bucket: usize) -> Result<()> {
        let (needed, memory) = (self.started <= bucket, &self.buckets[bucket]);
        let Some(shard) = memory.shard.clone().filter(|_| needed && self.accumulates_on_host()) else {
            return Ok(());
        };
        if memory.whole.is_some() || memory.stores == 0 {
            return Ok(());
        }
        let whole = Tensor::empty(&rank.compute, shard.shape(), DType::F32, Category::Gradients)?;
        let link = self.link()?;
        let h = link.fetch_after(rank, memory.stored.as_ref())?;
        h.copy(&shard, &whole)?;
        let memory = &mut self.buckets[bucket];
        (memory.loaded, memory.whole) = (Some(h.record()?), Some(whole));
        Ok(())
    }

    /// After a contribution to a bucket: copies it out if it was the last one of a micro-batch.
    pub(super) fn store_if_complete(&mut self, rank: &Rank, bucket: usize) -> Result<()> {
        let memory = &self.buckets[bucket];
        let resident = memory.whole.is_some() && memory.loaded.is_none();
        if !self.accumulates_on_host() || !resident || !self.is_complete(bucket, memory.stores + 1) {
            return Ok(());
        }
        self.store_whole(rank, bucket)
    }

    /// Copies a bucket to host memory. Its memory on the device is free afterwards.
    fn store_whole(&mut self, rank: &Rank, bucket: usize) -> Result<()> {
        let Some(whole) = self.buckets[bucket].whole.take() else { return Ok(()) };
        let (link, shard) = (self.link()?, self.host_shard(rank, bucket, whole.numel())?);
        let streams = (&rank.compute, &link.to_host);
        let copy = InFlight::launch(streams, (), vec![whole.clone()], |d, ()| d.copy(&whole, &shard))?;
        let memory = &mut self.buckets[bucket];
        (memory.stored, memory.stores) = (Some(link.to_host.record()?), memory.stores + 1);
        self.hold_back(rank, (whole.bytes(), copy))
    }

    /// Ends the accumulation of a bucket on a single data-parallel rank: sums over tensor-parallel ranks that hold the same
    /// weights.
    pub(super) fn reduce_accumulated(&mut self, rank: &Rank, bucket: usize) -> Result<()> {
        let memory = &self.buckets[bucket];
        let alone = rank.tp_group(self.plan.buckets()[bucket].experts).size() == 1;
        let there = memory.whole.is_none() && memory.stores > 0 && self.is_written(bucket);
        if alone && there {
            return Ok(());
        }
        let whole = self.whole(rank, bucket)?;
        self.complete(rank, bucket, false)?;
        self.reduce_over_tp(rank, bucket, &whole)?;
        drop(whole);
        self.store_whole(rank, bucket)
    }

    /// Reduces a bucket of micro-batch `round` over the data-parallel ranks and adds this rank's shard to what is in host
    /// memory.
    pub(super) fn reduce_to_host(
        &mut self,
        rank: &Rank,
        (bucket, round): (usize, usize),
        own: FlatBuffer,
    ) -> Result<()> {
        let replicas = rank.dp_group(self.plan.buckets()[bucket].experts);
        let sum = own.view_as(self.scheme.grad, group_rank(replicas))?;
        let (link, shard) = (self.link()?, self.host_shard(rank, bucket, sum.memory().numel())?);
        let mut buffers = vec![own.memory().clone()];
        let mut accumulated = None;
        if round > 0 {
            let memory = Tensor::empty(&rank.compute, shard.shape(), DType::F32, Category::Gradients)?;
            buffers.push(memory.clone());
            let h = link.fetch_after(rank, self.buckets[bucket].stored.as_ref())?;
            accumulated = Some((memory, h));
        }
        let bytes = buffers.iter().map(Tensor::bytes).sum();
        let reduction = InFlight::launch((&rank.compute, &link.to_host), (), buffers, |d, ()| {
            let s = rank.dp_comm_stream()?;
            own.redistribute(rank, replicas, &sum, s, LABEL)?;
            let mut out = sum.memory();
            if shard.numel() == 0 {
                return d.wait(&s.record()?);
            }
            if let Some((memory, h)) = &accumulated {
                h.copy(&shard, memory)?;
                link.order(HostEdge::Loaded, s, &h.record()?)?;
                rank.kernels.add_assign(s, memory, out)?;
                out = memory;
            }
            d.wait(&s.record()?)?;
            d.copy(out, &shard)
        })?;
        let memory = &mut self.buckets[bucket];
        (memory.whole, memory.stored) = (None, Some(link.to_host.record()?));
        self.hold_back(rank, (bytes, reduction))
    }
}
