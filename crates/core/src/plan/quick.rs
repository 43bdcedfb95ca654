//! A lower bound of a candidate's time and a closed form of its memory, for the search.

use super::hardware::Hardware;
use super::host_memory::HostMemory;
use super::layer_kinds::{LayerKindCost, LayerKinds};
use super::step_time::{Candidate, Replicas, Workload};
use crate::Result;
use crate::config::PipelineSchedule;
use crate::cost::MemoryEstimate;
use crate::cost::memory::MemoryBytes;
use crate::model::description::{ParallelRanks, StepShape};
use crate::model::{ModelConfig, PipelineLayout, Stage};
use crate::pipeline::ScheduleKind;

/// The pipeline ranks of a placement by what their chunks are made of. Most ranks of a pipeline are equal.
pub(super) struct StageTypes {
    /// One stage of each type.
    types: Vec<Stage>,
    /// The types of the chunks of a rank, for each type of rank.
    rank_types: Vec<Vec<usize>>,
    /// The type of every rank.
    of_rank: Vec<usize>,
}

impl StageTypes {
    pub(super) fn of(model: &ModelConfig, kinds: &LayerKinds, pp: usize, vp: usize) -> Result<StageTypes> {
        let placement = PipelineLayout { vp, layout: None }.place(model, pp)?;
        let mut found: Vec<(Vec<usize>, Stage)> = Vec::new();
        let mut out = StageTypes { types: Vec::new(), rank_types: Vec::new(), of_rank: Vec::new() };
        for rank in 0..pp {
            let mut chunks = Vec::with_capacity(vp);
            for stage in (0..placement.vp()).filter_map(|i| placement.at(rank, i)) {
                let parts = kinds.parts(stage);
                let at = found.iter().position(|(p, _)| *p == parts).unwrap_or_else(|| {
                    found.push((parts, stage.clone()));
                    found.len() - 1
                });
                chunks.push(at);
            }
            let at = out.rank_types.iter().position(|r| *r == chunks).unwrap_or_else(|| {
                out.rank_types.push(chunks);
                out.rank_types.len() - 1
            });
            out.of_rank.push(at);
        }
        out.types = found.into_iter().map(|(_, stage)| stage).collect();
        Ok(out)
    }
}

/// What the bounds need of a type of rank.
struct RankBounds {
    /// Seconds of all passes over a micro-batch.
    busy: f64,
    /// Forward, and backward or input gradient, of the first chunk.
    first: [f64; 2],
    /// Static bytes, saved bytes of a chunk, bytes of the workspace.
    bytes: [f64; 3],
}

impl Workload {
    /// Bytes by category on the pipeline stage that needs most, as training estimates them.
    pub fn memory(&self, c: &Candidate) -> Result<MemoryBytes> {
        let shapes = (0..c.layout.pp).map(|stage| self.shape(c, stage)).collect::<Result<Vec<_>>>()?;
        self.memory_estimate(c, shapes).largest()
    }

    pub(super) fn memory_estimate(&self, c: &Candidate, shapes: Vec<StepShape>) -> MemoryEstimate {
        let mut recipe = self.recipe.clone();
        recipe.config.parallel.schedule = match c.schedule {
            ScheduleKind::ZeroBubble => PipelineSchedule::ZeroBubble,
            ScheduleKind::Paired => PipelineSchedule::Paired,
            _ => PipelineSchedule::OneForwardOneBackward,
        };
        MemoryEstimate::of_shapes(&recipe, shapes)
    }

    /// Bytes of optimizer state of a parameter on the device, before ZeRO shards it.
    pub(super) fn state_bytes(&self, shape: &StepShape) -> f64 {
        let all = MemoryEstimate::of_shapes(&self.recipe, vec![shape.clone()]).optimizer_bytes();
        all * (1.0 - HostMemory::of(&self.recipe).optimizer)
    }

    /// All parameters and trained parameters of the whole model on one rank of its tp, ep and etp: dense, of experts.
    pub(super) fn whole_model_params(&self, c: &Candidate) -> Result<[[f64; 2]; 2]> {
        let shape = self.shape(c, 0)?;
        let totals = LayerKinds::parameters(&shape)?;
        Ok([totals.params, totals.trained])
    }

    /// Static bytes of a rank, in the mean over pipeline stages; `element`: bytes of a weight, `state`: of its optimizer state.
    pub(super) fn mean_static_bytes(
        &self,
        c: &Candidate,
        [params, trained]: [[f64; 2]; 2],
        (element, state): (f64, f64),
    ) -> f64 {
        let whole = LayerKindCost { params, trained, ..LayerKindCost::default() };
        static_bytes(&self.replicas(c, element), state, &[&whole]) / c.layout.pp as f64
    }

