//! What communication costs the host: frames between the ranks' hosts, and time inside the library that moves the data.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

#[cfg(test)]
mod tests;

/// What communication has cost this rank's host since the job began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostCost {
    /// Frames sent to other ranks' hosts, beside the data: heartbeats, host data, and on rank 0 what it forwards. Over NCCL
    /// they do not depend on the number of collectives.
    pub frames: u64,
    /// Time inside NCCL's calls; zero where the host itself moves the data.
    pub library: Duration,
}

impl HostCost {
    /// The difference to an earlier reading.
    pub fn since(&self, earlier: &HostCost) -> HostCost {
        HostCost {
            frames: self.frames.saturating_sub(earlier.frames),
            library: self.library.saturating_sub(earlier.library),
        }
    }
}

/// Adds up the time inside a library.
#[derive(Default)]
pub(crate) struct LibraryClock {
    nanoseconds: AtomicU64,
}

impl LibraryClock {
    pub(crate) fn time<T>(&self, call: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let out = call();
        self.nanoseconds.fetch_add(start.elapsed().as_nanos() as u64, Relaxed);
        out
    }

    pub(crate) fn read(&self) -> Duration {
        Duration::from_nanos(self.nanoseconds.load(Relaxed))
    }
}
