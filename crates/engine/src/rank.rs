//! A rank: everything a worker has. Nothing is global, so many ranks fit in one process.

use crate::Place;
use crate::flat::place;
use ferrotron_comm::{Communicator, World};
use ferrotron_kernels::cuda::{CudaKernels, Readiness};
use ferrotron_kernels::{Kernels, cpu};
use ferrotron_tensor::trace::COMMUNICATION;
use ferrotron_tensor::{Category, DType, Device, Result, Stream, Tensor, Threads, Watch};
use std::sync::Arc;

/// Device, queues of work, kernels, groups and seed of one worker.
#[derive(Clone)]
pub struct Rank {
    /// Where kernels run, in order.
    pub compute: Stream,
    /// Where communication runs that computation does not wait for at once.
    pub comm: Stream,
    /// Where rows travel to experts and back. What goes over [`Rank::comm`] is short and waited for soon: it must not stand
    /// behind them.
    pub travel: Stream,
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
    pub copies: Communicator,
    /// Ranks that share the layers among them, in the order of stages.
    pub pp: Communicator,
    /// The same ranks, for what goes from later stages to earlier ones.
    pub back: Communicator,
    /// The first and the last stage, which share a tied embedding; alone on stages between them.
    pub ends: Communicator,
    /// Ranks that share the tokens of a micro-batch, tp × cp.
    pub batch: Communicator,
    /// Ranks that share the tokens of a step, tp × cp × dp.
    pub step: Communicator,
    /// Ranks that have all experts of a layer between them, etp × ep; those that share an expert are neighbours.
    pub experts: Communicator,
    /// Ranks that share every expert of this one.
    pub etp: Communicator,
    /// Ranks that have the same experts and other tokens: gradients of experts are summed over them.
    pub expert_copies: Communicator,
    /// Communicate on [`Rank::comm`] beside computation where neither needs the other. Equal bits either way.
    pub overlap: bool,
    /// Seed of the run: initial values and dropout come from it.
    pub seed: u64,
}

impl Rank {
    /// A rank on the host's cores; `threads` 0 means all of them.
    pub fn cpu(threads: usize, seed: u64) -> Result<Rank> {
        Rank::cpu_watched(threads, seed, Watch::default())
    }

    /// The same under observation.
    pub fn cpu_watched(threads: usize, seed: u64, watch: Watch) -> Result<Rank> {
        // Detection first: it asks the system for the matrix unit before compute threads start.
        let kernels = Arc::new(cpu::CpuKernels::detect());
        Rank::alone(&Device::cpu_watched(Threads::new(threads)?, watch), kernels, seed)
    }

    /// A rank on card `ordinal`, and how its kernels were made ready; `threads` do what is left to the host.
    pub fn cuda(ordinal: usize, threads: usize, seed: u64, watch: Watch) -> Result<(Rank, Readiness)> {
        let device = Device::cuda(ordinal, Threads::new(threads)?, watch)?;
        let kernels = CudaKernels::load(&device)?;
        let readiness = kernels.readiness();
        Ok((Rank::alone(&device, Arc::new(kernels), seed)?, readiness))
    }

    /// A rank with streams of its own on a device, and nobody to share with.
    pub fn alone(device: &Device, kernels: Arc<dyn Kernels>, seed: u64) -> Result<Rank> {
        let solo = Communicator::solo;
        Ok(Rank {
            compute: device.stream("compute")?,
            comm: device.stream(COMMUNICATION)?,
            travel: device.stream(COMMUNICATION)?,
            kernels,
            overlap: true,
            seed,
            world: World::solo(),
            tp: solo(),
            cp: solo(),
            dp: solo(),
            copies: solo(),
            pp: solo(),
            back: solo(),
            ends: solo(),
            batch: solo(),
            step: solo(),
            experts: solo(),
            etp: solo(),
            expert_copies: solo(),
        })
    }

    /// Ranks that share this one's weights: those of experts, or all others.
    pub fn sharers(&self, experts: bool) -> &Communicator {
        if experts { &self.etp } else { &self.tp }
    }

    /// Ranks that have the same weights: those of experts, or all others.
    pub fn copies_of(&self, experts: bool) -> &Communicator {
        if experts { &self.expert_copies } else { &self.copies }
    }

    /// This rank's place among those that have all experts of a layer between them, by whole experts.
    pub fn expert_place(&self) -> Place {
        let (here, each) = (place(&self.experts), self.etp.size());
        Place { rank: here.rank / each, size: here.size / each }
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
