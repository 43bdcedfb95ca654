//! Checkpoints and events of a run: a checkpoint counts, and is reported, once it is on disk.

use super::checkpoint_parts::OwnParts;
use super::energy::Energy;
use super::run::{Observer, Run};
use super::run_folder::{CHECKPOINTS, RunFolder};
use super::state;
use crate::checkpoint::{self, Staged};
use crate::config::SaveFailurePolicy;
use crate::data::Batches;
use crate::events::{self, Event, Line};
use crate::fault::timeouts::Section;
use crate::{Error, Result};
use serde_json::Value;
use std::time::Instant;

impl Run {
    /// Logs an event and passes it to the observer. If the log cannot be written, `checkpoint.on_failure` decides whether that
    /// ends the run.
    pub fn emit(&mut self, event: Event, observer: &mut dyn Observer) -> Result<()> {
        let goes_on = self.resolved.config.checkpoint.on_failure == SaveFailurePolicy::Continue;
        let Some(writer) = &mut self.writer else { return Ok(()) };
        if !matches!(event, Event::Step(_)) {
            tracing::info!(shown = true, event = %serde_json::to_string(&event).unwrap_or_default(), "event");
        }
        let line = Line::now(event);
        if let Some(Err(e)) = writer.tensorboard.as_mut().map(|t| t.write(&line)) {
            writer.tensorboard = None;
            observer.warning(&format!(
                "{e}; TensorBoard gets no more of this run until it resumes, or `ferrotron runs export` writes its files"
            ));
        }
        match writer.log.write_line(&line) {
            Ok(()) => writer.log_failed = false,
            Err(e) if !goes_on => return Err(e),
            Err(e) if !std::mem::replace(&mut writer.log_failed, true) => {
                observer
                    .warning(&format!("{e}; the run goes on, and what it logs is lost until there is space"));
            }
            Err(_) => {}
        }
        observer.event(&line.event);
        Ok(())
    }

    /// Starts to save: every rank copies its parts of the state to host memory and writes them on a thread of its own, while
    /// training continues. Waits for the save before, if that is still in progress. Collective.
    pub(super) fn save(&mut self, data: &dyn Batches, observer: &mut dyn Observer) -> Result<()> {
        self.enter(Section::Save);
        self.verify_before_save(data, observer)?;
        let start = Instant::now();
        let inside = self.trainer.rank.world.host_cost().inside;
        self.energy.iter_mut().for_each(Energy::pause);
        self.wait_for_save(observer)?;
        let (step, samples) = (self.trainer.step(), self.trainer.samples());
        if self.writer.is_some() {
            self.trainer.record.iter_mut().for_each(|r| r.set_order(data, samples));
        }
        tracing::info!(samples, "saving a checkpoint");
        let synced = self.writer.as_mut().map_or(Ok(()), |w| w.log.sync());
        let synced = synced.and_then(|()| self.injected_full_disk(step));
        let own = OwnParts::of(&self.trainer)?;
        let begun = self.saver.begin(step, own.bytes(), synced)?;
        let bytes = *begun.as_ref().unwrap_or(&0);
        if begun.is_ok() {
            let staged = state::state(&self.trainer).and_then(|state| Ok((state, self.stage(own)?)));
            let (state, staged) = staged.map_or_else(|e| (Value::Null, Err(e)), |(s, parts)| (s, Ok(parts)));
            self.saver.write(state, staged);
        }
        let path = format!("{CHECKPOINTS}/{}", checkpoint::folder_name(step));
        let seconds = start.elapsed().as_secs_f64();
        let best = self.resolved.config.checkpoint.best && self.trainer.best.is_some_and(|b| b.step == step);
        self.pending = Some(events::Checkpoint { step, path, bytes, seconds, best });
        if let Err(e) = begun {
            self.save_ended(step, Err(e), observer)?;
        }
        self.energy.iter_mut().for_each(Energy::resume);
        let inside = self.trainer.rank.world.host_cost().inside.saturating_sub(inside);
        let own = start.elapsed().saturating_sub(inside).as_secs_f64();
        self.stragglers.iter_mut().for_each(|s| s.saved(own));
        Ok(())
    }

