//! A rank: everything a worker has. Nothing is global, so many ranks fit in one process.

use crate::GroupRank;
use crate::data_parallel::group_rank;
use ferrotron_comm::{Communicator, World};
use ferrotron_kernels::cuda::{CudaKernels, KernelCacheStats};
use ferrotron_kernels::{Kernels, cpu};
use ferrotron_tensor::trace::COMMUNICATION;
use ferrotron_tensor::{Category, DType, Device, Instrumentation, Result, Stream, Tensor, Threads};
use std::sync::Arc;

/// Device, queues of work, kernels, groups and seed of one worker.
#[derive(Clone)]
pub struct Rank {
    /// Where kernels run, in order.
    pub compute: Stream,
    /// Where communication runs that computation does not wait for at once.
    pub comm_stream: Stream,
    /// Where rows travel to experts and back. What goes over [`Rank::comm_stream`] is short and waited for soon: it must not stand
    /// behind them.
    pub dispatch_stream: Stream,
    /// The kernels of the device.
    pub kernels: Arc<dyn Kernels>,
    /// All ranks of the run.
    pub world: World,
    /// Ranks that share every layer.
    pub tp: Communicator,
    /// Ranks that share every sequence: each has its tokens of it.
    pub cp: Communicator,
    /// Ranks that have the same weights and other sequences.
    pub dp: Communicator,
    /// Ranks that have the same weights and other tokens, cp × dp: gradients are summed over them.
    pub dp_cp_group: Communicator,
    /// Ranks that share the layers among them, in the order of stages.
    pub pp: Communicator,
    /// The same ranks, for what goes from later stages to earlier ones.
    pub pp_backward_group: Communicator,
    /// The first and the last stage, which share a tied embedding; alone on stages between them.
    pub embedding_group: Communicator,
    /// Ranks that share the tokens of a micro-batch, tp × cp.
    pub tp_cp_group: Communicator,
    /// Ranks that share the tokens of a step, tp × cp × dp.
    pub tp_dp_cp_group: Communicator,
    /// Ranks that have all experts of a layer between them, etp × ep; those that share an expert are neighbours.
    pub etp_ep_group: Communicator,
    /// Ranks that share every expert of this one.
    pub etp: Communicator,
    /// Ranks that have the same experts and other tokens: gradients of experts are summed over them.
    pub expert_dp_group: Communicator,
    /// Communicate on [`Rank::comm_stream`] beside computation where neither needs the other. Equal bits either way.
    pub overlap: bool,
    /// Seed of the run: initial values and dropout come from it.
    pub seed: u64,
}

impl Rank {
    /// A rank on the host's cores; `threads` 0 means all of them.
    pub fn cpu(threads: usize, seed: u64) -> Result<Rank> {
        Rank::cpu_instrumented(threads, seed, Instrumentation::default())
    }

    /// The same under observation.
    pub fn cpu_instrumented(threads: usize, seed: u64, watch: Instrumentation) -> Result<Rank> {
        // Detection first: it asks the system for the matrix unit before compute threads start.
        let kernels = Arc::new(cpu::CpuKernels::detect());
        Rank::alone(&Device::cpu_instrumented(Threads::new(threads)?, watch), kernels, seed)
    }

    /// A rank on card `ordinal`, and how its kernels were made ready; `threads` do what is left to the host.
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

    /// A rank with streams of its own on a device, and nobody to share with.
    pub fn alone(device: &Device, kernels: Arc<dyn Kernels>, seed: u64) -> Result<Rank> {
        let solo = Communicator::solo;
        Ok(Rank {
            compute: device.stream("compute")?,
            comm_stream: device.stream(COMMUNICATION)?,
            dispatch_stream: device.stream(COMMUNICATION)?,
            kernels,
            overlap: true,
            seed,
            world: World::solo(),
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
        })
    }

    /// Ranks that share this one's weights: those of experts, or all others.
    pub fn tp_group(&self, experts: bool) -> &Communicator {
        if experts { &self.etp } else { &self.tp }
    }

    /// Ranks that have the same weights: those of experts, or all others.
    pub fn dp_group(&self, experts: bool) -> &Communicator {
        if experts { &self.expert_dp_group } else { &self.dp_cp_group }
    }

    /// This rank's place among those that have all experts of a layer between them, by whole experts.
    pub fn expert_parallel_rank(&self) -> GroupRank {
        let (here, each) = (group_rank(&self.etp_ep_group), self.etp.size());
        GroupRank { rank: here.rank / each, size: here.size / each }
    }

    /// The device of this rank.
    pub fn device(&self) -> &Device {
        self.compute.device()
    }

    /// New memory for activations on the compute stream.
    pub fn activation(&self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        Tensor::empty(&self.compute, shape, dtype, Category::Activations)
    }
}
