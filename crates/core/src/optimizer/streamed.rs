//! The update of parameters whose state, gradients or weights are in host memory, streamed through the device in chunks.
//!
//! A chunk is a range of a bucket. What is in host memory of its state and gradient is copied to a slot of device memory on
//! stream H, updated there on the compute stream, and copied back on stream D, with updated weights: copies in, updates and
//! copies out of different chunks run at the same time, and both directions of the link are busy. Copies out may still run
//! when the next step computes; whoever reads the state or fetches the weights waits for them.

use super::executor::{Executor, ExecutorChoice, Stage};
use super::host_update::HostUpdate;
use super::{GroupRule, Optimizer, OptimizerState, StateKind, UpdateRule};
use crate::Result;
use crate::config::OptimizerCompute;
use ferrotron_engine::{GradBuffer, ParamId, Params, Rank, StepState};
use ferrotron_kernels::moments::BLOCK;
use ferrotron_kernels::{Moment, scalars};
use ferrotron_tensor::trace::OFFLOAD;
use ferrotron_tensor::{Category, DType, Event, Stream, Tensor};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Most elements of a chunk: copies of tens of megabytes run at the link's rate.
const MAX_CHUNK: usize = 8 << 20;
/// Chunks begin at multiples of this many elements of a shard: those that share a scale stay together.
const ALIGN: usize = 1024;
/// Chunks of a large bucket, at least.
const PER_BUCKET: usize = 6;
/// Slots: one is filled, one is updated, one is emptied.
const SLOTS: usize = 3;

/// Streams and device memory for state on its way through the device.
pub(super) struct StateStream {
    to_host: Stream,
    from_host: Stream,
    /// Elements of a chunk.
    chunk: usize,
    /// Bytes of an element in a slot.
    sizes: InSlot<usize>,
    slots: Mutex<Slots>,
    pub(super) choice: ExecutorChoice,
    /// The CPU as executor, where it may be chosen.
    pub(super) host: Option<HostUpdate>,
}

/// Sizes of what is streamed.
pub(super) struct StreamedSizes {
    /// Elements of the longest bucket, and parameters of the one with most.
    pub(super) bucket: (usize, usize),
    /// Bytes of an element in a slot.
    pub(super) slot: InSlot<usize>,
    /// Parameters in all.
    pub(super) params: usize,
    /// Step clocks.
    pub(super) clocks: usize,
}

struct Slots {
    /// Memory of each slot, and the end of the copies out of it.
    slots: Vec<(SlotMemory, Option<Event>)>,
    next: usize,
    /// The end of the last copy to the host.
    last: Option<Event>,
}

/// Bytes of a slot, or of an element in it.
#[derive(Clone)]
pub(super) struct InSlot<T> {
    /// Of each state.
    pub(super) states: Vec<T>,
    /// Of gradients.
    pub(super) grads: T,
    /// Of weights.
    pub(super) weights: T,
}

type SlotMemory = InSlot<Tensor>;

/// The state of a chunk in a slot.
struct Chunk {
    bucket: usize,
    /// Elements of this rank's shard of the bucket.
    range: Range<usize>,
    /// Those states that are in host memory, by index in [`Optimizer::states`].
    states: Vec<Option<Tensor>>,
    /// Gradients, if they are in host memory.
    grads: Option<Tensor>,
    /// Memory for updated weights, if those go to host memory.
    weights: Option<Tensor>,
}

impl Chunk {
    /// Memory for updated weights `range` of a parameter that begins at element `start` of the shard, of `dtype`, which is no
    /// wider than the model's.
    fn weight(&self, start: usize, range: &Range<usize>, dtype: DType) -> Result<Option<Tensor>> {
        let Some(memory) = &self.weights else { return Ok(None) };
        let at = (start + range.start - self.range.start) * memory.numel() / self.range.len();
        Ok(Some(memory.narrow(0, at, range.len() * dtype.size())?.with_dtype(dtype)?))
    }
}

