//! Recording of launches and spans.

use super::{Activity, ActivityKind, HostLaunch, MemorySample, Trace};
use crate::cuda::{CudaContext, CudaStream, Priority};
use crate::timestamp::Timestamp;
use crate::{Result, Stream};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// Records launches of a device. Events are read only when the trace is taken.
#[derive(Default)]
pub(crate) struct Tracer {
    on: AtomicBool,
    notes: Mutex<Notes>,
}

#[derive(Default)]
struct Notes {
    /// The origin of all times.
    origin: Option<Origin>,
    records: Vec<Record>,
    /// Live bytes where they differ from those of the launch before.
    memory: Vec<(usize, Timestamp, [usize; 6])>,
    launches: Vec<(usize, [Instant; 2])>,
}

/// The same moment on all clocks.
struct Origin {
    at: Timestamp,
    instant: Instant,
    unix_ns: u64,
}

/// A launch as it is recorded.
pub(crate) struct TracedLaunch {
    pub op: &'static str,
    pub start: Timestamp,
    pub end: Timestamp,
    /// Live bytes by category.
    pub memory: [usize; 6],
    /// When the host launched it, where that is not when it ran.
    pub host: Option<[Instant; 2]>,
}

struct Record {
    name: &'static str,
    detail: String,
    kind: ActivityKind,
    in_collective: bool,
    /// Rank, stream id and stream name.
    stream: (usize, u32, &'static str),
    start: Timestamp,
    end: Timestamp,
}

impl Tracer {
    pub(crate) fn is_on(&self) -> bool {
        self.on.load(Relaxed)
    }

    /// Starts recording, or resumes a paused trace.
    pub(crate) fn start(&self, context: Option<&Arc<CudaContext>>) -> Result<()> {
        let mut notes = self.notes();
        if notes.origin.is_none() {
            let cuda = context.map(|c| CudaStream::new(c, Priority::Normal)).transpose()?;
            let at = Timestamp::now(cuda.as_ref())?;
            // Synchronize, so that the host's clock is read when the GPU has reached the event.
            cuda.map_or(Ok(()), |q| q.synchronize())?;
            let (instant, now) = (Instant::now(), SystemTime::now());
            let now = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
            let unix_ns = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX);
            notes.origin = Some(Origin { at, instant, unix_ns });
        }
        self.on.store(true, Relaxed);
        Ok(())
    }

    pub(crate) fn pause(&self) {
        self.on.store(false, Relaxed);
    }

    /// Records a launch.
    pub(crate) fn launch(&self, stream: &Stream, launch: TracedLaunch) {
        let TracedLaunch { op, start, end, memory, host } = launch;
        let mut notes = self.notes();
        if notes.memory.last().is_none_or(|(_, _, last)| *last != memory) {
            notes.memory.push((stream.rank(), start.clone(), memory));
        }
        notes.launches.extend(host.map(|times| (stream.rank(), times)));
        drop(notes);
        self.note(stream, ActivityKind::Kernel, (op, String::new()), start, end);
    }

    fn note(
        &self,
        s: &Stream,
        kind: ActivityKind,
        (name, detail): (&'static str, String),
        start: Timestamp,
        end: Timestamp,
    ) {
        let in_collective = kind == ActivityKind::Kernel && s.in_collective();
        let stream = (s.rank(), s.id(), s.name());
        self.notes().records.push(Record { name, detail, kind, in_collective, stream, start, end });
    }

    /// Ends the trace and returns it. Waits for running work.
    pub(crate) fn take(&self) -> Result<Trace> {
        self.pause();
        let Notes { origin, records, memory, launches } = std::mem::take(&mut *self.notes());
        let Some(origin) = origin else { return Ok(Trace::default()) };
        let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let since = |at: &Timestamp| -> Result<u64> { Ok(ns(at.since(&origin.at)?)) };
        let activity = |r: Record| -> Result<Activity> {
            let (rank, stream, stream_name) = r.stream;
            let start = since(&r.start)?;
            Ok(Activity {
                name: r.name.into(),
                detail: r.detail,
                kind: r.kind,
                in_collective: r.in_collective,
                rank,
                stream,
                stream_name: stream_name.into(),
                start,
                end: since(&r.end)?.max(start),
            })
        };
        let sample = |(rank, at, bytes): (usize, Timestamp, [usize; 6])| -> Result<MemorySample> {
            Ok(MemorySample { rank, at: since(&at)?, bytes })
        };
        let launch = |(rank, times): (usize, [Instant; 2])| {
            let [start, end] = times.map(|t| ns(t.saturating_duration_since(origin.instant)));
            HostLaunch { rank, start, end }
        };
        Ok(Trace {
            start_unix_ns: origin.unix_ns,
            activities: records.into_iter().map(activity).collect::<Result<_>>()?,
            memory: memory.into_iter().map(sample).collect::<Result<_>>()?,
            launches: launches.into_iter().map(launch).collect(),
        })
    }

    fn notes(&self) -> MutexGuard<'_, Notes> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A named part of a stream's work, from [`Stream::span`] to its drop. Does nothing unless a trace is active.
#[must_use = "the span ends when this is dropped"]
pub struct Span {
    open: Option<Box<Open>>,
}

struct Open {
    stream: Stream,
    kind: ActivityKind,
    name: &'static str,
    detail: String,
    start: Timestamp,
}

impl Span {
    /// Opens a span on a stream whose device is being traced.
    pub(crate) fn open(s: &Stream, kind: ActivityKind, name: &'static str, detail: String) -> Result<Span> {
        let start = Timestamp::now(s.cuda())?;
        if kind == ActivityKind::Collective {
            s.enter_collective();
        }
        Ok(Span { open: Some(Box::new(Open { stream: s.clone(), kind, name, detail, start })) })
    }

    pub(crate) const DISABLED: Span = Span { open: None };
}

impl Drop for Span {
    fn drop(&mut self) {
        let Some(open) = self.open.take() else { return };
        let Open { stream, kind, name, detail, start } = *open;
        if kind == ActivityKind::Collective {
            stream.leave_collective();
        }
        // If the device cannot record an event any more, the next launch reports it.
        if let (Some(tracer), Ok(end)) = (stream.device().inner.tracer(), Timestamp::now(stream.cuda())) {
            tracer.note(&stream, kind, (name, detail), start, end);
        }
    }
}
