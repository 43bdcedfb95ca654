//! The update of parameters whose state is in host memory, by the CPU and in place.
//!
//! A chunk is a range of a bucket. Stream D copies its gradients to a slot of pinned memory, stream U runs the CPU's kernels on
//! them and on the state where it is, and stream H copies new weights to the device: copies of one chunk run beside the update
//! of another, and nothing waits for the host. What the CPU must read or write but is on the device (f32 weights, the bf16
//! halves of split masters, block scales of moments, scales and values of FP8 weights) goes through the slot as well. Step
//! scalars are copied once a step: the clip factor, and whether the step is skipped, are known when U runs. The GPU's kernels do
//! the same operations in the same order: bits do not depend on the executor.
//!
//! | edge | before | after |
//! |---|---|---|
//! | [`Edge::Produced`] | gradients and step scalars, on the compute stream | their copy on D |
//! | [`Edge::Staged`] | copies on D | update on U |
//! | [`Edge::Updated`] | update on U | copies of weights on H |
//! | [`Edge::Arrived`] | copies of weights on H | the compute stream: gathers, forward, the next gradients |
//! | [`Edge::Emptied`] | copies out of a slot on H | the next copies into it on D |

use super::Optimizer;
use super::executor::{Executor, Stage};
use super::step::UpdatedPiece;
use super::streamed::{StatePiece, StateStream};
use crate::Result;
use ferrotron_engine::quant::Precomputed;
use ferrotron_engine::{GradBuffer, Params, Rank, StepState};
use ferrotron_kernels::cpu::CpuKernels;
use ferrotron_kernels::{ParamUpdate, scalars};
use ferrotron_tensor::{DType, Event, Stream, Tensor};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

#[cfg(test)]
#[path = "host_update_tests.rs"]
mod tests;

/// Slots: one is filled, one is updated, one is emptied.
const SLOTS: usize = 3;
/// Tensors in a slot begin at multiples of this many bytes: a cache line.
const ALIGN: usize = 64;
/// Most tensors of a parameter in a slot: gradient, weight, master or FP8 values, scale and inverse scale of those, two block
/// scales.
const PER_PARAM: usize = 6;

/// An edge of the order between streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Edge {
    /// Gradients are complete before they are copied to the host.
    Produced,
    /// Gradients are there before the CPU reads them.
    Staged,
    /// Weights are updated before they are copied to the device.
    Updated,
    /// Weights are on the device before anything reads them, and gradients on the host before they are overwritten.
    Arrived,
    /// A slot is emptied before it is filled again.
    Emptied,
}

/// The CPU as executor of updates: stream, kernels and pinned memory.
pub(super) struct HostUpdate {
    update: Stream,
    kernels: CpuKernels,
    /// Step scalars of each clock, on the host.
    scalars: Vec<Tensor>,
    /// f32: amax of each parameter, of its chunks so far.
    amax: Tensor,
    slots: Mutex<Slots>,
    /// Tests leave one edge out, which the race checker must find.
    #[cfg(test)]
    pub(super) without: Option<Edge>,
}

struct Slots {
    /// Memory, and the end of the copies out of it.
    slots: Vec<(Tensor, Option<Event>)>,
    next: usize,
    /// The end of the last copies of a step.
    last: Option<Event>,
}

/// The part of a slot that is in use.
struct Staging<'a> {
    to_host: &'a Stream,
    amax: &'a Tensor,
    memory: Tensor,
    used: usize,
    /// Bytes copied to it.
    copied: usize,
    /// What is copied to the device after the update.
    out: Vec<(Tensor, Tensor)>,
}

impl HostUpdate {
    /// Slots for chunks of `chunk` elements of at most `params` parameters; `clocks` step clocks, and `all` parameters.
    pub(super) fn new(
        rank: &Rank,
        to_host: &Stream,
        (clocks, all): (usize, usize),
        (chunk, params): (usize, usize),
    ) -> Result<HostUpdate> {
        let update = rank.device().stream("cpu update")?.with_rank(rank.compute.rank());
        let host = |len, dtype| Tensor::host(to_host, &[len], dtype);
        let bytes = HostUpdate::staged_bytes(chunk) / SLOTS + params * PER_PARAM * ALIGN;
        let slots = (0..SLOTS).map(|_| Ok((host(bytes, DType::U8)?, None))).collect::<Result<_>>()?;
        let scalars = (0..clocks).map(|_| Ok(host(scalars::COUNT, DType::F32)?)).collect::<Result<_>>()?;
        Ok(HostUpdate {
            update,
            kernels: CpuKernels::detect(),
            scalars,
            amax: host(all, DType::F32)?,
            slots: Mutex::new(Slots { slots, next: 0, last: None }),
            #[cfg(test)]
            without: None,
        })
    }