/// A range of a parameter that is updated, with its state.
pub(super) struct StatePiece<'a> {
    /// The parameter.
    pub(super) param: usize,
    /// Elements of this rank's shard of it.
    pub(super) range: Range<usize>,
    chunk: Option<&'a Chunk>,
}

/// Elements of a chunk, where the longest bucket has `longest` of them.
fn chunk_elements(longest: usize) -> usize {
    longest.div_ceil(PER_BUCKET).next_multiple_of(ALIGN).min(MAX_CHUNK)
}

/// Device memory of state on its way through the device: of buckets with at most `longest` elements of `each` bytes.
pub(crate) fn streamed_bytes(longest: usize, each: f64) -> usize {
    SLOTS * (chunk_elements(longest) as f64 * each) as usize
}

/// Host memory of gradients and weights on their way, where the CPU updates.
pub(crate) fn staged_bytes(longest: usize) -> usize {
    HostUpdate::staged_bytes(chunk_elements(longest))
}

impl StatePiece<'_> {
    /// A range with its state where it is kept.
    pub(super) fn in_place(param: usize, range: Range<usize>) -> StatePiece<'static> {
        StatePiece { param, range, chunk: None }
    }
}

impl StateStream {
    /// Slots for chunks with elements of these sizes.
    pub(super) fn new(rank: &Rank, compute: OptimizerCompute, sizes: StreamedSizes) -> Result<StateStream> {
        let stream = |name| rank.device().stream(name).map(|s| s.with_rank(rank.compute.rank()));
        let (longest, params) = sizes.bucket;
        let chunk = chunk_elements(longest);
        let (to_host, from_host) = (stream(OFFLOAD[0])?, stream(OFFLOAD[1])?);
        let choice = ExecutorChoice::new(rank, compute);
        let host = match choice.may_be(Executor::Cpu) {
            true => Some(HostUpdate::new(rank, &to_host, (sizes.clocks, sizes.params), (chunk, params))?),
            false => None,
        };
        let slots = Mutex::new(Slots { slots: Vec::new(), next: 0, last: None });
        let stream = StateStream { to_host, from_host, chunk, sizes: sizes.slot, slots, choice, host };
        if stream.choice.may_be(Executor::Device) {
            stream.allocate(rank, &mut stream.lock())?;
        }
        Ok(stream)
    }

    /// Allocates the slots, once. Copies to them follow what has used that memory before.
    fn allocate(&self, rank: &Rank, slots: &mut Slots) -> Result<()> {
        if slots.slots.len() == SLOTS {
            return Ok(());
        }
        let memory =
            |size: &usize| Tensor::empty(&rank.compute, &[self.chunk * size], DType::U8, Category::Workspace);
        while slots.slots.len() < SLOTS {
            let states = self.sizes.states.iter().map(memory).collect::<Result<_, _>>()?;
            let (grads, weights) = (memory(&self.sizes.grads)?, memory(&self.sizes.weights)?);
            slots.slots.push((InSlot { states, grads, weights }, None));
        }
        Ok(self.from_host.wait(&rank.compute.record()?)?)
    }

    /// Streams to the host and from it.
    pub(super) fn streams(&self) -> (&Stream, &Stream) {
        (&self.to_host, &self.from_host)
    }

