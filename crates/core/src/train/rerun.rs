//! Running steps again: from a snapshot in memory, on the same data, to the same bits, or to a fault's.
//!
//! | occasion | what is run again |
//! |---|---|
//! | loss or gradient norm not finite, or a spike (`fault.rerun`, `fault.spike`) | the steps since the base |
//! | parameters differ between replicas (`fault.hash_every`) | the same |
//! | a check that is due (`fault.verify_every`), or a checkpoint that is about to be saved | the same |
//!
//! The base is a snapshot of a state that was checked. Everything that ranks sent in those steps, and their state at the end, is
//! compared by digests. Equal: the hardware did what it was told; a result that was rejected is the data's or the program's, and
//! `fault.on_bad_step` decides. Different: a third run decides which of the two was wrong, [`culprit`] whose bits differed first,
//! and the run goes on from the state that two runs agree on.

use super::memory_snapshot::MemorySnapshot;
use super::run::{Observer, Run};
use super::state_digests::exchange;
use super::{InFlightStep, StepReport};
use crate::config::FaultSection;
use crate::data::Batches;
use crate::events::{self, Event, FaultPersistence, RerunOutcome};
use crate::fault::culprit::{Difference, Record, StepCalls, culprit, first_step};
use crate::{Error, Result, fs};
use std::time::Instant;

/// What is known since the last checked state.
pub(super) struct Rerun {
    pub(super) base: MemorySnapshot,
    /// What this rank sent in each step since.
    steps: Vec<StepCalls>,
    /// Largest loss, and number of losses so far.
    pub(super) losses: (f64, u64),
    /// Rejected steps in a row.
    pub(super) dropped: u64,
    /// Transient faults of each rank so far.
    faults: Vec<u64>,
}

/// Steps that were run again.
pub(super) struct Replayed {
    record: Record,
    reports: Vec<StepReport>,
    /// Whether the run survives the last.
    goes_on: bool,
}

impl FaultSection {
    /// Steps between states that become the base: those that are checked.
    fn base_every(&self) -> u64 {
        match (self.verify_every, self.hash_every) {
            (0, 0) => self.snapshot_every.max(1),
            (0, hash) => hash,
            (verify, _) => verify,
        }
    }
}

impl Run {
    /// Takes the first base, where steps may be run again.
    pub(super) fn begin_checks(&mut self) -> Result<()> {
        if self.resolved.config.fault.compares_runs() {
            let base = self.trainer.begin_memory_snapshot(None)?;
            let faults = vec![0; self.trainer.rank.world.size()];
            self.rerun = Some(Rerun { base, steps: Vec::new(), losses: (0.0, 0), dropped: 0, faults });
        }
        Ok(())
    }

    /// Whether a check follows step `step`, so that none is launched before it has ended.
    pub(super) fn check_is_due(&self, step: u64) -> bool {
        let f = &self.resolved.config.fault;
        let due = |every: u64| every > 0 && step.is_multiple_of(every);
        self.rerun.is_some() && (due(f.base_every()) || due(f.hash_every))
    }

    /// Ends a step and checks its result; `next` is the one launched after it, if it was. The report is that of the step as it
    /// counts.
    pub(super) fn end_checked_step(
        &mut self,
        this: InFlightStep,
        next: &mut Option<InFlightStep>,
        data: &dyn Batches,
        observer: &mut dyn Observer,
    ) -> Result<StepReport> {
        if self.rerun.is_none() {
            return self.trainer.end_step(this, next);
        }
        let (mut report, goes_on) = self.trainer.finish_step(this, next)?;
        self.trainer.rank.world.check()?;
        self.keep_calls();
        let step = report.step;
        // The norm is each rank's own: a fault may have changed it on one.
        let rejected = self.rejection(&report, goes_on);
        if self.any_rank(rejected.is_some(), "rejected results")? {
            let why = rejected.unwrap_or_else(|| "another rank rejects the result".into());
            if let Some(later) = next.take() {
                self.trainer.finish_step(later, &mut None)?;
                self.trainer.hooks.sent = None;
            }
            report = self.run_again(&why, Some(report), step, data, observer)?;
        } else if self.check_is_due(step) {
            let f = self.resolved.config.fault.clone();
            let due = |every: u64| every > 0 && step.is_multiple_of(every);
            let differ = due(f.hash_every) && self.replicas_differ()?;
            if due(f.verify_every) && !differ && self.verifies_on_partner() {
                let base = self.rerun.as_ref().map_or(step, |r| r.base.header.step);
                let steps = self.rerun.as_mut().map_or(Vec::new(), |r| std::mem::take(&mut r.steps));
                let own = Record { steps, state: self.trainer.state_digests()? };
                self.verify_on_partner((base, step), own, &report, observer)?;
            } else if differ || due(f.verify_every) {
                let why = if differ { "parameters of replicas differ" } else { "verification" };
                report = self.run_again(why, Some(report), step, data, observer)?;
                if differ && self.replicas_differ()? {
                    let why = "parameters of replicas differ, and differ again".into();
                    return Err(Error::InvalidResult { step, why, replay: None });
                }
            }
            if due(f.base_every()) {
                self.take_base()?;
            }
        }
        if let Some(rerun) = self.rerun.as_mut().filter(|_| report.loss.is_finite()) {
            rerun.losses = (rerun.losses.0.max(report.loss), rerun.losses.1 + 1);
        }
        Ok(report)
    }

