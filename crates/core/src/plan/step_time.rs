//! Time of a training step under a layout.
//!
//! Layers' times are summed over the chunks of every pipeline stage; the pipeline schedule, with those times, gives the time of
//! all micro-batches; data-parallel communication that backward and forward do not hide, and the optimizer, come on top.

use super::hardware::{GemmDtype, Hardware};
use super::layer_kinds::{LayerKindCost, LayerKinds};
use super::layer_time::{Seconds, cast_bytes, layer_time};
use super::network::GroupSpan;
use crate::Result;
use crate::config::Resolved;
use crate::cost::MemoryEstimate;
use crate::cost::roofline::update_bytes;
use crate::grid::RankLayout;
use crate::model::description::{Group, LayerDescription, ParallelRanks, StepShape};
use crate::model::{PipelineLayout, Stage};
use crate::pipeline::{OpKind as Op, PipelinePlan, ScheduleKind, Timeline};
use ferrotron_comm::OpKind;
use ferrotron_engine::Recompute;
use ferrotron_engine::attention::Layout;
use ferrotron_engine::offload::Link;
use serde::Serialize;

/// A way to run a recipe on a number of GPUs.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// Parallel sizes.
    pub layout: RankLayout,
    /// ZeRO stage.
    pub zero: usize,
    /// Sequences of a micro-batch.
    pub micro_batch: usize,
    /// What backward recomputes.
    pub recompute: Recompute,
    /// The pipeline schedule.
    pub schedule: ScheduleKind,
    /// Operands of quantized GEMMs.
    pub dtype: GemmDtype,
}

/// What is to be planned.
#[derive(Clone, Debug)]
pub struct Workload {
    /// The recipe; its own layout does not matter.
    pub recipe: Resolved,
    /// GPUs.
    pub gpus: usize,
    /// Bytes of a gradient in reduce-scatters.
    pub gradient_bytes: f64,
    /// Whether updated weights are gathered beside the next forward.
    pub overlap_param_gather: bool,
}

/// Seconds of a step, by part. The parts of passes are those of the pipeline rank that is busiest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct StepTime {
    /// All.
    pub total: f64,
    /// Passes of all micro-batches.
    pub passes: Seconds,
    /// Pipeline bubble.
    pub bubble: f64,
    /// Data-parallel communication that is not hidden.
    pub dp: f64,
    /// Optimizer.
    pub optimizer: f64,
    /// Waiting for activations and optimizer state in host memory.
    pub offload: f64,
}

impl Workload {
    /// The step of a candidate on the first rank of a pipeline stage.
    pub fn shape(&self, c: &Candidate, stage: usize) -> Result<StepShape> {
        let mut ranks = ParallelRanks::first_of(&c.layout, self.gpus);
        ranks.pp.rank = stage;
        let placement =
            PipelineLayout { vp: c.layout.vp, layout: None }.place(&self.recipe.model, c.layout.pp)?;
        let stages: Vec<Stage> =
            (0..placement.vp()).filter_map(|chunk| placement.at(stage, chunk).cloned()).collect();
        let mut base = StepShape::of_ranks(&self.recipe, ranks, stages);
        let tokens = c.micro_batch * self.recipe.plan.seq_len / c.layout.cp.max(1);
        base.options.loss.chunk = self.recipe.loss_chunk_with(tokens, c.layout.tp);
        Ok(StepShape {
            micro_batch: Layout::Rows { count: c.micro_batch, len: self.recipe.plan.seq_len },
            micro_batches: self.micro_batches(c),
            recompute: c.recompute,
            zero: c.zero,
            schedule: c.schedule,
            ..base
        })
    }

    /// Micro-batches of a step on each replica.
    pub fn micro_batches(&self, c: &Candidate) -> usize {
        let dp = self.gpus / (c.layout.tp * c.layout.cp * c.layout.pp).max(1);
        (self.recipe.config.train.global_batch / (c.micro_batch * dp).max(1)).max(1)
    }

    /// Tokens of a step.
    pub fn tokens(&self) -> f64 {
        (self.recipe.config.train.global_batch * self.recipe.plan.seq_len) as f64
    }

    /// The time of a step.
    pub fn step_time(&self, hw: &Hardware, c: &Candidate) -> Result<StepTime> {
        let shape = self.shape(c, 0)?;
        let kinds = LayerKinds::of(hw, &shape, c.dtype)?;
        self.step_time_of(hw, c, &shape, &kinds)
    }

