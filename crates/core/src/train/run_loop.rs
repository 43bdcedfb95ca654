//! The training loop: steps, evaluations and checkpoints, until the last step, a request to stop or an error.

use super::InFlightStep;
use super::energy::Energy;
use super::run::{Observer, Outcome, Run};
use super::run_save::Failure;
use super::trainer::HostBatch;
use crate::cost::Traffic;
use crate::data::Batches;
use crate::events::{self, Event};
use crate::{Error, Result};
use ferrotron_comm::ReduceOp;
use ferrotron_tensor::Category;
use std::time::Instant;

/// A rank's request after a step. All ranks follow the most urgent one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
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
            steps: 0,
            tokens: 0,
            seconds: 0.0,
            first: None,
            loss: None,
            eval: None,
        };
        match self.train_steps(data, eval, observer, &mut out) {
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
        // A single rank on a GPU launches the next step before it reads back this one's loss, so that the GPU never idles.
        let rank = &self.trainer.rank;
        let alone = rank.world.size() == 1;
        let ahead = rank.device().gpu().is_some() && alone && !observer.wants_single_steps();
        let mut queued: Option<InFlightStep> = None;
        // Prefetched data of the next step, or the error of reading it.
        let mut next: Option<Result<HostBatch>> = None;
        // A request that is not done yet; until then no further step is launched.
        let mut pending = Request::GoOn;
        self.energy.iter_mut().for_each(Energy::resume);
        // Steps are timed by the device, from the end of one to the end of the next.
        let mut since = rank.compute.record().map_err(Error::from)?;
        while queued.is_some() || self.trainer.step() < total {
            let left = total - self.trainer.step() + u64::from(queued.is_some());
            observer.before_step(&self.trainer.rank, left)?;
            let before = Traffic::of(&self.trainer.rank);
            let this = match queued.take() {
                Some(step) => step,
                None => {
                    let batch = next.take().unwrap_or_else(|| self.trainer.read_batch(data));
                    let batch = batch.map_err(|error| Failure { error, saveable: alone })?;
                    self.trainer.begin_step_on(batch)?
                }
            };
            let step = self.trainer.step();
            let _span = tracing::error_span!("step", step).entered();
            let due = |every: u64| every > 0 && step.is_multiple_of(every);
            let between = step == total || due(c.checkpoint.every) || (eval.is_some() && due(c.eval.every));
            if ahead && !between && pending == Request::GoOn {
                match self.trainer.read_batch(data) {
                    Ok(batch) => queued = Some(self.trainer.begin_step_on(batch)?),
                    Err(e) => next = Some(Err(e)), // once this step has ended
                }
            }
            let done = this.done().clone();
            let report = self.trainer.end_step(this)?;
            // Collectives of a job that has failed end without a result.
            self.trainer.rank.world.check().map_err(Error::from)?;
            self.sent = Traffic::of(&self.trainer.rank).since(&before);
            let seconds = done.since(&since).map_err(Error::from)?.as_secs_f64();
            since = done;
            tracing::debug!(
                loss = report.loss,
                grad_norm = report.grad_norm,
                lr = report.lr,
                seconds,
                "step done"
            );
            observer.after_step(&self.trainer.rank, left)?;
            out.steps += 1;
            out.tokens += report.tokens;
            out.seconds += seconds;
            out.first.get_or_insert_with(Instant::now);
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
            if let Some(offload) = self.trainer.runner.offload_event.take() {
                self.emit(Event::Offload(offload), observer)?;
            }
            if let Some(seen) = self.trainer.take_statistics() {
                self.emit(Event::Precision(seen), observer)?;
            }
            let mut paused = false;
            if let Some(data) = eval
                && c.eval.every > 0
                && (last || report.step % c.eval.every == 0)
            {
                let loss = self.evaluate(data, c.eval.batches, observer);
                out.eval =
                    Some(loss.map_err(|error| Failure { error, saveable: alone && queued.is_none() })?);
                paused = true;
            }
            if !last {
                if !alone {
                    // Read before the ranks agree, so that all of them save if one has no data.
                    next = Some(self.trainer.read_batch(data));
                }
                let (request, all_idle) = self.agree(request(&next, alone, observer), observer)?;
                pending = pending.max(request);
                self.poll_save(all_idle, observer)?;
            } else {
                self.share_gemms(self.trainer.gemms.is_some(), observer)?;
            }
            // A step that is already launched is ended first.
            let asked = if queued.is_none() { pending } else { Request::GoOn };
            let due = c.checkpoint.every > 0 && report.step % c.checkpoint.every == 0;
            if due || asked > Request::GoOn || (last && c.checkpoint.at_end) {
                self.save(data, observer)?;
                paused = true;
            }
            match asked {
                Request::GoOn => {}
                Request::Save => pending = Request::GoOn,
                Request::Stop => {
                    out.finished = false;
                    break;
                }
                Request::Fail => {
                    self.wait_for_save(observer)?;
                    if let Some(Err(e)) = next {
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
            }
        }
        Ok(())
    }

    /// The most urgent request of any rank, and whether no rank is writing a checkpoint. All then act on it after the same
    /// step. Between steps, too, they share the GEMM algorithms that any of them has chosen.
    fn agree(&mut self, mine: Request, observer: &mut dyn Observer) -> Result<(Request, bool)> {
        let (rank, busy) = (&self.trainer.rank, self.saver.is_busy());
        let has_gemms = self.trainer.has_new_gemm_choices();
        if rank.world.size() == 1 {
            self.share_gemms(has_gemms, observer)?;
            return Ok((mine, !busy));
        }
        let mine = [mine as i32, i32::from(has_gemms), i32::from(busy)];
        let asked = rank.compute.upload(&mine, &[mine.len()], Category::Communication)?;
        let all = rank.world.all();
        all.all_reduce(&rank.compute, &asked, ReduceOp::Max, "stop")?;
        let most = rank.compute.download::<i32>(&asked)?;
        self.share_gemms(most[1] > 0, observer)?;
        let known = [Request::Save, Request::Stop, Request::Fail];
        Ok((known.into_iter().find(|r| *r as i32 == most[0]).unwrap_or(Request::GoOn), most[2] == 0))
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
        self.energy.iter_mut().for_each(Energy::pause);
        let mut event = events::Eval { step: self.trainer.step(), ..Default::default() };
        let mut evaluate = |data: &dyn Batches, batches: u64| {
            let micro_batches = (batches * per_batch).max(1);
            event.tokens += micro_batches * micro * data.seq() as u64;
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
        self.emit(Event::Eval(event), observer)?;
        Ok(loss)
    }
}

/// This rank's request, before it launches the next step.
fn request(next: &Option<Result<HostBatch>>, alone: bool, observer: &dyn Observer) -> Request {
    let (stop, save) = (observer.stop(), observer.save());
    match next {
        Some(Err(_)) if !alone => Request::Fail,
        _ if stop => Request::Stop,
        _ if save => Request::Save,
        _ => Request::GoOn,
    }
}
