//! A model in training: what it is made of, its evaluation, and the state that makes it resume to the same bits.

mod step;

pub use step::{Queued, StepReport};

use super::memory::{Need, advise};
use super::micro_batch::{fetch, upload};
use super::replay::{Policy, Replayed};
use super::routing::Routing;
use super::{loads, state};
use crate::checkpoint::{Loaded, Snapshot};
use crate::config::{Resolved, Scaling};
use crate::data::Batches;
use crate::events::Precision;
use crate::model::{Decoder, Settings, Stages};
use crate::optimizer::{Kept, LossScale, Optimizer};
use crate::pipeline::{Aim, Mode, Plan, Schedule, execute};
use crate::schedule::{BatchSchedule, LrSchedule, WdSchedule};
use crate::{Error, Result};
use ferrotron_comm::{Communicator, Reduce};
use ferrotron_engine::flat::{Scheme, bucket_elements};
use ferrotron_engine::moe::Counters;
use ferrotron_engine::{GradBuffer, Params, Pass, Rank, Recompute, precision};
use ferrotron_kernels::IGNORE;
use ferrotron_tensor::{Category, Stream};
use std::sync::Arc;

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

    /// What the operands of 8-bit products were like in the last step that was ended, if it was one to look at them.
    pub fn take_statistics(&mut self) -> Option<Precision> {
        self.seen.take()
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