    pub(super) fn step_time_of(
        &self,
        hw: &Hardware,
        c: &Candidate,
        shape: &StepShape,
        kinds: &LayerKinds,
    ) -> Result<StepTime> {
        let micro_batches = self.micro_batches(c);
        let chunks = self.chunk_costs(c, kinds)?;
        let busy = |rank: &Vec<LayerKindCost>| {
            rank.iter().fold(Seconds::default(), |sum, k| sum + k.time.total()) * micro_batches as f64
        };
        let busiest =
            chunks.iter().map(busy).max_by(|a, b| a.total().total_cmp(&b.total())).unwrap_or_default();
        let makespan = self.makespan(hw, c, shape, &chunks, micro_batches)?;
        let (mut dp, mut optimizer) = (0.0f64, 0.0f64);
        let replicas = Replicas::of(shape);
        for rank in &chunks {
            dp = dp.max(self.exposed_dp(hw, &replicas, rank, micro_batches));
            optimizer = optimizer.max(self.update_seconds(hw, &replicas, rank, c.dtype));
        }
        let bubble = (makespan - busiest.total()).max(0.0);
        let offload = self.offload_seconds(hw, c, &replicas, &chunks)?;
        let total = makespan + dp + optimizer + offload;
        Ok(StepTime { total, passes: busiest, bubble, dp, optimizer, offload })
    }

    /// Seconds that a step waits for host memory: passes for activations, as the schedule of copies has it, and the update for the
    /// state that it streams both ways at once.
    fn offload_seconds(
        &self,
        hw: &Hardware,
        c: &Candidate,
        replicas: &Replicas,
        chunks: &[Vec<LayerKindCost>],
    ) -> Result<f64> {
        let shape = self.shape(c, 0)?;
        let estimate = MemoryEstimate::of_shapes(&self.recipe, vec![shape.clone()]);
        let rate = hw.host_gb_s * 1e9;
        let seconds = |shape: &StepShape, layer: &LayerDescription| {
            let t = layer_time(hw, shape, layer, c.dtype);
            [t.forward.total(), t.input.total() + t.weight.total()]
        };
        let link = Link { to_host: rate, from_host: rate };
        let stall = estimate.offload_stall(&shape, &seconds, link)? * self.micro_batches(c) as f64;
        let streamed = |rank: &Vec<LayerKindCost>| replicas.updated(rank) * estimate.optimizer_bytes();
        let state = chunks.iter().map(streamed).fold(0.0, f64::max) * estimate.offloaded_state();
        Ok(stall + state / rate)
    }

    /// Costs of the chunks of every pipeline rank.
    pub(super) fn chunk_costs(&self, c: &Candidate, kinds: &LayerKinds) -> Result<Vec<Vec<LayerKindCost>>> {
        let (pp, vp) = (c.layout.pp, c.layout.vp);
        let placement = PipelineLayout { vp, layout: None }.place(&self.recipe.model, pp)?;
        let of = |rank, chunk| {
            placement.at(rank, chunk).map_or_else(LayerKindCost::default, |stage| kinds.stage(stage))
        };
        Ok((0..pp).map(|rank| (0..placement.vp()).map(|chunk| of(rank, chunk)).collect()).collect())
    }

    /// Seconds until the last pipeline rank has ended its passes.
    fn makespan(
        &self,
        hw: &Hardware,
        c: &Candidate,
        shape: &StepShape,
        chunks: &[Vec<LayerKindCost>],
        micro_batches: usize,
    ) -> Result<f64> {
        if chunks.len() == 1 {
            let each: f64 = chunks.iter().flatten().map(|k| k.time.total().total()).sum();
            return Ok(each * micro_batches as f64);
        }
        Ok(self.timeline(hw, c, shape, chunks)?.makespan())
    }

    /// The pipeline schedule in time.
    pub(super) fn timeline(
        &self,
        hw: &Hardware,
        c: &Candidate,
        shape: &StepShape,
        chunks: &[Vec<LayerKindCost>],
    ) -> Result<Timeline> {
        let (pp, vp) = (chunks.len(), chunks.first().map_or(1, Vec::len));
        let micro_batches = self.micro_batches(c);
        let plan = PipelinePlan { kind: c.schedule, ..PipelinePlan::new(pp, vp, micro_batches) };
        let message = self.message_seconds(hw, c, shape, &shape.ranks);
        let cost = |rank: usize, op: crate::pipeline::PipelineOp| {
            let t = &chunks[rank][op.chunk].time;
            let seconds = match op.kind {
                Op::Forward => t.forward.total(),
                Op::Backward => t.input.total() + t.weight.total(),
                Op::BackwardInput => t.input.total(),
                Op::WeightGrad => t.weight.total(),
            };
            seconds.max(1e-9)
        };
        plan.timeline(cost, message)
    }

