//! The training loop: steps, evaluations and checkpoints, until the last step, a request to stop or an error.

use super::best_eval::BestEval;
use super::energy::Energy;
use super::run::{Observer, Outcome, Run};
use super::run_save::Failure;
use super::trainer::HostBatch;
use super::{InFlightStep, StepReport};
use crate::cost::Traffic;
use crate::data::Batches;
use crate::events::{self, Event};
use crate::fault::timeouts::Section;
use crate::{Error, Result};
use std::time::Instant;

/// A rank's request after a step. All ranks follow the most urgent one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
enum Request {
    GoOn,
    /// Save and go on.
    Save,
    /// Save and end.
    Stop,
    /// Save and fail: this rank cannot read its data.
    Fail,
}

impl Run {
    /// Trains until the recipe's last step, or until the observer asks to stop. If data cannot be read, the state of the
    /// last step is saved before the error is returned. Divergence saves nothing: a run resumed there would diverge again.
    pub fn train(
        &mut self,
        data: &dyn Batches,
        eval: Option<&dyn Batches>,
        observer: &mut dyn Observer,
    ) -> Result<Outcome> {
        let mut out = Outcome {
            finished: true,
            stopped_early: false,
            steps: 0,
            tokens: 0,
            seconds: 0.0,
            first: None,
            loss: None,
            eval: None,
        };
        let trained = self.train_steps(data, eval, observer, &mut out);
        self.trainer.rank.world.set_timeout(None);
        match trained {
            Ok(()) => self.finish_saves(out.finished, observer)?,
            Err(failure) => {
                if failure.saveable {
                    self.save_after_error(data, observer);
                }
                return Err(failure.error);
            }
        }
        Ok(out)
    }

    fn train_steps(
        &mut self,
        data: &dyn Batches,
        eval: Option<&dyn Batches>,
        observer: &mut dyn Observer,
        out: &mut Outcome,
    ) -> Result<(), Failure> {
        let total = self.resolved.plan.steps;
        let c = self.resolved.config.clone();
        if self.stops_early() {
            out.stopped_early = true;
            return Ok(());
        }
        let may_skip = c.optimizer.skip_nonfinite || c.loss_scale().is_some();
        let ahead = self.launches_ahead && !observer.wants_single_steps();
        // The step that was launched and not read back yet.
        let mut in_flight: Option<InFlightStep> = None;
        let mut saved = None;
        self.begin_checks()?;
        self.energy.iter_mut().for_each(Energy::resume);
        // Steps are timed by the device, from the end of one to the end of the next.
        let mut since = self.trainer.rank.compute.record().map_err(Error::from)?;
        let mut counted = Traffic::of(&self.trainer.rank);
        while in_flight.is_some() || self.trainer.step() < total {
            let launched = self.trainer.step();
            let due = |every: u64| every > 0 && launched.is_multiple_of(every);
            // A snapshot in memory is of a step whose outcome is known, where that may be to skip it.
            let snapshot_due = due(c.fault.snapshot_every) || self.snapshot_overdue;
            let between = due(c.checkpoint.every)
                || (may_skip && snapshot_due)
                || (eval.is_some() && due(c.eval.every))
                || self.check_is_due(launched);
            let may_launch = launched < total && (in_flight.is_none() || (ahead && !between));
            let mut next = None;
            let mut asked = Request::GoOn;
            let mut unread = None;
            if may_launch {
                let batch = self.trainer.read_batch(data);
                // What was asked for before the first step waits for its end.
                let may_ask = out.steps > 0 || in_flight.is_some();
                asked = self.agree(request(&batch, may_ask, observer), observer)?;
                match batch {
                    Ok(batch) if asked == Request::GoOn => {
                        self.take_snapshot(launched, out.steps == 0 && in_flight.is_none())?;
                        observer.before_step(&self.trainer.rank, total - launched)?;
                        next = Some(self.trainer.begin_step_on(batch)?);
                    }
                    Ok(_) => {}
                    Err(e) => unread = Some(e),
                }
            }
            let mut paused = false;
            if let Some(this) = std::mem::replace(&mut in_flight, next) {
                let done = this.done().clone();
                let report = self.end_checked_step(this, &mut in_flight, data, observer)?;
                // Collectives of a job that has failed end without a result.
                self.trainer.rank.world.check().map_err(Error::from)?;
                let now = Traffic::of(&self.trainer.rank);
                (self.sent, counted) = (now.since(&counted), now);
                let seconds = done.since(&since).map_err(Error::from)?.as_secs_f64();
                since = done;
                self.step_done(&report, seconds, out, observer)?;
                let last = report.step == total;
                let mut is_best = false;
                if let Some(data) = eval
                    && c.eval.every > 0
                    && (last || report.step % c.eval.every == 0)
                {
                    let loss = self.evaluate(data, c.eval.batches, observer);
                    let saveable = self.trainer.rank.world.size() == 1;
                    let loss = loss.map_err(|error| Failure { error, saveable })?;
                    out.eval = Some(loss);
                    is_best = self.note_evaluation(loss)?;
                    out.stopped_early = self.stops_early() && !last;
                    paused = true;
                }
                let ends = last || out.stopped_early;
                if ends {
                    self.share_gemms(self.trainer.gemms.is_some(), observer)?;
                }
                let due = c.checkpoint.every > 0 && report.step % c.checkpoint.every == 0;
                if due || is_best || (ends && c.checkpoint.at_end) {
                    self.save(data, observer)?;
                    (saved, paused) = (Some(report.step), true);
                }
            }
            if out.stopped_early {
                break;
            }
            // Once something is asked for no step is in flight.
            let step = self.trainer.step();
            if asked > Request::GoOn && saved != Some(step) && out.steps > 0 {
                self.save(data, observer)?;
                (saved, paused) = (Some(step), true);
            }
            match asked {
                Request::GoOn | Request::Save => {}
                Request::Stop => {
                    out.finished = false;
                    break;
                }
                Request::Fail => {
                    self.wait_for_save(observer)?;
                    if let Some(e) = unread {
                        return Err(e.into());
                    }
                    // The rank that failed says why.
                    let heard = self.trainer.rank.world.all().barrier("a rank has no data");
                    let unsaid = || Error::Invalid("another rank could not read its data".into());
                    return Err(heard.map_or_else(Error::from, |()| unsaid()).into());
                }
            }
            if paused {
                since = self.trainer.rank.compute.record().map_err(Error::from)?;
                counted = Traffic::of(&self.trainer.rank);
            }
        }
        Ok(())
    }

