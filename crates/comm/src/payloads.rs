//! Digests of what this rank sends, call by call: two runs of a step that send the same bytes have computed the same.
//!
//! Between [`World::record_payloads`] and [`World::take_payloads`] every tensor that this rank gives to a collective or sends
//! is hashed on the stream of the call, before it, into memory of the device; the host keeps which call it was. Nothing waits:
//! [`Payloads::read`] brings the digests to the host once the streams got there.

use crate::backend::{Collective, P2pOp};
use crate::op_descriptor::{Detail, OpDescriptor, OpKind};
use crate::{Result, World};
use ferrotron_tensor::{Category, DType, Event, Stream, Tensor};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// `out[0]` = digest of the bytes of a contiguous tensor, i64 `[1]`.
pub type DigestKernel = Arc<dyn Fn(&Stream, &Tensor, &Tensor) -> ferrotron_tensor::Result<()> + Send + Sync>;

/// Digests in one allocation.
const CHUNK: usize = 512;

/// A call of this rank, in the order in which it made them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PayloadCall {
    /// Number of the group, the same on all ranks.
    pub group: u64,
    /// Name of the group.
    pub name: &'static str,
    /// Kind of operation.
    pub kind: OpKind,
    /// Its number among the collectives of the group, or among the messages from one rank to another.
    pub sequence: u64,
    /// What it is for.
    pub label: String,
    /// Sender and receiver of a message, as ranks of the group.
    pub route: Option<(u64, u64)>,
    /// Whether this rank sends something: it does not where it receives a message or a broadcast.
    pub sends: bool,
}

/// What watches or disturbs the calls of a rank, shared by its groups.
#[derive(Default)]
pub(crate) struct CallHooks {
    /// The next collective is not made.
    lose: AtomicBool,
    /// Payloads are recorded.
    records: AtomicBool,
    recording: Mutex<Option<Recording>>,
}

struct Recording {
    kernel: DigestKernel,
    /// The stream whose memory holds the digests.
    alloc_stream: Stream,
    calls: Vec<PayloadCall>,
    /// i64 `[CHUNK]` each, with the event after which any stream may write it.
    chunks: Vec<(Tensor, Event)>,
    digests: usize,
    /// The last digest of each stream, and chunks it has waited for.
    streams: HashMap<u32, (Event, usize)>,
}

impl Recording {
    fn add(&mut self, s: &Stream, call: PayloadCall, payload: Option<&Tensor>) -> Result<()> {
        self.calls.push(call);
        let Some(payload) = payload else { return Ok(()) };
        let (chunk, at) = (self.digests / CHUNK, self.digests % CHUNK);
        if chunk == self.chunks.len() {
            let digests = Tensor::empty(&self.alloc_stream, &[CHUNK], DType::I64, Category::Workspace)?;
            self.chunks.push((digests, self.alloc_stream.record()?));
        }
        let (digests, ready) = &self.chunks[chunk];
        let waited = self.streams.get(&s.id()).map_or(0, |(_, chunks)| *chunks);
        if waited <= chunk && !s.same_as(&self.alloc_stream) {
            s.wait(ready)?;
        }
        (self.kernel)(s, payload, &digests.narrow(0, at, 1)?)?;
        self.streams.insert(s.id(), (s.record()?, chunk + 1));
        self.digests += 1;
        Ok(())
    }
}

impl CallHooks {
    /// Whether the next collective is to be left out; once.
    pub(crate) fn loses_call(&self) -> bool {
        self.lose.load(Ordering::Relaxed) && self.lose.swap(false, Ordering::Relaxed)
    }

