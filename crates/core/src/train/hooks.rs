//! What watches or replaces a step without being part of the training algorithm.

use super::cuda_graph::CudaGraph;
use super::moe_metrics::MoeMetrics;
use super::operand_stats::OperandStats;
use super::routing_replay::RoutingReplay;
use crate::Result;
use crate::config::Resolved;
use crate::fault::culprit::StepCalls;
use crate::fault::inject::Injector;
use ferrotron_comm::DigestKernel;
use ferrotron_engine::Rank;
use std::sync::Arc;

/// The hooks of a step, each the only owner of its state.
pub(super) struct StepHooks {
    /// Statistics of quantized operands, for `precision.stats_every`.
    pub(super) operand_stats: OperandStats,
    /// Load-balancing losses and tokens per expert, for `moe.log`.
    pub(super) moe_metrics: MoeMetrics,
    /// Recorded or replayed routing, for `moe.record` and `moe.replay`.
    pub(super) routing: RoutingReplay,
    /// The captured step, for `train.cuda_graph`.
    pub(super) cuda_graph: CudaGraph,
    /// Count zero gradients, for `train.log_num_zeros`.
    pub(super) counts_zeros: bool,
    /// Injected faults, for `fault.inject`.
    pub(super) faults: Injector,
    /// Hashes what this rank sends, where steps are compared.
    pub(super) payload_digests: Option<DigestKernel>,
    /// What this rank sent in the step that ended last, where it is hashed.
    pub(super) sent: Option<StepCalls>,
}

impl StepHooks {
    pub(super) fn new(rank: &Rank, r: &Resolved) -> Result<StepHooks> {
        let f = &r.config.fault;
        let kernels = rank.kernels.clone();
        let launched = ferrotron_comm::LaunchEnv::detect()?.map(|job| job.rank);
        let digest: DigestKernel = Arc::new(move |s, x, out| kernels.digest(s, x, out));
        Ok(StepHooks {
            operand_stats: OperandStats::new(r.config.precision.stats_every),
            moe_metrics: MoeMetrics::new(&r.config.moe.log.0),
            routing: RoutingReplay::new(r)?,
            cuda_graph: CudaGraph::new(&r.config, rank)?,
            counts_zeros: r.config.train.log_num_zeros,
            faults: Injector::new(&f.inject.0, rank.world.rank(), launched)?,
            payload_digests: f.compares_runs().then_some(digest),
            sent: None,
        })
    }
}