    /// Seconds of a message between two pipeline stages.
    pub(super) fn message_seconds(
        &self,
        hw: &Hardware,
        c: &Candidate,
        shape: &StepShape,
        ranks: &ParallelRanks,
    ) -> f64 {
        let rows = shape.micro_batch.tokens() / (c.layout.tp * c.layout.cp).max(1);
        let bytes = rows * shape.model.hidden * shape.dtype.size();
        GroupSpan::of(Group::Pp, ranks).seconds(hw, OpKind::SendRecv, bytes as u64)
    }

    /// Seconds of the optimizer on a rank: its update of the rank's shard, and quantization of the weights that its GEMMs read.
    pub(super) fn update_seconds(
        &self,
        hw: &Hardware,
        replicas: &Replicas,
        chunks: &[LayerKindCost],
        dtype: GemmDtype,
    ) -> f64 {
        let elements = replicas.updated(chunks);
        let quantized: f64 = chunks.iter().map(|c| c.quantized).sum();
        let cast = cast_bytes(dtype).map_or(0.0, |[read, written]| read + 2.0 * written);
        (elements * update_bytes(&self.recipe) + quantized * cast) / (hw.memory_gb_s * 1e9)
    }

    /// Seconds of data-parallel communication that a stage's passes do not hide.
    pub(super) fn exposed_dp(
        &self,
        hw: &Hardware,
        replicas: &Replicas,
        chunks: &[LayerKindCost],
        micro_batches: usize,
    ) -> f64 {
        let Replicas { ranks, zero, element: size } = replicas;
        let (zero, size) = (*zero, *size);
        let mut exposed = 0.0;
        let sum = |f: &dyn Fn(&LayerKindCost) -> f64| chunks.iter().map(f).sum::<f64>();
        let forward = sum(&|k| k.time.forward.compute());
        let backward = sum(&|k| k.time.input.compute() + k.time.weight.compute());
        let (mut gather, mut scatter) = (0.0, 0.0);
        for (kind, group) in [(0, Group::DpCp), (1, Group::ExpertDp)] {
            let span = GroupSpan::of(group, ranks);
            if span.size == 1 {
                continue;
            }
            let part = (span.size - 1) as f64 / span.size as f64;
            let trained = sum(&|k| k.trained[kind]);
            let all = sum(&|k| k.params[kind]);
            let of =
                |kind, elements: f64, bytes: f64| span.seconds(hw, kind, (part * elements * bytes) as u64);
            scatter += of(OpKind::ReduceScatter, trained, self.gradient_bytes);
            gather += of(OpKind::AllGather, if zero == 3 { all } else { trained }, size);
        }
        let hidden = |t: f64, window: f64| (t - hw.overlap.dp * window).max(0.05 * t);
        if zero == 3 {
            // Every pass gathers, every backward reduces.
            let times = micro_batches as f64;
            exposed += times * (hidden(gather, forward) + hidden(gather + scatter, backward));
        } else {
            let window = if self.overlap_param_gather { forward } else { 0.0 };
            // Sharded gradients are reduced after every micro-batch.
            let reductions = if zero == 2 { micro_batches as f64 } else { 1.0 };
            exposed += hidden(gather, window) + reductions * hidden(scatter, backward);
        }
        exposed
    }
}

/// How replicas share the state of a step.
pub(super) struct Replicas {
    pub ranks: ParallelRanks,
    /// The ZeRO stage in effect.
    pub zero: usize,
    /// Bytes of a weight.
    pub element: f64,
}

impl Replicas {
    pub(super) fn of(shape: &StepShape) -> Replicas {
        let element = shape.dtype.size() as f64;
        Replicas { ranks: shape.ranks.clone(), zero: shape.zero_stage(), element }
    }

    /// Parameters that a rank updates.
    fn updated(&self, chunks: &[LayerKindCost]) -> f64 {
        let shards = if self.zero > 0 { self.shards() } else { [1, 1] };
        [0, 1].iter().map(|&k| chunks.iter().map(|c| c.trained[k]).sum::<f64>() / shards[k] as f64).sum()
    }

    /// Numbers of ranks that shard dense and expert parameters between them.
    pub(super) fn shards(&self) -> [usize; 2] {
        self.ranks.shards.map(|place| place.size)
    }
}
