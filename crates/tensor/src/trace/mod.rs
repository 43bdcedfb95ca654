//! Traces: what ran when, on every stream of a device.
//!
//! A device created with [`crate::Instrumentation::trace`] records every launch between
//! [`crate::Device::start_trace`] and [`crate::Device::take_trace`], and the spans opened around launches with
//! [`Stream::span`].

mod breakdown;
mod by_kind;
mod overlap;
mod record;
mod report;

pub use breakdown::{RankTime, STEP};
pub use by_kind::CommunicationTime;
pub use overlap::{Coverage, Overlap};
pub use record::Span;
pub(crate) use record::{TracedLaunch, Tracer};
pub use report::KernelTime;

use serde::{Deserialize, Serialize};

#[cfg(doc)]
use crate::Stream;

/// Name of streams for communication that overlaps computation.
pub const COMMUNICATION: &str = "communication";

/// Name of streams that own staging memory of transfers between ranks; nothing on them counts as computation.
pub const STAGING: &str = "staging";

/// Name of streams on which hosts read results of a step and agree on the next one; their collectives wait for the step, and
/// nothing of it waits for them.
pub const READBACK: &str = "readback";

/// Names of streams that move tensors to host memory and back; nothing on them counts as computation.
pub const OFFLOAD: [&str; 2] = ["offload", "reload"];

/// The kind of a trace entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum ActivityKind {
    /// One launch: a kernel or a copy.
    Kernel,
    /// A collective or send/receive, from its start on the stream to its end, including the time spent waiting for
    /// other ranks. The copies and reductions inside it are [`ActivityKind::Kernel`] entries.
    Collective,
    /// Any other named span.
    Region,
}

/// One entry of a trace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Activity {
    /// Name of the kernel or collective.
    pub name: String,
    /// Details: group and label of a collective.
    pub detail: String,
    /// The kind of entry.
    pub kind: ActivityKind,
    /// True for a kernel launched as part of a collective.
    pub in_collective: bool,
    /// The rank whose stream it ran on.
    pub rank: usize,
    /// Id of the stream on its device.
    pub stream: u32,
    /// Name of the stream.
    pub stream_name: String,
    /// Nanoseconds since the start of the trace.
    pub start: u64,
    /// Nanoseconds since the start of the trace.
    pub end: u64,
}

/// Live bytes of a device when a kernel of a rank began.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemorySample {
    /// The rank that launched the kernel.
    pub rank: usize,
    /// Nanoseconds since the start of the trace. Memory is reused in stream order, so that on a GPU this is when the kernel
    /// ran, not when the host launched it.
    pub at: u64,
    /// Bytes by category, in the order of [`crate::Category::ALL`].
    pub bytes: [usize; 6],
}

/// The time that a host took to launch a kernel on a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostLaunch {
    /// The rank.
    pub rank: usize,
    /// Nanoseconds since the start of the trace, on the host's clock.
    pub start: u64,
    /// Nanoseconds since the start of the trace, on the host's clock.
    pub end: u64,
}

/// Everything recorded between start and take, in launch order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trace {
    /// Start of the trace on the host's clock, in nanoseconds since 1970.
    pub start_unix_ns: u64,
    /// The entries.
    pub activities: Vec<Activity>,
    /// Live memory whenever it changed from one launch to the next.
    #[serde(default)]
    pub memory: Vec<MemorySample>,
    /// Launches on the host's clock; on the CPU, where a launch is the kernel itself, none.
    #[serde(default)]
    pub launches: Vec<HostLaunch>,
}

impl Trace {
    /// Merges traces of several devices or processes on their hosts' clocks.
    pub fn merge(traces: impl IntoIterator<Item = Trace>) -> Trace {
        let mut traces: Vec<Trace> = traces.into_iter().filter(|t| !t.activities.is_empty()).collect();
        let start_unix_ns = traces.iter().map(|t| t.start_unix_ns).min().unwrap_or(0);
        for t in &mut traces {
            let later = t.start_unix_ns - start_unix_ns;
            for a in &mut t.activities {
                (a.start, a.end) = (a.start.saturating_add(later), a.end.saturating_add(later));
            }
            t.memory.iter_mut().for_each(|m| m.at = m.at.saturating_add(later));
            for l in &mut t.launches {
                (l.start, l.end) = (l.start.saturating_add(later), l.end.saturating_add(later));
            }
        }
        let mut all = Trace { start_unix_ns, ..Trace::default() };
        for t in traces {
            all.activities.extend(t.activities);
            all.memory.extend(t.memory);
            all.launches.extend(t.launches);
        }
        all
    }

    /// True if nothing was recorded.
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
