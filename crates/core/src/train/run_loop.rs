//! The training loop: steps, evaluations and checkpoints, until the last step, a request to stop or an error.

use super::energy::Energy;
use super::run::{Observer, Outcome, Run};
use super::run_requests::{Request, request};
use super::run_save::Failure;
use super::{InFlightStep, StepReport};
use crate::cost::Traffic;
use crate::data::Batches;
use crate::events;
use crate::fault::timeouts::Section;
use crate::{Error, Result};
use ferrotron_tensor::Event;
use std::time::Instant;

/// State of the training loop.
struct TrainLoop<'a> {
    data: &'a dyn Batches,
    eval: Option<&'a dyn Batches>,
    observer: &'a mut dyn Observer,
    out: &'a mut Outcome,
    /// Steps may be launched before the one before them has ended.
    launches_ahead: bool,
    /// The step that was launched and not read back yet.
    in_flight: Option<InFlightStep>,
    /// The last step that the loop has saved.
    saved: Option<u64>,
    /// Something else than a step has taken time.
    paused: bool,
    /// Steps are timed by the device, from the end of one to the end of the next.
    since: Event,
    /// Traffic before the step.
    counted: Traffic,
}

/// Outcome of the attempt to launch a step.
#[derive(Default)]
struct Launch {
    step: Option<InFlightStep>,
    asked: Request,
    /// Why this rank could not read its batch.
    unread: Option<Error>,
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
            peak_memory: [0; 2],
        };
        let trained = self.train_steps(data, eval, observer, &mut out);
        let memory = self.trainer.rank.device().memory();
        out.peak_memory = [memory.total_peak, memory.reserved_peak];
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
        if self.stops_early() {
            out.stopped_early = true;
            return Ok(());
        }
        let launches_ahead = self.launches_ahead && !observer.wants_single_steps();
        self.begin_checks()?;
        self.energy.iter_mut().for_each(Energy::resume);
        let since = self.trainer.rank.compute.record().map_err(Error::from)?;
        let counted = Traffic::of(&self.trainer.rank);
        let mut l = TrainLoop {
            data,
            eval,
            observer,
            out,
            launches_ahead,
            in_flight: None,
            saved: None,
            paused: false,
            since,
            counted,
        };
        while l.in_flight.is_some() || self.trainer.step() < self.resolved.plan.steps {
            let launch = if self.may_launch(&l) { self.launch_next(&mut l)? } else { Launch::default() };
            l.paused = false;
            if let Some(this) = std::mem::replace(&mut l.in_flight, launch.step) {
                self.finish_step(this, &mut l)?;
            }
            if l.out.stopped_early || !self.obey(launch.asked, launch.unread, &mut l)? {
                break;
            }
            if l.paused {
                l.since = self.trainer.rank.compute.record().map_err(Error::from)?;
                l.counted = Traffic::of(&self.trainer.rank);
            }
        }
        Ok(())
    }

    /// Whether the next step may be launched now: beside the one in flight only if nothing comes between them.
    fn may_launch(&self, l: &TrainLoop) -> bool {
        let (c, launched) = (&self.resolved.config, self.trainer.step());
        let due = |every: u64| every > 0 && launched.is_multiple_of(every);
        // A snapshot in memory is of a step whose outcome is known, where that may be to skip it or to run it again.
        let may_skip =
            c.optimizer.skip_nonfinite || c.loss_scale().is_some() || self.trainer.expects_split_sizes();
        let snapshot_due = due(c.fault.snapshot_every) || self.snapshot_overdue;
        let between = due(c.checkpoint.every)
            || (may_skip && snapshot_due)
            || (l.eval.is_some() && due(c.eval.every))
            || self.check_is_due(launched);
        launched < self.resolved.plan.steps && (l.in_flight.is_none() || (l.launches_ahead && !between))
    }

    /// Reads the batch of the next step and launches it, if no rank asks for anything else.
    fn launch_next(&mut self, l: &mut TrainLoop) -> Result<Launch, Failure> {
        let launched = self.trainer.step();
        let batch = self.trainer.read_batch(l.data);
        // What was asked for before the first step waits for its end.
        let may_ask = l.out.steps > 0 || l.in_flight.is_some();
        let asked = self.agree(request(&batch, may_ask, l.observer), l.observer)?;
        let mut launch = Launch { asked, ..Launch::default() };
        match batch {
            Ok(batch) if asked == Request::Continue => {
                self.take_snapshot(launched, l.out.steps == 0 && l.in_flight.is_none())?;
                l.observer.before_step(&self.trainer.rank, self.resolved.plan.steps - launched)?;
                launch.step = Some(self.trainer.begin_step_on(batch)?);
            }
            Ok(_) => {}
            Err(e) => launch.unread = Some(e),
        }
        Ok(launch)
    }

    /// Waits for the end of a step and reports it; then evaluates and saves where that is due.
    fn finish_step(&mut self, this: InFlightStep, l: &mut TrainLoop) -> Result<(), Failure> {
        let report = self.end_checked_step(this, &mut l.in_flight, l.data, l.observer)?;
        // Collectives of a job that has failed end without a result.
        self.trainer.rank.world.check().map_err(Error::from)?;
        let now = Traffic::of(&self.trainer.rank);
        (self.sent, l.counted) = (now.since(&l.counted), now);
        let done = self.trainer.last_done.clone();
        let seconds = done.since(&l.since).map_err(Error::from)?.as_secs_f64();
        l.since = done;
        self.step_done(&report, seconds, l.out, l.observer)?;
        let c = &self.resolved.config;
        let is_due = |every: u64| every > 0 && report.step % every == 0;
        let (eval_due, save_due) = (is_due(c.eval.every), is_due(c.checkpoint.every));
        let (batches, at_end) = (c.eval.batches, c.checkpoint.at_end);
        let last = report.step == self.resolved.plan.steps;
        let mut is_best = false;
        if let Some(data) = l.eval
            && c.eval.every > 0
            && (last || eval_due)
        {
            let loss = self.evaluate(data, batches, l.observer);
            let saveable = self.trainer.rank.world.size() == 1;
            // None: a rank is to stop, which the ranks agree on before the next step.
            if let Some(loss) = loss.map_err(|error| Failure { error, saveable })? {
                l.out.eval = Some(loss);
                is_best = self.note_evaluation(loss)?;
                l.out.stopped_early = self.stops_early() && !last;
            }
            l.paused = true;
        }
        let ends = last || l.out.stopped_early;
        if ends {
            self.share_gemms(self.trainer.gemms.is_some(), l.observer)?;
        }
        if save_due || is_best || (ends && at_end) {
            self.save(l.data, l.observer)?;
            (l.saved, l.paused) = (Some(report.step), true);
        }
        Ok(())
    }

    /// Does what a rank has asked for; whether training goes on. No step is in flight then.
    fn obey(&mut self, asked: Request, unread: Option<Error>, l: &mut TrainLoop) -> Result<bool, Failure> {
        let step = self.trainer.step();
        if asked > Request::Continue && l.saved != Some(step) && l.out.steps > 0 {
            self.save(l.data, l.observer)?;
            (l.saved, l.paused) = (Some(step), true);
        }
        match asked {
            Request::Continue | Request::Save => Ok(true),
            Request::Stop => {
                l.out.finished = false;
                Ok(false)
            }
            Request::Fail => {
                self.wait_for_save(l.observer)?;
                if let Some(e) = unread {
                    return Err(e.into());
                }
                // The rank that failed says why.
                let heard = self.trainer.rank.world.all().barrier("a rank has no data");
                let unsaid = || Error::Invalid("another rank could not read its data".into());
                Err(heard.map_or_else(Error::from, |()| unsaid()).into())
            }
        }
    }

    /// What ranks wait for now is not a step.
    pub(super) fn enter(&mut self, section: Section) {
        self.trainer.rank.world.set_timeout(self.timeouts.enter(section));
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
            self.emit(events::Event::Step(self.step_event(report, seconds, more)), observer)?;
        }
        if let Some(stragglers) = &mut self.stragglers {
            let times = self.trainer.runner.sections.take();
            for event in stragglers.step(&self.trainer.rank, step, times)? {
                self.emit(event, observer)?;
            }
        }
        if let Some(offload) = self.trainer.runner.offload_event.take() {
            self.emit(events::Event::Offload(offload), observer)?;
        }
        if let Some(seen) = self.trainer.take_statistics() {
            self.emit(events::Event::Precision(seen), observer)?;
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
}
