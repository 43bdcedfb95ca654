//! A run and its folder: resume, steps, evaluation, checkpoints, events, and a clean end when asked to stop.

use super::energy::Energy;
use super::{InFlightStep, StepMetrics, StepReport, Trainer};
use crate::checkpoint::{self, Saver};
use crate::config::{Resolved, STORED_CONFIG};
use crate::cost::Traffic;
use crate::data::Batches;
use crate::events::{self, Event, EventLog};
use crate::{Error, Result};
use ferrotron_comm::ReduceOp;
use ferrotron_engine::Rank;
use ferrotron_tensor::Category;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Hears what a run does, and may ask it to stop.
pub trait Observer {
    /// Something happened; it is in the log already.
    fn event(&mut self, event: &Event);
    /// Should the run save and end after this step?
    fn stop(&self) -> bool;
    /// Is each step to be ended before the next one begins, so that it can be looked at alone?
    fn wants_single_steps(&self) -> bool {
        false
    }
    /// This rank is about to do a step; `left` are to be done, this one included.
    fn before_step(&mut self, _rank: &Rank, _left: u64) -> Result<()> {
        Ok(())
    }
    /// The step is done; nothing follows it yet.
    fn after_step(&mut self, _rank: &Rank, _left: u64) -> Result<()> {
        Ok(())
    }
}

/// Fills the weights of a fresh model.
pub type InitialWeights<'a> = dyn Fn(&Trainer) -> Result<()> + 'a;

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// All steps are done (false: stopped on request, state saved).
    pub finished: bool,
    /// Steps done in this call.
    pub steps: u64,
    /// Tokens of those steps.
    pub tokens: u64,
    /// Seconds of those steps.
    pub seconds: f64,
    /// When the first of them was done.
    pub first: Option<Instant>,
    /// Loss of the last step done, if any was.
    pub loss: Option<f64>,
    /// Last evaluation, if any was.
    pub eval: Option<f64>,
}

/// A training run in a folder.
pub struct Run {
    /// Model, optimizer, counters.
    pub trainer: Trainer,
    /// The recipe, resolved.
    pub resolved: Resolved,
    /// FLOPs of one token, forward and backward.
    pub flops_per_token: f64,
    /// What this rank sent in the last step.
    pub sent: Traffic,
    /// Of the cards, if it is measured.
    energy: Option<Energy>,
    dir: PathBuf,
    /// Writes the folder: on the first rank only.
    writer: Option<RunFolderWriter>,
}

/// What writes into a run's folder.
struct RunFolderWriter {
    log: EventLog,
    saver: Saver,
}

/// Folder of checkpoints inside a run folder.
pub const CHECKPOINTS: &str = "checkpoints";
/// The resolved recipe inside a run folder.
pub const CONFIG: &str = STORED_CONFIG;

impl Run {
    /// Opens the run in `dir`: continues from its newest checkpoint if there is one, else starts fresh.
    /// `initial_weights` fills a fresh model (a Hugging Face folder), else declared initial values are used.
    pub fn open(
        rank: Rank,
        resolved: Resolved,
        dir: &Path,
        initial_weights: Option<&InitialWeights>,
    ) -> Result<Run> {
        let first = rank.world.rank() == 0;
        let together = rank.world.all();
        let wait = |label| together.barrier(label);
        let checkpoints = dir.join(CHECKPOINTS);
        let saver = first.then(|| Run::saver(dir, &resolved)).transpose()?;
        // What a broken-off save left is gone before anybody looks for the newest checkpoint.
        wait("the run folder is ready")?;
        let mut trainer = Trainer::new(rank, &resolved)?;
        let latest = checkpoint::latest(&checkpoints)?;
        match &latest {
            Some(path) => trainer.restore(&checkpoint::load_parallel(path, &together)?)?,
            None => initial_weights.map_or(Ok(()), |fill| fill(&trainer))?,
        }
        wait("the checkpoint is read")?;
        let writer =
            saver.map(|saver| Run::writer(dir, saver, &resolved, &latest, trainer.step())).transpose()?;
        let flops_per_token = resolved.model.flops_per_token(resolved.plan.seq_len as f64)?.total();
        let energy = resolved.config.train.energy.then(|| Energy::new(&trainer.rank)).transpose()?;
        let (sent, dir) = (Traffic::default(), dir.to_path_buf());
        Ok(Run { trainer, resolved, flops_per_token, sent, energy, dir, writer })
    }

