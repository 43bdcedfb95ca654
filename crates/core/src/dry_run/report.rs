//! What a dry run of a job found.

use super::build::{BuiltJob, build, micro_batches};
use crate::Result;
use crate::config::Resolved;
use crate::cost::memory::MemoryBytes;
use crate::cost::{CostSummary, USABLE_PERCENT, with_state_offload};
use crate::grid::Grid;
use crate::plan::{self, Hardware, Machine};
use ferrotron_tensor::format_bytes;
use serde::Serialize;
use std::collections::BTreeMap;

/// A job that would start, or why it would not.
#[derive(Clone, Debug, Serialize)]
pub struct DryRunReport {
    /// Ranks of the job.
    pub ranks: usize,
    /// Its layout, `tp=4,pp=16`.
    pub layout: String,
    /// Process groups by kind.
    pub groups: Vec<GroupSummary>,
    /// Micro-batches of a step on a data-parallel rank.
    pub micro_batches: usize,
    /// Operations and exchanges of the pipeline schedule, of all stages.
    pub schedule_steps: usize,
    /// Distinct programs of the ranks.
    pub programs: usize,
    /// Ranks that were built; the others run the program of one of them.
    pub built_ranks: usize,
    /// Communication calls of all ranks before the first step.
    pub start_calls: u64,
    /// Communication calls of all ranks in a step.
    pub step_calls: u64,
    /// Bytes that all ranks send in a step, by process group.
    pub sent: BTreeMap<&'static str, u64>,
    /// The rank that needs most memory.
    pub largest: RankMemory,
    /// Memory of a GPU.
    pub capacity: usize,
    /// Why the job would not run; empty if it would.
    pub problems: Vec<String>,
}

/// Process groups of one kind.
#[derive(Clone, Debug, Serialize)]
pub struct GroupSummary {
    /// Name.
    pub name: &'static str,
    /// Number of groups.
    pub count: usize,
    /// Ranks of each.
    pub size: usize,
}

/// Memory of a rank.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct RankMemory {
    /// The first rank with that much.
    pub rank: usize,
    /// Its pipeline stage.
    pub stage: usize,
    /// Estimate by category.
    pub bytes: MemoryBytes,
    /// Most that a simulated rank of the stage allocates.
    pub allocated: usize,
}

/// Builds and checks all ranks of a recipe on such GPUs. An error is one of the recipe; what is wrong with
/// the job is in the report.
pub fn dry_run(r: &Resolved, gpu: &Hardware) -> Result<DryRunReport> {
    let capacity = gpu.memory();
    let r = &*with_state_offload(r, Some(capacity))?;
    let grid = Grid::of(r.config.parallel.layout())?;
    let built = build(r)?;
    let mut problems: Vec<String> = built.job.run().err().into_iter().collect();
    let stages = memory(r, &grid, &built)?;
    let usable = capacity / 100 * USABLE_PERCENT;
    let over: Vec<&RankMemory> = stages.iter().filter(|m| m.bytes.total() > usable).collect();
    if !over.is_empty() {
        problems.push(too_large(r, &grid, &over, gpu)?);
    }
    let largest = stages.into_iter().max_by_key(|m| (m.bytes.total(), std::cmp::Reverse(m.rank)));
    let empty = RankMemory { rank: 0, stage: 0, bytes: MemoryBytes::default(), allocated: 0 };
    let mut report = DryRunReport {
        ranks: grid.world(),
        layout: grid.layout().to_string(),
        groups: Vec::new(),
        micro_batches: micro_batches(r),
        schedule_steps: crate::cost::summary::schedule(r)?.ranks.iter().map(Vec::len).sum(),
        programs: built.programs.len(),
        built_ranks: built.built,
        start_calls: 0,
        step_calls: 0,
        sent: BTreeMap::new(),
        largest: largest.unwrap_or(empty),
        capacity,
        problems,
    };
    for kind in built.job.groups.kinds().iter().filter(|k| k.size > 1) {
        report.groups.push(GroupSummary { name: kind.name, count: kind.count, size: kind.size });
    }
    for program in built.program_of.iter().map(|p| &built.programs[*p]) {
        report.start_calls += program.start_calls as u64;
        report.step_calls += program.step_calls as u64;
        for (group, bytes) in &program.sent {
            *report.sent.entry(group).or_default() += bytes;
        }
    }
    Ok(report)
}

/// Memory of the ranks of every pipeline stage.
fn memory(r: &Resolved, grid: &Grid, built: &BuiltJob) -> Result<Vec<RankMemory>> {
    let costs = CostSummary::of(r)?;
    let mut stages: Vec<RankMemory> = Vec::new();
    for (stage, cost) in costs.stages.iter().enumerate() {
        let rank = stage * (grid.world() / costs.stages.len().max(1));
        stages.push(RankMemory { rank, stage, bytes: cost.memory, allocated: 0 });
    }
    for program in &built.programs {
        let stage = grid.coordinates(program.rank)?.pp;
        if let Some(memory) = stages.get_mut(stage) {
            memory.allocated = memory.allocated.max(program.allocated);
        }
    }
    Ok(stages)
}

/// The ranks that need too much, what they need it for, and the way out.
fn too_large(r: &Resolved, grid: &Grid, over: &[&RankMemory], gpu: &Hardware) -> Result<String> {
    let each = grid.world() / r.config.parallel.pp.max(1);
    let Some(most) = over.iter().max_by_key(|m| m.bytes.total()) else { return Ok(String::new()) };
    let b = &most.bytes;
    let parts = [
        ("weights", b.parameters),
        ("gradients", b.gradients),
        ("optimizer state", b.optimizer),
        ("activations", b.activations),
        ("workspace", b.workspace),
    ];
    let parts: Vec<String> = parts.iter().map(|(name, n)| format!("{name} {}", format_bytes(*n))).collect();
    let advice = plan::advice(r, &Machine { gpus: grid.world(), hardware: gpu.clone() })?;
    let ranks = over.len() * each;
    let (rank, stage) = (most.rank, most.stage);
    Ok(format!(
        "memory: {ranks} ranks do not fit; rank {rank} (stage {stage}) needs most: {}: {}; {advice}",
        format_bytes(b.total()),
        parts.join(", ")
    ))
}