    /// Before a save: with `fault.verify_every` only states that were checked are saved.
    pub(super) fn verify_before_save(
        &mut self,
        data: &dyn Batches,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let step = self.trainer.step();
        let unchecked = self.rerun.as_ref().is_some_and(|r| r.base.header.step < step);
        if unchecked && self.resolved.config.fault.verify_every > 0 {
            self.run_again("verification before a save", None, step, data, observer)?;
            // Other processes begin where the last snapshot is.
            if !self.verifies_on_partner() {
                self.take_base()?;
            }
        }
        Ok(())
    }

    fn keep_calls(&mut self) {
        let sent = self.trainer.hooks.sent.take();
        if let Some(rerun) = &mut self.rerun {
            rerun.steps.extend(sent);
        }
    }

    /// The state after the last step becomes the base.
    pub(super) fn take_base(&mut self) -> Result<()> {
        if let Some(rerun) = &mut self.rerun {
            // The old base's memory is the new one's.
            let old = std::mem::replace(&mut rerun.base.buffer, Vec::new().into());
            rerun.base = self.trainer.begin_memory_snapshot(Some(old))?;
            rerun.steps.clear();
        }
        Ok(())
    }

    /// Runs the steps since the base again and compares. `report` is that of the last step, `step`; none if it was reported
    /// already. Returns the report that counts. Collective.
    fn run_again(
        &mut self,
        why: &str,
        report: Option<StepReport>,
        step: u64,
        data: &dyn Batches,
        observer: &mut dyn Observer,
    ) -> Result<StepReport> {
        let start = Instant::now();
        let best = self.trainer.best;
        let steps = self.rerun.as_mut().map_or(Vec::new(), |r| std::mem::take(&mut r.steps));
        let first = Record { steps, state: self.trainer.state_digests()? };
        let second = self.replay(step, data)?;
        // Not before: a step after it may have been launched already.
        let progress = self.trainer.runner.progress;
        let found = self.compare(&first, &second.record)?;
        let outcome = if found.is_some() { RerunOutcome::Different } else { RerunOutcome::Same };
        let base = self.rerun.as_ref().map_or(step, |r| r.base.header.step);
        let mut event = events::Rerun {
            step,
            steps: step - base,
            reason: why.into(),
            outcome,
            seconds: start.elapsed().as_secs_f64(),
        };
        let counts = match found {
            None => second,
            Some((rank, what)) => {
                let third = self.replay(step, data)?;
                let first_wrong = self.compare(&second.record, &third.record)?.is_none();
                let agrees = first_wrong || self.compare(&first, &third.record)?.is_none();
                let fault = self.describe_fault((rank, &what), (step, first_wrong), start)?;
                event.seconds = start.elapsed().as_secs_f64();
                self.emit(Event::Rerun(event.clone()), observer)?;
                self.emit(Event::Fault(fault.clone()), observer)?;
                self.blame(&fault, agrees)?;
                if first_wrong {
                    // What was kept since may hold the fault.
                    self.snapshots.drop_after(base);
                    self.snapshot_overdue = true;
                    self.report_again(&third.reports, report.is_some(), observer)?;
                }
                third
            }
        };
        self.trainer.best = best;
        let last = counts.reports.last().cloned().or(report);
        let Some(last) = last else { return Err(Error::Invalid("no step was run again".into())) };
        if let Some(rerun) = &mut self.rerun {
            rerun.steps = counts.record.steps;
        }
        match self.rejection(&last, counts.goes_on) {
            Some(why) => self.drop_step((event, &why), last, progress, data, observer),
            None => {
                self.rerun.iter_mut().for_each(|r| r.dropped = 0);
                if event.outcome == RerunOutcome::Same {
                    self.emit(Event::Rerun(event), observer)?;
                }
                Ok(last)
            }
        }
    }