    fn saver(dir: &Path, resolved: &Resolved) -> Result<Saver> {
        let io = |e| Error::io_doing(dir, "make the run folder", e);
        std::fs::create_dir_all(dir).map_err(io)?;
        let keep = (resolved.config.checkpoint.keep > 0).then_some(resolved.config.checkpoint.keep as usize);
        Saver::new(&dir.join(CHECKPOINTS), keep)
    }

    fn writer(
        dir: &Path,
        saver: Saver,
        resolved: &Resolved,
        latest: &Option<PathBuf>,
        step: u64,
    ) -> Result<RunFolderWriter> {
        let log = dir.join(events::FILE_NAME);
        let log = match latest {
            Some(_) => {
                saver.tidy()?;
                EventLog::resume(&log, step)?
            }
            None => EventLog::create(&log)?,
        };
        let path = dir.join(CONFIG);
        std::fs::write(&path, resolved.config.to_toml()).map_err(|e| Error::io_doing(&path, "write", e))?;
        Ok(RunFolderWriter { log, saver })
    }

    /// Throws away what a folder holds of a run: checkpoints, log and resolved recipe. Other files stay.
    pub fn discard(dir: &Path) -> Result<()> {
        let gone = |path: PathBuf, result: std::io::Result<()>| match result {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io_doing(&path, "remove", e)),
            _ => Ok(()),
        };
        let checkpoints = dir.join(CHECKPOINTS);
        gone(checkpoints.clone(), std::fs::remove_dir_all(&checkpoints))?;
        for file in [events::FILE_NAME, CONFIG].map(|f| dir.join(f)) {
            gone(file.clone(), std::fs::remove_file(&file))?;
        }
        Ok(())
    }

    /// The run folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Logs an event and tells the observer.
    pub fn emit(&mut self, event: Event, observer: &mut dyn Observer) -> Result<()> {
        if let Some(writer) = &mut self.writer {
            writer.log.write(&event)?;
            observer.event(&event);
        }
        Ok(())
    }

    /// Trains until the recipe's last step, or until the observer asks to stop.
    pub fn train(
        &mut self,
        data: &dyn Batches,
        eval: Option<&dyn Batches>,
        observer: &mut dyn Observer,
    ) -> Result<Outcome> {
        let total = self.resolved.plan.steps;
        let c = self.resolved.config.clone();
        let mut out = Outcome {
            finished: true,
            steps: 0,
            tokens: 0,
            seconds: 0.0,
            first: None,
            loss: None,
            eval: None,
        };
        // One rank on a card gets the next step before the loss of this one is read: it never waits for the host.
        let rank = &self.trainer.rank;
        let ahead = rank.device().gpu().is_some() && rank.world.size() == 1 && !observer.wants_single_steps();
        let mut queued: Option<InFlightStep> = None;
        let mut stopping = false;
        self.energy.iter_mut().for_each(Energy::resume);
        let mut start = Instant::now();
        while queued.is_some() || self.trainer.step() < total {
            let left = total - self.trainer.step() + u64::from(queued.is_some());
            observer.before_step(&self.trainer.rank, left)?;
            let before = Traffic::of(&self.trainer.rank);
            let this = queued.take().map_or_else(|| self.trainer.begin_step(data), Ok)?;
            let step = self.trainer.step();
            let due = |every: u64| every > 0 && step.is_multiple_of(every);
            let between = step == total || due(c.checkpoint.every) || (eval.is_some() && due(c.eval.every));
            if ahead && !between && !stopping {
                queued = Some(self.trainer.begin_step(data)?);
            }
            let report = self.trainer.end_step(this)?;
            self.sent = Traffic::of(&self.trainer.rank).since(&before);
            let seconds = std::mem::replace(&mut start, Instant::now()).elapsed().as_secs_f64();
            observer.after_step(&self.trainer.rank, left)?;
            out.steps += 1;
            out.tokens += report.tokens;
            out.seconds += seconds;
            out.first.get_or_insert(start);
            out.loss = Some(report.loss);
            self.energy.iter_mut().for_each(|e| e.step(report.tokens, seconds));
            let last = report.step == total;
            if last || report.step % c.train.log_every.max(1) == 0 {
                let mut more = self.trainer.take_moe_metrics()?;
                if let Some(energy) = &mut self.energy {
                    more.extend(energy.report(&self.trainer.rank)?);
                }
                self.emit(Event::Step(self.step_event(&report, seconds, more)), observer)?;
            }
            if let Some(seen) = self.trainer.take_statistics() {
                self.emit(Event::Precision(seen), observer)?;
            }
            let mut evaluated = false;
            if let Some(data) = eval
                && c.eval.every > 0
                && (last || report.step % c.eval.every == 0)
            {
                out.eval = Some(self.evaluate(data, c.eval.batches, observer)?);
                evaluated = true;
            }
            stopping = !last && self.agree(observer.stop())?;
            // A step that the card has already is ended first.
            let stop = stopping && queued.is_none();
            let due = c.checkpoint.every > 0 && report.step % c.checkpoint.every == 0;
            if due || stop || (last && c.checkpoint.at_end) {
                self.save(observer)?;
            }
            if stop {
                out.finished = false;
                break;
            }
            if due || evaluated {
                start = Instant::now();
            }
        }
        if let Some(writer) = &mut self.writer {
            writer.saver.finish()?;
        }
        Ok(out)
    }

    /// Does any rank ask for it? All then do it at the same step.
    fn agree(&self, mine: bool) -> Result<bool> {
        let rank = &self.trainer.rank;
        if rank.world.size() == 1 {
            return Ok(mine);
        }
        let asked = rank.compute.upload(&[i32::from(mine)], &[1], Category::Communication)?;
        let all = rank.world.all();
        all.all_reduce(&rank.compute, &asked, ReduceOp::Max, "stop")?;
        Ok(rank.compute.download::<i32>(&asked)?[0] != 0)
    }

    fn evaluate(&mut self, data: &dyn Batches, batches: u64, observer: &mut dyn Observer) -> Result<f64> {
        let micro = self.resolved.plan.micro_batch as u64;
        let per_batch = (self.resolved.config.train.global_batch as u64).div_ceil(micro);
        let micro_batches = (batches * per_batch).max(1);
        self.energy.iter_mut().for_each(Energy::pause);
        let loss = self.trainer.evaluate(data, micro_batches)?;
        self.energy.iter_mut().for_each(Energy::resume);
        let tokens = micro_batches * micro * data.seq() as u64;
        self.emit(Event::Eval(events::Eval { step: self.trainer.step(), loss, tokens }), observer)?;
        Ok(loss)
    }

    /// Hands a copy of the state to the writer; training goes on while it is written.
    fn save(&mut self, observer: &mut dyn Observer) -> Result<()> {
        let start = Instant::now();
        // Every rank brings its share; the first one writes.
        self.energy.iter_mut().for_each(Energy::pause);
        let snapshot = self.trainer.snapshot()?;
        let Some(writer) = &mut self.writer else {
            self.energy.iter_mut().for_each(Energy::resume);
            return Ok(());
        };
        let bytes = snapshot.items.iter().map(|i| i.bytes.len() as u64).sum();
        let step = self.trainer.step();
        writer.log.sync()?;
        writer.saver.save(snapshot)?;
        self.energy.iter_mut().for_each(Energy::resume);
        let path = format!("{CHECKPOINTS}/{}", checkpoint::folder_name(step));
        let seconds = start.elapsed().as_secs_f64();
        self.emit(Event::Checkpoint(events::Checkpoint { step, path, bytes, seconds }), observer)
    }

    fn step_event(&self, r: &StepReport, seconds: f64, more: StepMetrics) -> events::Step {
        let rate = r.tokens as f64 / seconds.max(1e-9);
        events::Step {
            step: r.step,
            loss: r.loss,
            tokens: r.consumed,
            lr: r.lr,
            grad_norm: r.grad_norm,
            loss_scale: r.loss_scale,
            num_zeros: r.num_zeros,
            batch: r.samples,
            seconds,
            tokens_per_s: rate,
            tflops: rate * self.flops_per_token / 1e12,
            memory: self.trainer.rank.device().memory().total_peak as u64,
            sent: self.sent.by_kind(),
            more,
            losses: r.mtp_losses.iter().zip(1..).map(|(x, d)| (format!("mtp_{d} loss"), *x)).collect(),
        }
    }
}
