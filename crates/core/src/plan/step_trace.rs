//! One step of a plan in time: what every pipeline rank computes and waits for, and the memory it holds.

use super::hardware::Hardware;
use super::layer_kinds::{LayerKindCost, LayerKinds};
use super::layer_time::Seconds;
use super::step_time::{Candidate, Replicas, Workload};
use crate::Result;
use crate::cost::memory::MemoryBytes;
use crate::pipeline::{OpKind, PipelineOp, Timeline};

/// A step of a plan. Passes run until `passes_end`; then come exposed data-parallel communication until `dp_end` and the optimizer
/// until `end`, which is the time of the step.
#[derive(Clone, Debug)]
pub struct StepTrace {
    /// The pipeline ranks.
    pub ranks: Vec<RankTrace>,
    /// When the last rank has ended its passes.
    pub passes_end: f64,
    /// When the last rank has ended its exposed data-parallel communication.
    pub dp_end: f64,
    /// When the last rank has ended its update.
    pub end: f64,
}

/// One pipeline rank of a step.
#[derive(Clone, Debug)]
pub struct RankTrace {
    /// Its passes, in order.
    pub ops: Vec<TracedOp>,
    /// Seconds of exposed data-parallel communication, of all micro-batches.
    pub dp: f64,
    /// Seconds of the optimizer.
    pub optimizer: f64,
    /// Saved tensors over time, with straight lines between the points.
    pub saved: Vec<MemoryPoint>,
    /// The rest of its memory, by category, with activations as the closed form has them.
    pub memory: MemoryBytes,
}

/// A pass of one chunk over one micro-batch.
#[derive(Clone, Debug)]
pub struct TracedOp {
    /// Which.
    pub op: PipelineOp,
    /// When it starts.
    pub start: f64,
    /// Its seconds: of a whole backward the input gradient, then the weight gradient.
    pub parts: Vec<(OpKind, Seconds)>,
}

/// Bytes of saved tensors at a time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryPoint {
    /// Seconds from the start of the step.
    pub time: f64,
    /// Bytes.
    pub bytes: f64,
}

impl TracedOp {
    /// When it ends.
    pub fn end(&self) -> f64 {
        self.start + self.parts.iter().map(|(_, s)| s.total()).sum::<f64>()
    }
}

impl RankTrace {
    /// The most memory during the step: static state, saved tensors and the workspace of one layer, or the update's.
    pub fn peak(&self) -> f64 {
        let saved = self.saved.iter().map(|l| l.bytes).fold(0.0, f64::max);
        let m = &self.memory;
        m.static_bytes() as f64 + (saved + m.workspace as f64).max(m.update as f64)
    }
}

impl Workload {
    /// The step of a candidate in time.
    pub fn trace(&self, hw: &Hardware, c: &Candidate) -> Result<StepTrace> {
        let shape = self.shape(c, 0)?;
        let kinds = LayerKinds::of(hw, &shape, c.dtype)?;
        let chunks = self.chunk_costs(c, &kinds)?;
        let timeline = self.timeline(hw, c, &shape, &chunks)?;
        let (replicas, micro_batches) = (Replicas::of(&shape), self.micro_batches(c));
        let mut ranks = Vec::with_capacity(chunks.len());
        for (rank, costs) in chunks.iter().enumerate() {
            let stage = self.shape(c, rank)?;
            let memory = self.memory_estimate(c, vec![stage.clone()]).stage(&stage)?;
            ranks.push(RankTrace {
                ops: traced(&timeline, rank, costs),
                dp: self.exposed_dp(hw, &replicas, costs, micro_batches),
                optimizer: self.update_seconds(hw, &replicas, costs, c.dtype),
                saved: saved(&timeline, rank, costs),
                memory,
            });
        }
        let most = |of: fn(&RankTrace) -> f64| ranks.iter().map(of).fold(0.0, f64::max);
        let passes_end = timeline.makespan();
        let dp_end = passes_end + most(|r| r.dp);
        let end = dp_end + most(|r| r.optimizer);
        Ok(StepTrace { ranks, passes_end, dp_end, end })
    }
}

fn traced(timeline: &Timeline, rank: usize, costs: &[LayerKindCost]) -> Vec<TracedOp> {
    let spans = timeline.ranks.get(rank).into_iter().flatten();
    spans
        .map(|span| {
            let t = &costs[span.op.chunk].time;
            let parts = match span.op.kind {
                OpKind::Forward => vec![(OpKind::Forward, t.forward)],
                OpKind::BackwardInput => vec![(OpKind::BackwardInput, t.input)],
                OpKind::WeightGrad => vec![(OpKind::WeightGrad, t.weight)],
                OpKind::Backward => vec![(OpKind::BackwardInput, t.input), (OpKind::WeightGrad, t.weight)],
            };
            TracedOp { op: span.op, start: span.start, parts }
        })
        .collect()
}

/// Saved tensors of the passes in flight: a forward adds those of its chunk, layer by layer, and backward frees them; where it is
/// split, the weight gradient.
fn saved(timeline: &Timeline, rank: usize, costs: &[LayerKindCost]) -> Vec<MemoryPoint> {
    let mut points = vec![MemoryPoint { time: 0.0, bytes: 0.0 }];
    let mut now = 0.0f64;
    for span in timeline.ranks.get(rank).into_iter().flatten() {
        let bytes = costs[span.op.chunk].saved;
        points.push(MemoryPoint { time: span.start, bytes: now });
        now = match span.op.kind {
            OpKind::Forward => now + bytes,
            OpKind::Backward | OpKind::WeightGrad => (now - bytes).max(0.0),
            OpKind::BackwardInput => now,
        };
        points.push(MemoryPoint { time: span.end, bytes: now });
    }
    points.dedup();
    points
}
