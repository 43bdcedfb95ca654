//! Health of a rank's host and GPU, as far as the system tells it.

use ferrotron_engine::Rank;
use ferrotron_kernels::cuda::{GpuHealth, NvmlDevice};
use std::collections::VecDeque;

/// Readings of resident memory over which growth must be steady.
const READINGS: usize = 8;
/// Growth that is reported at all: this part of the memory at the first of those readings, in 1000 steps.
const LEAST_GROWTH: f64 = 0.02;
/// The same in bytes.
const LEAST_BYTES: f64 = (64 << 20) as f64;

/// Reads the health of one rank.
pub(crate) struct HealthProbe {
    gpu: Option<NvmlDevice>,
    /// Name of the host.
    pub(crate) host: String,
    /// The rank's device in words: the GPU with its bus id, or the CPU.
    pub(crate) device: String,
}

impl HealthProbe {
    pub(crate) fn new(rank: &Rank) -> HealthProbe {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let gpu = NvmlDevice::open(rank.device());
        let bus = gpu.as_ref().map(|g| format!(", {}", g.bus_id())).unwrap_or_default();
        let device =
            rank.device().gpu().map_or("CPU".into(), |g| format!("GPU {} ({}{bus})", g.ordinal, g.name));
        HealthProbe { gpu, host: host.trim().into(), device }
    }

    /// Clocks, power, temperature and errors of the GPU; none without NVML.
    pub(crate) fn gpu(&self) -> Option<GpuHealth> {
        self.gpu.as_ref().map(NvmlDevice::health)
    }
}

/// Resident bytes of this process; none where the system does not tell.
pub(crate) fn resident_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").ok();
    let of_rollup = text.as_deref().and_then(|t| kibibytes(t, "Rss:"));
    of_rollup.or_else(|| kibibytes(&std::fs::read_to_string("/proc/self/status").ok()?, "VmRSS:"))
}

/// Bytes of a line `NAME   123 kB`.
fn kibibytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|k| k << 10)
}

/// Resident memory of one process over time. Memory that grows from reading to reading for long is a leak, or a cache
/// without a bound, and ends a run at the worst time.
#[derive(Default)]
pub(crate) struct MemoryTrend {
    readings: VecDeque<(u64, u64)>,
    /// Bytes at the last report: the next follows when memory has grown by half.
    reported: Option<u64>,
}

impl MemoryTrend {
    /// Adds a reading after `step`; bytes of growth in 1000 steps if it is steady and was not reported before.
    pub(crate) fn add(&mut self, step: u64, bytes: u64) -> Option<u64> {
        self.readings.push_back((step, bytes));
        if self.readings.len() > READINGS {
            self.readings.pop_front();
        }
        let (first, last) = (*self.readings.front()?, *self.readings.back()?);
        let pairs = self.readings.iter().zip(self.readings.iter().skip(1));
        let steady = self.readings.len() == READINGS && pairs.clone().all(|(a, b)| b.1 > a.1);
        let growth =
            last.1.saturating_sub(first.1) as f64 / last.0.saturating_sub(first.0).max(1) as f64 * 1e3;
        let is_new = self.reported.is_none_or(|at| bytes > at + at / 2);
        let reports = steady && is_new && growth >= LEAST_BYTES && growth >= LEAST_GROWTH * first.1 as f64;
        if reports {
            self.reported = Some(bytes);
        }
        reports.then_some(growth as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steady_growth_is_reported_once_and_again_when_it_goes_on() {
        let mut trend = MemoryTrend::default();
        let reports: Vec<u64> =
            (1..=40).filter(|i| trend.add(i * 10, (1 << 30) + (i << 25)).is_some()).collect();
        assert_eq!(reports, [8, 29]);
        // A reading that falls, as that of any cache does, ends the row.
        let mut sawtooth = MemoryTrend::default();
        assert!((1..100).all(|i| sawtooth.add(i * 10, (1 << 30) + ((i % 7) << 25)).is_none()));
        // Growth that would take weeks to matter is not reported.
        let mut slow = MemoryTrend::default();
        assert!((1..100).all(|i| slow.add(i * 1000, (1 << 30) + (i << 20)).is_none()));
    }

    #[test]
    fn resident_memory_is_read() {
        assert_eq!(kibibytes("Name: x\nVmRSS:\t  12 kB\n", "VmRSS:"), Some(12 << 10));
        assert!(resident_bytes().is_none_or(|b| b > 1 << 20));
    }
}
