//! Where a run that is opened begins: at a snapshot in memory, at a checkpoint, or with a new model.

use super::Trainer;
use super::gemm_choices::GemmTable;
use super::partner_verification::Verification;
use super::run::Run;
use super::run_folder::CHECKPOINTS;
use super::run_open::OpenOptions;
use super::run_resume::best_checkpoint;
use super::snapshots::Recovery;
use crate::Result;
use crate::checkpoint;
use crate::config::Resolved;
use crate::events::Resume;
use ferrotron_comm::Communicator;
use std::path::{Path, PathBuf};

/// The state that a run begins with. At most one of snapshot and checkpoint; neither is a new model.
pub(super) struct Start {
    snapshot: Option<Recovery>,
    checkpoint: Option<PathBuf>,
    /// Steps that are verified from the snapshot on.
    verification: Option<Verification>,
}

impl Start {
    /// The newest state that all ranks have, or a new model if the run is `fresh`. Takes the verification out of
    /// [`OpenOptions::snapshots`]. Collective.
    pub(super) fn choose(
        dir: &Path,
        resolved: &Resolved,
        world_group: &Communicator,
        options: &OpenOptions,
        fresh: bool,
    ) -> Result<Start> {
        let checkpoint = match (fresh, options.resumes_from_best()) {
            (true, _) => None,
            (false, true) => Some(best_checkpoint(dir)?),
            (false, false) => checkpoint::latest(&dir.join(CHECKPOINTS))?,
        };
        let snapshot = match resolved.config.fault.snapshot_every {
            0 => None,
            _ => options.snapshots.recovery(world_group)?,
        };
        let on_disk = checkpoint.as_ref().and_then(|path| checkpoint::step_of(path.file_name()?));
        // Steps are verified from the snapshot on, also if a request has saved a checkpoint since.
        let rotated = options.restarted.as_ref().is_some_and(|r| r.rotated);
        let verification = options.snapshots.take_verification();
        let verification =
            verification.filter(|v| rotated && snapshot.as_ref().is_some_and(|r| v.begins_at(r.step)));
        let snapshot =
            snapshot.filter(|r| verification.is_some() || on_disk.is_none_or(|step| step <= r.step));
        let checkpoint = checkpoint.filter(|_| snapshot.is_none());
        Ok(Start { snapshot, checkpoint, verification })
    }

    /// Gives the trainer this state, and [`OpenOptions::snapshots`] the verification back. Returns how the run resumes, and
    /// the GEMM algorithms of the checkpoint.
    pub(super) fn restore(
        &mut self,
        trainer: &mut Trainer,
        resolved: &Resolved,
        world_group: &Communicator,
        options: &OpenOptions,
    ) -> Result<(Option<Resume>, Option<GemmTable>)> {
        let is_new = self.snapshot.is_none() && self.checkpoint.is_none();
        // Checkpoints and snapshots of adapters do not hold the base model.
        if is_new || resolved.config.has_lora() {
            options.initial_weights.map_or(Ok(()), |fill| fill(trainer))?;
        }
        let mut gemms = None;
        let resumed = match (&self.snapshot, &self.checkpoint) {
            (Some(snapshot), _) => {
                options.snapshots.recover(trainer, snapshot)?;
                Some(Resume { step: snapshot.step, ..Resume::default() })
            }
            (None, Some(path)) => {
                let (resume, origin) = Run::resume(trainer, resolved, path, world_group, options)?;
                gemms = origin.and_then(|o| o.gemms);
                Some(resume)
            }
            (None, None) => None,
        };
        options.snapshots.set_verification(self.verification.take());
        Ok((resumed, gemms))
    }

    /// The last step that is verified, before [`Start::restore`].
    pub(super) fn verifying(&self) -> Option<u64> {
        self.verification.as_ref().map(|v| v.step)
    }

    /// Where the state at `step` comes from, for people.
    pub(super) fn origin(&self, step: u64) -> &'static str {
        match (&self.snapshot, step) {
            (Some(_), _) => "memory",
            (None, 0) => "the beginning",
            (None, _) => "checkpoint",
        }
    }
}
