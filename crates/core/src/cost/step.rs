//! The step of a recipe as the description takes it.

use crate::Result;
use crate::config::{Derived, FsdpOuter, Resolved};
use crate::grid::Grid;
use crate::model::description::{ModelDescription, ParallelRanks, StepShape};
use crate::model::{PipelineLayout, Stage};
use crate::pipeline::ScheduleKind;
use ferrotron_engine::attention::Layout;
use ferrotron_engine::data_parallel::HostShards;
use ferrotron_tensor::format_bytes;

impl StepShape {
    /// The step of a recipe on a rank of its layout.
    pub fn of(r: &Resolved, ranks: ParallelRanks) -> Result<StepShape> {
        let p = &r.config.parallel;
        let pipeline = PipelineLayout { vp: p.vp, layout: p.stages.clone() };
        let placement = pipeline.place(&r.model, ranks.pp.size)?;
        let chunks = (0..placement.vp()).filter_map(|chunk| placement.at(ranks.pp.rank, chunk).cloned());
        let stages = chunks.collect();
        Ok(StepShape::of_ranks(r, ranks, stages))
    }

    /// The step of a recipe on a rank that holds `stages`, whatever the recipe's own layout.
    pub(crate) fn of_ranks(r: &Resolved, ranks: ParallelRanks, stages: Vec<Stage>) -> StepShape {
        let p = &r.config.parallel;
        let samples = r.plan.micro_batch * ranks.dp.size;
        StepShape {
            model: r.model.clone(),
            stages,
            micro_batch: Layout::Rows { count: r.plan.micro_batch, len: r.plan.seq_len },
            micro_batches: (r.config.train.global_batch / samples.max(1)).max(1),
            dtype: r.config.precision.dtype.dtype(),
            recompute: r.config.train.recompute.modules(),
            mlp_chunk: r.config.train.mlp_chunk,
            options: r.model_options(),
            zero: p.zero,
            comm_unit: p.comm_unit.map(|bytes| bytes.0 as usize),
            outer_optimizer: p.fsdp_outer == FsdpOuter::Optimizer,
            host: r.config.offload.host_shards(),
            schedule: p.schedule.schedule_kind(),
            overlap: p.overlap,
            ranks,
        }
    }

    /// The recipe's whole model on one rank, in one micro-batch.
    pub fn whole_model(r: &Resolved, micro_batch: Layout) -> StepShape {
        let m = &r.model;
        let stage = Stage { embedding: true, layers: 0..m.layers, mtp: 0..m.mtp_depth(), loss: true };
        StepShape {
            model: m.clone(),
            ranks: ParallelRanks::single(),
            stages: vec![stage],
            micro_batch,
            micro_batches: 1,
            dtype: r.config.precision.dtype.dtype(),
            recompute: r.config.train.recompute.modules(),
            mlp_chunk: None,
            options: r.model_options(),
            zero: 0,
            comm_unit: None,
            outer_optimizer: false,
            host: HostShards::default(),
            schedule: ScheduleKind::default(),
            overlap: true,
        }
    }

    /// The step of a recipe on the first rank of every pipeline stage of its layout.
    pub fn of_stages(r: &Resolved) -> Result<Vec<StepShape>> {
        let grid = Grid::of(r.config.parallel.layout())?;
        let pp = grid.layout().pp;
        let stride = grid.world() / pp.max(1);
        (0..pp).map(|stage| StepShape::of(r, ParallelRanks::at(&grid, stage * stride)?)).collect()
    }
}

/// `parallel.comm_unit` of a recipe that does not set it, on the pipeline stage where it is largest; none where no weights
/// or gradients are exchanged with other ranks or host memory.
pub fn derived_comm_unit(r: &Resolved) -> Result<Option<Derived>> {
    if r.config.parallel.comm_unit.is_some() {
        return Ok(None);
    }
    let mut largest = 0;
    for shape in StepShape::of_stages(r)?.iter().filter(|s| s.replicas() > 1 || s.host.any()) {
        largest = largest.max(shape.param_layout(&ModelDescription::params(shape)?).comm_unit);
    }
    let of = match r.config.parallel.zero {
        3.. => "two of the largest layer's weights",
        _ => "two buckets of gradients, each large enough to use the network's bandwidth",
    };
    let reason = format!("{}: {of}", format_bytes(largest));
    Ok((largest > 0).then(|| Derived { key: "parallel.comm_unit", value: largest.to_string(), reason }))
}

/// MoE layers of a rank.
pub(crate) struct MoeLayers {
    pub(crate) count: usize,
    pub(crate) experts: usize,
}

impl MoeLayers {
    /// Those of the stages of a rank; an MTP layer that is used repeatedly counts once.
    pub(crate) fn of(shape: &StepShape) -> MoeLayers {
        let m = &shape.model;
        let own = m.mtp.map_or(0, |c| c.modules());
        let in_stage = |s: &Stage| {
            let mtp = if s.mtp.is_empty() { 0 } else { own };
            s.layers.clone().chain(m.layers..m.layers + mtp).filter(|i| m.moe_layer(*i).is_some()).count()
        };
        let count = shape.stages.iter().map(in_stage).sum();
        MoeLayers { count, experts: m.moe.as_ref().map_or(0, |c| c.experts) }
    }
}
