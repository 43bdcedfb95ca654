//! One training step: launched without waiting for the device, and read back when it is done.

use super::Trainer;
use super::overflow::{StateBefore, StepSplits};
use crate::cost::advise;
use crate::data::Batches;
use crate::fault::culprit::{Call, StepCalls};
use crate::fault::sections::StepMarks;
use crate::optimizer::{StepRates, outcome};
use crate::train::cuda_graph::StepTimer;
use crate::train::global_batch::{GlobalBatch, StepSeed};
use crate::train::micro_batch::read_all;
use crate::train::operand_stats::RankOperandStats;
use crate::train::step_faults::StepFaults;
use crate::{Error, Result};
use ferrotron_comm::{PayloadCall, Payloads};
use ferrotron_engine::moe::MoeCounters;
use ferrotron_tensor::trace::{ActivityKind, STEP};
use ferrotron_tensor::{Event, Tensor};

/// A step that was launched and not read back yet.
pub struct InFlightStep {
    step: u64,
    lr: f64,
    tokens: u64,
    samples: u64,
    consumed: u64,
    launched: LaunchedStep,
    /// It is a replay of a CUDA graph.
    is_replayed: bool,
    /// When the device is done with it.
    done: Event,
    /// Times of host and device, where they decide whether a CUDA graph pays.
    timer: Option<StepTimer>,
    /// This rank's operand statistics, where the step collected them.
    operands: Option<Vec<RankOperandStats>>,
    /// Zeros in the gradient, f64 `[1]`, where they are counted.
    num_zeros: Option<Tensor>,
    /// What this rank sent in it, where that is hashed.
    payloads: Option<Payloads>,
    /// The sections of the step, where they are measured.
    sections: Option<StepMarks>,
    /// What its MoE messages had to hold, and the state before it, where split sizes are expected.
    pub(super) splits: Option<StepSplits>,
}

/// The data of a step, read and not launched yet.
pub(in crate::train) struct HostBatch(GlobalBatch);

/// Results of a launched step, on the device.
pub(in crate::train) struct LaunchedStep {
    /// Per micro-batch f32 `[1 + D]`: `Σ weight·loss` of the language model and of each MTP depth.
    pub(in crate::train) losses: Vec<Tensor>,
    /// f32 `[outcome::COUNT]`, see [`outcome`].
    pub(in crate::train) outcome: Tensor,
    /// MoE counters.
    pub(in crate::train) moe_counters: Option<MoeCounters>,
}

/// Metrics of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReport {
    /// Number of the step, from 1.
    pub step: u64,
    /// Mean language-modelling loss over the tokens that have a label.
    pub loss: f64,
    /// Mean loss of each MTP depth.
    pub mtp_losses: Vec<f64>,
    /// Global gradient norm before clipping. If it is not finite, the step was skipped.
    pub grad_norm: f64,
    /// The loss scale of f16 training; loss and norm are unscaled.
    pub loss_scale: Option<f64>,
    /// Elements of the reduced gradient that are zero, where `train.log_num_zeros` asks for the count.
    pub num_zeros: Option<u64>,
    /// Learning rate.
    pub lr: f64,
    /// Tokens in the step.
    pub tokens: u64,
    /// Sequences in the step.
    pub samples: u64,
    /// Tokens of the run so far.
    pub consumed: u64,
}

impl Trainer {
    /// Runs one optimizer step on the next samples of `data`. The loss is the mean over all labels of the step,
    /// whatever micro-batch they are in.
    pub fn train_step(&mut self, data: &dyn Batches) -> Result<StepReport> {
        let step = self.begin_step(data)?;
        self.end_step(step, &mut None)
    }

    /// Launches a step without waiting for the device. The next step may begin before this one is ended, so that the
    /// device never waits for the host.
    pub fn begin_step(&mut self, data: &dyn Batches) -> Result<InFlightStep> {
        let batch = self.read_batch(data)?;
        self.begin_step_on(batch)
    }

    /// Reads the data of the next step. Nothing changes, whether it succeeds or not.
    pub(in crate::train) fn read_batch(&self, data: &dyn Batches) -> Result<HostBatch> {
        let read = || GlobalBatch::read(&self.rank, &self.model.decoder, &self.runner, data);
        Ok(HostBatch(self.runner.sections.read_data(read)?))
    }

    /// [`Trainer::begin_step`] on data that was read before.
    pub(in crate::train) fn begin_step_on(&mut self, batch: HostBatch) -> Result<InFlightStep> {
        self.begin_gemm_choices();
        self.launch(batch.0, false)
    }

    /// Launches the next step; `again`: it was launched before, and its messages did not hold their tokens.
    pub(super) fn launch(&mut self, batch: GlobalBatch, again: bool) -> Result<InFlightStep> {
        let _span = self.rank.compute.span(ActivityKind::Region, STEP, format_args!(""))?;
        let step = self.launch_step(batch, again);
        advise(step, &self.rank, &self.recipe)
    }

