//! Events of steps that were run again, and of faults.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Steps were run again from a snapshot in memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Rerun {
    /// The last of them.
    pub step: u64,
    /// Steps that were run again.
    pub steps: u64,
    /// Why: a check that was due, or what was wrong with the result.
    pub reason: String,
    /// What came of it: `same` bits, or `different`; where the result is rejected, what was done: `stop`, `skip`, `rollback`.
    pub outcome: String,
    /// Wall-clock seconds that it took.
    pub seconds: f64,
}

/// A fault was found.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Fault {
    /// The last step of those that were compared.
    pub step: u64,
    /// `transient`: other bits once.
    pub fault: String,
    /// The rank at fault.
    pub rank: u64,
    /// Its host.
    pub host: String,
    /// Its device.
    pub device: String,
    /// What differed first on that rank: what it sent, or a tensor of its state.
    pub tensor: String,
    /// The step in which that was, where it was sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_step: Option<u64>,
    /// Whether the run that counted was wrong; otherwise it was the one that checked it.
    pub first_run: bool,
    /// Wall-clock seconds that finding it took.
    pub seconds: f64,
}

impl fmt::Display for Rerun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Rerun { steps, reason, outcome, seconds, .. } = self;
        write!(f, "{reason}: {steps} steps again in {seconds:.1} s, {outcome}")
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Fault { fault, rank, host, device, tensor, seconds, .. } = self;
        write!(f, "{fault} fault of rank {rank} ({host}, {device}): {tensor} differed")?;
        self.at_step.map_or(Ok(()), |step| write!(f, " in step {step}"))?;
        let run = if self.first_run { "steps were computed again" } else { "only the check was wrong" };
        write!(f, "; {run}, {seconds:.1} s")
    }
}
