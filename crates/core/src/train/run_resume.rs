//! A run resumes from a checkpoint: its state is restored, and what has changed since is listed or refused.

use super::Trainer;
use super::record::{self, ScheduleSpan};
use super::run::Run;
use super::run_folder::CHECKPOINTS;
use super::run_open::OpenOptions;
use super::state::{self, Origin};
use crate::checkpoint::{self, Loaded};
use crate::config::Resolved;
use crate::events::{Change, Resume};
use crate::{Error, Result};
use ferrotron_comm::Communicator;
use std::path::{Path, PathBuf};

impl Run {
    /// Restores the checkpoint at `path`, unless what has changed since breaks the data position. Also returns where it
    /// comes from.
    pub(super) fn resume(
        trainer: &mut Trainer,
        resolved: &Resolved,
        path: &Path,
        together: &Communicator,
        options: &OpenOptions,
    ) -> Result<(Resume, Option<Origin>)> {
        let loaded = checkpoint::load_parallel(path, together)?;
        let origin = state::origin(&loaded);
        let mut changes = Vec::new();
        let mut notes = Vec::new();
        match origin.as_ref().map(|o| (o, &o.run)) {
            Some((origin, Some(old))) => {
                let new = trainer.record.get_or_insert_default();
                changes = old.changes(new);
                new.continue_from(old);
                // A run of another model or seed is refused as such below.
                let known = changes.iter().any(record::breaks_position);
                let reordered = options.data.filter(|_| !known);
                changes.extend(reordered.and_then(|data| old.order_change(data, origin.samples)));
            }
            Some((_, None)) => notes.push(
                "the checkpoint is of a version that recorded neither configuration nor data: changes cannot be shown".into(),
            ),
            None => {}
        }
        Run::restore(trainer, &loaded, &changes)?;
        record::refuse(path, &changes, options.allow_changes)?;
        notes.extend(origin.as_ref().and_then(|o| Run::schedule_note(trainer, resolved, o)));
        Ok((Resume { step: trainer.step(), changes, notes }, origin))
    }

    /// Restores a checkpoint; the error of one that does not fit lists what has changed.
    fn restore(trainer: &mut Trainer, loaded: &Loaded, changes: &[Change]) -> Result<()> {
        trainer.restore(loaded).map_err(|e| {
            let list: Vec<String> = changes.iter().map(Change::to_string).collect();
            if list.is_empty() { e } else { e.with_hint(&format!(" (changed: {})", list.join(", "))) }
        })
    }

    fn schedule_note(trainer: &Trainer, resolved: &Resolved, old: &Origin) -> Option<String> {
        let skipped = old.skipped.total();
        let span = ScheduleSpan {
            step: trainer.step(),
            samples: old.samples.saturating_sub(skipped),
            batch: resolved.config.train.global_batch as u64,
            steps: resolved.plan.steps,
            end: resolved.plan.samples.saturating_sub(skipped),
        };
        record::schedule_note(&old.lr, &trainer.runner.schedules.lr, span)
    }
}

/// The best step that the newest checkpoint of a run knows of; none if its manifest is damaged, which loading it reports.
pub(super) fn newest_best(dir: &Path) -> Result<Option<u64>> {
    let newest = checkpoint::latest(&dir.join(CHECKPOINTS))?;
    Ok(newest.and_then(|path| checkpoint::state(&path).ok()?.get("best")?.get("step")?.as_u64()))
}

/// Makes the link [`checkpoint::BEST`] name the best checkpoint, if that is there: a crash between a checkpoint and its link
/// leaves the old link, or none.
pub(super) fn restore_best_link(checkpoints: &Path, best: Option<u64>) -> Result<()> {
    let is_there = |step: &u64| checkpoints.join(checkpoint::folder_name(*step)).is_dir();
    match best.filter(|step| checkpoint::best(checkpoints) != Some(*step) && is_there(step)) {
        Some(step) => checkpoint::mark_best(checkpoints, step),
        None => Ok(()),
    }
}

/// The checkpoint of a run with the lowest validation loss.
pub(super) fn best_checkpoint(dir: &Path) -> Result<PathBuf> {
    let checkpoints = dir.join(CHECKPOINTS);
    let found = checkpoint::best(&checkpoints).map(|step| checkpoints.join(checkpoint::folder_name(step)));
    found.filter(|path| path.is_dir()).ok_or_else(|| Error::Missing {
        path: checkpoints.join(checkpoint::BEST),
        what: "the run has no best checkpoint to resume from: it keeps one with checkpoint.best=true and eval.every set; \
               resume from the latest instead"
            .into(),
    })
}
