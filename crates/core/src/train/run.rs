//! A training run and its folder: starts or resumes it; [`Run::train`] runs the steps.

use super::energy::Energy;
use super::record::{self, RunRecord, ScheduleSpan};
use super::rerun::Rerun;
use super::run_folder::{CHECKPOINTS, RunFolder};
use super::snapshots::Snapshots;
use super::state::{self, Origin};
use super::{StepMetrics, StepReport, Trainer};
use crate::checkpoint::{self, Loaded, Saver};
use crate::config::Resolved;
use crate::cost::Traffic;
use crate::data::{Batches, digest};
use crate::events::{self, Change, Event, EventLog, Resume, TENSORBOARD, TensorBoard};
use crate::fault::stragglers::Stragglers;
use crate::fault::timeouts::Timeouts;
use crate::{Error, Result};
use ferrotron_comm::Communicator;
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

/// Sets the weights of a new model.
pub type InitialWeights<'a> = dyn Fn(&Trainer) -> Result<()> + 'a;

/// How a run is opened.
#[derive(Default)]
pub struct OpenOptions<'a> {
    /// Sets the weights of a new model (from a Hugging Face folder); none draws the declared initial values.
    pub initial_weights: Option<&'a InitialWeights<'a>>,
    /// The training data that the recipe names. Its files and the order of its samples are recorded in checkpoints, and
    /// compared by a resumed run. Without it only the configuration is.
    pub data: Option<&'a dyn Batches>,
    /// Resume from the checkpoint with the lowest validation loss (`checkpoint.best`) instead of the newest. Later ones are
    /// deleted.
    pub from_best: bool,
    /// Replace the run in the folder. It is deleted once the new one has a checkpoint, and restored otherwise.
    pub fresh: bool,
    /// The job has begun before, and some of its processes are new: a run that `fresh` has begun goes on.
    pub begun: bool,
    /// Keys that may change although the data position is lost, see [`crate::config::refused_changes`].
    pub allow_changes: &'a [String],
    /// Snapshots that this process keeps over restarts of its job.
    pub snapshots: Snapshots,
    /// The restart of the job that opens the run again.
    pub restarted: Option<Restarted>,
}

/// An in-job restart.
#[derive(Clone, Debug)]
pub struct Restarted {
    /// How often the job's groups were formed, from 1.
    pub generation: u64,
    /// Why the last generation ended.
    pub reason: String,
    /// Ranks whose process is another than before.
    pub replaced: Vec<usize>,
    /// Nothing has failed: processes have changed ranks, to verify steps of each other.
    pub rotated: bool,
    /// When this process noticed it.
    pub since: Instant,
    /// Steps done before, as far as this process knows.
    pub steps: u64,
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
    dir: PathBuf,
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

impl Restarted {
    fn event(&self, step: u64, from: &str) -> events::Restart {
        events::Restart {
            step,
            generation: self.generation,
            reason: self.reason.clone(),
            replaced: self.replaced.clone(),
            from: from.into(),
            seconds: self.since.elapsed().as_secs_f64(),
            steps_lost: self.steps.saturating_sub(step),
        }
    }
}

impl Run {
    /// Opens the run in `dir`: resumes from its newest checkpoint if there is one, else starts a new run.
    /// `initial_weights` sets the weights of a new model (from a Hugging Face folder); none draws the declared values.
    pub fn open(
        rank: Rank,
        resolved: Resolved,
        dir: &Path,
        initial_weights: Option<&InitialWeights>,
    ) -> Result<Run> {
        Run::open_with(rank, resolved, dir, OpenOptions { initial_weights, ..OpenOptions::default() })
    }