    fn replicas(&self, c: &Candidate, element: f64) -> Replicas {
        let ranks = ParallelRanks::first_of(&c.layout, self.gpus);
        let alone = ranks.dp_cp.size.max(ranks.expert_dp.size) == 1;
        Replicas { ranks, zero: if alone { 0 } else { c.zero }, element }
    }

    /// A lower bound of the seconds of a step, and bytes of the stage that needs most; `state`: bytes of optimizer state of a parameter.
    ///
    /// Time: rank r starts after a forward of the first chunk on every rank before it, computes all its passes, and backward of
    /// the last micro-batch goes through the ranks before it again; of a zero-bubble schedule weight gradients may be left, so
    /// either those or the way back are counted. Bytes: static state, and the saved tensors of the chunks in flight,
    /// min(M·v, 2(P − r − 1) + (v − 1)P + 1) interleaved and min(M, P − r) otherwise; zero-bubble schedules as on the first rank.
    pub(super) fn quick(
        &self,
        hw: &Hardware,
        c: &Candidate,
        (shape, state): (&StepShape, f64),
        kinds: &LayerKinds,
        stages: &StageTypes,
    ) -> Result<(f64, f64)> {
        let (pp, vp, m) = (c.layout.pp, c.layout.vp, self.micro_batches(c));
        let replicas = self.replicas(c, shape.dtype.size() as f64);
        let message = self.message_seconds(hw, c, shape, &replicas.ranks);
        let (split, host) = (c.schedule == ScheduleKind::ZeroBubble, HostMemory::of(&self.recipe));
        let costs: Vec<LayerKindCost> = stages.types.iter().map(|s| kinds.stage(s)).collect();
        let (mut dp, mut optimizer) = (0.0f64, 0.0f64);
        let mut of_type = Vec::with_capacity(stages.rank_types.len());
        for types in &stages.rank_types {
            let chunks: Vec<LayerKindCost> = types.iter().map(|t| costs[*t]).collect();
            dp = dp.max(self.exposed_dp(hw, &replicas, &chunks, m));
            optimizer = optimizer.max(self.update_seconds(hw, &replicas, &chunks, c.dtype));
            let saved: f64 = chunks.iter().map(|k| k.saved).sum::<f64>() / chunks.len().max(1) as f64;
            let saved = saved * host.kept(self.recipe.model.layers as f64 / (pp * vp) as f64);
            let workspace = chunks.iter().map(|k| k.recomputed).fold(0.0, f64::max);
            let all: Vec<&LayerKindCost> = chunks.iter().collect();
            let first = chunks.first().map_or([0.0; 2], |k| {
                let weight = if split { 0.0 } else { k.time.weight.total() };
                [k.time.forward.total(), k.time.input.total() + weight]
            });
            of_type.push(RankBounds {
                busy: chunks.iter().map(|k| k.time.total().total()).sum(),
                first,
                bytes: [static_bytes(&replicas, state, &all), saved, workspace],
            });
        }
        let (mut passes, mut bytes, mut fill, mut drain) = (0.0f64, 0.0f64, 0.0f64, 0.0f64);
        for (rank, of) in stages.of_rank.iter().enumerate() {
            let r = &of_type[*of];
            passes = passes.max(fill + m as f64 * r.busy + if split { 0.0 } else { drain });
            fill += r.first[0] + message;
            drain += r.first[1] + message;
            let behind = if split { pp } else { pp - rank };
            let in_flight = match vp {
                1 => m.min(behind),
                _ => (m * vp).min(2 * (behind - 1) + (vp - 1) * pp + 1),
            };
            bytes = bytes.max(r.bytes[0] + r.bytes[1] * in_flight as f64 + r.bytes[2]);
        }
        // Sums in another order differ in the last bits.
        Ok(((passes + dp + optimizer) * (1.0 - 1e-9), bytes))
    }
}

/// Weights, gradients and optimizer state, of which a parameter has `state` bytes.
fn static_bytes(replicas: &Replicas, state: f64, chunks: &[&LayerKindCost]) -> f64 {
    let shards = replicas.shards();
    let of_kind = |kind: usize| {
        let over = |from: usize| if replicas.zero >= from { shards[kind] as f64 } else { 1.0 };
        let all: f64 = chunks.iter().map(|k| k.params[kind]).sum();
        let trained: f64 = chunks.iter().map(|k| k.trained[kind]).sum();
        all * replicas.element / over(3) + trained * (4.0 / over(2) + state / over(1))
    };
    of_kind(0) + of_kind(1)
}
