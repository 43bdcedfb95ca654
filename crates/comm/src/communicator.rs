//! Process groups as seen by one rank, and the collectives on them.

use crate::backend::{Collective, Completion, Descriptors, GroupBackend, JobBackend, OpError, SplitSizes};
use crate::flight_recorder::OpStatus;
use crate::host_cost::InsideClock;
use crate::op_descriptor::{Detail, OpDescriptor, OpKind};
use crate::payloads::CallHooks;
use crate::timeout::Timeout;
use crate::volume::{self, VolumeMeter};
use crate::{Error, ReduceOp, Result, Volume, World, watchdog};
use ferrotron_tensor::trace::{self, Span};
use ferrotron_tensor::{Stream, Tensor};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// One rank's membership of a process group. Clones share it.
///
/// A call returns once its work is on the stream: later work on that stream sees the result and may overwrite the
/// inputs. Over NCCL the host waits for nobody; elsewhere it waits until the other ranks have made the same call, at most
/// for the [`World`]'s timeout. Arguments are contiguous and on the stream's device. After an error the job is over: every
/// further call on every rank fails.
#[derive(Clone)]
pub struct Communicator {
    pub(crate) core: Arc<CommunicatorInner>,
}

pub(crate) struct CommunicatorInner {
    pub(crate) name: &'static str,
    /// Number of the group; all ranks create the same groups in the same order.
    pub(crate) index: u64,
    pub(crate) rank: usize,
    pub(crate) ranks: Vec<usize>,
    /// `None` in a group of one.
    pub(crate) backend: Option<Arc<dyn GroupBackend>>,
    pub(crate) job_backend: Arc<dyn JobBackend>,
    pub(crate) timeout: Timeout,
    /// Held during a call: the calls of one rank on one group are serialized.
    pub(crate) counters: Mutex<Counters>,
    pub(crate) meter: VolumeMeter,
    /// Volume over all groups of this rank.
    pub(crate) world_meter: Arc<VolumeMeter>,
    /// What watches the calls of this rank.
    pub(crate) hooks: Arc<CallHooks>,
    /// Time of this rank's host inside calls on all groups.
    pub(crate) inside: Arc<InsideClock>,
}

/// Sequence numbers.
#[derive(Default)]
pub(crate) struct Counters {
    collectives: u64,
    /// Messages by direction and peer.
    pub(crate) messages: HashMap<(Direction, usize), u64>,
}

impl Counters {
    /// The next collective, with its sequence number.
    pub(crate) fn numbered(&mut self, mut descriptor: OpDescriptor) -> OpDescriptor {
        descriptor.sequence = self.collectives;
        self.collectives += 1;
        descriptor
    }
}

/// A collective whose arguments were checked.
pub(crate) struct PreparedCall<'a> {
    pub(crate) descriptor: OpDescriptor,
    pub(crate) collective: Collective<'a>,
    /// Bytes that this rank sends.
    pub(crate) sent: u64,
}

/// Direction of a message.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Direction {
    Out,
    In,
}

impl Communicator {
    /// A group of one rank: every operation is a copy or does nothing.
    pub fn solo() -> Communicator {
        World::solo().all()
    }

    /// Name of the group.
    pub fn name(&self) -> &str {
        self.core.name
    }

    /// This rank within the group.
    pub fn rank(&self) -> usize {
        self.core.rank
    }

    /// Number of ranks in the group.
    pub fn size(&self) -> usize {
        self.core.ranks.len()
    }

    /// The members as ranks of the job.
    pub fn ranks(&self) -> &[usize] {
        &self.core.ranks
    }

    /// Number of calls and bytes sent on this group so far.
    pub fn volume(&self) -> Volume {
        self.core.meter.read()
    }

    /// Adds calls that a replayed CUDA graph makes, of which this rank's host knows nothing.
    pub fn add_replayed(&self, volume: &Volume) {
        self.core.meter.add_all(volume);
        self.core.world_meter.add_all(volume);
    }

    /// Returns when all ranks have called it. Synchronizes hosts, not streams.
    pub fn barrier(&self, label: &'static str) -> Result<()> {
        self.collective(None, self.descriptor(OpKind::Barrier, label), Collective::Barrier, 0)
    }

