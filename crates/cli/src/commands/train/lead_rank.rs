//! What rank 0 does in `train`: it reports progress, logs how the run begins and ends, and writes the summary.

use super::Training;
use super::announce::announce;
use super::sample::sample;
use crate::commands::{next_commands, train_summary};
use crate::format;
use crate::output;
use crate::progress::Progress;
use crate::signal::Signals;
use crate::trace;
use anyhow::Result;
use ferrotron_core::events::{self, Ending, Event, RunEnd};
use ferrotron_core::ranks::StepCount;
use ferrotron_core::train::{Observer, Outcome, Run};
use ferrotron_engine::Rank;
use std::time::Instant;

impl Training<'_> {
    /// Trains on rank 0, which reports progress and writes the summary. However it ends, the log says so.
    pub(super) fn on_lead_rank(self, mut run: Run) -> Result<()> {
        let begin = Instant::now();
        let (total, done) = (run.resolved.plan.steps, run.trainer.step());
        let progress = Progress::new(self.global, total, done, self.recipe.is_set("train.log_every"));
        let mut view = View { progress, signals: self.signals.clone(), total, steps: self.steps };
        let ended = self.train(&mut run, &mut view, begin);
        let goes_on =
            |e: &anyhow::Error| matches!(e.downcast_ref(), Some(ferrotron_core::Error::ChangeRanks));
        if let Err(e) = &ended
            && !goes_on(e)
        {
            let seconds = begin.elapsed().as_secs_f64();
            let (ending, reason) = (Ending::Failed, Some(output::describe(e)));
            let end = RunEnd { step: run.trainer.step(), ending, seconds, tokens_per_s: 0.0, reason };
            // The error at hand is the one to report.
            drop(run.emit(Event::RunEnd(end), &mut view));
        }
        view.progress.finish();
        // From here on there is nothing to finish or save.
        let (outcome, text, traced) = ended?;
        if !self.global.json && outcome.finished {
            let summary = train_summary::text(&run, &outcome, self.global.started, text.as_deref());
            output::print(&format!("{summary}{}", next_commands::text(self.args, self.global, &run)?))?;
        }
        traced.map_or(Ok(()), |t| t.print(self.global))
    }

    /// The run from its first to its last event.
    fn train(&self, run: &mut Run, view: &mut View, begin: Instant) -> Result<Ended> {
        run.epoch_tokens = Some(self.sources.epoch_tokens);
        if let Some(samples) = self.sources.varying {
            run.count_flops_of(samples.mean_length)?;
        }
        let is_new = run.verifying.is_none();
        if is_new {
            announce(run, self.recipe, view, self.global, run.trainer.step())?;
        }
        if !self.global.json && is_new {
            self.sources.notes.iter().for_each(output::note);
        }
        view.progress.start();
        self.signals.set_printer(view.progress.say());
        // The log has it already.
        match (&run.restarted, &run.resumed) {
            (Some(restart), _) => view.event(&Event::Restart(restart.clone())),
            (None, Some(resume)) if is_new => view.event(&Event::Resume(resume.clone())),
            (None, _) => {}
        }
        let (train, eval) = (&*self.sources.train, self.sources.eval.as_deref());
        let (outcome, traced) = self.args.trace.train(run, self.subject(), train, eval, view)?;
        let text = if outcome.finished { sample(run)? } else { None };
        if let Some(text) = &text {
            let prompt = run.resolved.config.generate.prompt.clone().unwrap_or_default();
            let event = events::Sample { step: run.trainer.step(), prompt, text: text.clone() };
            run.emit(Event::Sample(event), view)?;
        }
        let ending = if outcome.finished { Ending::Finished } else { Ending::Interrupted };
        let seconds = begin.elapsed().as_secs_f64();
        let tokens_per_s = outcome.tokens as f64 / seconds;
        let reason = outcome.stopped_early.then(|| early_stop(run)).flatten();
        let end = RunEnd { step: run.trainer.step(), ending, seconds, tokens_per_s, reason };
        run.emit(Event::RunEnd(end), view)?;
        Ok((outcome, text, traced))
    }
}

/// Why early stopping ended a run.
fn early_stop(run: &Run) -> Option<String> {
    let (best, patience) = (run.trainer.best?, run.resolved.config.eval.patience);
    Some(format!(
        "early stopping: the validation loss has not improved for {patience} evaluations; it was {} after step {}",
        format::loss(best.loss),
        best.step
    ))
}

/// Outcome, sample and trace of a run.
type Ended = (Outcome, Option<String>, Option<trace::Summary>);

/// Shows events as progress, and brings requests of signals to the run.
pub(super) struct View<'a> {
    progress: Progress,
    signals: Signals,
    steps: &'a StepCount,
    /// Steps of the run.
    total: u64,
}

impl Observer for View<'_> {
    fn event(&mut self, event: &Event) {
        self.progress.event(event);
    }
    fn stop(&self) -> bool {
        self.signals.stop_requested()
    }
    fn save(&self) -> bool {
        self.signals.take_save_request()
    }
    fn warning(&mut self, what: &str) {
        self.progress.warning(what);
    }
    fn before_step(&mut self, _: &Rank, left: u64) -> ferrotron_core::Result<()> {
        let step = self.total + 1 - left.min(self.total);
        self.signals.set_step(step);
        self.steps.begin(step);
        Ok(())
    }
}