    /// What ranks wait for now is not a step.
    pub(super) fn enter(&mut self, section: Section) {
        self.trainer.rank.world.set_timeout(self.timeouts.enter(section));
    }

    /// Keeps the best evaluation; true if its checkpoint is to be kept and this is the best so far. All ranks go by the loss
    /// of rank 0, so that they decide alike.
    fn note_evaluation(&mut self, loss: f64) -> Result<bool> {
        let c = &self.resolved.config;
        if !c.checkpoint.best && c.eval.patience == 0 {
            return Ok(false);
        }
        let (rank, runner) = (&self.trainer.rank, &self.trainer.runner);
        let own = if rank.world.rank() == 0 { loss } else { 0.0 };
        let loss = runner.all_reduce(&rank.control, vec![own], "validation loss")?[0];
        let step = self.trainer.step();
        let (best, lowest) = BestEval::after(self.trainer.best, step, loss, c.eval.min_delta);
        self.trainer.best = best;
        Ok(lowest && c.checkpoint.best)
    }

    /// Whether evaluations have not improved for `eval.patience` of them.
    pub fn stops_early(&self) -> bool {
        self.trainer.best.is_some_and(|best| best.exhausts(self.resolved.config.eval.patience))
    }

    /// Counts and reports a step that has ended.
    fn step_done(
        &mut self,
        report: &StepReport,
        seconds: f64,
        out: &mut Outcome,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let (step, total) = (report.step, self.resolved.plan.steps);
        let _span = tracing::error_span!("step", step).entered();
        tracing::debug!(
            loss = report.loss,
            grad_norm = report.grad_norm,
            lr = report.lr,
            seconds,
            "step done"
        );
        observer.after_step(&self.trainer.rank, total + 1 - step.min(total))?;
        self.trainer.rank.world.set_timeout(self.timeouts.step_ended(Instant::now()));
        out.steps += 1;
        out.tokens += report.tokens;
        out.seconds += seconds;
        out.first.get_or_insert_with(Instant::now);
        out.loss = Some(report.loss);
        self.energy.iter_mut().for_each(|e| e.step(report.tokens, seconds));
        if self.verifying.is_some_and(|last| step < last) {
            // Its line is there already.
            self.verified.push(report.clone());
        } else if step == total || step.is_multiple_of(self.resolved.config.train.log_every.max(1)) {
            let mut more = self.trainer.take_moe_metrics()?;
            if let Some(energy) = &mut self.energy {
                more.extend(energy.report(&self.trainer.rank)?);
            }
            self.emit(Event::Step(self.step_event(report, seconds, more)), observer)?;
        }
        if let Some(stragglers) = &mut self.stragglers {
            let times = self.trainer.runner.sections.take();
            for event in stragglers.step(&self.trainer.rank, step, times)? {
                self.emit(event, observer)?;
            }
        }
        if let Some(offload) = self.trainer.runner.offload_event.take() {
            self.emit(Event::Offload(offload), observer)?;
        }
        if let Some(seen) = self.trainer.take_statistics() {
            self.emit(Event::Precision(seen), observer)?;
        }
        Ok(())
    }

