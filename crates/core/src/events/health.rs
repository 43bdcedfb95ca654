//! Section times, stragglers and health of ranks, as events.

use crate::fault::sections::{Section, SectionTimes};
use ferrotron_kernels::cuda::GpuHealth;
use ferrotron_tensor::format_bytes;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Section times of ranks over a window of steps.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sections {
    /// The last step of the window.
    pub step: u64,
    /// Steps of the window that were measured; those replayed as a CUDA graph are not.
    pub steps: u64,
    /// Medians over all ranks.
    pub median: SectionTimes,
    /// Every rank, or the slowest if there are many.
    pub ranks: Vec<RankSections>,
}

/// One rank in a window.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankSections {
    /// The rank.
    pub rank: usize,
    /// Its median seconds in each section; of saves the sum.
    #[serde(flatten)]
    pub times: SectionTimes,
    /// Speed relative to the ranks of the same pipeline stage, 1 for an even rank; none where there is no other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub relative: Option<f64>,
    /// Speed relative to its own earlier windows; none before there are enough.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub individual: Option<f64>,
    /// Resident bytes of its process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rss: Option<u64>,
    /// Its GPU as NVML reports it at the end of the window.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<GpuHealth>,
}

/// What probably makes a rank slow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// Its samples take long to read.
    Data,
    /// Its GPU is too hot.
    ThermalThrottle,
    /// Its GPU is at its power limit, or its power supply brakes.
    PowerThrottle,
    /// Its GPU's clock is lower than those of the others, for no reason that NVML names.
    Clocks,
    /// Its GPU has new ECC errors, or an Xid error.
    GpuErrors,
    /// Its host is slow: other load, swapping, a slow CPU clock.
    Host,
    /// Nothing that is measured.
    #[default]
    Unknown,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Cause::Data => "reading its data is slow",
            Cause::ThermalThrottle => "its GPU is hot and throttles",
            Cause::PowerThrottle => "its GPU is at its power limit and throttles",
            Cause::Clocks => "its GPU runs at a lower clock",
            Cause::GpuErrors => "its GPU reports ECC or Xid errors",
            Cause::Host => "its host is slow",
            Cause::Unknown => "cause unknown",
        })
    }
}

/// A rank is slower than others, or than it was.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Straggler {
    /// The last step of the window in which it was.
    pub step: u64,
    /// The rank.
    pub rank: usize,
    /// Its host.
    pub host: String,
    /// Its device.
    pub device: String,
    /// Its speed: 1 is even, 0.8 means that its own work takes 1.25 times as long.
    pub score: f64,
    /// The section that loses most time.
    pub section: Section,
    /// Seconds that it loses in a step.
    pub lost: f64,
    /// The likely cause.
    pub cause: Cause,
}

impl fmt::Display for Straggler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Straggler { rank, host, device, score, section, lost, cause, .. } = self;
        let (percent, lost, section) = (100.0 / score - 100.0, lost * 1e3, section.name());
        write!(
            f,
            "straggler: rank {rank} on {host}, {device}, takes {percent:.0} % longer ({lost:.1} ms a step, "
        )?;
        write!(f, "most in {section}): {cause}")
    }
}

/// Resident memory of a rank's process grows steadily.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MemoryGrowth {
    /// Steps made before.
    pub step: u64,
    /// The rank.
    pub rank: usize,
    /// Its host.
    pub host: String,
    /// Resident bytes of the process.
    pub rss: u64,
    /// Bytes of growth in 1000 steps.
    pub per_1000_steps: u64,
}

impl fmt::Display for MemoryGrowth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [rss, growth] = [self.rss, self.per_1000_steps].map(|b| format_bytes(b as usize));
        let MemoryGrowth { rank, host, .. } = self;
        write!(f, "host memory of rank {rank} on {host} grows by {growth} in 1000 steps and is {rss} now")
    }
}