    /// `t = Σ over ranks of t` (or the maximum), in place, with identical bits on every rank. For f32, f64, i32, i64;
    /// bf16 and f16 are summed in f32 and rounded once (NCCL rounds at every step).
    pub fn all_reduce(&self, s: &Stream, t: &Tensor, op: ReduceOp, label: &'static str) -> Result<()> {
        self.run_prepared(s, self.prepare_all_reduce(s, t, op, label)?)
    }

    pub(crate) fn prepare_all_reduce<'a>(
        &self,
        s: &Stream,
        t: &'a Tensor,
        op: ReduceOp,
        label: &'static str,
    ) -> Result<PreparedCall<'a>> {
        let descriptor = self
            .descriptor(OpKind::AllReduce, label)
            .for_tensor(t, true)
            .with_detail(Detail::Reduce(op as u64));
        self.check(&descriptor, |c| c.contiguous_on(s, t)?.reducible(t))?;
        let sent = volume::all_reduce(self.size(), t.bytes());
        Ok(PreparedCall { descriptor, collective: Collective::AllReduce { t, op }, sent })
    }

    /// `all [n·count]` = concatenation of every rank's `mine [count]`. `mine` may be its own slot in `all`.
    pub fn all_gather(&self, s: &Stream, mine: &Tensor, all: &Tensor, label: &'static str) -> Result<()> {
        self.run_prepared(s, self.prepare_all_gather(s, mine, all, label)?)
    }

    pub(crate) fn prepare_all_gather<'a>(
        &self,
        s: &Stream,
        mine: &'a Tensor,
        all: &'a Tensor,
        label: &'static str,
    ) -> Result<PreparedCall<'a>> {
        let descriptor = self.descriptor(OpKind::AllGather, label).for_tensor(mine, true);
        self.check(&descriptor, |c| {
            c.contiguous_on(s, mine)?.contiguous_on(s, all)?.is_multiple(mine, all, self.size())?.in_slot(
                mine,
                all,
                self.rank(),
            )
        })?;
        let sent = (self.size() as u64 - 1) * mine.bytes() as u64;
        Ok(PreparedCall { descriptor, collective: Collective::AllGather { mine, all, counts: None }, sent })
    }

    /// [`Communicator::all_gather`] with `counts[r]` elements from rank r; the list is the same on all ranks.
    pub fn all_gather_v(
        &self,
        s: &Stream,
        mine: &Tensor,
        all: &Tensor,
        counts: &[usize],
        label: &'static str,
    ) -> Result<()> {
        let descriptor = self
            .descriptor(OpKind::AllGather, label)
            .for_tensor(mine, false)
            .with_detail(Detail::Counts(to_u64(counts)));
        self.check(&descriptor, |c| {
            c.contiguous_on(s, mine)?.contiguous_on(s, all)?.counts(self.size(), counts, all)?;
            c.has_elements("mine", mine, counts[self.rank()])?;
            c.in_slot_at(mine, all, counts[..self.rank()].iter().sum())
        })?;
        let size = mine.dtype().size();
        let sent = volume::all_gather(self.rank(), counts.iter().map(|n| n * size));
        self.collective(Some(s), descriptor, Collective::AllGather { mine, all, counts: Some(counts) }, sent)
    }

    /// `mine [count]` = this rank's part of n equal parts of the sum (or maximum) of `all [n·count]` over ranks.
    /// Dtypes as for [`Communicator::all_reduce`]. `mine` may be that part of `all`; the other parts of `all` are
    /// unspecified afterwards.
    pub fn reduce_scatter(
        &self,
        s: &Stream,
        all: &Tensor,
        mine: &Tensor,
        op: ReduceOp,
        label: &'static str,
    ) -> Result<()> {
        let descriptor = self
            .descriptor(OpKind::ReduceScatter, label)
            .for_tensor(mine, true)
            .with_detail(Detail::Reduce(op as u64));
        self.check(&descriptor, |c| {
            c.contiguous_on(s, mine)?.contiguous_on(s, all)?.reducible(all)?.is_multiple(
                mine,
                all,
                self.size(),
            )?;
            c.in_slot(mine, all, self.rank())
        })?;
        let sent = (self.size() as u64 - 1) * mine.bytes() as u64;
        self.collective(Some(s), descriptor, Collective::ReduceScatter { all, mine, op }, sent)
    }

    /// Part p of n equal parts of `from` goes to rank p; part p of `to` comes from rank p.
    pub fn all_to_all(&self, s: &Stream, from: &Tensor, to: &Tensor, label: &'static str) -> Result<()> {
        let descriptor = self.descriptor(OpKind::AllToAll, label).for_tensor(from, true);
        self.check(&descriptor, |c| {
            c.contiguous_on(s, from)?.contiguous_on(s, to)?.disjoint(from, to)?.equal_parts(
                from,
                to,
                self.size(),
            )
        })?;
        let sent = (from.bytes() - from.bytes() / self.size()) as u64;
        self.collective(Some(s), descriptor, Collective::AllToAll { from, to, splits: None }, sent)
    }

    /// [`Communicator::all_to_all`] with parts of different sizes.
    pub fn all_to_all_v(
        &self,
        s: &Stream,
        from: &Tensor,
        to: &Tensor,
        splits: SplitSizes<'_>,
        label: &'static str,
    ) -> Result<()> {
        let SplitSizes { sent, received } = splits;
        let pairs = Detail::Pairs { sent: to_u64(sent), received: to_u64(received) };
        let descriptor = self.descriptor(OpKind::AllToAll, label).for_tensor(from, false).with_detail(pairs);
        self.check(&descriptor, |c| {
            c.contiguous_on(s, from)?.contiguous_on(s, to)?.disjoint(from, to)?.same_type(from, to)?;
            c.counts(self.size(), sent, from)?.counts(self.size(), received, to)
        })?;
        let bytes = ((from.numel() - sent[self.rank()]) * from.dtype().size()) as u64;
        self.collective(Some(s), descriptor, Collective::AllToAll { from, to, splits: Some(splits) }, bytes)
    }

    /// `t` = the `t` of rank `root` of the group.
    pub fn broadcast(&self, s: &Stream, t: &Tensor, root: usize, label: &'static str) -> Result<()> {
        let descriptor = self
            .descriptor(OpKind::Broadcast, label)
            .for_tensor(t, true)
            .with_detail(Detail::Root(root as u64));
        self.check(&descriptor, |c| c.contiguous_on(s, t)?.is_member(root, self.size()))?;
        let sent = volume::broadcast(self.rank(), self.size(), root, t.bytes());
        self.collective(Some(s), descriptor, Collective::Broadcast { t, root }, sent)
    }

    pub(crate) fn descriptor(&self, kind: OpKind, label: &'static str) -> OpDescriptor {
        OpDescriptor::new(self.core.name, kind, label)
    }

    pub(crate) fn counters(&self) -> MutexGuard<'_, Counters> {
        self.core.counters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn run_prepared(&self, s: &Stream, call: PreparedCall) -> Result<()> {
        self.collective(Some(s), call.descriptor, call.collective, call.sent)
    }

    fn collective(
        &self,
        s: Option<&Stream>,
        descriptor: OpDescriptor,
        collective: Collective,
        sent: u64,
    ) -> Result<()> {
        let run = |backend: &dyn GroupBackend, deadline| match s {
            Some(s) if !matches!(collective, Collective::Barrier) => {
                backend.run(s, &collective, deadline).map(|completion| ((), completion))
            }
            _ => Ok(((), Completion::Done)),
        };
        match s {
            Some(s) if self.core.backend.is_none() => single_rank(s, &collective)?,
            _ => {}
        }
        self.run_collective(s, descriptor, &collective, run, |()| sent)
    }

    /// Runs one collective: compares descriptors, moves data, updates the flight recorder and the volume. `run` is
    /// not called in a group of one.
    pub(crate) fn run_collective<T: Default>(
        &self,
        s: Option<&Stream>,
        descriptor: OpDescriptor,
        collective: &Collective,
        run: impl FnOnce(&dyn GroupBackend, Instant) -> Result<(T, Completion), OpError>,
        sent: impl FnOnce(&T) -> u64,
    ) -> Result<T> {
        let core = &*self.core;
        let kind = descriptor.kind;
        let mut out = T::default();
        if let Some(backend) = &core.backend {
            if core.hooks.loses_call() {
                return Ok(out);
            }
            let _span = s.map(|s| self.span(s, &descriptor)).transpose()?;
            let mut counters = self.counters();
            let descriptor = Arc::new(counters.numbered(descriptor));
            core.hooks.collective(s, (core.index, core.rank), (&descriptor, collective), core.name)?;
            let recorder = core.job_backend.flight_recorder();
            let number = recorder.begin(core.index, descriptor.clone());
            let start = Instant::now();
            let done = core.inside.time(|| {
                let deferred = self.agree(&**backend, s, (&descriptor, collective), start)?;
                // A backend that only enqueues waits in `run`, if at all.
                if !deferred {
                    recorder.set(number, OpStatus::Running);
                }
                let done = run(&**backend, watchdog::deadline(core.timeout.get()));
                done.map_err(|e| self.failed(&descriptor, start, e))
            });
            match done {
                Ok((result, completion)) => {
                    self.completed(s, &[number], completion)?;
                    out = result;
                }
                Err(error) => {
                    recorder.set(number, OpStatus::Failed);
                    return Err(error);
                }
            }
        }
        self.add_volume(kind, sent(&out));
        Ok(out)
    }

    /// The backend has taken operations `numbers` of stream `s` together.
    pub(crate) fn completed(
        &self,
        s: Option<&Stream>,
        numbers: &[u64],
        completion: Completion,
    ) -> Result<()> {
        if let (Some(s), Completion::Enqueued { start, done }) = (s, &completion) {
            s.ran_collective(start, done)?;
        }
        self.core.job_backend.flight_recorder().complete(numbers, completion);
        Ok(())
    }

    /// Exchanges and compares descriptors; true if that is left to digests.
    pub(crate) fn agree(
        &self,
        backend: &dyn GroupBackend,
        s: Option<&Stream>,
        (descriptor, collective): (&OpDescriptor, &Collective),
        start: Instant,
    ) -> Result<bool> {
        let core = &*self.core;
        match backend.exchange_descriptors(s, descriptor, collective, watchdog::deadline(core.timeout.get()))
        {
            Ok(Descriptors::AllEqual) => Ok(false),
            Ok(Descriptors::Deferred) => Ok(true),
            Ok(Descriptors::PerRank(descriptors)) => watchdog::compare(&core.ranks, &descriptors)
                .inspect_err(|e| watchdog::report(&*core.job_backend, e))
                .map(|()| false),
            Err(e) => Err(self.failed(descriptor, start, e)),
        }
    }

    /// Reports that a call begun at `start` has failed.
    pub(crate) fn failed(&self, call: &OpDescriptor, start: Instant, error: OpError) -> Error {
        watchdog::fail_op(&*self.core.job_backend, &self.core.ranks, call, start.elapsed(), error)
    }

    /// Opens a span for the call in a trace of its stream.
    pub(crate) fn span(&self, s: &Stream, descriptor: &OpDescriptor) -> Result<Span> {
        let (group, label) = (self.name(), &descriptor.label);
        Ok(s.span(
            trace::ActivityKind::Collective,
            descriptor.kind.name(),
            format_args!("{group}: '{label}'"),
        )?)
    }

    pub(crate) fn add_volume(&self, kind: OpKind, bytes: u64) {
        self.core.meter.add(kind, bytes);
        self.core.world_meter.add(kind, bytes);
    }

    /// Reports an error of this rank's arguments to the other ranks, so that they do not wait for it.
    pub(crate) fn reported(&self, error: Error) -> Error {
        if self.core.backend.is_some() {
            watchdog::report(&*self.core.job_backend, &error);
        }
        error
    }
}

/// A collective in a group of one.
fn single_rank(s: &Stream, collective: &Collective) -> Result<()> {
    let (from, to) = match collective {
        Collective::AllGather { mine, all, .. } => (mine, all),
        Collective::ReduceScatter { all, mine, .. } => (all, mine),
        Collective::AllToAll { from, to, .. } => (from, to),
        Collective::Barrier
        | Collective::AllReduce { .. }
        | Collective::Broadcast { .. }
        | Collective::AllGatherBytes(_) => return Ok(()),
    };
    if from.numel() > 0 && !from.same_memory(to) {
        s.copy(from, to)?;
    }
    Ok(())
}

fn to_u64(counts: &[usize]) -> Vec<u64> {
    counts.iter().map(|n| *n as u64).collect()
}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Communicator({}, rank {} of {:?})", self.name(), self.rank(), self.ranks())
    }
}