    /// Goes back to the base and runs the steps up to `step` again.
    pub(super) fn replay(&mut self, step: u64, data: &dyn Batches) -> Result<Replayed> {
        let Some(rerun) = &mut self.rerun else { return Err(Error::Invalid("nothing to run again".into())) };
        self.trainer.restore_memory_snapshot(&mut rerun.base)?;
        let mut out = Replayed { record: Record::default(), reports: Vec::new(), goes_on: true };
        while self.trainer.step() < step {
            let launched = self.trainer.begin_step(data)?;
            let (report, goes_on) = self.trainer.finish_step(launched, &mut None)?;
            self.trainer.rank.world.check()?;
            out.record.steps.extend(self.trainer.hooks.sent.take());
            out.reports.push(report);
            out.goes_on = goes_on;
        }
        out.record.state = self.trainer.state_digests()?;
        Ok(out)
    }

    /// The rank whose results differ first between two runs, and where; none if no rank's do. The same on all ranks.
    fn compare(&self, a: &Record, b: &Record) -> Result<Option<(usize, Difference)>> {
        let all = &self.trainer.rank.control;
        let differences: Vec<Option<Difference>> = exchange(all, &a.difference(b), "differences")?;
        if differences.iter().all(Option::is_none) {
            return Ok(None);
        }
        let calls = match first_step(&differences) {
            None => Vec::new(),
            Some(step) => {
                let own = a.steps.iter().find(|s| s.step == step).cloned().unwrap_or_default();
                exchange(all, &own, "calls of a step")?
            }
        };
        let rank = culprit(&differences, &calls).unwrap_or(0);
        Ok(differences.into_iter().nth(rank).flatten().map(|what| (rank, what)))
    }

    fn describe_fault(
        &self,
        (rank, what): (usize, &Difference),
        (step, first_run): (u64, bool),
        start: Instant,
    ) -> Result<events::Fault> {
        let device = self.trainer.rank.device();
        let host = fs::host_name().trim_start_matches(" on ").to_string();
        let own = (host, device.gpu().map_or_else(|| "CPU".into(), |gpu| gpu.name.clone()));
        let places: Vec<(String, String)> = exchange(&self.trainer.rank.control, &own, "hosts and devices")?;
        let (host, device) = places.into_iter().nth(rank).unwrap_or_default();
        let (tensor, at_step) = match what {
            Difference::Sent { step, what, .. } => (what.clone(), Some(*step)),
            Difference::State { tensor } => (tensor.clone(), None),
        };
        let fault = FaultPersistence::Transient;
        let (rank, seconds) = (rank as u64, start.elapsed().as_secs_f64());
        Ok(events::Fault { step, fault, rank, host, device, tensor, at_step, first_run, seconds })
    }

    /// Counts a fault of a rank; an error if no two of three runs agree, or if the rank has failed too often.
    fn blame(&mut self, fault: &events::Fault, agrees: bool) -> Result<()> {
        let limit = self.resolved.config.fault.rank_failures;
        let rank = fault.rank as usize;
        let counts = self.rerun.as_mut().and_then(|r| r.faults.get_mut(rank));
        let count = counts.map_or(0, |n| {
            *n += 1;
            *n
        });
        let why = match agrees {
            false => "three runs of the same steps gave three results".to_string(),
            true if count < limit => return Ok(()),
            true => format!("it computed something else {count} times (fault.rank_failures)"),
        };
        let place = format!("{}, {}", fault.host, fault.device);
        Err(Error::FaultyHardware { rank, place, why })
    }

    /// Writes the lines of steps again whose first run was wrong; the last is yet to be written if it is `pending`.
    pub(super) fn report_again(
        &mut self,
        reports: &[StepReport],
        pending: bool,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let every = self.resolved.config.train.log_every.max(1);
        let written = &reports[..reports.len() - usize::from(pending && !reports.is_empty())];
        for report in written.iter().filter(|r| r.step.is_multiple_of(every)) {
            let event = self.step_event(report, 0.0, Default::default());
            self.emit(Event::Step(event), observer)?;
        }
        Ok(())
    }
}
