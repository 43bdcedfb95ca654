//! f32 gradient accumulation in buckets.

use super::{BucketPlan, HostLink, Placement, ShardingStrategy, bucket_elements};
use crate::{ParamId, ParamSpec, Params, Rank};
use ferrotron_comm::InFlight;
use ferrotron_tensor::{Category, DType, Error, Event, Result, Tensor};
use std::collections::VecDeque;
use std::sync::Arc;

/// f32 gradients of all parameters, in the buckets of a [`BucketPlan`]. A bucket's memory is allocated when its first
/// gradient is written. When its last one is, the bucket is reduced over the ranks, overlapped with the rest of backward.
pub struct GradBuffer {
    pub(crate) plan: Arc<BucketPlan>,
    pub(crate) scheme: ShardingStrategy,
    pub(crate) specs: Vec<ParamSpec>,
    slots: Vec<Slot>,
    pub(crate) buckets: Vec<Memory>,
    /// Micro-batches of the step; if unknown, nothing is reduced before the end of it.
    pub(crate) micro_batches: Option<usize>,
    /// Reductions started in this step: every bucket in order, once, or once per micro-batch.
    pub(crate) started: usize,
    /// Reductions that are still running, each with its bytes and the memory it reads and that is free afterwards.
    pub(crate) in_flight: VecDeque<(usize, InFlight<()>)>,
    /// Bytes that may be reduced at a time, where their memory is freed afterwards.
    pub(crate) comm_unit: usize,
    /// Where shards are in host memory: their way there and back.
    pub(super) link: Option<Arc<HostLink>>,
}

#[derive(Clone)]
struct Slot {
    /// Contributions accumulated in this step.
    arrived: usize,
    /// Nothing written since the step began: the next write overwrites instead of accumulating.
    fresh: bool,
}

/// Memory of a bucket.
#[derive(Default)]
pub(crate) struct Memory {
    /// Gradients of this rank's own data.
    pub(crate) whole: Option<Tensor>,
    /// This rank's shard of the reduced gradients, where they are sharded between micro-batches (ZeRO-2), or what is
    /// accumulated so far, in host memory.
    pub(crate) shard: Option<Tensor>,
    /// End of the copy of a shard in host memory to `whole`, until the compute stream has waited for it.
    pub(super) loaded: Option<Event>,
    /// End of the last copy to the shard in host memory.
    pub(super) stored: Option<Event>,
    /// Copies of this step to it.
    pub(super) stores: usize,
}

impl GradBuffer {
    /// Buffers for a model without sharded gradients or optimizer state. Allocates nothing yet.
    pub fn new(specs: &[ParamSpec]) -> GradBuffer {
        let plan = Arc::new(BucketPlan::new(specs, [1; 2], bucket_elements(1)));
        GradBuffer::over(plan, specs.to_vec(), ShardingStrategy::REPLICATED, usize::MAX)
    }

    /// Buffers with the buckets of `params`, sharded as `scheme` says. Allocates nothing yet.
    pub fn of(params: &Params, scheme: ShardingStrategy) -> GradBuffer {
        let (plan, specs) = (params.plan().clone(), params.specs().to_vec());
        let link = params.link().filter(|_| scheme.host.gradients).cloned();
        GradBuffer { link, ..GradBuffer::over(plan, specs, scheme, params.comm_unit()) }
    }

    fn over(
        plan: Arc<BucketPlan>,
        specs: Vec<ParamSpec>,
        scheme: ShardingStrategy,
        comm_unit: usize,
    ) -> GradBuffer {
        let slots = vec![Slot { arrived: 0, fresh: true }; specs.len()];
        let buckets = plan.buckets().iter().map(|_| Memory::default()).collect();
        let (micro_batches, started, in_flight) = (None, 0, VecDeque::new());
        let link = None;
        GradBuffer { plan, scheme, specs, slots, buckets, micro_batches, started, in_flight, comm_unit, link }
    }

    /// Begins a step of `micro_batches` backward passes, in any order. Nothing is zeroed: the first write of each gradient
    /// overwrites.
    pub fn begin_step(&mut self, micro_batches: usize) {
        self.slots.iter_mut().for_each(|s| (s.fresh, s.arrived) = (true, 0));
        self.buckets.iter_mut().for_each(|b| b.stores = 0);
        (self.micro_batches, self.started) = (Some(micro_batches), 0);
    }

    /// Memory of the gradient of `id`, and whether to accumulate (true) or overwrite (false). Call it only when about to
    /// write: it answers "overwrite" once per step.
    pub(crate) fn main_grad(&mut self, rank: &Rank, id: ParamId) -> Result<(Tensor, bool)> {
        if self.started > (self.rounds() - 1) * self.buckets.len() + self.plan.slot(id).0 {
            let name = self.specs[id.0].parts.first().map_or("", |p| &p.name);
            let what = format!("'{name}' gets a contribution after its bucket was reduced");
            return Err(Error::Unsupported { op: "gradient", what });
        }
        let tensor = self.view(rank, id)?;
        Ok((tensor, !std::mem::replace(&mut self.slots[id.0].fresh, false)))
    }

    /// Reductions of every bucket in a step.
    pub(crate) fn rounds(&self) -> usize {
        if self.scheme.grad.is_full_size() { 1 } else { self.micro_batches.unwrap_or(1).max(1) }
    }

