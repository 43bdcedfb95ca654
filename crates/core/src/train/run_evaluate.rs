//! Evaluations of a run: the validation loss, the best one so far, and early stopping.

use super::best_eval::BestEval;
use super::energy::Energy;
use super::run::{Observer, Run};
use crate::Result;
use crate::data::Batches;
use crate::events::{self, Event};
use crate::fault::timeouts::Section;

impl Run {
    /// Keeps the best evaluation; true if its checkpoint is to be kept and this is the best so far. All ranks go by the loss
    /// of rank 0, so that they decide alike.
    pub(super) fn note_evaluation(&mut self, loss: f64) -> Result<bool> {
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

    /// The validation loss over `batches` global batches, as an event of the run too; none if the observer of a rank asks to
    /// stop before it is known.
    pub(super) fn evaluate(
        &mut self,
        data: &dyn Batches,
        batches: u64,
        observer: &mut dyn Observer,
    ) -> Result<Option<f64>> {
        let micro = self.resolved.plan.micro_batch as u64;
        let per_batch = (self.resolved.config.train.global_batch as u64).div_ceil(micro);
        self.enter(Section::Evaluation);
        self.energy.iter_mut().for_each(Energy::pause);
        let mut event = events::Eval { step: self.trainer.step(), ..Default::default() };
        let mut evaluate = |data: &dyn Batches, batches: u64| {
            let micro_batches = (batches * per_batch).max(1);
            event.tokens += data.tokens(0, micro_batches * micro)?;
            self.trainer.evaluate_until(data, micro_batches, &|| observer.stop())
        };
        let members = data.members();
        let mut losses = Vec::new();
        if members.is_empty() {
            losses.push(evaluate(data, batches)?);
        }
        for m in &members {
            // Every member gets its share of the batches, at least one.
            let share = ((batches as f64 * m.weight).round() as u64).max(1);
            let loss = evaluate(m.data, share)?;
            losses.push(loss);
            if loss.is_none() {
                break;
            }
        }
        self.energy.iter_mut().for_each(Energy::resume);
        let Some(losses) = losses.into_iter().collect::<Option<Vec<f64>>>() else { return Ok(None) };
        let weights = members.iter().map(|m| m.weight);
        event.loss = match members.is_empty() {
            true => losses.iter().sum(),
            false => weights.zip(&losses).map(|(weight, loss)| weight * loss).sum(),
        };
        event.members = members.iter().map(|m| m.name.to_owned()).zip(losses).collect();
        let loss = event.loss;
        if self.verifying.is_none_or(|last| event.step >= last) {
            self.emit(Event::Eval(event), observer)?;
        }
        Ok(Some(loss))
    }
}
