//! One step of training: given to the device whole, and read back when it is done.

use super::{Trainer, sums};
use crate::data::{Batch, Batches};
use crate::model::Decoder;
use crate::optimizer::{StepRates, outcome};
use crate::pipeline::{Aim, MicroBatch, execute};
use crate::train::memory::advise;
use crate::train::micro_batch::{InStep, read_all, upload};
use crate::train::replay::Watch;
use crate::train::statistics::{self, Seen};
use crate::train::{ahead, loads};
use crate::{Error, Result};
use ferrotron_engine::moe::Counters;
use ferrotron_engine::{Pass, Rank};
use ferrotron_tensor::{Event, Tensor};

/// Steps without finite gradients, one after the other, that end a run even where they are left out.
const SKIPS: u64 = 10;

/// A step that the device has been given.
pub struct Queued {
    step: u64,
    losses: Vec<Tensor>,
    /// See [`outcome`].
    came: Tensor,
    lr: f64,
    tokens: u64,
    samples: u64,
    consumed: u64,
    done: Event,
    /// When the card began, where its time is to be compared with the host's.
    watch: Option<Watch>,
    /// What its operands were like on this rank, where they were looked at.
    operands: Option<Vec<Seen>>,
    /// What its mixtures count.
    counters: Option<Counters>,
}

