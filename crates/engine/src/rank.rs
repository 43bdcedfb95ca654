//! A rank: everything a worker has. Nothing is global, so many ranks fit in one process.

use ferrotron_comm::World;
use ferrotron_kernels::cuda::{CudaKernels, Readiness};
use ferrotron_kernels::{Kernels, cpu};
use ferrotron_tensor::{Category, DType, Device, Result, Stream, Tensor, Threads, Watch};
use std::sync::Arc;

/// Device, queue of work, kernels, world and seed of one worker.
#[derive(Clone)]
pub struct Rank {
    /// Where kernels run, in order.
    pub compute: Stream,
    /// The kernels of the device.
    pub kernels: Arc<dyn Kernels>,
    /// All ranks of the run.
    pub world: World,
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
        let device = Device::cpu_watched(Threads::new(threads)?, watch);
        Ok(Rank { compute: device.stream("compute")?, kernels, seed, world: World::solo() })
    }

    /// A rank on card `ordinal`, and how its kernels were made ready; `threads` do what is left to the host.
    pub fn cuda(ordinal: usize, threads: usize, seed: u64, watch: Watch) -> Result<(Rank, Readiness)> {
        let device = Device::cuda(ordinal, Threads::new(threads)?, watch)?;
        let kernels = CudaKernels::load(&device)?;
        let readiness = kernels.readiness();
        let compute = device.stream("compute")?;
        Ok((Rank { compute, kernels: Arc::new(kernels), seed, world: World::solo() }, readiness))
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
