//! Results that are rejected, and what `fault.on_bad_step` does about one that is the same when it is run again.

use super::StepReport;
use super::run::{Observer, Run};
use super::step_runner::Progress;
use crate::config::BadStepPolicy;
use crate::data::Batches;
use crate::events::{self, Event, RerunOutcome};
use crate::{Error, Result};

/// Losses before a spike can be told from them.
const SPIKE_SAMPLES: u64 = 100;
/// Steps in a row that `fault.on_bad_step` may drop.
const MAX_DROPPED: u64 = 10;

impl Run {
    /// What is wrong with a result.
    pub(super) fn rejection(&self, report: &StepReport, goes_on: bool) -> Option<String> {
        let (f, StepReport { loss, grad_norm, .. }) = (&self.resolved.config.fault, report);
        if !goes_on {
            return Some(format!("loss {loss}, gradient norm {grad_norm}"));
        }
        let (most, count) = self.rerun.as_ref().map_or((0.0, 0), |r| r.losses);
        let spike = f.rerun && f.spike > 0.0 && count >= SPIKE_SAMPLES && *loss > f.spike * most;
        spike.then(|| format!("loss {loss} is more than {} times the largest so far, {most}", f.spike))
    }

    /// A result that is wrong and reproducible: `fault.on_bad_step` decides.
    pub(super) fn drop_step(
        &mut self,
        (mut event, why): (events::Rerun, &str),
        last: StepReport,
        progress: Progress,
        data: &dyn Batches,
        observer: &mut dyn Observer,
    ) -> Result<StepReport> {
        let (step, policy) = (last.step, self.resolved.config.fault.on_bad_step);
        // The state before the step: what `replay` starts from, and where `skip` goes on.
        let best = self.trainer.best;
        self.replay(step - 1, data)?;
        let replay = self.save_for_replay(step, data);
        if let Err(e) = &replay {
            observer.warning(&format!("step {step} could not be saved for replay: {e}"));
        }
        let dropped = self.rerun.as_mut().map_or(0, |r| {
            r.dropped += 1;
            r.dropped
        });
        let stops = policy == BadStepPolicy::Stop || dropped >= MAX_DROPPED;
        event.reason = why.into();
        event.outcome = RerunOutcome::Rejected(if stops { BadStepPolicy::Stop } else { policy });
        self.emit(Event::Rerun(event), observer)?;
        if stops {
            let more = if dropped > 1 { format!(" ({dropped} steps in a row)") } else { String::new() };
            return Err(Error::InvalidResult { step, why: format!("{why}{more}"), replay: replay.ok() });
        }
        if policy == BadStepPolicy::Rollback {
            self.replay(0, data)?;
        }
        // The data of what is dropped has been consumed.
        self.trainer.best = best;
        self.trainer.drop_until(progress);
        self.take_base()?;
        Ok(last)
    }
}
