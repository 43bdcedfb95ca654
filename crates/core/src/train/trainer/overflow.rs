//! A step whose MoE messages did not hold their tokens: it is undone and launched again with sizes that the host reads.
//!
//! | part of a step | what an overflow does to it |
//! |---|---|
//! | forward, backward | tokens beyond a message are missing: loss and gradients are of no use |
//! | optimizer | the gradient norm is not finite on any rank, so that weights and optimizer state stay |
//! | FP8 scales, expert biases, quantiles | change before the optimizer's part: copies from before the step are put back |
//! | FP8-resident weights | are quantized again from their masters, under those scales |
//! | the step launched after it | the flag stays set, so it is not applied either; it is launched again afterwards |
//!
//! All ranks do so together: the flag is in the all-reduce of the loss.

use super::{InFlightStep, StepReport, Trainer};
use crate::train::global_batch::GlobalBatch;
use crate::train::step_runner::Progress;
use crate::{Error, Result};
use ferrotron_engine::moe::StepCounts;
use ferrotron_tensor::{Category, Tensor};

/// The state before a step, as far as a step changes it that is not applied.
pub(super) struct StateBefore {
    progress: Progress,
    /// Steps under delayed scaling.
    scaled_steps: u64,
    /// The host reads the counts of the step; the same on all ranks.
    exact: bool,
    /// Copies of [`Trainer::step_tensors`], where the step may overflow.
    tensors: Vec<Tensor>,
}

impl StateBefore {
    /// Whether the host reads the counts of the step.
    pub(super) fn is_exact(&self) -> bool {
        self.exact
    }
}

/// A launched step with expected split sizes.
pub(super) struct StepSplits {
    /// Of this rank's MoE layers, if it has any.
    counts: Option<StepCounts>,
    before: StateBefore,
    batch: GlobalBatch,
}

/// What the messages of a step had to hold on this rank.
pub(super) struct SplitUse {
    counts: Vec<usize>,
    overflow: bool,
    unfit: bool,
    /// The host read the counts, and sizes would not have held them.
    missed: bool,
    /// The host read the counts, here or on other ranks.
    exact: bool,
}

impl SplitUse {
    /// What this rank tells the others: whether a message did not hold its tokens, whether sizes should change, and whether they
    /// would not have held what the host counted.
    pub(super) fn flags(&self) -> [bool; 3] {
        [self.overflow, self.unfit, self.missed]
    }

    /// Whether a message of any rank did not hold its tokens. `ranks`: how many have raised each flag.
    pub(super) fn overflowed(&self, ranks: &[f64]) -> bool {
        ranks.first().is_some_and(|n| *n > 0.0)
    }
}

impl Trainer {
    /// Before a step is launched, where split sizes are expected. With `exact` the host reads its counts all the same.
    pub(super) fn state_before_step(&self, exact: bool) -> Result<Option<StateBefore>> {
        let Some(splits) = &self.runner.splits else { return Ok(None) };
        let exact = exact || splits.epoch().is_none();
        if let Some(sizes) = self.split_sizes() {
            sizes.set_exact(exact);
        }
        let s = &self.rank.compute;
        let copy = |(_, t): (String, Tensor)| {
            let copy = Tensor::empty(s, t.shape(), t.dtype(), Category::Workspace)?;
            s.copy(&t, &copy)?;
            Ok(copy)
        };
        let tensors = if exact { Vec::new() } else { self.step_tensors() };
        Ok(Some(StateBefore {
            progress: self.runner.progress,
            scaled_steps: self.runner.delayed_scaling.steps,
            exact,
            tensors: tensors.into_iter().map(copy).collect::<Result<_>>()?,
        }))
    }

    /// After its launch.
    pub(super) fn step_splits(&self, before: StateBefore, batch: GlobalBatch) -> Result<StepSplits> {
        let counts = self.split_sizes().map(|sizes| sizes.step_counts(&self.rank.compute)).transpose()?;
        Ok(StepSplits { counts, before, batch })
    }

    /// Reads what the messages of an ended step had to hold.
    pub(super) fn split_use(&self, splits: &StepSplits) -> Result<SplitUse> {
        let read = splits.counts.as_ref().map(|counts| counts.read(&self.runner.readback)).transpose()?;
        let (counts, overflow) = read.unwrap_or_default();
        let unfit = self.split_sizes().is_some_and(|sizes| sizes.are_unfit(&counts));
        let exact = splits.before.exact;
        let missed = exact && self.split_sizes().is_some_and(|sizes| !sizes.hold(&counts));
        Ok(SplitUse { counts, overflow, unfit, missed, exact })
    }

    /// Remembers the counts of a step, changes sizes where any rank's should, and uses them once they would have held.
    pub(super) fn follow_counts(&mut self, used: &SplitUse, ranks: &[f64]) -> Result<()> {
        if let Some(sizes) = self.split_sizes() {
            sizes.remember(&used.counts);
        }
        if ranks.get(1).is_some_and(|n| *n > 0.0) {
            if let Some(sizes) = self.split_sizes() {
                sizes.set_sizes(&self.rank.compute)?;
            }
            self.runner.splits.iter_mut().for_each(|splits| splits.changed());
        }
        if used.exact {
            let held = ranks.get(2).is_some_and(|n| *n == 0.0);
            self.runner.splits.iter_mut().for_each(|splits| splits.counted(held));
        }
        Ok(())
    }

    /// Undoes step `step`, whose messages did not hold their tokens, and the one launched after it. Launches the first again with
    /// sizes that the host reads, and ends it; then launches `next` again.
    pub(super) fn run_with_exact_splits(
        &mut self,
        (step, splits): (u64, StepSplits),
        next: &mut Option<InFlightStep>,
    ) -> Result<(StepReport, bool)> {
        tracing::info!(
            step,
            "MoE: more tokens than expected were routed to a rank; the step was not applied and runs again with sizes that the \
             host reads; a larger moe.split_headroom makes this rarer"
        );
        let lost =
            || Error::Invalid(format!("the data of step {step} was not kept, and the step must run again"));
        let later = match next.take() {
            Some(later) => Some(later.splits.ok_or_else(lost)?.batch),
            None => None,
        };
        let StepSplits { before, batch, .. } = splits;
        let s = &self.rank.compute;
        for ((_, tensor), copy) in self.step_tensors().iter().zip(&before.tensors) {
            s.copy(copy, tensor)?;
        }
        if let Some(sizes) = self.split_sizes() {
            sizes.clear_overflow(s)?;
        }
        self.runner.progress = before.progress;
        self.runner.delayed_scaling.steps = before.scaled_steps;
        self.runner.splits.iter_mut().for_each(|splits| splits.overflowed());
        if self.model.step_state.quant().is_some_and(|q| q.delayed().is_some()) {
            // A step that is not applied still quantizes FP8-resident weights under its new scales.
            self.model.params.wait_params(&self.rank)?;
            self.optimizer.wait_state(&self.rank)?;
            self.optimizer.sync_params(&self.rank, &self.model.params, &self.model.step_state)?;
        }
        self.return_to_gemm_choices();
        let again = self.launch(batch, true)?;
        let report = self.finish_step(again, &mut None)?;
        if let Some(batch) = later {
            self.begin_gemm_choices();
            *next = Some(self.launch(batch, false)?);
        }
        Ok(report)
    }
}
