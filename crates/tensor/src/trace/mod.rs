//! What ran when, on every stream of a device.
//!
//! A device made with [`crate::Instrumentation::trace`] notes every launch between [`crate::Device::start_trace`] and
//! [`crate::Device::take_trace`], and the spans laid around launches with [`Stream::span`].

mod overlap;
mod record;
mod report;

pub use overlap::{Coverage, Overlap};
pub use record::Span;
pub(crate) use record::Tracer;
pub use report::KernelTime;

use serde::{Deserialize, Serialize};

#[cfg(doc)]
use crate::Stream;

/// Streams of this name carry communication that computation does not wait for at once.
pub const COMMUNICATION: &str = "communication";

/// Streams of this name own memory on its way between ranks; what runs there is no computation.
pub const STAGING: &str = "staging";

/// What an entry of a trace is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum ActivityKind {
    /// One launch: a kernel or a copy.
    Kernel,
    /// A collective or message: from the stream reaching it to the stream being past it, time spent waiting for
    /// other ranks included. Its copies and sums are [`ActivityKind::Kernel`]s inside it.
    Collective,
    /// Any other stretch of work that was given a name.
    Region,
}

/// Something that took time on a stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Activity {
    /// The kernel's or the collective's name.
    pub name: String,
    /// More about it: group and label of a collective.
    pub detail: String,
    /// What it is.
    pub kind: ActivityKind,
    /// A kernel launched as part of a collective.
    pub in_collective: bool,
    /// The rank whose stream it is.
    pub rank: usize,
    /// Number of the stream on its device.
    pub stream: u32,
    /// Name of the stream.
    pub stream_name: String,
    /// Nanoseconds from the beginning of the trace.
    pub start: u64,
    /// The same.
    pub end: u64,
}

/// Everything noted between a start and a take, in the order it was given to streams.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trace {
    /// When it start_unix_ns: nanoseconds since 1970 by the host's clock.
    pub start_unix_ns: u64,
    /// What ran.
    pub activities: Vec<Activity>,
}

impl Trace {
    /// Traces of several devices or processes as one, on the clock of their hosts.
    pub fn merge(traces: impl IntoIterator<Item = Trace>) -> Trace {
        let mut traces: Vec<Trace> = traces.into_iter().filter(|t| !t.activities.is_empty()).collect();
        let start_unix_ns = traces.iter().map(|t| t.start_unix_ns).min().unwrap_or(0);
        for t in &mut traces {
            let later = t.start_unix_ns - start_unix_ns;
            for a in &mut t.activities {
                (a.start, a.end) = (a.start.saturating_add(later), a.end.saturating_add(later));
            }
        }
        Trace { start_unix_ns, activities: traces.into_iter().flat_map(|t| t.activities).collect() }
    }

    /// Is there nothing in it?
    pub fn is_empty(&self) -> bool {
        self.activities.is_empty()
    }

    /// Seconds from the first start to the last end.
    pub fn seconds(&self) -> f64 {
        let start = self.activities.iter().map(|a| a.start).min().unwrap_or(0);
        let end = self.activities.iter().map(|a| a.end).max().unwrap_or(0);
        (end - start) as f64 / 1e9
    }
}
