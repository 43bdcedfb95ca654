//! A model in training on one rank: steps, evaluation, and the snapshot it resumes from to the same bits.

mod overflow;
mod step;

pub(in crate::train) use step::HostBatch;
pub(super) use step::LaunchedStep;
pub use step::{InFlightStep, StepReport};

use super::best_eval::BestEval;
use super::gemm_choices::GemmTable;
use super::hooks::StepHooks;
use super::magnitudes::initialize_magnitudes;
use super::micro_batch::upload;
use super::model_state::{self, ModelState};
use super::moe_metrics::StepMetrics;
use super::record::RunRecord;
use super::split_sizes::ExpectedSplits;
use super::step_runner::{Progress, StepRunner};
use super::{CudaGraphDecision, state};
use crate::Result;
use crate::checkpoint::{Loaded, Snapshot};
use crate::config::Resolved;
use crate::cost::{advise, with_state_offload};
use crate::data::Batches;
use crate::events::Precision;
use crate::optimizer::{LossScale, Optimizer, StateStorage};
use crate::pipeline::Schedule;
use ferrotron_engine::Rank;
use ferrotron_engine::offload::OffloadReport;
use ferrotron_kernels::IGNORE;
use ferrotron_tensor::{Event, Stream};
use std::sync::Arc;

/// Micro-batches of an evaluation on each rank, times pipeline stages, between which a request to stop is heard.
const EVALUATION_PART: u64 = 32;

/// Trains a model on one rank. Each part owns its state: the model with its data-parallel buckets, the optimizer, the
/// step runner with the counters of the run, and the hooks that watch a step.
pub struct Trainer {
    /// This rank: device, streams and process groups.
    pub rank: Rank,
    /// Modules, parameters and gradient buckets.
    pub model: ModelState,
    pub(crate) optimizer: Optimizer,
    pub(super) runner: StepRunner,
    pub(super) hooks: StepHooks,
    /// What it was made of, for the advice of out-of-memory errors.
    recipe: Resolved,
    /// Stream of copies to the host for checkpoints.
    pub(super) staging: Stream,
    /// When the copies of the last checkpoint are done, before which the optimizer must not change its state.
    pub(super) staged: Option<Event>,
    /// When the device was done with the last ended step; of one that ran again, with its last run.
    pub(super) last_done: Event,
    /// Configuration and data of the run it is part of, for its checkpoints.
    pub(super) record: Option<RunRecord>,
    /// Algorithms of its GEMMs, where they are chosen.
    pub(super) gemms: Option<GemmTable>,
    /// The best evaluation so far, where the run goes by it.
    pub best: Option<BestEval>,
}

impl Trainer {
    /// Allocates the model and optimizer of a recipe and draws initial weights.
    pub fn new(rank: Rank, r: &Resolved) -> Result<Trainer> {
        let r = &with_state_offload(r, rank.device().gpu().map(|gpu| gpu.memory))?;
        advise(Trainer::allocate(rank.clone(), r), &rank, r)
    }

    fn allocate(rank: Rank, r: &Resolved) -> Result<Trainer> {
        let rank = Rank { overlap: rank.overlap && r.config.parallel.overlap, ..rank };
        rank.device().set_host_budget(r.config.offload.host_budget.map(|bytes| bytes.0 as usize));
        let hooks = StepHooks::new(&rank, r)?;
        let sharding = model_state::sharding(&rank, r);
        let mut model = ModelState::new(&rank, r, sharding)?;
        let o = &r.config.optimizer;
        let clip = (o.clip > 0.0).then_some(o.clip as f32);
        let loss_scale = r.config.loss_scale().map(|c| LossScale::new(&rank, c)).transpose()?;
        let groups = r.param_groups();
        let offload = &r.config.offload;
        let storage = StateStorage {
            sharding,
            master: o.master_dtype,
            on_host: offload.optimizer.fraction(),
            compute: offload.optimizer_compute,
        };
        let optimizer =
            Optimizer::new(&rank, &model.params, groups, storage, clip)?.with_loss_scale(loss_scale);
        optimizer.initialize(&rank, &model.params, &model.step_state)?;
        initialize_magnitudes(&rank, &model, &optimizer)?;
        let mut runner = StepRunner::new(&rank, r)?;
        if let Some(headroom) = ExpectedSplits::headroom(&rank, r) {
            runner.splits = Some(ExpectedSplits::begin(&rank, &mut model, headroom)?);
        }
        let staging = rank.device().stream("checkpoint")?.with_rank(rank.world.rank());
        let gemms = GemmTable::begin(&rank);
        let last_done = rank.compute.record()?;
        Ok(Trainer {
            rank,
            model,
            optimizer,
            runner,
            hooks,
            recipe: r.clone(),
            staging,
            staged: None,
            last_done,
            record: None,
            gemms,
            best: None,
        })
    }

    /// Moves the data position and counters, as when weights come from elsewhere.
    pub fn set_progress(&mut self, progress: Progress) {
        self.runner.progress = progress;
    }

    /// Counts data up to there as consumed by steps that are dropped: schedules do not advance.
    pub fn drop_until(&mut self, progress: Progress) {
        let samples = progress.samples.saturating_sub(self.runner.progress.samples);
        self.runner.skipped.add(progress.step, samples);
        self.runner.progress = progress;
    }

    /// The pipeline schedule of the next step, made and checked once for all ranks of a simulated job.
    pub(crate) fn set_schedule(&mut self, schedule: Arc<Schedule>) {
        self.runner.set_schedule(schedule);
    }

    /// What the offloading of activations does, once a step has been measured.
    pub fn offload_report(&self) -> Option<OffloadReport> {
        self.runner.offload_report
    }

