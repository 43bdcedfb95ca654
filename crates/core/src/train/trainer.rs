//! A model in training: what it is made of, its evaluation, and the state that makes it resume to the same bits.

mod step;

pub use step::{InFlightStep, StepReport};

use super::cuda_graph::{CapturedStep, GraphPolicy};
use super::micro_batch::{read_scalar, upload};
use super::routing_replay::RoutingReplay;
use super::{moe_metrics, state};
use crate::checkpoint::{Loaded, Snapshot};
use crate::config::{QuantRecipe, Resolved};
use crate::cost::{MemoryEstimate, advise};
use crate::data::Batches;
use crate::events::Precision;
use crate::model::{Decoder, ModelOptions, PipelineLayout};
use crate::optimizer::{LossScale, Optimizer, StateDtypes};
use crate::pipeline::{PipelinePlan, Schedule, ScheduleKind, StepMode, execute};
use crate::schedule::{BatchSchedule, LrSchedule, WdSchedule};
use crate::{Error, Result};
use ferrotron_comm::{Communicator, ReduceOp};
use ferrotron_engine::data_parallel::{ShardingStrategy, bucket_elements};
use ferrotron_engine::moe::MoeCounters;
use ferrotron_engine::{GradBuffer, Params, Rank, Recompute, StepContext, StepState, quant};
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
    /// Quantization and MoE state of its steps.
    pub step_state: StepState,
    pub(super) optimizer: Optimizer,
    pub(super) grads: GradBuffer,
    pub(super) lr: LrSchedule,
    pub(super) wd: WdSchedule,
    pub(super) batches: BatchSchedule,
    dropout: f32,
    recompute: Recompute,
    memory_estimate: MemoryEstimate,
    schedule_kind: ScheduleKind,
    /// Are steps without finite gradients left out, and how many were, one after the other?
    skip_nonfinite: bool,
    consecutive_skips: u64,
    /// Where numbers of a step are read while the next one is computed.
    readback: Stream,
    /// The schedule of the last step; most steps have as many micro-batches as the one before.
    schedule: Option<Schedule>,
    pub(super) graph_policy: GraphPolicy,
    /// Steps between looks at 8-bit operands; 0: never.
    stats_every: u64,
    /// What the last look saw.
    operand_stats: Option<Precision>,
    /// What the mixtures of the last step that was begun are counting.
    counters: Option<MoeCounters>,
    /// What those of the last step that was ended counted.
    pub(super) moe_counts: Vec<moe_metrics::MoeLayerCounts>,
    /// What of it is logged.
    pub(super) moe_log: moe_metrics::MoeLogOptions,
    routing: RoutingReplay,
    delayed: bool,
    /// Steps of delayed scaling that only collect magnitudes.
    calibrate: u64,
    /// Steps under delayed scaling, those included.
    pub(super) scaled_steps: u64,
    /// The step as a graph, once it is one.
    pub(super) captured: Option<CapturedStep>,
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
        let graph_policy = GraphPolicy::new(&r.config, &rank)?;
        advise(Trainer::allocate(rank.clone(), r, graph_policy), &rank, &MemoryEstimate::of(r)?)
    }

    fn allocate(rank: Rank, r: &Resolved, graph_policy: GraphPolicy) -> Result<Trainer> {
        let rank = Rank { overlap: rank.overlap && r.config.parallel.overlap, ..rank };
        let positions = r.plan.seq_len;
        let options = ModelOptions {
            policy: quant_policy(&rank, r)?,
            moe_training: Arc::new(r.moe_training()),
            mtp: r.mtp_training(),
        };
        let (decoder, specs) = Decoder::new(&rank, &r.model, positions, &stages(r), &options)?;
        let dtype = r.config.precision.dtype.dtype();
        let copies = rank.dp_cp_group.size().max(rank.expert_dp_group.size());
        let bucket = r.config.parallel.bucket.map_or_else(|| bucket_elements(copies), |n| n as usize);
        let params = Params::in_buckets(&rank, specs, dtype, bucket)?;
        let step_state = StepState::new(&rank, params.specs(), decoder.moe_layers())?;
        let scheme = ShardingStrategy::zero(r.config.parallel.zero, copies);
        let clip = (r.config.optimizer.clip > 0.0).then_some(r.config.optimizer.clip as f32);
        let dtypes =
            StateDtypes { moments: r.config.optimizer.state_dtype, master: r.config.optimizer.master_dtype };
        let rule = state::rule(&r.config.optimizer);
        let loss_scale = r.config.loss_scale().map(|c| LossScale::new(&rank, c)).transpose()?;
        let optimizer =
            Optimizer::new(&rank, &params, scheme, rule, dtypes, clip)?.with_loss_scale(loss_scale);
        optimizer.initialise(&rank, &params, &step_state)?;
        let grads = GradBuffer::of(&params, scheme);
        let (lr, wd, batches) = state::schedules(r)?;
        Ok(Trainer {
            readback: rank.device().stream("readback")?.with_rank(rank.world.rank()),
            rank,
            decoder,
            params,
            step_state,
            optimizer,
            grads,
            lr,
            wd,
            batches,
            dropout: r.config.dropout.hidden as f32,
            recompute: r.config.train.recompute.modules(),
            memory_estimate: MemoryEstimate::of(r)?,
            schedule_kind: r.config.parallel.schedule.schedule_kind(),
            skip_nonfinite: r.config.optimizer.skip_nonfinite,
            consecutive_skips: 0,
            schedule: None,
            graph_policy,
            stats_every: r.config.precision.stats_every,
            operand_stats: None,
            counters: None,
            moe_counts: Vec::new(),
            moe_log: moe_metrics::MoeLogOptions::of(&r.config.moe.log.0),
            routing: RoutingReplay::new(r)?,
            delayed: r.config.precision.recipe == QuantRecipe::Fp8Delayed,
            calibrate: r.config.precision.calibrate,
            scaled_steps: 0,
            captured: None,
            step: 0,
            samples: 0,
            tokens: 0,
        })
    }

    /// What the operands of 8-bit products were like in the last step that was ended, if it was one to look at them.
    pub fn take_statistics(&mut self) -> Option<Precision> {
        self.operand_stats.take()
    }

    /// Has products stay in full width while scales are not known yet. Says whether they do.
    fn begin_calibration(&self) -> bool {
        let Some(quant) = self.step_state.quant() else { return false };
        quant.calibrate_only(self.scaled_steps < self.calibrate);
        quant.is_calibrating()
    }

    /// Does the recipe scale by earlier steps?
    pub(super) fn is_delayed(&self) -> bool {
        self.delayed
    }

    /// This step's schedule.
    fn pipeline_schedule(&mut self, micro_batches: usize) -> Result<Schedule> {
        match self.schedule.take() {
            Some(s) if s.shape.micro_batches == micro_batches => Ok(s),
            _ => PipelinePlan { kind: self.schedule_kind, ..self.pipeline_plan(micro_batches) }.schedule(),
        }
    }

    fn pipeline_plan(&self, micro_batches: usize) -> PipelinePlan {
        let placement = self.decoder.placement();
        PipelinePlan::new(placement.pp(), placement.vp(), micro_batches)
    }

    /// Numbers of the last stage, summed over the ranks that have other tokens, on every rank.
    fn sum_over_ranks(&self, mine: Vec<f64>, label: &'static str) -> Result<Vec<f64>> {
        let copies = all_reduce_sums(&self.rank.dp_cp_group, &self.readback, mine, label)?;
        // All but the last stage bring nothing.
        all_reduce_sums(&self.rank.pp, &self.readback, copies, label)
    }

    /// Mean loss over `count` micro-batches of `data`, from its first sample on.
    pub fn evaluate(&self, data: &dyn Batches, count: u64) -> Result<f64> {
        let (dp_rank, ranks) = (self.rank.dp.rank() as u64, self.rank.dp.size() as u64);
        let micro = self.batches.micro as usize;
        let mut batches = (dp_rank..count)
            .step_by(ranks as usize)
            .map(|i| data.batch(i * self.batches.micro, micro))
            .collect::<Result<Vec<_>>>()?;
        // Experts get tokens of ranks with other data: all of these make as many passes.
        let together = self.decoder.config().moe.is_some() && self.rank.etp_ep_group.size() > 1;
        if together && (batches.len() as u64) < count.div_ceil(ranks) {
            batches.push(data.batch(0, micro)?.as_padding());
        }
        let mut total = 0.0;
        self.begin_calibration();
        if let Some(quant) = self.step_state.quant() {
            quant.begin_evaluation();
        }
        if !batches.is_empty() {
            let (rank, decoder) = (&self.rank, &self.decoder);
            let schedule =
                PipelinePlan { kind: ScheduleKind::ForwardOnly, ..self.pipeline_plan(batches.len()) }
                    .schedule()?;
            let mut load = |i: usize| upload(rank, decoder, &batches[i], data.seq(), &[1.0], None);
            let pass = StepContext { train: false, ..StepContext::new(rank, &self.params, &self.step_state) };
            let sums = execute(pass, decoder, &schedule, &mut load, StepMode::Loss)?;
            total = sums.iter().map(|l| read_scalar(rank, l)).sum::<Result<f64>>()?;
        }
        if let Some(quant) = self.step_state.quant() {
            quant.end_evaluation();
        }
        let valid = batches.iter().map(|b| b.labels.iter().filter(|l| **l != IGNORE).count() as f64).sum();
        let total = self.sum_over_ranks(vec![total], "evaluation")?[0];
        let valid =
            all_reduce_sums(&self.rank.dp, &self.readback, vec![valid], "tokens of an evaluation")?[0];
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
pub(super) fn stages(r: &Resolved) -> PipelineLayout {
    PipelineLayout { vp: r.config.parallel.vp, layout: r.config.parallel.stages.clone() }
}

/// Which products of a recipe are narrow; an error where the card has no such products.
fn quant_policy(rank: &Rank, r: &Resolved) -> Result<quant::Policy> {
    let policy = r.policy();
    let real = policy.recipe.is_some_and(|recipe| !recipe.emulated());
    match rank.device().gpu().filter(|card| real && card.capability < (8, 9)) {
        None => Ok(policy),
        Some(card) => Err(Error::Invalid(format!(
            "precision.recipe = \"{}\": the {} (compute capability {}.{}) has no FP8 products, which begin with 8.9; set \
             precision.recipe = \"none\"",
            r.config.precision.recipe, card.name, card.capability.0, card.capability.1
        ))),
    }
}

/// Numbers summed over the ranks of a group; counts are exact.
fn all_reduce_sums(
    group: &Communicator,
    s: &Stream,
    mine: Vec<f64>,
    label: &'static str,
) -> Result<Vec<f64>> {
    if group.size() == 1 {
        return Ok(mine);
    }
    let t = s.upload(&mine, &[mine.len()], Category::Communication)?;
    group.all_reduce(s, &t, ReduceOp::Sum, label)?;
    Ok(s.download::<f64>(&t)?)
}
