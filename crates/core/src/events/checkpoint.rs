//! Events of checkpoints: written, not written, resumed from; and of in-job restarts.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A checkpoint is on disk, complete and synced. Training went on while it was written.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Checkpoint {
    /// Steps made before.
    pub step: u64,
    /// Where it is, relative to the run folder.
    pub path: String,
    /// Its size.
    pub bytes: u64,
    /// Wall-clock seconds that training was blocked.
    pub seconds: f64,
    /// It has the lowest validation loss so far, and is `checkpoints/best`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub best: bool,
}

/// A checkpoint could not be written; earlier ones are as they were.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SaveFailed {
    /// Steps made before.
    pub step: u64,
    /// Why.
    pub reason: String,
}

/// A run went on from a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Resume {
    /// The checkpoint's step.
    pub step: u64,
    /// Keys whose values differ from the checkpoint's, and data that does.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub changes: Vec<Change>,
    /// What else the user should know.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// The job formed its groups anew after a failure, and the run went on from the newest state that all ranks had.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Restart {
    /// The step from which it went on.
    pub step: u64,
    /// How often the groups were formed, this time included.
    pub generation: u64,
    /// What happened.
    pub reason: String,
    /// Ranks whose process is another than before.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub replaced: Vec<usize>,
    /// Where the state came from: `memory`, `checkpoint` or `the beginning`.
    pub from: String,
    /// Seconds from noticing the failure on rank 0 until the run went on; 0 if its process is new.
    pub seconds: f64,
    /// Steps that are done again, as far as rank 0 knows.
    pub steps_lost: u64,
}

/// A key with another value than before.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Change {
    /// The key, `optimizer.lr`.
    pub key: String,
    /// The checkpoint's value.
    pub old: String,
    /// The value from here on.
    pub new: String,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} -> {}", self.key, self.old, self.new)
    }
}
