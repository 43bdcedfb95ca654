//! What the offloading of activations does, as an event.

use ferrotron_engine::offload::OffloadReport;
use ferrotron_tensor::format_bytes;
use serde::{Deserialize, Serialize};

/// What the offloading of activations does to one micro-batch of rank 0: when it is chosen, and when it was measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Offload {
    /// The step before which it was known.
    pub step: u64,
    /// Bytes that layers save and that could be offloaded.
    pub movable: u64,
    /// Bytes that move to the host and back.
    pub moved: u64,
    /// Bytes by which the resident activations are lower at their peak.
    pub peak_reduction: u64,
    /// Measured GB/s of copies to the host; 0 if nothing moves.
    pub to_host_gb_s: f64,
    /// Measured GB/s of copies back.
    pub from_host_gb_s: f64,
    /// Milliseconds of computation.
    pub computation_ms: f64,
    /// Milliseconds that computation is expected to wait for copies.
    pub expected_stall_ms: f64,
    /// Milliseconds that it waited, where the choice has run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured_stall_ms: Option<f64>,
}

impl Offload {
    /// A report that was made before step `step`.
    pub fn new(step: u64, r: &OffloadReport) -> Offload {
        Offload {
            step,
            movable: r.movable as u64,
            moved: r.moved as u64,
            peak_reduction: r.peak_reduction as u64,
            to_host_gb_s: r.link.to_host / 1e9,
            from_host_gb_s: r.link.from_host / 1e9,
            computation_ms: r.seconds * 1e3,
            expected_stall_ms: r.expected_stall * 1e3,
            measured_stall_ms: r.measured_stall.map(|s| s * 1e3),
        }
    }
}

impl std::fmt::Display for Offload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.to_host_gb_s == 0.0 {
            return f.write_str(
                "no layer but the last saves a tensor of at least offload.min_bytes: nothing is offloaded",
            );
        }
        let [moved, movable, lower] =
            [self.moved, self.movable, self.peak_reduction].map(|bytes| format_bytes(bytes as usize));
        write!(
            f,
            "offloads {moved} of {movable} of activations in a micro-batch, {lower} less at the peak; copies at {:.1} GB/s to the \
             host, {:.1} GB/s back; stall in {:.1} ms: expected {:.1} ms",
            self.to_host_gb_s, self.from_host_gb_s, self.computation_ms, self.expected_stall_ms
        )?;
        self.measured_stall_ms.map_or(Ok(()), |ms| write!(f, ", measured {ms:.1} ms"))
    }
}