    /// Starts to copy this rank's parts to host memory, as far as they are not there.
    fn stage(&mut self, own: OwnParts) -> Result<Staged> {
        let bytes = own.staged_bytes(&self.trainer);
        let buffer = self.saver.buffer(self.trainer.rank.device(), bytes)?;
        let (staged, copied) = own.stage(&self.trainer, buffer)?;
        self.trainer.staged = Some(copied);
        Ok(staged)
    }

    /// Reports the checkpoint that was written in the meantime, if there is one. `all_idle`: no rank writes; all ranks agree
    /// on it.
    pub(super) fn poll_save(&mut self, all_idle: bool, observer: &mut dyn Observer) -> Result<()> {
        match self.saver.poll(all_idle)? {
            Some((step, result)) => self.save_ended(step, result, observer),
            None => Ok(()),
        }
    }

    /// Waits for the checkpoint that is being written and reports it. Collective.
    pub(super) fn wait_for_save(&mut self, observer: &mut dyn Observer) -> Result<()> {
        match self.saver.wait()? {
            Some((step, result)) => self.save_ended(step, result, observer),
            None => Ok(()),
        }
    }

    /// Acts on the end of a save, which is the same on all ranks.
    fn save_ended(&mut self, step: u64, result: Result<()>, observer: &mut dyn Observer) -> Result<()> {
        if result.is_ok() {
            self.injected_damage(step)?;
        }
        let stops = self.resolved.config.checkpoint.on_failure == SaveFailurePolicy::Stop;
        let pending = self.pending.take();
        let folder = self.writer.as_mut().map(|w| &mut w.folder);
        match result {
            Ok(()) => {
                (self.saved, self.failed) = (Some(step), None);
                // It stays a checkpoint even if the run it replaces cannot be deleted.
                if let Some(Err(e)) = folder.map(RunFolder::new_run_is_saved) {
                    observer.warning(&e.to_string());
                }
                if self.writer.is_some() && pending.as_ref().is_some_and(|p| p.best) {
                    // The one that was best until now may be surplus.
                    let marked = checkpoint::mark_best(&self.dir().join(CHECKPOINTS), step);
                    if let Err(e) = marked.and_then(|()| self.saver.tidy()) {
                        observer.warning(&e.to_string());
                    }
                }
                pending.map_or(Ok(()), |event| self.emit(Event::Checkpoint(event), observer))
            }
            Err(e) => {
                let e = match folder.and_then(|f| f.replaced()) {
                    Some(path) => {
                        e.with_hint(&format!("; the run that it replaces is still in {}", path.display()))
                    }
                    None => e,
                };
                let failed = events::SaveFailed { step, reason: e.to_string() };
                if stops {
                    self.emit(Event::SaveFailed(failed), observer)?;
                    return Err(e);
                }
                self.failed = Some(e);
                self.emit(Event::SaveFailed(failed), observer)
            }
        }
    }

    /// Waits until the last checkpoint of the run is on disk; fails if it could not be written. Collective.
    pub(super) fn finish_saves(&mut self, finished: bool, observer: &mut dyn Observer) -> Result<()> {
        self.wait_for_save(observer)?;
        if let Some(e) = self.failed.take() {
            return Err(e);
        }
        // A run that is to leave no checkpoint replaces the old one when it has ended.
        match &mut self.writer {
            Some(writer) if finished => writer.folder.new_run_is_saved(),
            _ => Ok(()),
        }
    }

    /// After an error that left the state intact: saves the state of the last step if it is not saved yet. A failed save is
    /// reported; the run still ends with the original error.
    pub(super) fn save_after_error(&mut self, data: &dyn Batches, observer: &mut dyn Observer) {
        let step = self.trainer.step();
        let known = self.saved == Some(step) || self.pending.is_some();
        let saved = match step == 0 || known {
            true => Ok(()),
            false => self.save(data, observer),
        };
        if let Err(e) = saved.and_then(|()| self.wait_for_save(observer)) {
            observer.warning(&format!("the state after step {step} could not be saved: {e}"));
        }
    }
}

/// An error in the middle of a run.
pub(super) struct Failure {
    pub(super) error: Error,
    /// Every rank is between two steps and knows of the error: the state can be saved.
    pub(super) saveable: bool,
}

impl From<Error> for Failure {
    /// In the middle of a step, or on one of several ranks, nothing can be saved.
    fn from(error: Error) -> Failure {
        Failure { error, saveable: false }
    }
}
