//! Opens a run in its folder: begins a new one, or resumes from a checkpoint or a snapshot.

use super::Trainer;
use super::energy::Energy;
use super::record::RunRecord;
use super::run::{Run, RunFolderWriter};
use super::run_folder::{CHECKPOINTS, RunFolder, require_shared};
use super::run_resume::{newest_best, restore_best_link};
use super::run_start::Start;
use super::snapshots::Snapshots;
use crate::Result;
use crate::checkpoint::{self, Saver};
use crate::config::Resolved;
use crate::cost::Traffic;
use crate::data::{Batches, digest};
use crate::events::{self, Event, EventLog, Resume, TENSORBOARD, TensorBoard};
use crate::fault::stragglers::Stragglers;
use crate::fault::timeouts::Timeouts;
use ferrotron_comm::Communicator;
use ferrotron_engine::Rank;
use std::path::Path;
use std::time::Instant;

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

impl OpenOptions<'_> {
    pub(super) fn resumes_from_best(&self) -> bool {
        self.from_best && !self.begun
    }
}

/// Note of a run with `fault.verify_on_partner` whose ranks have no partners.
const VERIFIES_IN_PLACE: &str = "\
    fault.verify_on_partner: ranks cannot change places in this job, so that steps are verified in place; it takes \
    launched processes and fault.restarts (docs/launch.md)";

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
        let world_group = rank.world.all();
        let digests = match first && options.data.is_some() {
            true => digest::digests(&resolved)?,
            false => Vec::new(),
        };
        let record = RunRecord::new(&resolved, digests);
        let mut folder = first.then(|| RunFolder::open(dir, options.restarted.is_some())).transpose()?;
        require_shared(dir, &world_group)?;
        let mut saver = Run::saver(dir, &resolved, &world_group)?;
        if first && options.resumes_from_best() && resolved.config.checkpoint.best {
            restore_best_link(&dir.join(CHECKPOINTS), newest_best(dir)?)?;
        }
        // Leftovers of an interrupted save are removed before any rank looks for the newest checkpoint. A run that was begun
        // in place of another and has no checkpoint yet begins in its place again.
        let is_back = folder.as_ref().is_some_and(|f| f.restored);
        let is_back = world_group.all_gather_bytes(&[u8::from(is_back)], "the run folder is ready")?;
        let fresh = options.fresh && (!options.begun || is_back.first().is_some_and(|b| b == &[1]));
        let mut trainer = Trainer::new(rank, &resolved)?;
        trainer.record = Some(record);
        trainer.hooks.faults.remember_in(dir, options.fresh && !options.begun);
        let mut start = Start::choose(dir, &resolved, &world_group, &options, fresh)?;
        let verifying = start.verifying();
        let (resumed, gemms) = start.restore(&mut trainer, &resolved, &world_group, &options)?;
        let step = trainer.step();
        let restarted = options.restarted.as_ref().filter(|_| verifying.is_none());
        let restarted = restarted.map(|r| r.event(step, start.origin(step)));
        let in_folder = folder.as_mut().filter(|_| !fresh).and_then(RunFolder::gemm_table);
        let mut notes = trainer.resume_gemm_choices(gemms, in_folder)?;
        world_group.barrier("the checkpoint is read")?;
        let flops_per_token = resolved.flops_per_token(resolved.plan.seq_len as f64)?.total();
        let energy = resolved.config.train.energy.then(|| Energy::new(&trainer.rank)).transpose()?;
        let fault = &resolved.config.fault;
        let stragglers = (fault.straggler_every > 0)
            .then(|| Stragglers::new(&trainer.rank, fault.straggler_every, fault.straggler_threshold));
        let timeouts = Timeouts::new(fault.min_timeout);
        // Everything is valid: the folder changes from here on.
        if let Some(folder) = &mut folder {
            if fresh {
                drop(saver);
                folder.set_aside()?;
                saver = Run::saver(dir, &resolved, &world_group)?;
            }
            if options.resumes_from_best() {
                notes.extend(delete_later_checkpoints(dir, step)?);
            }
        }
        if fault.verify_on_partner && !(options.snapshots.are_mirrored() && trainer.rank.world.size() > 1) {
            notes.push(VERIFIES_IN_PLACE.into());
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

    fn saver(dir: &Path, resolved: &Resolved, world_group: &Communicator) -> Result<Saver> {
        let keep = (resolved.config.checkpoint.keep > 0).then_some(resolved.config.checkpoint.keep as usize);
        Saver::on(&dir.join(CHECKPOINTS), keep, world_group)
    }

    /// Opens the log and writes the configuration. The folder's run has been read and found good.
    fn begin_writing(&mut self, folder: RunFolder) -> Result<()> {
        let (path, step) = (self.dir.join(events::FILE_NAME), self.trainer.step());
        let mut log = match &self.resumed {
            Some(_) => {
                if let Err(e) = self.saver.tidy() {
                    self.notes.push(format!("an old checkpoint stays: {e}"));
                }
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
        folder.write_chat_template(self.resolved.config.data.chat_template.as_deref())?;
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
}

/// Deletes checkpoints after `step`; returns a note that names them.
fn delete_later_checkpoints(dir: &Path, step: u64) -> Result<Option<String>> {
    let later = checkpoint::remove_after(&dir.join(CHECKPOINTS), step)?;
    let names: Vec<String> = later.into_iter().map(checkpoint::folder_name).collect();
    Ok((!names.is_empty()).then(|| format!("checkpoints after the best were deleted: {}", names.join(", "))))
}
