//! One step of training: given to the device whole, and read back when it is done.

use super::{Trainer, all_reduce_sums};
use crate::cost::advise;
use crate::data::{Batch, Batches};
use crate::model::Decoder;
use crate::optimizer::{StepRates, outcome};
use crate::pipeline::{MicroBatch, StepMode, execute};
use crate::train::cuda_graph::StepTimer;
use crate::train::micro_batch::{MicroBatchPosition, read_all, upload};
use crate::train::operand_stats::{self, RankOperandStats};
use crate::train::{moe_metrics, mtp};
use crate::{Error, Result};
use ferrotron_engine::moe::MoeCounters;
use ferrotron_engine::{Rank, StepContext};
use ferrotron_tensor::{Event, Tensor};

/// Steps without finite gradients, one after the other, that end a run even where they are left out.
const MAX_CONSECUTIVE_SKIPS: u64 = 10;

/// A step that the device has been given.
pub struct InFlightStep {
    step: u64,
    losses: Vec<Tensor>,
    /// See [`outcome`].
    outcome: Tensor,
    lr: f64,
    tokens: u64,
    samples: u64,
    consumed: u64,
    done: Event,
    /// When the card began, where its time is to be compared with the host's.
    timer: Option<StepTimer>,
    /// What its operands were like on this rank, where they were looked at.
    operands: Option<Vec<RankOperandStats>>,
    /// What its mixtures count.
    counters: Option<MoeCounters>,
}

/// What a step reports.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReport {
    /// Its number, from 1.
    pub step: u64,
    /// Mean loss over the tokens that have one.
    pub loss: f64,
    /// The same of each prediction further ahead.
    pub mtp_losses: Vec<f64>,
    /// Global gradient norm before clipping. Where it is not finite, the step was left out.
    pub grad_norm: f64,
    /// The factor that was on the loss, where there is one; loss and norm are without it.
    pub loss_scale: Option<f64>,
    /// Learning rate used.
    pub lr: f64,
    /// Tokens in the step.
    pub tokens: u64,
    /// Samples in the step.
    pub samples: u64,
    /// Tokens of the run so far.
    pub consumed: u64,
}

impl Trainer {
    /// One optimizer step on the next samples of `data`. The loss is the mean over all tokens of the step
    /// that have a label, whatever micro-batch they are in.
    pub fn train_step(&mut self, data: &dyn Batches) -> Result<StepReport> {
        let step = self.begin_step(data)?;
        self.end_step(step)
    }

    /// Gives a whole step to the device, without waiting for any of it. The next may be begun before this one is ended,
    /// so that the device never waits for the host.
    pub fn begin_step(&mut self, data: &dyn Batches) -> Result<InFlightStep> {
        let step = self.launch_step(data);
        advise(step, &self.rank, &self.memory_estimate)
    }