    /// Whether what is offloaded will not change any more.
    pub fn offload_is_settled(&self) -> bool {
        self.runner.offload_is_settled()
    }

    /// Makes this rank's own work take `percent` longer from now on, as on a slower machine: for tests and drills.
    pub fn slow_down(&self, percent: f64) {
        self.runner.sections.slow_down(percent);
    }

    /// Optimizer steps done.
    pub fn step(&self) -> u64 {
        self.runner.progress.step
    }

    /// Sequences consumed: the data position.
    pub fn samples(&self) -> u64 {
        self.runner.progress.samples
    }

    /// Tokens consumed.
    pub fn tokens(&self) -> u64 {
        self.runner.progress.tokens
    }

    /// Whether a forward pass takes all data-parallel ranks: expert parallelism exchanges tokens between them, and sharded
    /// weights are gathered from them, so all of them need as many forward passes.
    pub fn forward_is_collective(&self) -> bool {
        let exchanges = self.model.decoder.config().moe.is_some() && self.rank.etp_ep_group.size() > 1;
        let gathers = !self.model.params.placement().is_full_size();
        exchanges || gathers
    }

    /// Mean loss over `count` micro-batches of `data`, from its first sample on. Collective.
    pub fn evaluate(&self, data: &dyn Batches, count: u64) -> Result<f64> {
        Ok(self.evaluate_until(data, count, &|| false)?.unwrap_or_default())
    }

    /// [`Trainer::evaluate`], unless `stop` is true on any rank before the end: then there is no loss. It is asked between parts,
    /// so that a request to save and end does not wait for all of a long evaluation.
    pub(super) fn evaluate_until(
        &self,
        data: &dyn Batches,
        count: u64,
        stop: &dyn Fn() -> bool,
    ) -> Result<Option<f64>> {
        let rank = &self.rank;
        // The more stages, the longer it takes to fill the pipeline, and the shorter a micro-batch takes on each.
        let longest = EVALUATION_PART * (rank.dp.size() * rank.pp.size()) as u64;
        let (mut total, mut labels, mut done) = (0.0, 0.0, 0);
        loop {
            let part = longest.min(count - done);
            let (of_part, labels_of_part) = self.evaluate_part(data, done, part)?;
            (total, labels, done) = (total + of_part, labels + labels_of_part, done + part);
            if done == count {
                return Ok(Some(total / f64::max(labels, 1.0)));
            }
            let asked = f64::from(u8::from(stop()));
            if self.runner.all_reduce(&rank.control, vec![asked], "go on evaluating")?[0] > 0.0 {
                return Ok(None);
            }
        }
    }

    /// Sum of the losses of `count` micro-batches from the one numbered `first` on, and their labels. `first` is a multiple of
    /// the data-parallel ranks.
    fn evaluate_part(&self, data: &dyn Batches, first: u64, count: u64) -> Result<(f64, f64)> {
        let rank = &self.rank;
        let (dp_rank, ranks) = (rank.dp.rank() as u64, rank.dp.size() as u64);
        let micro = self.runner.schedules.batch.micro;
        let own = count.saturating_sub(dp_rank).div_ceil(ranks);
        let passes = if self.forward_is_collective() { count.div_ceil(ranks) } else { own } as usize;
        let mut labels = vec![0.0; passes];
        // Each batch is read when its pass begins: the host does not hold them all.
        let total = self.runner.forward_only(rank, &self.model, passes, &mut |rank, decoder, i| {
            let batch = match i as u64 {
                i if i < own => data.batch((first + dp_rank + i * ranks) * micro, micro as usize)?,
                _ => data.batch(0, micro as usize)?.as_padding(),
            };
            labels[i] = batch.labels.iter().filter(|l| **l != IGNORE).count() as f64;
            upload(rank, decoder, &batch, data.seq(), &[1.0], None)
        })?;
        let labels = labels.iter().sum();
        let total = self.runner.all_reduce_from_last_stage(rank, vec![total], "evaluation loss")?[0];
        let labels = self.runner.all_reduce(&rank.dp, vec![labels], "evaluation labels")?[0];
        Ok((total, labels))
    }

    /// Takes the operand statistics of the last ended step, if that step collected them.
    pub fn take_statistics(&mut self) -> Option<Precision> {
        self.hooks.operand_stats.take()
    }

    /// Takes what the MoE layers of the last ended step counted, by event name, as far as `moe.log` asks for it. Every
    /// rank calls it, on stages without MoE layers too.
    pub fn take_moe_metrics(&mut self) -> Result<StepMetrics> {
        self.hooks.moe_metrics.take(&self.rank, &self.model.decoder)
    }

    /// Whether steps are replayed as a CUDA graph, and why.
    pub fn cuda_graph_decision(&self) -> CudaGraphDecision {
        self.hooks.cuda_graph.decision()
    }

    /// Ended steps that were replayed from a CUDA graph. A replay that an overflow undoes is none.
    pub fn steps_replayed(&self) -> u64 {
        self.hooks.cuda_graph.steps_replayed()
    }

    /// True while steps like the last one may still be captured; false once a graph exists or was ruled out.
    pub fn cuda_graph_undecided(&self) -> bool {
        self.hooks.cuda_graph.is_undecided()
    }

    /// Copies this rank's part of a checkpoint to the host: all ranks together have everything that a resumed run needs.
    /// Collective.
    pub fn snapshot(&self) -> Result<Snapshot> {
        state::snapshot(self)
    }

    /// Continues from a checkpoint: weights, optimizer state, counters.
    pub fn restore(&mut self, loaded: &Loaded) -> Result<()> {
        state::restore(self, loaded)
    }
}
