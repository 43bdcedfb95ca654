//! A model in training: one step, evaluation, and the state that makes it resume to the same bits.

use super::memory::{Need, advise};
use super::micro_batch::{InStep, fetch, read_all, upload};
use super::replay::{Policy, Replayed, Watch};
use super::routing::Routing;
use super::statistics::{self, Seen};
use super::{ahead, loads, state};
use crate::checkpoint::{Loaded, Snapshot};
use crate::config::{Resolved, Scaling};
use crate::data::{Batch, Batches};
use crate::events::Precision;
use crate::model::{Decoder, Settings, Stages};
use crate::optimizer::{Kept, LossScale, Optimizer, StepRates, outcome};
use crate::pipeline::{Aim, MicroBatch, Mode, Plan, Schedule, execute};
use crate::schedule::{BatchSchedule, LrSchedule, WdSchedule};
use crate::{Error, Result};
use ferrotron_comm::{Communicator, Reduce};
use ferrotron_engine::flat::{Scheme, bucket_elements};
use ferrotron_engine::moe::Counters;
use ferrotron_engine::{GradBuffer, Params, Pass, Rank, Recompute, precision};
use ferrotron_kernels::IGNORE;
use ferrotron_tensor::{Category, Event, Stream, Tensor};
use std::sync::Arc;

/// Steps without finite gradients, one after the other, that end a run even where they are left out.
const SKIPS: u64 = 10;