/// What a step reports.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReport {
    /// Its number, from 1.
    pub step: u64,
    /// Mean loss over the tokens that have one.
    pub loss: f64,
    /// The same of each prediction further ahead.
    pub further: Vec<f64>,
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
        let queued = self.begin_step(data)?;
        self.end_step(queued)
    }

    /// Gives a whole step to the device, without waiting for any of it. The next may be begun before this one is ended,
    /// so that the device never waits for the host.
    pub fn begin_step(&mut self, data: &dyn Batches) -> Result<Queued> {
        let made = self.queue_step(data);
        advise(made, &self.rank, &self.need)
    }

    fn queue_step(&mut self, data: &dyn Batches) -> Result<Queued> {
        // Ranks with other data take turns: of every `micro·dp` samples in a row, each has its `micro`.
        let (turn, ranks) = (self.rank.dp.rank() as u64, self.rank.dp.size() as u64);
        let count = self.batches.at(self.samples, ranks)?.count;
        let micro = self.batches.micro as usize;
        let batches = (0..count)
            .map(|i| data.batch(self.samples + (i * ranks + turn) * micro as u64, micro))
            .collect::<Result<Vec<_>>>()?;
        let depth = self.decoder.config().mtp_depth();
        let mut valid = vec![0.0; 1 + depth];
        for batch in &batches {
            let counts = ahead::labels(batch, data.seq(), depth)?;
            valid.iter_mut().zip(counts).for_each(|(all, n)| *all += n);
        }
        let valid = sums(&self.rank.dp, &self.readback, valid, "tokens of the step")?;
        let weights = ahead::weights(&valid, self.decoder.mtp().factor);
        let samples = micro as u64 * count * ranks;
        // Rates are those of the samples consumed including this step's: the first step already moves.
        let after = self.samples + samples;
        let rates = StepRates { lr: self.lr.at(after), weight_decay: self.wd.at(after) };
        let (seq, mut watch) = (data.seq(), None);
        // Such steps are not like others: they are given launch by launch, and say nothing of how long others take.
        let (looks, collects) = (self.begin_look(), self.collect_magnitudes());
        let special = looks || collects;
        let replayed = if special { None } else { self.replay(&batches, seq, weights[0], rates)? };
        let (losses, came) = match replayed {
            Some(made) => made,
            None => {
                watch = if special { None } else { self.policy.watch(&self.rank.compute)? };
                let (dropout, step) = (self.dropout, self.step);
                let share = 1.0 / (count * ranks).max(1) as f32;
                // The number of a micro-batch's first token in the step.
                let first = |i: usize| (i as u64 * ranks + turn) * (micro * seq) as u64;
                self.begin_routing(&batches, samples as usize * seq, &first)?;
                let losses = self.passes(batches.len(), &mut |rank, decoder, i| {
                    let step = InStep { step, first: first(i), share, dropout };
                    upload(rank, decoder, &batches[i], seq, &weights, Some(step))
                })?;
                if let Some(mixtures) = self.params.mixtures() {
                    self.routing.end(&self.rank, mixtures, step + 1)?;
                }
                let came = self.optimizer.step(&self.rank, &self.params, &self.grads, rates)?;
                watch.iter_mut().for_each(Watch::given);
                (losses, came)
            }
        };
        let operands = looks.then(|| statistics::end_look(&self.params));
        let tokens = ranks * batches.iter().map(|b| b.tokens.len() as u64).sum::<u64>();
        self.samples = after;
        self.step += 1;
        self.scaled_steps += u64::from(self.is_delayed());
        self.tokens += tokens;
        let done = self.rank.compute.record()?;
        let (step, consumed, lr) = (self.step, self.tokens, rates.lr);
        let counters = self.counters.take();
        Ok(Queued { step, losses, came, lr, tokens, samples, consumed, done, watch, operands, counters })
    }

    /// Choices of experts that are recorded or replayed, of a step of `tokens` tokens.
    fn begin_routing(&self, batches: &[Batch], tokens: usize, first: &dyn Fn(usize) -> u64) -> Result<()> {
        let Some(mixtures) = self.params.mixtures().filter(|_| !self.routing.is_idle()) else {
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
    pub(in crate::train) fn passes(
        &mut self,
        micro_batches: usize,
        load: &mut dyn FnMut(&Rank, &Decoder, usize) -> Result<MicroBatch>,
    ) -> Result<Vec<Tensor>> {
        let schedule = self.plan(micro_batches)?;
        self.grads.begin_step(micro_batches);
        if let Some(eight) = self.params.eight() {
            eight.begin_step(self.step, micro_batches);
        }
        if let Some(mixtures) = self.params.mixtures() {
            mixtures.begin_step(&self.rank.compute)?;
        }
        let (rank, decoder) = (&self.rank, &self.decoder);
        let pass = Pass { recompute: self.recompute, ..Pass::new(rank, &self.params) };
        let scale = self.optimizer.loss_scale();
        let mut load = |i: usize| {
            let mut batch = load(rank, decoder, i)?;
            let further = batch.input.ahead.iter_mut().map(|a| &mut a.targets);
            for targets in batch.targets.iter_mut().chain(further) {
                if let Some(scale) = scale {
                    targets.weights = scale.weights(rank, &targets.weights)?;
                }
            }
            Ok(batch)
        };
        let losses = execute(pass, decoder, &schedule, &mut load, Aim::Train(&mut self.grads))?;
        self.schedule = Some(schedule);
        self.grads.reduce(&self.rank)?;
        if let Some(eight) = self.params.eight() {
            eight.end_step(&self.rank)?;
        }
        if let Some(mixtures) = self.params.mixtures() {
            self.counters = Some(mixtures.end_step(&self.rank, micro_batches, self.decoder.mixing())?);
        }
        Ok(losses)
    }

    /// Waits for a step, and for nothing that was begun after it.
    pub fn end_step(&mut self, q: Queued) -> Result<StepReport> {
        let s = &self.readback;
        s.wait(&q.done)?;
        let mut losses = vec![0.0; 1 + self.decoder.config().mtp_depth()];
        for made in &q.losses {
            losses.iter_mut().zip(read_all(s, made)?).for_each(|(sum, x)| *sum += x);
        }
        let came = s.download::<f32>(&q.came)?;
        let [norm, scale] = [outcome::NORM, outcome::LOSS_SCALE].map(|i| f64::from(came[i]));
        let scale = self.optimizer.loss_scale().map(|s| (scale, f64::from(s.config().min)));
        if let Some((scale, _)) = scale {
            losses.iter_mut().for_each(|loss| *loss /= scale);
        }
        if let (Some(counters), Some(mixtures)) = (&q.counters, self.params.mixtures()) {
            self.counted = loads::read(s, mixtures.specs(), counters)?;
        }
        if let Some(watch) = &q.watch {
            self.policy.measured(watch, &q.done)?;
        }
        // Their memory may be used again now.
        self.rank.compute.wait(&s.record()?)?;
        let losses = self.over_ranks(losses, "loss of the step")?;
        // Means of their own, without the factor they have in the gradient.
        let factor = self.decoder.mtp().factor / self.decoder.config().mtp_depth().max(1) as f64;
        let (loss, further) = (losses[0], losses[1..].iter().map(|x| x / factor).collect());
        let Queued { step, lr, tokens, samples, consumed, operands, .. } = q;
        if let Some(mine) = operands {
            self.seen = statistics::joined(&self.rank, self.decoder.config(), step, mine)?;
        }
        // The device has changed nothing where the norm is no number, so the run may go on; but not forever. A loss scale
        // that can fall further is to blame before anything else is.
        let to_blame = scale.is_none_or(|(scale, least)| scale <= least);
        self.skipped = if norm.is_finite() { 0 } else { self.skipped + u64::from(to_blame) };
        let left_out = !norm.is_finite() && (self.skips || scale.is_some());
        let goes_on = left_out && self.skipped < SKIPS;
        if !goes_on && (!loss.is_finite() || !norm.is_finite()) {
            return Err(Error::Diverged { step, loss, grad_norm: norm });
        }
        let loss_scale = scale.map(|(scale, _)| scale);
        Ok(StepReport { step, loss, further, grad_norm: norm, loss_scale, lr, tokens, samples, consumed })
    }

    /// Watches operands from now on, if this step is one to do so.
    fn begin_look(&self) -> bool {
        let due = self.stats_every > 0 && (self.step + 1).is_multiple_of(self.stats_every);
        if let Some(eight) = self.params.eight().filter(|_| due) {
            eight.watch(true);
        }
        due
    }
}
