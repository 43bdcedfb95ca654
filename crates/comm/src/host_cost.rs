//! What communication costs the host: frames between the ranks' hosts, and time inside the library that moves the data.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;
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
    /// Time inside calls on groups: waiting for other ranks, and moving the data where the host does that.
    pub inside: Duration,
    /// Time outside of them in which the rank's thread could run and had no core, see
    /// [`World::meter_run_delay`](crate::World::meter_run_delay).
    pub delayed: Duration,
}

impl HostCost {
    /// The difference to an earlier reading.
    pub fn since(&self, earlier: &HostCost) -> HostCost {
        HostCost {
            frames: self.frames.saturating_sub(earlier.frames),
            library: self.library.saturating_sub(earlier.library),
            inside: self.inside.saturating_sub(earlier.inside),
            delayed: self.delayed.saturating_sub(earlier.delayed),
        }
    }
}

/// Adds up the time inside calls.
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

/// Adds up the time of a rank inside calls on groups.
#[derive(Default)]
pub(crate) struct InsideClock {
    clock: LibraryClock,
    /// Nanoseconds of run delay inside of calls.
    delay: AtomicU64,
    meter: OnceLock<RunDelay>,
}

impl InsideClock {
    pub(crate) fn time<T>(&self, call: impl FnOnce() -> T) -> T {
        let Some(meter) = self.meter.get() else { return self.clock.time(call) };
        let before = meter.nanoseconds();
        let out = self.clock.time(call);
        self.delay.fetch_add(meter.nanoseconds().saturating_sub(before), Relaxed);
        out
    }

    /// Meters the run delay of the calling thread from now on.
    pub(crate) fn meter_run_delay(&self) {
        if let Some(meter) = RunDelay::of_this_thread() {
            self.delay.store(meter.nanoseconds(), Relaxed);
            _ = self.meter.set(meter);
        }
    }

    /// Time inside calls, and run delay outside of them.
    pub(crate) fn read(&self) -> (Duration, Duration) {
        let total = self.meter.get().map_or(0, RunDelay::nanoseconds);
        (self.clock.read(), Duration::from_nanos(total.saturating_sub(self.delay.load(Relaxed))))
    }
}

/// The time that Linux let one thread wait for a core.
struct RunDelay(File);

impl RunDelay {
    fn of_this_thread() -> Option<RunDelay> {
        // The link leads to the thread that opens it, whoever reads the file.
        File::open("/proc/thread-self/schedstat").ok().map(RunDelay)
    }

    /// `TIME_ON_CORE RUN_DELAY SLICES`; 0 where it cannot be read.
    fn nanoseconds(&self) -> u64 {
        let mut text = [0; 96];
        let read = self.0.read_at(&mut text, 0).unwrap_or(0);
        let text = std::str::from_utf8(&text[..read]).unwrap_or_default();
        text.split_whitespace().nth(1).and_then(|n| n.parse().ok()).unwrap_or(0)
    }
}