    fn launch_step(&mut self, mut batch: GlobalBatch, again: bool) -> Result<InFlightStep> {
        let stats = &self.hooks.operand_stats;
        let collects_stats = stats.begin(self.runner.progress.step + 1, &self.model.step_state);
        // Statistics are of rows that are tokens, and not of the room behind them.
        let before = self.state_before_step(again || collects_stats)?;
        let (rank, runner, hooks) = (&self.rank, &mut self.runner, &mut self.hooks);
        runner.splits.iter().for_each(|splits| hooks.cuda_graph.drop_other_splits(splits));
        if let Some(digest) = &hooks.payload_digests {
            rank.world.record_payloads(&rank.compute, digest.clone());
        }
        batch.count_labels(rank, &self.model.decoder, runner)?;
        let rates = runner.next_rates(batch.samples);
        let calibrates = runner.delayed_scaling.begin(&self.model.step_state);
        // Such a step launches other kernels: it is neither replayed nor timed.
        let reads_counts = before.as_ref().is_some_and(StateBefore::is_exact);
        let is_usual = !(collects_stats || calibrates || reads_counts);
        let mut timer = None;
        // A graph holds the optimizer too, so its replay waits for the copies of a checkpoint as a whole.
        if is_usual && hooks.cuda_graph.may_replay() {
            self.staged.take().map_or(Ok(()), |copied| rank.compute.wait(&copied))?;
        }
        let replayed = match is_usual {
            true => hooks.cuda_graph.run(rank, &mut self.model, &self.optimizer, runner, (&batch, rates))?,
            false => None,
        };
        let is_replayed = replayed.is_some();
        let launched = match replayed {
            Some(launched) => launched,
            None => {
                timer = if is_usual { self.hooks.cuda_graph.timer(&self.rank.compute)? } else { None };
                let micro_batches = batch.micro_batches.len();
                if let Some(faults) = StepFaults::of(&self.hooks.faults, self.step() + 1, micro_batches) {
                    self.inject_before_step(&faults)?;
                }
                let launched = self.launch_eagerly(&batch, rates, timer.as_mut())?;
                timer.iter_mut().for_each(StepTimer::launched);
                launched
            }
        };
        let operands = collects_stats.then(|| self.hooks.operand_stats.collect(&self.model));
        let zeros = || self.optimizer.count_zero_grads(&self.rank, &self.model.grads);
        let num_zeros = self.hooks.counts_zeros.then(zeros).transpose()?;
        self.runner.advance(batch.samples, batch.tokens);
        let (tokens, samples) = (batch.tokens, batch.samples);
        let splits = before.map(|before| self.step_splits(before, batch)).transpose()?;
        let payloads = self.rank.world.take_payloads();
        let sections = self.runner.sections.end(&self.rank)?;
        Ok(InFlightStep {
            step: self.step(),
            lr: rates.lr,
            tokens,
            samples,
            consumed: self.tokens(),
            launched,
            is_replayed,
            done: self.rank.compute.record()?,
            timer,
            operands,
            num_zeros,
            payloads,
            sections,
            splits,
        })
    }

    /// Launches the kernels of a step one by one: all forward and backward passes, then the optimizer.
    fn launch_eagerly(
        &mut self,
        batch: &GlobalBatch,
        rates: StepRates,
        mut timer: Option<&mut StepTimer>,
    ) -> Result<LaunchedStep> {
        let (rank, model, optimizer) = (&self.rank, &mut self.model, &self.optimizer);
        let at = StepSeed { step: self.runner.progress.step, dropout: self.runner.dropout };
        let faults = StepFaults::of(&self.hooks.faults, at.step + 1, batch.micro_batches.len());
        self.hooks.routing.begin(rank, &model.step_state, at.step + 1, &|| batch.local_tokens())?;
        let passes = self.runner.forward_backward(
            rank,
            model,
            optimizer.loss_scale(),
            (batch.micro_batches.len(), faults),
            &mut |rank, decoder, i| {
                timer.iter_mut().for_each(|t| t.micro_batch(i));
                batch.upload(rank, decoder, i, at)
            },
        )?;
        self.hooks.routing.end(rank, &model.step_state, at.step + 1)?;
        self.staged.take().map_or(Ok(()), |copied| rank.compute.wait(&copied))?;
        faults.map_or(Ok(()), |f| f.reduced(rank, model))?;
        let outcome = optimizer.step(rank, &model.params, &model.step_state, &model.grads, rates)?;
        Ok(LaunchedStep { losses: passes.losses, outcome, moe_counters: passes.moe_counters })
    }