    /// Notes a collective of this rank and hashes what it sends.
    pub(crate) fn collective(
        &self,
        s: Option<&Stream>,
        (group, rank): (u64, usize),
        (descriptor, collective): (&OpDescriptor, &Collective),
        name: &'static str,
    ) -> Result<()> {
        let Some(s) = s.filter(|_| self.records.load(Ordering::Relaxed)) else { return Ok(()) };
        let payload = match *collective {
            Collective::AllReduce { t, .. } => Some(t),
            Collective::AllGather { mine, .. } => Some(mine),
            Collective::ReduceScatter { all, .. } => Some(all),
            Collective::AllToAll { from, .. } => Some(from),
            Collective::Broadcast { t, root } => (root == rank).then_some(t),
            Collective::Barrier | Collective::AllGatherBytes(_) => return Ok(()),
        };
        match &mut *self.lock() {
            Some(recording) => recording.add(s, call((group, name), descriptor, payload.is_some()), payload),
            None => Ok(()),
        }
    }

    /// Notes messages of this rank and hashes those that it sends.
    pub(crate) fn messages(
        &self,
        s: &Stream,
        (group, name): (u64, &'static str),
        sends: &[P2pOp],
        receives: &[P2pOp],
    ) -> Result<()> {
        if !self.records.load(Ordering::Relaxed) {
            return Ok(());
        }
        let mut recording = self.lock();
        let Some(recording) = recording.as_mut() else { return Ok(()) };
        for op in sends {
            recording.add(s, call((group, name), &op.descriptor, true), Some(op.tensor))?;
        }
        let received = |op: &P2pOp| recording.add(s, call((group, name), &op.descriptor, false), None);
        receives.iter().try_for_each(received)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Recording>> {
        self.recording.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn call((group, name): (u64, &'static str), descriptor: &OpDescriptor, sends: bool) -> PayloadCall {
    PayloadCall {
        group,
        name,
        kind: descriptor.kind,
        sequence: descriptor.sequence,
        label: descriptor.label.to_string(),
        route: match descriptor.detail {
            Detail::Route(from, to) => Some((from, to)),
            _ => None,
        },
        sends,
    }
}

/// Calls of this rank, and the digests of what it sent, on the device.
pub struct Payloads {
    calls: Vec<PayloadCall>,
    chunks: Vec<Tensor>,
    done: Vec<Event>,
}

impl Payloads {
    /// Waits for the digests on stream `s` and reads them: the calls in order, each with the digest of what this rank sent.
    /// The allocation stream must wait for `s` before what was read is dropped.
    pub fn read(&self, s: &Stream) -> Result<Vec<(PayloadCall, Option<u64>)>> {
        self.done.iter().try_for_each(|done| s.wait(done))?;
        let mut digests = Vec::new();
        let sent = self.calls.iter().filter(|c| c.sends).count();
        for (i, chunk) in self.chunks.iter().enumerate() {
            let used = chunk.narrow(0, 0, CHUNK.min(sent - (i * CHUNK).min(sent)))?;
            digests.extend(s.download::<i64>(&used)?);
        }
        let mut digests = digests.into_iter().map(|d| d as u64);
        Ok(self.calls.iter().map(|c| (c.clone(), if c.sends { digests.next() } else { None })).collect())
    }
}

impl World {
    /// Records the digests of what this rank sends from here on. Digests are in memory of stream `alloc_stream`.
    pub fn record_payloads(&self, alloc_stream: &Stream, kernel: DigestKernel) {
        let (calls, chunks, streams) = Default::default();
        let recording =
            Recording { kernel, alloc_stream: alloc_stream.clone(), calls, chunks, digests: 0, streams };
        *self.hooks().lock() = Some(recording);
        self.hooks().records.store(true, Ordering::Relaxed);
    }

    /// Ends the recording.
    pub fn take_payloads(&self) -> Option<Payloads> {
        self.hooks().records.store(false, Ordering::Relaxed);
        let Recording { calls, chunks, streams, .. } = self.hooks().lock().take()?;
        let done = streams.into_values().map(|(done, _)| done).collect();
        Some(Payloads { calls, chunks: chunks.into_iter().map(|(t, _)| t).collect(), done })
    }

    /// Fault injection: the next collective of this rank is not made, so that the other ranks wait for it.
    pub fn lose_next_collective(&self) {
        self.hooks().lose.store(true, Ordering::Relaxed);
    }
}