    fn lock(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Before the first chunk of a step: copies to the device follow those of the last step to the host, and whatever else
    /// has changed the state. Returns what updates in this step; `step` has the scalars of its clocks.
    pub(super) fn begin_step(&self, rank: &Rank, step: &[&Tensor]) -> Result<Executor> {
        if let Some(done) = &self.lock().last {
            self.from_host.wait(done)?;
        }
        self.from_host.wait(&rank.compute.record()?)?;
        let is_skipped = || {
            let values = rank.compute.download::<f32>(step[0])?;
            Ok(!values[scalars::GRAD_NORM].is_finite())
        };
        let (executor, chosen) = self.choice.of_step(is_skipped)?;
        if chosen && executor == Executor::Cpu {
            // The device memory of slots is free after the last copies out of it.
            self.wait(rank)?;
            self.lock().slots.clear();
        }
        if let (Executor::Cpu, Some(host)) = (executor, &self.host) {
            host.begin_step(rank, &self.to_host, step)?;
        }
        Ok(executor)
    }

    /// Makes the compute stream wait for weights that the CPU updates.
    pub(super) fn wait_weights(&self, rank: &Rank) -> Result<()> {
        self.host.as_ref().map_or(Ok(()), |host| host.wait(rank))
    }

    /// Makes the compute stream wait for copies to the host: before anything but a streamed update uses the state.
    pub(super) fn wait(&self, rank: &Rank) -> Result<()> {
        let last = &self.lock().last;
        Ok(last.as_ref().map_or(Ok(()), |done| rank.compute.wait(done))?)
    }
}

impl Optimizer {
    /// Whether the state, the gradient or the weights of a parameter are in host memory.
    pub(super) fn is_streamed(&self, param: usize) -> bool {
        let bucket = self.pieces[param].bucket;
        self.stream.is_some()
            && (self.scheme.host.any() || self.states().iter().any(|s| s.is_on_host(bucket)))
    }

    /// Bytes of an element in a slot, of what is in host memory.
    pub(super) fn slot_sizes(&self, params: &Params) -> InSlot<usize> {
        let (host, buckets) = (self.scheme.host, params.plan().buckets().len());
        let on_host = |s: &OptimizerState| (0..buckets).any(|b| s.is_on_host(b));
        let size = |s: &&OptimizerState| if on_host(s) { s.widest() } else { 0 };
        // f32 weights are states.
        let weights = host.weights && params.dtype() != DType::F32;
        InSlot {
            states: self.states().iter().map(size).collect(),
            grads: if host.gradients { DType::F32.size() } else { 0 },
            weights: if weights { params.dtype().size() } else { 0 },
        }
    }

    /// Where the update writes elements `range` of a parameter's shard: weights, or FP8 values; none where it writes neither.
    fn written(
        &self,
        params: &Params,
        (step_state, looks): (&StepState, bool),
        (i, range): (usize, &Range<usize>),
    ) -> Result<Option<Tensor>> {
        if params.specs()[i].fp8_resident() {
            let begin = self.pieces[i].param_range.start;
            let inside = begin + range.start..begin + range.end;
            let outputs = match looks {
                true => params.precomputed(step_state, ParamId(i), &inside)?,
                false => None,
            };
            return Ok(outputs.and_then(|p| p.fp8().cloned()));
        }
        Ok(Some(self.weight(params, i)?.narrow(0, range.start, range.len())?))
    }

    /// Where the update of a piece puts what goes to `memory`: there, or in a slot on the way to host memory.
    pub(super) fn through_slot(&self, piece: &StatePiece, memory: Tensor) -> Result<Tensor> {
        let start = self.pieces[piece.param].local_range.start;
        let slot = piece.chunk.map(|c| c.weight(start, &piece.range, memory.dtype())).transpose()?.flatten();
        Ok(slot.unwrap_or(memory))
    }

    /// All of a parameter's shard, with its state where it is.
    pub(super) fn whole(&self, param: usize) -> StatePiece<'_> {
        StatePiece { param, range: 0..self.pieces[param].local_range.len(), chunk: None }
    }

