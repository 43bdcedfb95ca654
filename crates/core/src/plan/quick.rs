//! Closed forms of a candidate's time and memory, for the search.

use super::hardware::Hardware;
use super::layer_kinds::{LayerKindCost, LayerKinds};
use super::step_time::{Candidate, Replicas, Workload};
use crate::Result;
use crate::cost::MemoryEstimate;
use crate::cost::memory::MemoryBytes;
use crate::model::PipelineLayout;
use crate::model::description::{ParallelRanks, StepShape};

impl Workload {
    /// Bytes by category on the pipeline stage that needs most, as training estimates them.
    pub fn memory(&self, c: &Candidate) -> Result<MemoryBytes> {
        let shapes = (0..c.layout.pp).map(|stage| self.shape(c, stage)).collect::<Result<Vec<_>>>()?;
        MemoryEstimate::of_shapes(&self.recipe, shapes).largest()
    }

    /// Bytes of optimizer state of a parameter, before ZeRO shards it.
    pub(super) fn state_bytes(&self, shape: &StepShape) -> f64 {
        MemoryEstimate::of_shapes(&self.recipe, vec![shape.clone()]).optimizer_bytes()
    }

    /// Seconds of a step and bytes of the stage that needs most; `state`: bytes of optimizer state of a parameter.
    ///
    /// Time: the busiest rank's passes, and the bubble of equal stages: (P − 1) passes of one chunk. Bytes: static state, and the
    /// saved tensors of the chunks in flight at the first stage, min(M·v, 2(P − 1) + (v − 1)P + 1) interleaved and min(M, P)
    /// otherwise.
    pub(super) fn quick(
        &self,
        hw: &Hardware,
        c: &Candidate,
        (shape, state): (&StepShape, f64),
        kinds: &LayerKinds,
    ) -> Result<(f64, f64)> {
        let (pp, vp, m) = (c.layout.pp, c.layout.vp, self.micro_batches(c));
        let ranks = ParallelRanks::first_of(&c.layout, self.gpus);
        let alone = ranks.dp_cp.size.max(ranks.expert_dp.size) == 1;
        let replicas =
            Replicas { ranks, zero: if alone { 0 } else { c.zero }, element: shape.dtype.size() as f64 };
        let placement = PipelineLayout { vp, layout: None }.place(&self.recipe.model, pp)?;
        let (mut busiest, mut chunk_time, mut bytes) = (0.0f64, 0.0f64, 0.0f64);
        let mut rest = 0.0f64;
        for rank in 0..pp {
            let chunks: Vec<LayerKindCost> =
                (0..placement.vp()).filter_map(|i| placement.at(rank, i)).map(|s| kinds.stage(s)).collect();
            let each: Vec<f64> = chunks.iter().map(|k| k.time.total().total()).collect();
            busiest = busiest.max(each.iter().sum());
            chunk_time = chunk_time.max(each.iter().sum::<f64>() / each.len().max(1) as f64);
            rest = rest.max(self.after_passes(hw, &replicas, &chunks, m, c.dtype));
            let in_flight = match vp {
                1 => m.min(pp - rank),
                _ => (m * vp).min(2 * (pp - rank - 1) + (vp - 1) * pp + 1),
            } as f64;
            let saved: f64 = chunks.iter().map(|k| k.saved).sum::<f64>() / chunks.len().max(1) as f64;
            let workspace = chunks.iter().map(|k| k.recomputed).fold(0.0, f64::max);
            bytes = bytes.max(static_bytes(&replicas, state, &chunks) + saved * in_flight + workspace);
        }
        Ok((busiest * m as f64 + (pp - 1) as f64 * chunk_time + rest, bytes))
    }
}

/// Weights, gradients and optimizer state, of which a parameter has `state` bytes.
fn static_bytes(replicas: &Replicas, state: f64, chunks: &[LayerKindCost]) -> f64 {
    let shards = replicas.shards();
    let of_kind = |kind: usize| {
        let over = |from: usize| if replicas.zero >= from { shards[kind] as f64 } else { 1.0 };
        let all: f64 = chunks.iter().map(|k| k.params[kind]).sum();
        let trained: f64 = chunks.iter().map(|k| k.trained[kind]).sum();
        all * replicas.element / over(3) + trained * (4.0 / over(2) + state / over(1))
    };
    of_kind(0) + of_kind(1)
}