/// Model, optimizer and counters.
pub struct Trainer {
    /// The worker.
    pub rank: Rank,
    /// The model.
    pub decoder: Decoder,
    /// Its weights.
    pub params: Params,
    pub(super) optimizer: Optimizer,
    pub(super) grads: GradBuffer,
    pub(super) lr: LrSchedule,
    pub(super) wd: WdSchedule,
    pub(super) batches: BatchSchedule,
    dropout: f32,
    recompute: Recompute,
    need: Need,
    mode: Mode,
    /// Are steps without finite gradients left out, and how many were, one after the other?
    skips: bool,
    skipped: u64,
    /// Where numbers of a step are read while the next one is computed.
    readback: Stream,
    /// The schedule of the last step; most steps have as many micro-batches as the one before.
    schedule: Option<Schedule>,
    pub(super) policy: Policy,
    /// Steps between looks at 8-bit operands; 0: never.
    stats_every: u64,
    /// What the last look saw.
    seen: Option<Precision>,
    /// What the mixtures of the last step that was begun are counting.
    counters: Option<Counters>,
    /// What those of the last step that was ended counted.
    pub(super) counted: Vec<loads::Counted>,
    /// What of it is logged.
    pub(super) wanted: loads::Wanted,
    routing: Routing,
    delayed: bool,
    /// Steps of delayed scaling that only collect magnitudes.
    calibrate: u64,
    /// Steps under delayed scaling, those included.
    pub(super) scaled_steps: u64,
    /// The step as a graph, once it is one.
    pub(super) replayed: Option<Replayed>,
    /// Steps done.
    pub step: u64,
    /// Samples consumed: the data position.
    pub samples: u64,
    /// Tokens consumed.
    pub tokens: u64,
}

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
    /// A fresh model as the recipe says, with its declared initial weights.
    pub fn new(rank: Rank, r: &Resolved) -> Result<Trainer> {
        let policy = Policy::new(&r.config, &rank)?;
        advise(Trainer::allocate(rank.clone(), r, policy), &rank, &Need::of(r))
    }

    fn allocate(rank: Rank, r: &Resolved, policy: Policy) -> Result<Trainer> {
        let rank = Rank { overlap: rank.overlap && r.config.parallel.overlap, ..rank };
        let positions = r.plan.seq_len;
        let settings =
            Settings { policy: narrow(&rank, r)?, mixing: Arc::new(r.mixing()), mtp: r.predicting() };
        let (decoder, specs) = Decoder::new(&rank, &r.model, positions, &stages(r), &settings)?;
        let dtype = r.config.precision.dtype.dtype();
        let copies = rank.copies.size().max(rank.expert_copies.size());
        let bucket = r.config.parallel.bucket.map_or_else(|| bucket_elements(copies), |n| n as usize);
        let params =
            Params::in_buckets(&rank, specs, dtype, bucket)?.with_mixtures(&rank, decoder.mixtures())?;
        let scheme = Scheme::zero(r.config.parallel.zero, copies);
        let clip = (r.config.optimizer.clip > 0.0).then_some(r.config.optimizer.clip as f32);
        let kept = Kept { moments: r.config.optimizer.moments, master: r.config.optimizer.master };
        let rule = state::rule(&r.config.optimizer);
        let loss_scale = r.config.loss_scale().map(|c| LossScale::new(&rank, c)).transpose()?;
        let optimizer = Optimizer::new(&rank, &params, scheme, rule, kept, clip)?.with_loss_scale(loss_scale);
        optimizer.initialise(&rank, &params)?;
        let grads = GradBuffer::of(&params, scheme);
        let (lr, wd, batches) = state::schedules(r)?;
        Ok(Trainer {
            readback: rank.device().stream("readback")?.of_rank(rank.world.rank()),
            rank,
            decoder,
            params,
            optimizer,
            grads,
            lr,
            wd,
            batches,
            dropout: r.config.dropout.hidden as f32,
            recompute: state::recompute(&r.config.train.recompute),
            need: Need::of(r),
            mode: r.config.parallel.schedule.mode(),
            skips: r.config.optimizer.skip_nonfinite,
            skipped: 0,
            schedule: None,
            policy,
            stats_every: r.config.precision.stats_every,
            seen: None,
            counters: None,
            counted: Vec::new(),
            wanted: loads::Wanted::of(&r.config.moe.log.0),
            routing: Routing::new(r)?,
            delayed: r.config.precision.scaling == Scaling::Delayed,
            calibrate: r.config.precision.calibrate,
            scaled_steps: 0,
            replayed: None,
            step: 0,
            samples: 0,
            tokens: 0,
        })
    }

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
    pub(super) fn passes(
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

    /// What the operands of 8-bit products were like in the last step that was ended, if it was one to look at them.
    pub fn take_statistics(&mut self) -> Option<Precision> {
        self.seen.take()
    }

    /// Watches operands from now on, if this step is one to do so.
    fn begin_look(&self) -> bool {
        let due = self.stats_every > 0 && (self.step + 1).is_multiple_of(self.stats_every);
        if let Some(eight) = self.params.eight().filter(|_| due) {
            eight.watch(true);
        }
        due
    }

    /// Has products stay in full width while scales are not known yet. Says whether they do.
    fn collect_magnitudes(&self) -> bool {
        let Some(eight) = self.params.eight() else { return false };
        eight.collect_only(self.scaled_steps < self.calibrate);
        eight.is_collecting()
    }

    /// Does the recipe scale by earlier steps?
    pub(super) fn is_delayed(&self) -> bool {
        self.delayed
    }

    /// This step's schedule.
    fn plan(&mut self, micro_batches: usize) -> Result<Schedule> {
        match self.schedule.take() {
            Some(s) if s.shape.micro_batches == micro_batches => Ok(s),
            _ => Plan { mode: self.mode, ..self.plan_of(micro_batches) }.schedule(),
        }
    }

    fn plan_of(&self, micro_batches: usize) -> Plan {
        let placement = self.decoder.placement();
        Plan::new(placement.pp(), placement.vp(), micro_batches)
    }

    /// Numbers of the last stage, summed over the ranks that have other tokens, on every rank.
    fn over_ranks(&self, mine: Vec<f64>, label: &'static str) -> Result<Vec<f64>> {
        let copies = sums(&self.rank.copies, &self.readback, mine, label)?;
        // All but the last stage bring nothing.
        sums(&self.rank.pp, &self.readback, copies, label)
    }

    /// Mean loss over `count` micro-batches of `data`, from its first sample on.
    pub fn evaluate(&self, data: &dyn Batches, count: u64) -> Result<f64> {
        let (turn, ranks) = (self.rank.dp.rank() as u64, self.rank.dp.size() as u64);
        let micro = self.batches.micro as usize;
        let mut batches = (turn..count)
            .step_by(ranks as usize)
            .map(|i| data.batch(i * self.batches.micro, micro))
            .collect::<Result<Vec<_>>>()?;
        // Experts get tokens of ranks with other data: all of these make as many passes.
        let together = self.decoder.config().moe.is_some() && self.rank.experts.size() > 1;
        if together && (batches.len() as u64) < count.div_ceil(ranks) {
            batches.push(data.batch(0, micro)?.as_padding());
        }
        let mut total = 0.0;
        self.collect_magnitudes();
        if let Some(eight) = self.params.eight() {
            eight.begin_evaluation();
        }
        if !batches.is_empty() {
            let (rank, decoder) = (&self.rank, &self.decoder);
            let schedule = Plan { mode: Mode::ForwardOnly, ..self.plan_of(batches.len()) }.schedule()?;
            let mut load = |i: usize| upload(rank, decoder, &batches[i], data.seq(), &[1.0], None);
            let pass = Pass { train: false, ..Pass::new(rank, &self.params) };
            let sums = execute(pass, decoder, &schedule, &mut load, Aim::Loss)?;
            total = sums.iter().map(|l| fetch(rank, l)).sum::<Result<f64>>()?;
        }
        if let Some(eight) = self.params.eight() {
            eight.end_evaluation();
        }
        let valid = batches.iter().map(|b| b.labels.iter().filter(|l| **l != IGNORE).count() as f64).sum();
        let total = self.over_ranks(vec![total], "evaluation")?[0];
        let valid = sums(&self.rank.dp, &self.readback, vec![valid], "tokens of an evaluation")?[0];
        Ok(total / valid.max(1.0))
    }

    /// A copy of everything a resumed run needs. The model and optimizer go on while it is written.
    pub fn snapshot(&self) -> Result<Snapshot> {
        state::snapshot(self)
    }

    /// Continues from a checkpoint: weights, moments, counters.
    pub fn restore(&mut self, loaded: &Loaded) -> Result<()> {
        state::restore(self, loaded)
    }
}