    /// Steps of the rules of single elements on the buckets `buckets` whose state is in host memory.
    pub(super) fn streamed_step(
        &self,
        rank: &Rank,
        params: &Params,
        (step_state, looks): (&StepState, bool),
        grads: &GradBuffer,
        (buckets, executor): (Range<usize>, Executor),
    ) -> Result<()> {
        let Some(stream) = &self.stream else { return Ok(()) };
        let host = stream.host.as_ref().filter(|_| executor == Executor::Cpu);
        let rules = self.groups.rules();
        let elementwise = |g: &GroupRule| !g.frozen && !matches!(g.rule, UpdateRule::Muon(_));
        for bucket in buckets {
            let mine = |i: &usize| {
                self.pieces[*i].bucket == bucket
                    && self.is_streamed(*i)
                    && !self.pieces[*i].param_range.is_empty()
                    && elementwise(&rules[params.specs()[*i].group.index])
            };
            let list: Vec<usize> = (0..self.pieces.len()).filter(mine).collect();
            let Some(end) = list.iter().map(|i| self.pieces[*i].local_range.end).max() else { continue };
            for start in (0..end).step_by(stream.chunk) {
                let range = start..end.min(start + stream.chunk);
                let part = |i: &usize| {
                    let held = &self.pieces[*i].local_range;
                    let common = range.start.max(held.start)..range.end.min(held.end);
                    (!common.is_empty()).then(|| (*i, common.start - held.start..common.end - held.start))
                };
                let parts: Vec<(usize, Range<usize>)> = list.iter().filter_map(part).collect();
                if parts.is_empty() {
                    continue;
                }
                if let Some(host) = host {
                    self.host_update(rank, params, (step_state, looks), grads, (stream, host, &parts))?;
                    continue;
                }
                let grad = grads.on_host(rank, bucket)?;
                let (chunk, slot) = self.load_chunk(rank, stream, (bucket, grad.as_ref()), range)?;
                let mut stored = Vec::new();
                for (i, range) in parts.iter().filter(|_| chunk.weights.is_some()) {
                    if let Some(host) = self.written(params, (step_state, looks), (*i, range))? {
                        let start = self.pieces[*i].local_range.start;
                        let slot = chunk.weight(start, range, host.dtype())?;
                        stored.extend(slot.map(|slot| (slot, host)));
                    }
                }
                if self.masters.kind() == StateKind::Remainders {
                    // Remainders complete the weights, which the update reads.
                    stored.iter().try_for_each(|(slot, host)| stream.from_host.copy(host, slot))?;
                    rank.compute.wait(&stream.from_host.record()?)?;
                }
                for (index, group) in rules.iter().enumerate() {
                    let of_group = |(i, _): &&(usize, Range<usize>)| params.specs()[*i].group.index == index;
                    let piece = |(i, range): &(usize, Range<usize>)| StatePiece {
                        param: *i,
                        range: range.clone(),
                        chunk: Some(&chunk),
                    };
                    let list: Vec<StatePiece> = parts.iter().filter(of_group).map(piece).collect();
                    if !list.is_empty() {
                        self.elementwise_step(rank, params, (step_state, looks), grads, (group, &list))?;
                    }
                }
                let done = self.store_chunk(rank, stream, (&chunk, &stored), slot)?;
                params.weights_stored(done);
            }
        }
        stream.wait_weights(rank)
    }

