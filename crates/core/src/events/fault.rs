//! Events of steps that were run again, and of faults.

use crate::config::BadStepPolicy;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// What running steps again showed. Logs hold its text: `the same bits`, `different bits`, or `the same bits, POLICY`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum RerunOutcome {
    /// Both runs gave the same bits, and the result is good: a verification passed.
    #[default]
    Same,
    /// The runs gave different bits: one of them was computed wrongly.
    Different,
    /// Both runs gave the same bits, and the result is rejected: this was done about it.
    Rejected(BadStepPolicy),
}

/// Whether a fault shows whenever its process computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultPersistence {
    /// One run of the steps gave other bits; two gave the same.
    #[default]
    Transient,
    /// A process gives other bits than the others, whatever its rank.
    Persistent,
}

/// Steps were run again from a snapshot in memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Rerun {
    /// The last of them.
    pub step: u64,
    /// Steps that were run again.
    pub steps: u64,
    /// Why: a check that was due, or what was wrong with the result.
    pub reason: String,
    /// What came of it.
    pub outcome: RerunOutcome,
    /// Wall-clock seconds that it took.
    pub seconds: f64,
}

/// A fault was found.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Fault {
    /// The last step of those that were compared.
    pub step: u64,
    /// `transient` or `persistent`.
    pub fault: FaultPersistence,
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

const SAME: &str = "the same bits";
const DIFFERENT: &str = "different bits";

impl fmt::Display for RerunOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RerunOutcome::Same => f.write_str(SAME),
            RerunOutcome::Different => f.write_str(DIFFERENT),
            RerunOutcome::Rejected(policy) => write!(f, "{SAME}, {policy}"),
        }
    }
}

impl FromStr for RerunOutcome {
    type Err = String;
    fn from_str(text: &str) -> Result<RerunOutcome, String> {
        let policy = || text.strip_prefix(SAME)?.strip_prefix(", ")?.parse::<BadStepPolicy>().ok();
        match text {
            SAME => Ok(RerunOutcome::Same),
            DIFFERENT => Ok(RerunOutcome::Different),
            _ => policy()
                .map(RerunOutcome::Rejected)
                .ok_or_else(|| format!("\"{text}\" is no outcome of steps that were run again")),
        }
    }
}

impl From<RerunOutcome> for String {
    fn from(outcome: RerunOutcome) -> String {
        outcome.to_string()
    }
}

impl TryFrom<String> for RerunOutcome {
    type Error = String;
    fn try_from(text: String) -> Result<RerunOutcome, String> {
        text.parse()
    }
}

impl fmt::Display for FaultPersistence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FaultPersistence::Transient => "transient",
            FaultPersistence::Persistent => "persistent",
        })
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Logs of earlier versions, which wrote these strings, are read and written as they are.
    #[test]
    fn outcomes_and_faults_are_the_strings_of_the_log() {
        for (outcome, text) in [
            (RerunOutcome::Same, "the same bits"),
            (RerunOutcome::Different, "different bits"),
            (RerunOutcome::Rejected(BadStepPolicy::Stop), "the same bits, stop"),
            (RerunOutcome::Rejected(BadStepPolicy::Skip), "the same bits, skip"),
            (RerunOutcome::Rejected(BadStepPolicy::Rollback), "the same bits, rollback"),
        ] {
            assert_eq!(serde_json::to_value(outcome).unwrap(), json!(text));
            assert_eq!(serde_json::from_value::<RerunOutcome>(json!(text)).unwrap(), outcome);
        }
        for text in ["same", "the same bits,", "the same bits, ", "the same bits, warn", ""] {
            assert!(text.parse::<RerunOutcome>().is_err(), "{text}");
        }
        for (fault, text) in
            [(FaultPersistence::Transient, "transient"), (FaultPersistence::Persistent, "persistent")]
        {
            assert_eq!((serde_json::to_value(fault).unwrap(), fault.to_string()), (json!(text), text.into()));
            assert_eq!(serde_json::from_value::<FaultPersistence>(json!(text)).unwrap(), fault);
        }
    }
}