    /// [`Run::open`] with more options. Whatever fails, the folder's run is as it was.
    pub fn open_with(rank: Rank, resolved: Resolved, dir: &Path, options: OpenOptions) -> Result<Run> {
        let first = rank.world.rank() == 0;
        let together = rank.world.all();
        let wait = |label| together.barrier(label);
        let digests = match first && options.data.is_some() {
            true => digest::digests(&resolved)?,
            false => Vec::new(),
        };
        let record = RunRecord::new(&resolved, digests);
        let mut folder = first.then(|| RunFolder::open(dir, options.restarted.is_some())).transpose()?;
        let mut saver = Run::saver(dir, &resolved, &together)?;
        if first && options.from_best && !options.begun && resolved.config.checkpoint.best {
            restore_best_link(&dir.join(CHECKPOINTS), newest_best(dir)?)?;
        }
        // Leftovers of an interrupted save are removed before any rank looks for the newest checkpoint. A run that was begun
        // in place of another and has no checkpoint yet begins in its place again.
        let is_back = folder.as_ref().is_some_and(|f| f.restored);
        let is_back = together.all_gather_bytes(&[u8::from(is_back)], "the run folder is ready")?;
        let fresh = options.fresh && (!options.begun || is_back.first().is_some_and(|b| b == &[1]));
        let mut trainer = Trainer::new(rank, &resolved)?;
        trainer.record = Some(record);
        trainer.hooks.faults.remember_in(dir, options.fresh && !options.begun);
        let latest = match (fresh, options.from_best && !options.begun) {
            (true, _) => None,
            (false, true) => Some(best_checkpoint(dir)?),
            (false, false) => checkpoint::latest(&dir.join(CHECKPOINTS))?,
        };
        let recovery = match resolved.config.fault.snapshot_every {
            0 => None,
            _ => options.snapshots.recovery(&together)?,
        };
        let on_disk = latest.as_ref().and_then(|path| checkpoint::step_of(path.file_name()?));
        // Steps are verified from the snapshot on, also if a request has saved a checkpoint since.
        let rotated = options.restarted.as_ref().is_some_and(|r| r.rotated);
        let verification = options.snapshots.take_verification();
        let verification =
            verification.filter(|v| rotated && recovery.as_ref().is_some_and(|r| v.begins_at(r.step)));
        let recovery =
            recovery.filter(|r| verification.is_some() || on_disk.is_none_or(|step| step <= r.step));
        let latest = latest.filter(|_| recovery.is_none());
        let mut gemms = None;
        // Checkpoints and snapshots of adapters do not hold the base model.
        if (latest.is_none() && recovery.is_none()) || resolved.config.has_lora() {
            options.initial_weights.map_or(Ok(()), |fill| fill(&trainer))?;
        }
        let resumed = match (&recovery, &latest) {
            (Some(recovery), _) => {
                options.snapshots.recover(&mut trainer, recovery)?;
                Some(Resume { step: recovery.step, ..Resume::default() })
            }
            (None, Some(path)) => {
                let (resume, origin) = Run::resume(&mut trainer, &resolved, path, &together, &options)?;
                gemms = origin.and_then(|o| o.gemms);
                Some(resume)
            }
            (None, None) => None,
        };
        let verifying = verification.as_ref().map(|v| v.step);
        options.snapshots.set_verification(verification);
        let restarted = options.restarted.as_ref().filter(|_| verifying.is_none()).map(|r| {
            let from = match (&recovery, trainer.step()) {
                (Some(_), _) => "memory",
                (None, 0) => "the beginning",
                (None, _) => "checkpoint",
            };
            r.event(trainer.step(), from)
        });
        let in_folder = folder.as_mut().filter(|_| !fresh).and_then(RunFolder::gemm_table);
        let mut notes = trainer.resume_gemm_choices(gemms, in_folder)?;
        wait("the checkpoint is read")?;
        let flops_per_token = resolved.flops_per_token(resolved.plan.seq_len as f64)?.total();
        let energy = resolved.config.train.energy.then(|| Energy::new(&trainer.rank)).transpose()?;
        let fault = &resolved.config.fault;
        let stragglers = (fault.straggler_every > 0)
            .then(|| Stragglers::new(&trainer.rank, fault.straggler_every, fault.straggler_threshold));
        let timeouts = Timeouts::new(fault.min_timeout);
        // Everything is valid: the folder changes from here on.
        if let Some(folder) = folder.as_mut().filter(|_| fresh) {
            drop(saver);
            folder.set_aside()?;
            saver = Run::saver(dir, &resolved, &together)?;
        }
        if folder.is_some() && options.from_best && !options.begun {
            let later = checkpoint::remove_after(&dir.join(CHECKPOINTS), trainer.step())?;
            if !later.is_empty() {
                let names: Vec<String> = later.into_iter().map(checkpoint::folder_name).collect();
                notes.push(format!("checkpoints after the best were deleted: {}", names.join(", ")));
            }
        }
        if fault.verify_on_partner && !(options.snapshots.are_mirrored() && trainer.rank.world.size() > 1) {
            notes.push(
                "fault.verify_on_partner: ranks cannot change places in this job, so that steps are verified in place; it takes \
                 launched processes and fault.restarts (docs/launch.md)"
                    .into(),
            );
        }
        notes.extend(folder.iter_mut().flat_map(|f| std::mem::take(&mut f.notes)));
        let (sent, dir) = (Traffic::default(), dir.to_path_buf());
        let launches_ahead = trainer.rank.device().gpu().is_some();
        let saved = resumed.as_ref().map(|r: &Resume| r.step);
        let mut run = Run {
            trainer,
            resolved,
            flops_per_token,
            epoch_tokens: None,
            sent,
            resumed,
            notes,
            launches_ahead,
            energy,
            stragglers,
            timeouts,
            dir,
            writer: None,
            saver,
            pending: None,
            saved,
            failed: None,
            snapshots: options.snapshots.clone(),
            snapshot_overdue: false,
            mirrors_idle: true,
            restarted,
            verifying,
            verified: Vec::new(),
            rerun: None,
        };
        if let Some(folder) = folder {
            // Before surplus checkpoints are deleted.
            let best = run.trainer.best.filter(|_| run.resolved.config.checkpoint.best);
            restore_best_link(&run.dir.join(CHECKPOINTS), best.map(|b| b.step))?;
            run.begin_writing(folder)?;
        }
        let done = run.trainer.step();
        tracing::info!(ranks = run.trainer.rank.world.size(), done, "the run begins");
        Ok(run)
    }