    fn launch_step(&mut self, data: &dyn Batches) -> Result<InFlightStep> {
        // Ranks with other data take turns: of every `micro·dp` samples in a row, each has its `micro`.
        let (dp_rank, ranks) = (self.rank.dp.rank() as u64, self.rank.dp.size() as u64);
        let count = self.batches.at(self.samples, ranks)?.count;
        let micro = self.batches.micro as usize;
        let batches = (0..count)
            .map(|i| data.batch(self.samples + (i * ranks + dp_rank) * micro as u64, micro))
            .collect::<Result<Vec<_>>>()?;
        let depth = self.decoder.config().mtp_depth();
        let mut valid = vec![0.0; 1 + depth];
        for batch in &batches {
            let counts = mtp::labels(batch, data.seq(), depth)?;
            valid.iter_mut().zip(counts).for_each(|(all, n)| *all += n);
        }
        let valid = all_reduce_sums(&self.rank.dp, &self.readback, valid, "tokens of the step")?;
        let weights = mtp::weights(&valid, self.decoder.mtp().loss_weight);
        let samples = micro as u64 * count * ranks;
        // Rates are those of the samples consumed including this step's: the first step already moves.
        let after = self.samples + samples;
        let rates = StepRates { lr: self.lr.at(after), weight_decay: self.wd.at(after) };
        let (seq, mut timer) = (data.seq(), None);
        // Such steps are not like others: they are given launch by launch, and say nothing of how long others take.
        let (collects_stats, calibrates) = (self.begin_operand_stats(), self.begin_calibration());
        let special = collects_stats || calibrates;
        let replayed = if special { None } else { self.replay(&batches, seq, weights[0], rates)? };
        let (losses, outcome) = match replayed {
            Some(made) => made,
            None => {
                timer = if special { None } else { self.graph_policy.watch(&self.rank.compute)? };
                let (dropout, step) = (self.dropout, self.step);
                let share = 1.0 / (count * ranks).max(1) as f32;
                // The number of a micro-batch's first token in the step.
                let first = |i: usize| (i as u64 * ranks + dp_rank) * (micro * seq) as u64;
                self.begin_routing(&batches, samples as usize * seq, &first)?;
                let losses = self.forward_backward(batches.len(), &mut |rank, decoder, i| {
                    let step = MicroBatchPosition { step, first: first(i), share, dropout };
                    upload(rank, decoder, &batches[i], seq, &weights, Some(step))
                })?;
                if let Some(mixtures) = self.step_state.moe() {
                    self.routing.end(&self.rank, mixtures, step + 1)?;
                }
                let outcome =
                    self.optimizer.step(&self.rank, &self.params, &self.step_state, &self.grads, rates)?;
                timer.iter_mut().for_each(StepTimer::launched);
                (losses, outcome)
            }
        };
        let operands =
            collects_stats.then(|| operand_stats::take_operand_stats(&self.params, &self.step_state));
        let tokens = ranks * batches.iter().map(|b| b.tokens.len() as u64).sum::<u64>();
        self.samples = after;
        self.step += 1;
        self.scaled_steps += u64::from(self.is_delayed());
        self.tokens += tokens;
        let done = self.rank.compute.record()?;
        let (step, consumed, lr) = (self.step, self.tokens, rates.lr);
        let counters = self.counters.take();
        Ok(InFlightStep {
            step,
            losses,
            outcome,
            lr,
            tokens,
            samples,
            consumed,
            done,
            timer,
            operands,
            counters,
        })
    }

    /// Choices of experts that are recorded or replayed, of a step of `tokens` tokens.
    fn begin_routing(&self, batches: &[Batch], tokens: usize, first: &dyn Fn(usize) -> u64) -> Result<()> {
        let Some(mixtures) = self.step_state.moe().filter(|_| !self.routing.is_idle()) else {
            return Ok(());
        };
        let mut needed = vec![false; tokens];
        for (i, batch) in batches.iter().enumerate() {
            let is_token = |t: usize| batch.padding.as_ref().is_none_or(|p| !p[t]);
            let here = needed.iter_mut().skip(first(i) as usize).take(batch.tokens.len());
            here.enumerate().for_each(|(t, n)| *n = is_token(t));
        }
        self.routing.begin(&self.rank, mixtures, self.step + 1, &needed)
    }

