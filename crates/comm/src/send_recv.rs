//! Point-to-point sends and receives, and all-gather of host bytes.

use crate::backend::{Collective, Completion, OpError, P2pOp};
use crate::communicator::{Counters, Direction};
use crate::flight_recorder::OpStatus;
use crate::op_descriptor::{Detail, OpDescriptor, OpKind};
use crate::{Communicator, Result, volume, watchdog};
use ferrotron_tensor::trace::Span;
use ferrotron_tensor::{Stream, Tensor};
use std::sync::{Arc, MutexGuard};
use std::time::Instant;

/// Sends and receives of one group on one stream; see [`Communicator::send_recv_batch`].
#[derive(Clone, Copy)]
pub struct SendRecv<'a> {
    /// The group whose ranks are named below.
    pub group: &'a Communicator,
    /// The stream on which tensors are read and written.
    pub stream: &'a Stream,
    /// (rank of the group, contiguous tensor).
    pub sends: &'a [(usize, &'a Tensor)],
    /// (rank of the group, contiguous tensor).
    pub receives: &'a [(usize, &'a Tensor)],
}

/// A [`SendRecv`] with the descriptors of its messages.
struct DescribedBatch<'a> {
    group: &'a Communicator,
    stream: &'a Stream,
    sends: Vec<P2pOp<'a>>,
    receives: Vec<P2pOp<'a>>,
}

impl<'a> DescribedBatch<'a> {
    fn new(batch: &SendRecv<'a>, label: &'static str) -> Result<DescribedBatch<'a>> {
        let SendRecv { group, stream, sends, receives } = *batch;
        let me = group.rank();
        let op = |peer: usize, (from, to): (usize, usize), tensor: &'a Tensor| {
            let route = Detail::Route(from as u64, to as u64);
            P2pOp {
                peer,
                tensor,
                descriptor: group
                    .descriptor(OpKind::SendRecv, label)
                    .for_tensor(tensor, true)
                    .with_detail(route),
            }
        };
        let sends = sends.iter().map(|(p, t)| op(*p, (me, *p), t)).collect();
        let receives = receives.iter().map(|(p, t)| op(*p, (*p, me), t)).collect();
        let batch = DescribedBatch { group, stream, sends, receives };
        for l in batch.sends.iter().chain(&batch.receives) {
            group.check(&l.descriptor, |c| {
                c.contiguous_on(stream, l.tensor)?.is_member(l.peer, group.size())
            })?;
        }
        Ok(batch)
    }

    /// Checks that received tensors overlap no other tensor.
    fn check_disjoint(all: &[DescribedBatch]) -> Result<()> {
        let sent: Vec<&P2pOp> = all.iter().flat_map(|b| &b.sends).collect();
        let received: Vec<(&DescribedBatch, &P2pOp)> =
            all.iter().flat_map(|b| b.receives.iter().map(move |l| (b, l))).collect();
        for (i, (b, l)) in received.iter().enumerate() {
            let others = sent.iter().copied().chain(received[..i].iter().map(|(_, o)| *o));
            others
                .into_iter()
                .try_for_each(|o| b.group.check(&l.descriptor, |c| c.disjoint(l.tensor, o.tensor)))?;
        }
        Ok(())
    }

    /// Assigns sequence numbers, which count by direction and peer.
    fn assign_sequence_numbers(&mut self, counters: &mut Counters) {
        let mut next = |direction, l: &mut P2pOp| {
            let next = counters.messages.entry((direction, l.peer)).or_default();
            l.descriptor.sequence = *next;
            *next += 1;
        };
        self.sends.iter_mut().for_each(|l| next(Direction::Out, l));
        self.receives.iter_mut().for_each(|l| next(Direction::In, l));
    }
}

/// A batch in progress: in the flight recorder until it completes or fails.
struct ActiveBatch<'a, 'b> {
    batch: &'b DescribedBatch<'a>,
    /// What an error of the whole batch names: the first receive, else the first send.
    first: Option<Arc<OpDescriptor>>,
    /// Every message in the flight recorder.
    numbers: Vec<u64>,
    start: Instant,
    /// True once the backend has taken it.
    taken: bool,
    /// Its span in a trace.
    span: Option<Span>,
}

impl<'a, 'b> ActiveBatch<'a, 'b> {
    fn begin(batch: &'b DescribedBatch<'a>) -> Result<ActiveBatch<'a, 'b>> {
        let first = batch.receives.first().or(batch.sends.first()).map(|l| Arc::new(l.descriptor.clone()));
        let core = &batch.group.core;
        let recorder = core.job_backend.flight_recorder();
        // The last entry is what a report of this rank shows: the receive that it waits for.
        let messages = batch.sends.iter().chain(batch.receives.iter().rev());
        let numbers = messages.map(|l| recorder.begin(core.index, Arc::new(l.descriptor.clone()))).collect();
        let mut open = ActiveBatch { batch, first, numbers, start: Instant::now(), taken: false, span: None };
        if let Some(first) = &open.first {
            open.span = Some(batch.group.span(batch.stream, first)?);
        }
        Ok(open)
    }

    fn run<T: Default>(
        &mut self,
        half: impl FnOnce(&dyn crate::backend::GroupBackend, &DescribedBatch) -> Result<T, OpError>,
    ) -> Result<T> {
        let (core, batch) = (&*self.batch.group.core, self.batch);
        let (Some(backend), Some(first)) = (&core.backend, &self.first) else { return Ok(T::default()) };
        core.inside.time(|| half(&**backend, batch)).map_err(|t| {
            // Name the message that is missing.
            let late = |peer: usize| batch.receives.iter().find(|l| l.peer == peer).map(|l| &l.descriptor);
            let call = match &t {
                OpError::RanksMissing { missing, .. } => missing.first().and_then(|p| late(*p)),
                _ => None,
            };
            watchdog::fail_op(&*core.job_backend, &core.ranks, call.unwrap_or(first), self.start.elapsed(), t)
        })
    }

