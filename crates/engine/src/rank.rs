//! A rank: device, streams, kernels and process groups of one worker. Nothing is global, so many ranks fit in one process.

use crate::attention::Layout;
use crate::data_parallel::group_rank;
use crate::{GroupRank, Part, Tokens};
use ferrotron_comm::{Communicator, World};
use ferrotron_kernels::cuda::{CudaKernels, KernelCacheStats};
use ferrotron_kernels::{Kernels, cpu};
use ferrotron_tensor::trace::COMMUNICATION;
use ferrotron_tensor::{Category, DType, Device, Instrumentation, Result, Stream, Tensor, Threads};
use std::sync::Arc;

/// Device, streams, kernels, process groups and seed of one worker.
#[derive(Clone)]
pub struct Rank {
    /// The compute stream.
    pub compute: Stream,
    /// Stream of collectives that overlap with computation.
    pub comm_stream: Stream,
    /// Stream of MoE dispatch and combine. Separate from [`Rank::comm_stream`], whose collectives are short and waited for
    /// soon, and must not queue behind an all-to-all.
    pub dispatch_stream: Stream,
    /// The kernels of the device.
    pub kernels: Arc<dyn Kernels>,
    /// All ranks of the job.
    pub world: World,
    /// All ranks, for small values that hosts read while a step computes. NCCL runs the operations of a communicator one after
    /// another, whatever their streams: on the world's, such a value would wait for the gradient norm of the step.
    pub control: Communicator,
    /// Tensor-parallel group.
    pub tp: Communicator,
    /// Context-parallel group: its ranks split every sequence.
    pub cp: Communicator,
    /// Data-parallel group: the same weights, other sequences.
    pub dp: Communicator,
    /// dp × cp group: the same weights, other tokens. Gradients are reduced over it.
    pub dp_cp_group: Communicator,
    /// Pipeline-parallel group, in stage order.
    pub pp: Communicator,
    /// The same ranks for sends from later to earlier stages (activation gradients).
    pub pp_backward_group: Communicator,
    /// Embedding group: first and last stage, which share a tied embedding; a group of one elsewhere.
    pub embedding_group: Communicator,
    /// tp × cp group: the ranks that split the tokens of a micro-batch.
    pub tp_cp_group: Communicator,
    /// tp × dp × cp group: the ranks that split the tokens of a step.
    pub tp_dp_cp_group: Communicator,
    /// etp × ep group: together its ranks hold all experts of a layer; ranks of one etp group are adjacent.
    pub etp_ep_group: Communicator,
    /// Expert-tensor-parallel group.
    pub etp: Communicator,
    /// Expert-data-parallel group: the same experts, other tokens. Expert gradients are reduced over it.
    pub expert_dp_group: Communicator,
    /// What shards of weights, gradients and optimizer state are spread over: the dp × cp group, or with HSDP a part of it;
    /// of expert parameters the expert-data-parallel group, or a part of that.
    pub shard_groups: [Communicator; 2],
    /// HSDP: ranks that hold the same shard, of dense and of expert parameters; groups of one elsewhere.
    pub shard_replica_groups: [Communicator; 2],
    /// Overlap communication with computation on [`Rank::comm_stream`]. Results are bit-equal either way.
    pub overlap: bool,
    /// Seed of initialization and dropout.
    pub seed: u64,
}

impl Rank {
    /// A CPU rank; `threads` 0 uses all cores.
    pub fn cpu(threads: usize, seed: u64) -> Result<Rank> {
        Rank::cpu_instrumented(threads, seed, Instrumentation::default())
    }

    /// A CPU rank with instrumentation (race checker, tracing).
    pub fn cpu_instrumented(threads: usize, seed: u64, watch: Instrumentation) -> Result<Rank> {
        // Detect the ISA first: AMX permission must be requested before compute threads start.
        let kernels = Arc::new(cpu::CpuKernels::detect());
        Rank::alone(&Device::cpu_instrumented(Threads::new(threads)?, watch), kernels, seed)
    }

    /// A rank of a [meta device](Device::meta): it runs a program without tensors' values.
    pub fn meta(seed: u64) -> Result<Rank> {
        Rank::alone(&Device::meta(Threads::new(1)?), Arc::new(cpu::CpuKernels::detect()), seed)
    }