    /// Forward and backward of a step's micro-batches, which `load` brings: the loss of each, and in the buffer the
    /// gradients, summed over ranks.
    pub(in crate::train) fn forward_backward(
        &mut self,
        micro_batches: usize,
        load: &mut dyn FnMut(&Rank, &Decoder, usize) -> Result<MicroBatch>,
    ) -> Result<Vec<Tensor>> {
        let schedule = self.pipeline_schedule(micro_batches)?;
        self.grads.begin_step(micro_batches);
        if let Some(quant) = self.step_state.quant() {
            quant.begin_step(self.step, micro_batches);
        }
        if let Some(mixtures) = self.step_state.moe() {
            mixtures.begin_step(&self.rank.compute)?;
        }
        let (rank, decoder) = (&self.rank, &self.decoder);
        let pass = StepContext {
            recompute: self.recompute,
            ..StepContext::new(rank, &self.params, &self.step_state)
        };
        let scale = self.optimizer.loss_scale();
        let mut load = |i: usize| {
            let mut batch = load(rank, decoder, i)?;
            let further = batch.input.mtp.iter_mut().map(|a| &mut a.targets);
            for targets in batch.targets.iter_mut().chain(further) {
                if let Some(scale) = scale {
                    targets.weights = scale.weights(rank, &targets.weights)?;
                }
            }
            Ok(batch)
        };
        let losses = execute(pass, decoder, &schedule, &mut load, StepMode::Train(&mut self.grads))?;
        self.schedule = Some(schedule);
        self.grads.reduce(&self.rank)?;
        if let Some(quant) = self.step_state.quant() {
            quant.end_step(&self.rank)?;
        }
        if let Some(mixtures) = self.step_state.moe() {
            self.counters =
                Some(mixtures.end_step(&self.rank, micro_batches, self.decoder.moe_training())?);
        }
        Ok(losses)
    }

    /// Waits for a step, and for nothing that was begun after it.
    pub fn end_step(&mut self, q: InFlightStep) -> Result<StepReport> {
        let s = &self.readback;
        s.wait(&q.done)?;
        let mut losses = vec![0.0; 1 + self.decoder.config().mtp_depth()];
        for made in &q.losses {
            losses.iter_mut().zip(read_all(s, made)?).for_each(|(sum, x)| *sum += x);
        }
        let outcome = s.download::<f32>(&q.outcome)?;
        let [norm, scale] = [outcome::NORM, outcome::LOSS_SCALE].map(|i| f64::from(outcome[i]));
        let scale = self.optimizer.loss_scale().map(|s| (scale, f64::from(s.config().min)));
        if let Some((scale, _)) = scale {
            losses.iter_mut().for_each(|loss| *loss /= scale);
        }
        if let (Some(counters), Some(mixtures)) = (&q.counters, self.step_state.moe()) {
            self.moe_counts = moe_metrics::read(s, mixtures.specs(), counters)?;
        }
        if let Some(timer) = &q.timer {
            self.graph_policy.finish_timer(timer, &q.done)?;
        }
        // Their memory may be used again now.
        self.rank.compute.wait(&s.record()?)?;
        let losses = self.sum_over_ranks(losses, "loss of the step")?;
        // Means of their own, without the factor they have in the gradient.
        let factor = self.decoder.mtp().loss_weight / self.decoder.config().mtp_depth().max(1) as f64;
        let (loss, mtp_losses) = (losses[0], losses[1..].iter().map(|x| x / factor).collect());
        let InFlightStep { step, lr, tokens, samples, consumed, operands, .. } = q;
        if let Some(mine) = operands {
            self.operand_stats = operand_stats::gather(&self.rank, self.decoder.config(), step, mine)?;
        }
        // The device has changed nothing where the norm is no number, so the run may go on; but not forever. A loss scale
        // that can fall further is to blame before anything else is.
        let to_blame = scale.is_none_or(|(scale, least)| scale <= least);
        self.consecutive_skips =
            if norm.is_finite() { 0 } else { self.consecutive_skips + u64::from(to_blame) };
        let left_out = !norm.is_finite() && (self.skip_nonfinite || scale.is_some());
        let goes_on = left_out && self.consecutive_skips < MAX_CONSECUTIVE_SKIPS;
        if !goes_on && (!loss.is_finite() || !norm.is_finite()) {
            return Err(Error::Diverged { step, loss, grad_norm: norm });
        }
        let loss_scale = scale.map(|(scale, _)| scale);
        Ok(StepReport { step, loss, mtp_losses, grad_norm: norm, loss_scale, lr, tokens, samples, consumed })
    }

    /// Watches operands from now on, if this step is one to do so.
    fn begin_operand_stats(&self) -> bool {
        let due = self.stats_every > 0 && (self.step + 1).is_multiple_of(self.stats_every);
        if let Some(quant) = self.step_state.quant().filter(|_| due) {
            quant.record_stats(true);
        }
        due
    }
}