    fn done(&mut self, completion: Completion) -> Result<()> {
        self.taken = true;
        self.span = None;
        let group = self.batch.group;
        group.completed(Some(self.batch.stream), &self.numbers, completion)?;
        for l in self.batch.sends.iter().filter(|l| l.peer != group.rank()) {
            group.add_volume(OpKind::SendRecv, l.tensor.bytes() as u64);
        }
        Ok(())
    }
}

impl Drop for ActiveBatch<'_, '_> {
    fn drop(&mut self) {
        if !self.taken {
            let recorder = self.batch.group.core.job_backend.flight_recorder();
            self.numbers.iter().for_each(|number| recorder.set(*number, OpStatus::Failed));
        }
    }
}

impl Communicator {
    /// Sends `t` to rank `to` of the group. Does not wait for the receiver, except on NCCL, where the stream does.
    pub fn send(&self, s: &Stream, t: &Tensor, to: usize, label: &'static str) -> Result<()> {
        self.send_recv(s, &[(to, t)], &[], label)
    }

    /// Receives `t` from rank `from` of the group, which must send the same shape, dtype and label.
    pub fn receive(&self, s: &Stream, t: &Tensor, from: usize, label: &'static str) -> Result<()> {
        self.send_recv(s, &[], &[(from, t)], label)
    }

    /// Sends and receives several tensors at once, as (rank of the group, tensor). The order of the lists need not
    /// match between ranks; messages from one rank to another arrive in the order sent. Only the named ranks take
    /// part. Received tensors overlap no other tensor of the call.
    pub fn send_recv(
        &self,
        s: &Stream,
        sends: &[(usize, &Tensor)],
        receives: &[(usize, &Tensor)],
        label: &'static str,
    ) -> Result<()> {
        Communicator::send_recv_batch(&[SendRecv { group: self, stream: s, sends, receives }], label)
    }

    /// Several [`SendRecv`]s at once, each on its own group and stream; a group may appear more than once. Their
    /// order need not match between ranks, and ranks may have different numbers of them: everything is sent before
    /// anything is waited for.
    pub fn send_recv_batch(batches_in: &[SendRecv], label: &'static str) -> Result<()> {
        let mut batches =
            batches_in.iter().map(|batch| DescribedBatch::new(batch, label)).collect::<Result<Vec<_>>>()?;
        DescribedBatch::check_disjoint(&batches)?;
        batches.retain(|b| !b.sends.is_empty() || !b.receives.is_empty());
        for b in batches.extract_if(.., |b| b.group.core.backend.is_none()) {
            b.group.send_to_self(b.stream, &b.sends, &b.receives)?;
        }
        // All ranks take groups in the same order: a backend may have to connect two ranks on first use of a group.
        batches.sort_by_key(|b| b.group.core.index);
        let mut held: Vec<(u64, MutexGuard<Counters>)> = Vec::new();
        for b in &mut batches {
            let core = &b.group.core;
            if held.last().is_none_or(|(index, _)| *index != core.index) {
                held.push((core.index, b.group.counters()));
            }
            if let Some((_, counters)) = held.last_mut() {
                b.assign_sequence_numbers(counters);
            }
            core.hooks.messages(b.stream, (core.index, core.name), &b.sends, &b.receives)?;
        }
        let mut open = batches.iter().map(ActiveBatch::begin).collect::<Result<Vec<_>>>()?;
        for o in &mut open {
            let deadline = watchdog::deadline(o.batch.group.core.timeout.get());
            o.run(|e, b| e.post_sends(b.stream, &b.sends, deadline))?;
        }
        for o in &mut open {
            let deadline = watchdog::deadline(o.batch.group.core.timeout.get());
            let completion = o.run(|e, b| e.complete_receives(b.stream, &b.sends, &b.receives, deadline))?;
            o.done(completion)?;
        }
        Ok(())
    }

    /// Sends to itself in a group of one.
    fn send_to_self(&self, s: &Stream, sends: &[P2pOp], receives: &[P2pOp]) -> Result<()> {
        let paired = sends.len() == receives.len()
            && sends.iter().zip(receives).all(|(a, b)| !a.descriptor.conflicts_with(0, &b.descriptor, 0));
        if !paired {
            let call = sends.first().or(receives.first()).map_or(String::new(), |l| l.descriptor.to_string());
            let what =
                "a rank in a group of one sends to itself in one send_recv, with as many sends as receives of the \
                        same shapes"
                    .to_string();
            return Err(crate::Error::Argument { call, what });
        }
        sends.iter().zip(receives).try_for_each(|(a, b)| Ok(s.copy(a.tensor, b.tensor)?))
    }

    /// Host bytes of any length from every rank, in rank order.
    pub fn all_gather_bytes(&self, mine: &[u8], label: &'static str) -> Result<Vec<Vec<u8>>> {
        let descriptor: OpDescriptor = self.descriptor(OpKind::AllGatherBytes, label);
        if self.core.backend.is_none() {
            self.add_volume(OpKind::AllGatherBytes, 0);
            return Ok(vec![mine.to_vec()]);
        }
        let rank = self.rank();
        self.run_collective(
            None,
            descriptor,
            &Collective::AllGatherBytes(mine),
            |backend, deadline| Ok((backend.all_gather_bytes(mine, deadline)?, Completion::Done)),
            |all: &Vec<Vec<u8>>| volume::all_gather(rank, all.iter().map(Vec::len)),
        )
    }
}