    /// A rank on GPU `ordinal`, and how its kernels were loaded; `threads` serve host-side work.
    pub fn cuda(
        ordinal: usize,
        threads: usize,
        seed: u64,
        watch: Instrumentation,
    ) -> Result<(Rank, KernelCacheStats)> {
        let device = Device::cuda(ordinal, Threads::new(threads)?, watch)?;
        let kernels = CudaKernels::load(&device)?;
        let cache_stats = kernels.cache_stats();
        Ok((Rank::alone(&device, Arc::new(kernels), seed)?, cache_stats))
    }

    /// A rank with its own streams on a device and groups of one.
    pub fn alone(device: &Device, kernels: Arc<dyn Kernels>, seed: u64) -> Result<Rank> {
        let solo = Communicator::solo;
        Ok(Rank {
            compute: device.stream("compute")?,
            comm_stream: device.urgent_stream(COMMUNICATION)?,
            dispatch_stream: device.urgent_stream(COMMUNICATION)?,
            kernels,
            overlap: true,
            seed,
            world: World::solo(),
            control: solo(),
            tp: solo(),
            cp: solo(),
            dp: solo(),
            dp_cp_group: solo(),
            pp: solo(),
            pp_backward_group: solo(),
            embedding_group: solo(),
            tp_cp_group: solo(),
            tp_dp_cp_group: solo(),
            etp_ep_group: solo(),
            etp: solo(),
            expert_dp_group: solo(),
            shard_groups: [solo(), solo()],
            shard_replica_groups: [solo(), solo()],
        })
    }

    /// The tensor-parallel group of expert or of all other parameters.
    pub fn tp_group(&self, experts: bool) -> &Communicator {
        if experts { &self.etp } else { &self.tp }
    }

    /// The data-parallel ranks that shard expert or all other parameters between them.
    pub fn dp_group(&self, experts: bool) -> &Communicator {
        &self.shard_groups[usize::from(experts)]
    }

    /// The data-parallel ranks that hold the same shard of expert or of all other parameters (HSDP).
    pub fn shard_replica_group(&self, experts: bool) -> &Communicator {
        &self.shard_replica_groups[usize::from(experts)]
    }

    /// This rank's position in the expert-parallel group.
    pub fn expert_parallel_rank(&self) -> GroupRank {
        let (here, each) = (group_rank(&self.etp_ep_group), self.etp.size());
        GroupRank { rank: here.rank / each, size: here.size / each }
    }

    /// This rank in its tensor-parallel group.
    pub fn place(&self) -> GroupRank {
        GroupRank { rank: self.tp.rank(), size: self.tp.size() }
    }

    /// The tokens of a batch that this rank holds.
    pub fn tokens(&self, layout: &Layout) -> Result<Tokens> {
        let cp = GroupRank { rank: self.cp.rank(), size: self.cp.size() };
        Tokens::new(layout, cp, self.tp.size())
    }

    /// All-gathers a logical tensor from its tensor-parallel shards. `held` is this rank's shard, row-major. `experts`: it is
    /// sharded over the expert tensor-parallel group.
    pub fn gather_tensor(&self, experts: bool, part: &Part, held: &[f32]) -> Result<Vec<f32>> {
        let tp_group = self.tp_group(experts);
        if tp_group.size() == 1 {
            return Ok(held.to_vec());
        }
        let all = tp_group.all_gather_bytes(bytemuck::cast_slice(held), "a whole tensor")?;
        let mut whole = vec![0.0; part.shape.iter().product()];
        for (rank, bytes) in all.iter().enumerate() {
            let values: Vec<f32> = bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
            part.cut(GroupRank { rank, size: tp_group.size() }).put(&part.shape, &values, &mut whole);
        }
        Ok(whole)
    }

    /// The device of this rank.
    pub fn device(&self) -> &Device {
        self.compute.device()
    }

    /// Allocates an activation on the compute stream.
    pub fn activation(&self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        Tensor::empty(&self.compute, shape, dtype, Category::Activations)
    }
}