    /// Bytes of all slots: for each element of a chunk an f32 gradient, an f32 or 16-bit weight, and two block scales.
    pub(super) fn staged_bytes(chunk: usize) -> usize {
        SLOTS * (2 * DType::F32.size() * chunk + chunk / 8)
    }

    fn lock(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes `stream` wait for `event`.
    fn order(&self, _edge: Edge, stream: &Stream, event: &Event) -> Result<()> {
        #[cfg(test)]
        if self.without == Some(_edge) {
            return Ok(());
        }
        Ok(stream.wait(event)?)
    }

    /// Before the first chunk of a step: copies its scalars, once gradients are complete.
    pub(super) fn begin_step(&self, rank: &Rank, to_host: &Stream, scalars: &[&Tensor]) -> Result<()> {
        self.order(Edge::Produced, to_host, &rank.compute.record()?)?;
        // The CPU has read those of the last step.
        to_host.wait(&self.update.record()?)?;
        scalars.iter().zip(&self.scalars).try_for_each(|(device, host)| to_host.copy(device, host))?;
        // Without a chunk to update, these copies are the last.
        self.lock().last = Some(to_host.record()?);
        Ok(())
    }

    /// Makes the compute stream wait for the weights of all chunks so far, and for the copies that were made for them.
    pub(super) fn wait(&self, rank: &Rank) -> Result<()> {
        let last = self.lock().last.take();
        last.map_or(Ok(()), |arrived| self.order(Edge::Arrived, &rank.compute, &arrived))
    }
}

impl<'a> Staging<'a> {
    /// Memory for a tensor like `like`.
    fn take(&mut self, like: &Tensor) -> Result<Tensor> {
        let bytes = like.bytes();
        let memory = self.memory.narrow(0, self.used, bytes)?.with_dtype(like.dtype())?;
        self.used += bytes.next_multiple_of(ALIGN);
        Ok(memory)
    }

    /// A copy of `device`.
    fn copy_in(&mut self, device: &Tensor) -> Result<Tensor> {
        let host = self.take(device)?;
        self.to_host.copy(device, &host)?;
        self.copied += host.bytes();
        Ok(host)
    }

    /// A copy of `device`, which is copied back after the update.
    fn in_and_out(&mut self, device: &Tensor) -> Result<Tensor> {
        let host = self.copy_in(device)?;
        self.out.push((host.clone(), device.clone()));
        Ok(host)
    }

    /// The tensor itself where it is in host memory.
    fn state(&mut self, t: &Tensor) -> Result<Tensor> {
        if t.is_on_host() { Ok(t.clone()) } else { self.in_and_out(t) }
    }

    /// Memory for `device`, which is written by the update and copied there.
    fn out(&mut self, device: &Tensor) -> Result<Tensor> {
        let host = self.take(device)?;
        self.out.push((host.clone(), device.clone()));
        Ok(host)
    }

    /// FP8 outputs of elements `range` of the `len` of parameter `i`. Its amax is that of all chunks: it is copied in with the
    /// first and out with the last.
    fn fp8(
        &mut self,
        fp8: &Precomputed,
        i: usize,
        (range, len): (&Range<usize>, usize),
    ) -> Result<Precomputed> {
        let amax = self.amax.narrow(0, i, 1)?;
        if range.start == 0 {
            self.to_host.copy(&fp8.amax, &amax)?;
        }
        if range.end == len {
            self.out.push((amax.clone(), fp8.amax.clone()));
        }
        let fp8 = match &fp8.fp8 {
            Some([data, scale, inverse]) => Some([self.out(data)?, self.copy_in(scale)?, self.out(inverse)?]),
            None => None,
        };
        Ok(Precomputed { amax, fp8 })
    }