    /// Waits for a step, and for nothing that was launched after it, and reads its results. `next` is the step that was
    /// launched after it, if one was: where MoE messages of this one did not hold their tokens, both are launched again.
    pub fn end_step(&mut self, step: InFlightStep, next: &mut Option<InFlightStep>) -> Result<StepReport> {
        let (report, goes_on) = self.finish_step(step, next)?;
        let StepReport { step, loss, grad_norm, .. } = report;
        if goes_on { Ok(report) } else { Err(Error::Diverged { step, loss, grad_norm }) }
    }

    /// [`Trainer::train_step`] whose report may be of a result that is not finite.
    pub fn step_whatever_comes(&mut self, data: &dyn Batches) -> Result<StepReport> {
        let step = self.begin_step(data)?;
        Ok(self.finish_step(step, &mut None)?.0)
    }

    /// [`Trainer::end_step`], and whether the run survives such a result.
    pub(in crate::train) fn finish_step(
        &mut self,
        step: InFlightStep,
        next: &mut Option<InFlightStep>,
    ) -> Result<(StepReport, bool)> {
        let InFlightStep {
            step,
            lr,
            tokens,
            samples,
            consumed,
            launched,
            is_replayed,
            done,
            timer,
            operands,
            num_zeros,
            payloads,
            sections,
            splits,
        } = step;
        let (rank, decoder) = (&self.rank, &self.model.decoder);
        let s = &self.runner.readback;
        s.wait(&done)?;
        let mut losses = vec![0.0; 1 + decoder.config().mtp_depth()];
        for micro_batch in &launched.losses {
            losses.iter_mut().zip(read_all(s, micro_batch)?).for_each(|(sum, x)| *sum += x);
        }
        let outcome = s.download::<f32>(&launched.outcome)?;
        let [grad_norm, scale] = [outcome::NORM, outcome::LOSS_SCALE].map(|i| f64::from(outcome[i]));
        let scale = self.optimizer.loss_scale().map(|s| (scale, f64::from(s.config().min)));
        if let Some((scale, _)) = scale {
            losses.iter_mut().for_each(|loss| *loss /= scale);
        }
        let used = splits.as_ref().map(|splits| self.split_use(splits)).transpose()?;
        let flags = used.as_ref().map_or(Vec::new(), |used| used.flags().into());
        let (losses, flags) = self.runner.all_reduce_with_flags(rank, losses, flags, "loss of the step")?;
        if let (Some(splits), Some(used)) = (splits, used) {
            // Before anything counts this step.
            if used.overflowed(&flags) {
                rank.compute.wait(&s.record()?)?;
                return self.run_with_exact_splits((step, splits), next);
            }
            self.follow_counts(&used, &flags)?;
        }
        let (rank, decoder, s) = (&self.rank, &self.model.decoder, &self.runner.readback);
        let num_zeros = num_zeros.map(|n| s.download::<f64>(&n)).transpose()?.map(|n| n[0] as u64);
        self.hooks.moe_metrics.read(s, &self.model, launched.moe_counters.as_ref())?;
        if is_replayed {
            self.hooks.cuda_graph.replay_ended();
        }
        if let Some(timer) = &timer {
            self.hooks
                .cuda_graph
                .finish_timer(timer, &done, |times| self.runner.mean_of_ranks(rank, times))?;
        }
        self.hooks.sent = payloads.map(|p| p.read(s)).transpose()?.map(|calls| step_calls(step, calls));
        self.runner.sections.ended(sections)?;
        self.last_done = done;
        // The compute stream may reuse the memory of what was read once this event has passed.
        rank.compute.wait(&s.record()?)?;
        // MTP losses carry loss_weight/D in the gradient; the report has their plain means.
        let weight = decoder.mtp().loss_weight / decoder.config().mtp_depth().max(1) as f64;
        let (loss, mtp_losses) = (losses[0], losses[1..].iter().map(|x| x / weight).collect());
        if let Some(mine) = operands {
            self.hooks.operand_stats.gather(rank, decoder.config(), step, mine)?;
        }
        let goes_on = self.runner.continues((step, samples), (loss, grad_norm), scale);
        let loss_scale = scale.map(|(scale, _)| scale);
        let report = StepReport {
            step,
            loss,
            mtp_losses,
            grad_norm,
            loss_scale,
            num_zeros,
            lr,
            tokens,
            samples,
            consumed,
        };
        Ok((report, goes_on))
    }
}

fn step_calls(step: u64, calls: Vec<(PayloadCall, Option<u64>)>) -> StepCalls {
    let call = |(c, digest): (PayloadCall, Option<u64>)| Call {
        group: c.group,
        sequence: c.sequence,
        route: c.route,
        what: format!("{} '{}' of group {}", c.kind.name(), c.label, c.name),
        digest,
    };
    StepCalls { step, calls: calls.into_iter().map(call).collect() }
}