    /// Takes the snapshot of `fault.snapshot_every` before the next step is launched, if it is due or `first`, and no rank is
    /// mirroring the last one.
    fn take_snapshot(&mut self, launched: u64, first: bool) -> Result<()> {
        let every = self.resolved.config.fault.snapshot_every;
        let due = every > 0 && (first || self.snapshot_overdue || launched.is_multiple_of(every));
        if due && self.snapshots.newest() != Some(launched) {
            if self.verifies_on_partner() {
                // Snapshots are where verifications begin, not later.
                self.snapshots.finish_mirroring();
                self.mirrors_idle = !self.any_rank(false, "mirrored snapshots")?;
            }
            self.snapshot_overdue = !self.mirrors_idle;
            if self.mirrors_idle {
                self.snapshots.take(&mut self.trainer)?;
            }
        }
        Ok(())
    }

    /// The most urgent request of any rank before a step is launched, on which all then act. At the same time ranks learn
    /// whether none of them is writing a checkpoint any more, and share the GEMM algorithms that any of them has chosen.
    ///
    /// Hosts wait for each other here, while the GPUs compute the step before.
    fn agree(&mut self, mine: Request, observer: &mut dyn Observer) -> Result<Request> {
        const REQUESTS: [Request; 3] = [Request::Fail, Request::Stop, Request::Save];
        let (rank, runner) = (&self.trainer.rank, &self.trainer.runner);
        let busy = self.saver.is_busy();
        let mut mine: Vec<f64> = REQUESTS.iter().map(|r| f64::from(*r == mine)).collect();
        let mirroring = self.snapshots.is_mirroring();
        mine.extend([self.trainer.has_new_gemm_choices(), busy, mirroring].map(f64::from));
        // Numbers of ranks.
        let all = runner.all_reduce(&rank.control, mine, "requests")?;
        let (asking, others) = all.split_at(REQUESTS.len());
        let most = REQUESTS.into_iter().zip(asking).find(|(_, ranks)| **ranks > 0.0);
        self.share_gemms(others[0] > 0.0, observer)?;
        self.mirrors_idle = others[2] == 0.0;
        self.poll_save(others[1] == 0.0, observer)?;
        Ok(most.map_or(Request::GoOn, |(request, _)| request))
    }

    /// Adds newly chosen GEMM algorithms to the run's table, and writes it. Collective.
    fn share_gemms(&mut self, has_new: bool, observer: &mut dyn Observer) -> Result<()> {
        if has_new && self.trainer.share_gemm_choices()? {
            tracing::info!("GEMM algorithms were chosen");
            let writer = self.writer.as_ref().zip(self.trainer.gemms.as_ref());
            if let Some(Err(e)) = writer.map(|(w, table)| w.folder.write_gemm_table(table)) {
                observer.warning(&format!("{e}; the next checkpoint has the GEMM algorithms"));
            }
        }
        Ok(())
    }

    fn evaluate(&mut self, data: &dyn Batches, batches: u64, observer: &mut dyn Observer) -> Result<f64> {
        let micro = self.resolved.plan.micro_batch as u64;
        let per_batch = (self.resolved.config.train.global_batch as u64).div_ceil(micro);
        self.enter(Section::Evaluation);
        self.energy.iter_mut().for_each(Energy::pause);
        let mut event = events::Eval { step: self.trainer.step(), ..Default::default() };
        let mut evaluate = |data: &dyn Batches, batches: u64| {
            let micro_batches = (batches * per_batch).max(1);
            event.tokens += data.tokens(0, micro_batches * micro)?;
            self.trainer.evaluate(data, micro_batches)
        };
        let members = data.members();
        if members.is_empty() {
            event.loss = evaluate(data, batches)?;
        } else {
            // Every member gets its share of the batches, at least one.
            let mut losses = Vec::new();
            for m in &members {
                let share = ((batches as f64 * m.weight).round() as u64).max(1);
                losses.push((m.name.to_owned(), evaluate(m.data, share)?));
            }
            event.loss = members.iter().zip(&losses).map(|(m, (_, loss))| m.weight * loss).sum();
            event.members = losses.into_iter().collect();
        }
        self.energy.iter_mut().for_each(Energy::resume);
        let loss = event.loss;
        if self.verifying.is_none_or(|last| event.step >= last) {
            self.emit(Event::Eval(event), observer)?;
        }
        Ok(loss)
    }
}

/// This rank's request before the step of `batch` is launched.
fn request(batch: &Result<HostBatch>, may_ask: bool, observer: &dyn Observer) -> Request {
    let (stop, save) = if may_ask { (observer.stop(), observer.save()) } else { (false, false) };
    match batch {
        Err(_) => Request::Fail,
        Ok(_) if stop => Request::Stop,
        Ok(_) if save => Request::Save,
        Ok(_) => Request::GoOn,
    }
}