    /// Copies a chunk's state to a slot, for which the compute stream waits.
    fn load_chunk(
        &self,
        rank: &Rank,
        stream: &StateStream,
        (bucket, grads): (usize, Option<&Tensor>),
        range: Range<usize>,
    ) -> Result<(Chunk, usize)> {
        let mut slots = stream.lock();
        stream.allocate(rank, &mut slots)?;
        let slot = slots.next;
        slots.next = (slot + 1) % SLOTS;
        let from_host = &stream.from_host;
        // The slot is free when it was copied out.
        if let Some(free) = &slots.slots[slot].1 {
            from_host.wait(free)?;
        }
        let begin = stream.choice.begin(from_host)?;
        let mut states = Vec::new();
        let memory = &slots.slots[slot].0;
        let load = |all: &Tensor, memory: &Tensor| -> Result<Tensor> {
            let host = all.narrow(0, range.start, range.len())?;
            let there = memory.narrow(0, 0, host.bytes())?.with_dtype(host.dtype())?;
            from_host.copy(&host, &there)?;
            Ok(there)
        };
        for (state, memory) in self.states().into_iter().zip(&memory.states) {
            states.push(match state.is_on_host(bucket) {
                false => None,
                true => Some(load(state.bucket(bucket), memory)?),
            });
        }
        let grads = grads.map(|all| load(all, &memory.grads)).transpose()?;
        let bytes = states.iter().flatten().chain(&grads).map(Tensor::bytes).sum();
        let stage = Stage { name: "in", elements: range.len(), bytes };
        stream.choice.end((Executor::Device, stage), begin, from_host)?;
        let size = memory.weights.numel() / stream.chunk;
        let weights = (size > 0).then(|| memory.weights.narrow(0, 0, range.len() * size)).transpose()?;
        rank.compute.wait(&from_host.record()?)?;
        Ok((Chunk { bucket, range, states, grads, weights }, slot))
    }

    /// Copies the updated state and weights of a chunk to the host, the latter each to its place; returns the end of it.
    fn store_chunk(
        &self,
        rank: &Rank,
        stream: &StateStream,
        (chunk, weights): (&Chunk, &[(Tensor, Tensor)]),
        slot: usize,
    ) -> Result<Event> {
        let mut slots = stream.lock();
        let to_host = &stream.to_host;
        to_host.wait(&rank.compute.record()?)?;
        let begin = stream.choice.begin(to_host)?;
        for (state, updated) in self.states().into_iter().zip(&chunk.states) {
            if let Some(updated) = updated {
                let host = state.bucket(chunk.bucket).narrow(0, chunk.range.start, chunk.range.len())?;
                to_host.copy(updated, &host)?;
            }
        }
        weights.iter().try_for_each(|(updated, host)| to_host.copy(updated, host))?;
        let copied = chunk.states.iter().flatten().chain(weights.iter().map(|(updated, _)| updated));
        let bytes = copied.map(Tensor::bytes).sum();
        let stage = Stage { name: "out", elements: chunk.range.len(), bytes };
        stream.choice.end((Executor::Device, stage), begin, to_host)?;
        let done = to_host.record()?;
        slots.slots[slot].1 = Some(done.clone());
        slots.last = Some(done.clone());
        Ok(done)
    }

    /// State `index` of a piece: values, and block scales of a packed moment.
    pub(super) fn state_of(&self, index: usize, piece: &StatePiece) -> Result<(Tensor, Option<Tensor>)> {
        let state: &OptimizerState = self.states()[index];
        let (range, held) = (&piece.range, &self.pieces[piece.param].local_range);
        let Moment { values, scales } = state.moment(piece.param);
        let scales = match scales {
            Some(all) => Some(all.narrow(0, range.start / BLOCK, range.len().div_ceil(BLOCK))?),
            None => None,
        };
        let in_chunk = piece.chunk.and_then(|c| Some((c, c.states[index].as_ref()?)));
        let values = match in_chunk {
            Some((chunk, memory)) => {
                memory.narrow(0, held.start + range.start - chunk.range.start, range.len())?
            }
            None => values.narrow(0, range.start, range.len())?,
        };
        Ok((values, scales))
    }

    /// Gradient of a piece.
    pub(super) fn grad_of(&self, rank: &Rank, grads: &GradBuffer, piece: &StatePiece) -> Result<Tensor> {
        if let Some((chunk, memory)) = piece.chunk.and_then(|c| Some((c, c.grads.as_ref()?))) {
            let held = &self.pieces[piece.param].local_range;
            return Ok(memory.narrow(
                0,
                held.start + piece.range.start - chunk.range.start,
                piece.range.len(),
            )?);
        }
        let whole = grads.piece(rank, ParamId(piece.param))?.1;
        Ok(whole.narrow(0, piece.range.start, piece.range.len())?)
    }
}