/// How a recipe cuts its model.
pub(super) fn stages(r: &Resolved) -> Stages {
    Stages { chunks: r.config.parallel.vp, text: r.config.parallel.stages.clone() }
}

/// Which products of a recipe are narrow; an error where the card has no such products.
fn narrow(rank: &Rank, r: &Resolved) -> Result<precision::Policy> {
    let policy = r.policy();
    let real = policy.recipe.is_some_and(|recipe| !recipe.emulated());
    match rank.device().card().filter(|card| real && card.capability < (8, 9)) {
        None => Ok(policy),
        Some(card) => Err(Error::Invalid(format!(
            "precision.scaling = \"{}\": the {} (compute capability {}.{}) has no FP8 products, which begin with 8.9; set \
             precision.scaling = \"none\"",
            r.config.precision.scaling, card.name, card.capability.0, card.capability.1
        ))),
    }
}

/// Numbers summed over the ranks of a group; counts are exact.
fn sums(group: &Communicator, s: &Stream, mine: Vec<f64>, label: &'static str) -> Result<Vec<f64>> {
    if group.size() == 1 {
        return Ok(mine);
    }
    let t = s.upload(&mine, &[mine.len()], Category::Communication)?;
    group.all_reduce(s, &t, Reduce::Sum, label)?;
    Ok(s.download::<f64>(&t)?)
}