    /// Memory of a bucket for the gradients of this rank's own data.
    pub(crate) fn whole(&mut self, rank: &Rank, bucket: usize) -> Result<Tensor> {
        if let Some(whole) = self.load_whole(rank, bucket)? {
            return Ok(whole);
        }
        let layout = &self.plan.buckets()[bucket];
        let whole = Tensor::empty(&rank.compute, &[layout.len], DType::F32, Category::Gradients)?;
        // The gaps between gradients are reduced like the rest.
        layout.gaps().try_for_each(|r| rank.compute.zero(&whole.narrow(0, r.start, r.len())?))?;
        Ok(self.buckets[bucket].whole.insert(whole).clone())
    }

    fn view(&mut self, rank: &Rank, id: ParamId) -> Result<Tensor> {
        let (bucket, range) = self.plan.slot(id);
        let whole = self.whole(rank, bucket)?;
        whole.narrow(0, range.start, range.len())?.view(&self.specs[id.0].shape)
    }

    /// Whether a parameter is not trained: its gradient stays zero.
    pub(crate) fn is_frozen(&self, id: ParamId) -> bool {
        self.specs[id.0].group.frozen
    }

    /// Counts a contribution and starts the reductions that are now possible.
    pub(crate) fn ready(&mut self, rank: &Rank, id: ParamId) -> Result<()> {
        self.slots[id.0].arrived += 1;
        if self.micro_batches.is_none() {
            return Ok(());
        }
        self.reduce_ready(rank, false)?;
        self.store_if_complete(rank, self.plan.slot(id).0)
    }

    /// Whether every use of the parameter has contributed in this many micro-batches.
    pub(crate) fn arrived(&self, id: ParamId, micro_batches: usize) -> bool {
        self.slots[id.0].arrived >= micro_batches * self.specs[id.0].uses as usize
    }

    /// Whether every parameter of a bucket has contributed in this many micro-batches.
    pub(super) fn is_complete(&self, bucket: usize, micro_batches: usize) -> bool {
        self.plan.buckets()[bucket].spans.iter().all(|s| self.arrived(s.param, micro_batches))
    }

    /// Whether every gradient of a bucket was written in this step.
    pub(super) fn is_written(&self, bucket: usize) -> bool {
        self.plan.buckets()[bucket].spans.iter().all(|s| !self.slots[s.param.0].fresh)
    }

    /// Whether every use of the parameter has contributed in all micro-batches of the step.
    pub fn is_ready(&self, id: ParamId) -> bool {
        self.arrived(id, self.micro_batches.unwrap_or(1))
    }

    /// Zeroes the gradients of a bucket that nothing was written to. With `reset`, the next write overwrites again.
    pub(crate) fn complete(&mut self, rank: &Rank, bucket: usize, reset: bool) -> Result<()> {
        for k in 0..self.plan.buckets()[bucket].spans.len() {
            let id = self.plan.buckets()[bucket].spans[k].param;
            if std::mem::replace(&mut self.slots[id.0].fresh, reset) {
                rank.compute.zero(&self.view(rank, id)?)?;
            }
        }
        Ok(())
    }

    /// All gradients of this rank's own data, after the last micro-batch; zeros for parameters without one.
    pub fn finish(&mut self, rank: &Rank) -> Result<Vec<Tensor>> {
        let frozen = |b: usize| self.plan.buckets()[b].frozen;
        let trained: Vec<usize> = (0..self.buckets.len()).filter(|b| !frozen(*b)).collect();
        trained.into_iter().try_for_each(|b| self.complete(rank, b, false))?;
        let mut all = Vec::with_capacity(self.slots.len());
        for i in 0..self.slots.len() {
            all.push(match self.is_frozen(ParamId(i)) {
                true => rank.compute.zeros(&self.specs[i].shape, DType::F32, Category::Workspace)?,
                false => self.view(rank, ParamId(i))?,
            });
        }
        Ok(all)
    }

    /// Gradients that were written in this step and whose reduction has not begun, by name.
    pub fn accumulated(&self) -> impl Iterator<Item = (&str, Tensor)> {
        let begun = self.started % self.buckets.len().max(1);
        self.specs.iter().enumerate().filter_map(move |(i, spec)| {
            let (bucket, range) = self.plan.slot(ParamId(i));
            let whole =
                self.buckets[bucket].whole.as_ref().filter(|_| !self.slots[i].fresh && bucket >= begun)?;
            let name = spec.parts.first().map_or("", |p| p.name.as_str());
            Some((name, whole.narrow(0, range.start, range.len()).ok()?))
        })
    }

    /// The gradient of one parameter, for reading; an error before it exists, or where it is sharded.
    pub fn get(&self, id: ParamId) -> Result<Tensor> {
        let (bucket, range) = self.plan.slot(id);
        let missing = |what: &str| Err(Error::Unsupported { op: "gradient", what: what.into() });
        match &self.buckets[bucket].whole {
            _ if self.scheme.optimizer != Placement::Replicate => missing("it is sharded; gather it first"),
            Some(whole) => whole.narrow(0, range.start, range.len())?.view(&self.specs[id.0].shape),
            None => missing("no backward pass has run yet"),
        }
    }
}
