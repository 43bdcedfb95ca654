//! Checkpoints and events of a run: a checkpoint counts, and is reported, once it is on disk.

use super::energy::Energy;
use super::run::{Observer, Run};
use super::run_folder::CHECKPOINTS;
use crate::checkpoint;
use crate::config::SaveFailurePolicy;
use crate::data::Batches;
use crate::events::{self, Event};
use crate::{Error, Result};
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
        match writer.log.write(&event) {
            Ok(()) => writer.log_failed = false,
            Err(e) if !goes_on => return Err(e),
            Err(e) if !std::mem::replace(&mut writer.log_failed, true) => {
                observer
                    .warning(&format!("{e}; the run goes on, and what it logs is lost until there is space"));
            }
            Err(_) => {}
        }
        observer.event(&event);
        Ok(())
    }

    /// Hands a copy of the state to the writer thread; training continues meanwhile. Collective.
    pub(super) fn save(&mut self, data: &dyn Batches, observer: &mut dyn Observer) -> Result<()> {
        let start = Instant::now();
        // Rank 0 gathers the shards of all ranks and writes.
        self.energy.iter_mut().for_each(Energy::pause);
        let (step, samples) = (self.trainer.step(), self.trainer.samples());
        if self.writer.is_some() {
            self.trainer.record.iter_mut().for_each(|r| r.set_order(data, samples));
        }
        tracing::info!(samples, "saving a checkpoint");
        let snapshot = self.trainer.snapshot()?;
        self.wait_for_save(observer)?;
        if let Some(writer) = &mut self.writer {
            let bytes = snapshot.items.iter().map(|i| i.bytes.len() as u64).sum();
            let begun = writer.log.sync().and_then(|()| writer.saver.save(snapshot));
            let path = format!("{CHECKPOINTS}/{}", checkpoint::folder_name(step));
            let seconds = start.elapsed().as_secs_f64();
            writer.pending = Some(events::Checkpoint { step, path, bytes, seconds });
            if let Err(e) = begun {
                self.save_ended(step, Err(e), observer)?;
            }
        }
        self.energy.iter_mut().for_each(Energy::resume);
        Ok(())
    }

    /// Reports the checkpoint that was written in the meantime, if there is one.
    pub(super) fn poll_save(&mut self, observer: &mut dyn Observer) -> Result<()> {
        match self.writer.as_mut().and_then(|w| w.saver.poll()) {
            Some((step, result)) => self.save_ended(step, result, observer),
            None => Ok(()),
        }
    }

    /// Waits for the checkpoint that is being written and reports it.
    pub(super) fn wait_for_save(&mut self, observer: &mut dyn Observer) -> Result<()> {
        match self.writer.as_mut().and_then(|w| w.saver.wait()) {
            Some((step, result)) => self.save_ended(step, result, observer),
            None => Ok(()),
        }
    }

    fn save_ended(&mut self, step: u64, result: Result<()>, observer: &mut dyn Observer) -> Result<()> {
        let stops = self.resolved.config.checkpoint.on_failure == SaveFailurePolicy::Stop;
        let Some(writer) = &mut self.writer else { return Ok(()) };
        let pending = writer.pending.take();
        match result {
            Ok(()) => {
                (writer.saved, writer.failed) = (Some(step), None);
                // It stays a checkpoint even if the run it replaces cannot be deleted.
                if let Err(e) = writer.folder.new_run_is_saved() {
                    observer.warning(&e.to_string());
                }
                pending.map_or(Ok(()), |event| self.emit(Event::Checkpoint(event), observer))
            }
            Err(e) => {
                let e = match writer.folder.replaced() {
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
                writer.failed = Some(e);
                self.emit(Event::SaveFailed(failed), observer)
            }
        }
    }

    /// Waits until the last checkpoint of the run is on disk; fails if it could not be written.
    pub(super) fn finish_saves(&mut self, finished: bool, observer: &mut dyn Observer) -> Result<()> {
        self.wait_for_save(observer)?;
        let Some(writer) = &mut self.writer else { return Ok(()) };
        if let Some(e) = writer.failed.take() {
            return Err(e);
        }
        // A run that is to leave no checkpoint replaces the old one when it has ended.
        if finished { writer.folder.new_run_is_saved() } else { Ok(()) }
    }

    /// After an error that left the state intact: saves the state of the last step if it is not saved yet. A failed save is
    /// reported; the run still ends with the original error.
    pub(super) fn save_after_error(&mut self, data: &dyn Batches, observer: &mut dyn Observer) {
        let step = self.trainer.step();
        let known = self.writer.as_ref().is_some_and(|w| w.saved == Some(step) || w.pending.is_some());
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
