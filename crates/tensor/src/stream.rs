//! Streams and events.

use crate::cuda::CudaStream;
use crate::peer_waits::{PeerWait, PeerWaits};
use crate::race_checker::VectorClock;
use crate::timestamp::Timestamp;
use crate::trace::{ActivityKind, Span};
use crate::{Device, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

/// An in-order queue of work on a device. Work on different streams is ordered by [`Stream::record`] and
/// [`Stream::wait`] only.
#[derive(Clone)]
pub struct Stream {
    device: Device,
    id: u32,
    name: &'static str,
    /// The rank that uses it, for traces.
    rank: usize,
    /// The CUDA stream; `None` on the host.
    cuda: Option<Arc<CudaStream>>,
    /// Number of open collective spans, while traced.
    collectives: Arc<AtomicU32>,
    peer_waits: Arc<PeerWaits>,
}

/// A point in a stream's work that another stream can wait for.
#[derive(Clone)]
pub struct Event {
    clock: VectorClock,
    at: Timestamp,
    /// Its stream carries collectives.
    of_collectives: bool,
}

impl Event {
    /// True if all work before it is complete. Does not block, and may be called from any thread.
    pub fn is_reached(&self) -> bool {
        self.at.is_reached()
    }

    /// Time from `earlier` to `self` on the device's clock. Blocks until both are reached.
    pub fn since(&self, earlier: &Event) -> Result<Duration> {
        self.at.since(&earlier.at)
    }
}

impl Stream {
    pub(crate) fn new(device: Device, id: u32, name: &'static str, cuda: Option<Arc<CudaStream>>) -> Stream {
        Stream { device, id, name, rank: 0, cuda, collectives: Arc::default(), peer_waits: Arc::default() }
    }

    /// The device it belongs to.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The same stream, attributed to `rank` in traces.
    pub fn with_rank(self, rank: usize) -> Stream {
        Stream { rank, ..self }
    }

    /// The rank it is attributed to in traces; 0 by default.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// True if both are handles to the same stream.
    pub fn same_as(&self, other: &Stream) -> bool {
        self.id == other.id && Arc::ptr_eq(&self.device.inner, &other.device.inner)
    }

    /// True while its work is captured into a graph instead of run.
    pub fn is_capturing(&self) -> bool {
        self.cuda.as_ref().is_some_and(|cuda| cuda.is_capturing())
    }

    /// Its number on the device.
    pub fn id(&self) -> u32 {
        self.id
    }

    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    pub(crate) fn cuda(&self) -> Option<&CudaStream> {
        self.cuda.as_deref()
    }

    pub(crate) fn cuda_handle(&self) -> Option<&Arc<CudaStream>> {
        self.cuda.as_ref()
    }

    pub(crate) fn in_collective(&self) -> bool {
        self.collectives.load(Relaxed) > 0
    }

    pub(crate) fn enter_collective(&self) {
        self.collectives.fetch_add(1, Relaxed);
    }

    pub(crate) fn leave_collective(&self) {
        self.collectives.fetch_sub(1, Relaxed);
    }

    /// Names the work given to this stream until the span is dropped; spans nest. Does nothing, and does not format
    /// `detail`, unless a trace is active.
    pub fn span(&self, kind: ActivityKind, name: &'static str, detail: std::fmt::Arguments) -> Result<Span> {
        match self.device.inner.tracer() {
            None => Ok(Span::DISABLED),
            Some(_) => Span::open(self, kind, name, detail.to_string()),
        }
    }

    /// Records an event after all work given to this stream so far.
    pub fn record(&self) -> Result<Event> {
        let mut clock = VectorClock::default();
        self.device.inner.check(|c| {
            clock = c.record(self.id);
            Ok(())
        })?;
        let of_collectives = self.peer_waits.carries_collectives();
        Ok(Event { clock, at: Timestamp::now(self.cuda())?, of_collectives })
    }

    /// Orders later work of this stream after `event`. Does not block the host.
    pub fn wait(&self, event: &Event) -> Result<()> {
        self.device.inner.check(|c| {
            c.wait(self.id, &event.clock);
            Ok(())
        })?;
        let (Some(cuda), Timestamp::Cuda(at)) = (&self.cuda, &event.at) else { return Ok(()) };
        if event.of_collectives {
            self.meter_peer_wait(None, event)?;
        }
        cuda.wait(at)
    }

    /// A collective has been enqueued on this stream between two of its events. Waits for its later events are waits for
    /// other ranks.
    pub fn ran_collective(&self, begin: &Event, end: &Event) -> Result<()> {
        self.peer_waits.set_carries_collectives();
        self.meter_peer_wait(Some(begin), end)
    }

    /// Starts or stops metering the time that this stream of a GPU spends in communication. A host's stream computes when it
    /// is given work and never waits.
    pub fn meter_peer_waits(&self, on: bool) {
        self.peer_waits.set_metered(on);
    }

    /// What was metered since the last call; the stream may not have got there yet.
    pub fn take_peer_waits(&self) -> Vec<PeerWait> {
        self.peer_waits.take()
    }

    /// Meters the span from `begin`, or from the work given so far, to `end`. Events of a captured stream have no time.
    fn meter_peer_wait(&self, begin: Option<&Event>, end: &Event) -> Result<()> {
        if self.peer_waits.is_metered() && self.cuda.is_some() && !self.is_capturing() {
            let begin = begin.map_or_else(|| self.record(), |begin| Ok(begin.clone()))?;
            self.peer_waits.add(PeerWait::new(begin, end.clone()));
        }
        Ok(())
    }

    /// Blocks the host until all work given so far is complete, and reports what kernels found wrong.
    pub fn synchronize(&self) -> Result<()> {
        self.cuda.as_ref().map_or(Ok(()), |q| q.synchronize())
    }
}