    fn saver(dir: &Path, resolved: &Resolved, together: &Communicator) -> Result<Saver> {
        let keep = (resolved.config.checkpoint.keep > 0).then_some(resolved.config.checkpoint.keep as usize);
        Saver::on(&dir.join(CHECKPOINTS), keep, together)
    }

    /// Restores the checkpoint at `path`, unless what has changed since breaks the data position. Also returns where it
    /// comes from.
    fn resume(
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

    /// Opens the log and writes the configuration. The folder's run has been read and found good.
    fn begin_writing(&mut self, folder: RunFolder) -> Result<()> {
        let (path, step) = (self.dir.join(events::FILE_NAME), self.trainer.step());
        let mut log = match &self.resumed {
            Some(_) => {
                self.saver.tidy()?;
                // Lines of steps that are verified stay.
                EventLog::resume(&path, self.verifying.map_or(step, |last| last - 1))?
            }
            None => EventLog::create(&path)?,
        };
        if !log.damaged().is_empty() {
            let lines: Vec<String> = log.damaged().iter().map(usize::to_string).collect();
            let what = format!("{}: dropped damaged lines: {}", path.display(), lines.join(", "));
            self.notes.push(what);
        }
        folder.write_config(&self.resolved, step)?;
        let mut tensorboard = None;
        if self.resolved.config.logging.tensorboard {
            match TensorBoard::create(&self.dir, &self.dir.join(TENSORBOARD)) {
                Ok(writer) => tensorboard = Some(writer),
                // The run is worth more than a view of it.
                Err(e) => self.notes.push(format!("{e}; the run goes on without TensorBoard files")),
            }
        }
        if let Some(resume) = &mut self.resumed {
            resume.notes.append(&mut self.notes);
        }
        let event = match (&self.restarted, &self.resumed) {
            (Some(restart), _) => Some(Event::Restart(restart.clone())),
            (None, Some(resume)) => Some(Event::Resume(resume.clone())),
            (None, None) => None,
        };
        let says = step < self.resolved.plan.steps && self.verifying.is_none();
        if let Some(event) = event.filter(|_| says) {
            log.write(&event)?;
        }
        self.writer = Some(RunFolderWriter { log, folder, tensorboard, log_failed: false });
        Ok(())
    }

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

/// The best step that the newest checkpoint of a run knows of; none if its manifest is damaged, which loading it reports.
fn newest_best(dir: &Path) -> Result<Option<u64>> {
    let newest = checkpoint::latest(&dir.join(CHECKPOINTS))?;
    Ok(newest.and_then(|path| checkpoint::state(&path).ok()?.get("best")?.get("step")?.as_u64()))
}

/// Makes the link [`checkpoint::BEST`] name the best checkpoint, if that is there: a crash between a checkpoint and its link
/// leaves the old link, or none.
fn restore_best_link(checkpoints: &Path, best: Option<u64>) -> Result<()> {
    let is_there = |step: &u64| checkpoints.join(checkpoint::folder_name(*step)).is_dir();
    match best.filter(|step| checkpoint::best(checkpoints) != Some(*step) && is_there(step)) {
        Some(step) => checkpoint::mark_best(checkpoints, step),
        None => Ok(()),
    }
}

/// The checkpoint of a run with the lowest validation loss.
fn best_checkpoint(dir: &Path) -> Result<PathBuf> {
    let checkpoints = dir.join(CHECKPOINTS);
    let found = checkpoint::best(&checkpoints).map(|step| checkpoints.join(checkpoint::folder_name(step)));
    found.filter(|path| path.is_dir()).ok_or_else(|| Error::Missing {
        path: checkpoints.join(checkpoint::BEST),
        what: "the run has no best checkpoint to resume from: it keeps one with checkpoint.best=true and eval.every set; \
               resume from the latest instead"
            .into(),
    })
}
