//! A training run and its folder: [`Run::open`] starts or resumes it, [`Run::train`] runs the steps.

use super::energy::Energy;
use super::rerun::Rerun;
use super::run_folder::RunFolder;
use super::snapshots::Snapshots;
use super::{StepMetrics, StepReport, Trainer};
use crate::checkpoint::Saver;
use crate::config::Resolved;
use crate::cost::Traffic;
use crate::events::{self, Event, EventLog, Resume, TensorBoard};
use crate::fault::stragglers::Stragglers;
use crate::fault::timeouts::Timeouts;
use crate::{Error, Result};
use ferrotron_engine::Rank;
use ferrotron_tensor::{Category, MemoryReport};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Receives the events of a run, and may ask it to save or to stop.
pub trait Observer {
    /// An event, already written to the log.
    fn event(&mut self, event: &Event);
    /// Whether the run should save and end after this step.
    fn stop(&self) -> bool;
    /// Whether the run should save after this step and continue. Called once per step; a request is taken once.
    fn save(&self) -> bool {
        false
    }
    /// A warning that cannot be logged: the log itself cannot be written.
    fn warning(&mut self, _what: &str) {}
    /// Whether each step must end before the next begins, so that it can be profiled alone.
    fn wants_single_steps(&self) -> bool {
        false
    }
    /// Called before a step; `left` steps remain, including this one.
    fn before_step(&mut self, _rank: &Rank, _left: u64) -> Result<()> {
        Ok(())
    }
    /// Called after a step, before the next.
    fn after_step(&mut self, _rank: &Rank, _left: u64) -> Result<()> {
        Ok(())
    }
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// All steps are done, or early stopping has ended the run; false if it stopped on request and saved its state.
    pub finished: bool,
    /// Early stopping has ended the run, now or before it was resumed.
    pub stopped_early: bool,
    /// Steps done in this call.
    pub steps: u64,
    /// Tokens of those steps.
    pub tokens: u64,
    /// Seconds of those steps.
    pub seconds: f64,
    /// When the first of them ended.
    pub first: Option<Instant>,
    /// Loss of the last step, if any was done.
    pub loss: Option<f64>,
    /// Loss of the last evaluation, if there was one.
    pub eval: Option<f64>,
    /// Peak bytes of device memory in use and reserved, up to the end of the last step.
    pub peak_memory: [usize; 2],
}

/// A training run in a folder.
pub struct Run {
    /// Model, optimizer, counters.
    pub trainer: Trainer,
    /// The resolved recipe.
    pub resolved: Resolved,
    /// FLOPs of one token, forward and backward.
    pub flops_per_token: f64,
    /// Tokens in one epoch of the training data, where they are counted.
    pub epoch_tokens: Option<u64>,
    /// Bytes that this rank sent in the last step.
    pub sent: Traffic,
    /// The checkpoint it resumed from and what has changed since; none for a new run.
    pub resumed: Option<Resume>,
    /// Notes for the user about the folder of a new run; those of a resumed run are in [`Resume::notes`].
    pub notes: Vec<String>,
    /// Launch a step before the results of the one before are read, so that a GPU never waits for the host. On the CPU, which
    /// computes as it launches, that would only delay what is reported.
    pub launches_ahead: bool,
    /// Energy meter of the GPUs, with `train.energy`.
    pub(super) energy: Option<Energy>,
    /// Compares ranks, with `fault.straggler_every`.
    pub(super) stragglers: Option<Stragglers>,
    /// How long ranks wait for each other.
    pub(super) timeouts: Timeouts,
    pub(super) dir: PathBuf,
    /// Writer of the folder, on rank 0 only.
    pub(super) writer: Option<RunFolderWriter>,
    /// Writes this rank's parts of checkpoints.
    pub(super) saver: Saver,
    /// The checkpoint being written; its event follows when it is on disk.
    pub(super) pending: Option<events::Checkpoint>,
    /// The newest checkpoint of this run that is on disk.
    pub(super) saved: Option<u64>,
    /// Why the last save failed, if it did.
    pub(super) failed: Option<Error>,
    /// Snapshots in host memory.
    pub(crate) snapshots: Snapshots,
    /// A snapshot was due while one was being mirrored.
    pub(super) snapshot_overdue: bool,
    /// No rank is mirroring a snapshot.
    pub(super) mirrors_idle: bool,
    /// The restart that opened the run again.
    pub restarted: Option<events::Restart>,
    /// Steps up to this one are run again, in place of another process, to be verified.
    pub verifying: Option<u64>,
    /// Reports of those steps, but for the last.
    pub(super) verified: Vec<StepReport>,
    /// What steps are compared with that are run again.
    pub(super) rerun: Option<Rerun>,
}

/// Log writer of a run folder.
pub(super) struct RunFolderWriter {
    pub(super) log: EventLog,
    pub(super) folder: RunFolder,
    /// TensorBoard event files, with `logging.tensorboard`.
    pub(super) tensorboard: Option<TensorBoard>,
    /// A failed write of the log has been reported.
    pub(super) log_failed: bool,
}

impl Run {
    /// Counts the FLOPs of attention for sequences of `length` tokens instead of `data.seq_len`.
    pub fn count_flops_of(&mut self, length: f64) -> Result<()> {
        self.flops_per_token = self.resolved.flops_per_token(length)?.total();
        Ok(())
    }

    /// The run folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub(super) fn step_event(&self, r: &StepReport, seconds: f64, more: StepMetrics) -> events::Step {
        let rate = r.tokens as f64 / seconds.max(1e-9);
        let memory = self.trainer.rank.device().memory();
        events::Step {
            step: r.step,
            loss: r.loss,
            tokens: r.consumed,
            epoch: self.epoch_tokens.map(|tokens| r.consumed as f64 / tokens.max(1) as f64),
            lr: r.lr,
            grad_norm: r.grad_norm,
            loss_scale: r.loss_scale,
            num_zeros: r.num_zeros,
            batch: r.samples,
            seconds,
            tokens_per_s: rate,
            tflops: rate * self.flops_per_token / 1e12,
            memory: memory.total_peak as u64,
            reserved: memory.reserved_peak as u64,
            memory_peaks: memory_peaks(&memory),
            sent: self.sent.by_kind(),
            more,
            losses: r.mtp_losses.iter().zip(1..).map(|(x, d)| (format!("mtp_{d} loss"), *x)).collect(),
        }
    }
}

/// Peak bytes by category, without those that have none.
fn memory_peaks(memory: &MemoryReport) -> BTreeMap<String, u64> {
    let all = Category::ALL.iter().zip(memory.peak);
    all.filter(|(_, bytes)| *bytes > 0).map(|(c, bytes)| (c.name().to_string(), bytes as u64)).collect()
}
