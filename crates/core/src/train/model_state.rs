//! The model of a run on this rank: its modules, its parameters and their gradients in data-parallel buckets.

use super::base_model::SavedAdapters;
use crate::config::{FsdpOuter, Resolved};
use crate::model::{Decoder, ModelOptions, PipelineLayout};
use crate::{Error, Result};
use ferrotron_engine::data_parallel::ShardingStrategy;
use ferrotron_engine::{GradBuffer, ParamLayout, Params, Rank, StepState, quant};

/// The model and its data-parallel state.
pub struct ModelState {
    /// The modules of this rank's pipeline stages.
    pub decoder: Decoder,
    /// This rank's parameters, in buckets.
    pub params: Params,
    /// Quantization and MoE state of the steps: scales, caches, counters.
    pub step_state: StepState,
    /// f32 gradients of the same buckets, reduced over the data-parallel group at the end of a step.
    pub(super) grads: GradBuffer,
    /// What its parameters depend on besides the architecture.
    pub(super) options: ModelOptions,
    /// The base model of its adapters, where it has any.
    pub(super) adapters: Option<SavedAdapters>,
}

impl ModelState {
    /// Allocates the model of a recipe. Parameters are not initialized yet.
    pub(super) fn new(rank: &Rank, r: &Resolved, sharding: ShardingStrategy) -> Result<ModelState> {
        let options = ModelOptions { policy: quant_policy(rank, r)?, ..r.model_options() };
        let layout = PipelineLayout { vp: r.config.parallel.vp, layout: r.config.parallel.stages.clone() };
        let (decoder, specs) = Decoder::new(rank, &r.model, r.plan.seq_len, &layout, &options)?;
        let dtype = r.config.precision.dtype.dtype();
        let comm_unit = r.config.parallel.comm_unit.map(|bytes| bytes.0 as usize);
        let layout = ParamLayout::new(sharding, (replicas(rank), groups(rank)), comm_unit, (&specs, dtype));
        let params = Params::new(rank, specs, dtype, layout)?;
        let step_state = StepState::new(rank, &params, decoder.moe_layers())?;
        let grads = GradBuffer::of(&params, sharding);
        let adapters = SavedAdapters::of(rank, r)?;
        Ok(ModelState { decoder, params, step_state, grads, options, adapters })
    }

    /// Whether adapters of a frozen base model are trained.
    pub fn has_adapters(&self) -> bool {
        self.adapters.is_some()
    }
}

/// What `parallel.zero` and `parallel.fsdp_outer` shard over the data-parallel replicas, and what of it is in host memory.
pub(super) fn sharding(rank: &Rank, r: &Resolved) -> ShardingStrategy {
    let scheme = match r.config.parallel.fsdp_outer {
        FsdpOuter::Optimizer if groups(rank) > 1 => ShardingStrategy::hybrid(),
        _ => ShardingStrategy::zero(r.config.parallel.zero, replicas(rank)),
    };
    scheme.with_host(r.config.offload.host_shards())
}

/// Groups of data-parallel ranks that hold the same shards.
fn groups(rank: &Rank) -> usize {
    rank.shard_replica_group(false).size()
}

/// The larger of the dense and the expert data-parallel group.
fn replicas(rank: &Rank) -> usize {
    rank.dp_cp_group.size().max(rank.expert_dp_group.size())
}

/// Which GEMMs of a recipe are quantized; an error where the GPU has no FP8 tensor cores.
fn quant_policy(rank: &Rank, r: &Resolved) -> Result<quant::Policy> {
    let policy = r.policy();
    let native = policy.recipe.is_some_and(|recipe| !recipe.emulated());
    match rank.device().gpu().filter(|gpu| native && gpu.capability < (8, 9)) {
        None => Ok(policy),
        Some(gpu) => Err(Error::Invalid(format!(
            "precision.recipe = \"{}\": the {} (compute capability {}.{}) has no FP8 tensor cores, which need 8.9 or \
             later; set precision.recipe = \"none\"",
            r.config.precision.recipe, gpu.name, gpu.capability.0, gpu.capability.1
        ))),
    }
}