    /// The tensors of elements of parameter `i` as the CPU updates them.
    fn piece(
        &mut self,
        p: UpdatedPiece<'a>,
        i: usize,
        elements: (&Range<usize>, usize),
    ) -> Result<UpdatedPiece<'a>> {
        let split = p.master.dtype() == DType::I16;
        let weight = match &p.weight {
            None => None,
            // The bf16 half of the master.
            Some(weight) if split => Some(self.in_and_out(weight)?),
            Some(weight) => Some(self.out(weight)?),
        };
        let fp8 = p.fp8.as_ref().map(|fp8| self.fp8(fp8, i, elements)).transpose()?;
        let mut moments = Vec::with_capacity(p.moments.len());
        for (values, scales) in &p.moments {
            let scales = scales.as_ref().map(|s| self.state(s)).transpose()?;
            moments.push((self.state(values)?, scales));
        }
        let (master, grad) = (self.state(&p.master)?, self.copy_in(&p.grad)?);
        Ok(UpdatedPiece { master, weight, grad, moments, fp8, spec: p.spec })
    }
}

impl Optimizer {
    /// Updates elements `parts` of parameters of a chunk with the CPU.
    pub(super) fn host_update(
        &self,
        rank: &Rank,
        params: &Params,
        quantized: (&StepState, bool),
        grads: &GradBuffer,
        (stream, host, parts): (&StateStream, &HostUpdate, &[(usize, Range<usize>)]),
    ) -> Result<()> {
        let (to_host, from_host) = stream.streams();
        let mut slots = host.lock();
        let slot = slots.next;
        slots.next = (slot + 1) % SLOTS;
        let (memory, emptied) = &slots.slots[slot];
        emptied.as_ref().map_or(Ok(()), |event| host.order(Edge::Emptied, to_host, event))?;
        let mut staging = Staging {
            to_host,
            amax: &host.amax,
            memory: memory.clone(),
            used: 0,
            copied: 0,
            out: Vec::new(),
        };
        let (choice, elements) = (&stream.choice, parts.iter().map(|(_, r)| r.len()).sum());
        let stage = |name, bytes| (Executor::Cpu, Stage { name, elements, bytes });
        let begin = choice.begin(to_host)?;
        let mut groups = Vec::new();
        for (index, group) in self.groups.rules().iter().enumerate() {
            let of_group = parts.iter().filter(|(i, _)| params.specs()[*i].group.index == index);
            let list: Vec<StatePiece> = of_group.map(|(i, r)| StatePiece::in_place(*i, r.clone())).collect();
            let pieces = self.updated_pieces(rank, params, quantized, grads, (group, &list))?;
            let mut staged = Vec::with_capacity(list.len());
            for (p, StatePiece { param, range, .. }) in pieces.into_iter().zip(&list) {
                staged.push(staging.piece(p, *param, (range, self.pieces[*param].local_range.len()))?);
            }
            groups.push((group, staged));
        }
        choice.end(stage("gradients", staging.copied), begin, to_host)?;
        host.order(Edge::Staged, &host.update, &to_host.record()?)?;
        let begin = choice.begin(&host.update)?;
        for (group, pieces) in &groups {
            let list: Vec<ParamUpdate> = pieces.iter().filter_map(|p| p.update(group)).collect();
            if list.is_empty() {
                continue;
            }
            let scalars = &host.scalars[self.clock_of(&group.rule)];
            group.rule.launch(&host.kernels, &host.update, scalars, &list)?;
            host.kernels.round_skipped_weights(&host.update, scalars, &list)?;
        }
        choice.end(stage("update", 0), begin, &host.update)?;
        host.order(Edge::Updated, from_host, &host.update.record()?)?;
        let begin = choice.begin(from_host)?;
        for (from, to) in &staging.out {
            from_host.copy(from, to)?;
        }
        let bytes = staging.out.iter().map(|(from, _)| from.bytes()).sum();
        choice.end(stage("weights", bytes), begin, from_host)?;
        let done = from_host.record()?;
        slots.slots[slot].1 = Some(done.clone());
        slots.last = Some(done);
        Ok(())
    }
}
