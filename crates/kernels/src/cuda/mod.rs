//! CUDA implementation of the kernels. Each family is a `.cu` source beside the `.rs` file that launches it. NVRTC
//! compiles the sources for the GPU at the first start, and the cubins are cached on disk; GEMMs go through cuBLASLt.

mod activation;
mod args;
mod attention;
mod attention_merge;
mod autotune;
mod cache;
mod compile;
mod copy;
mod cublaslt;
mod digest;
mod dora;
mod elementwise;
mod embedding;
mod functions;
mod fused;
mod gemm;
mod gemm_cache;
#[cfg(test)]
mod gemm_tests;
mod generic_gemm;
mod grad_norm;
mod grid;
mod grouped;
mod libraries;
mod loss;
mod mla_keys;
mod modules;
mod moe_elementwise;
mod moments;
mod multi_tensor;
mod muon;
mod norm;
mod nvml;
#[cfg(test)]
mod occupy;
mod optim;
mod permute;
mod permute_maps;
mod philox;
mod quant;
mod random_normal;
mod reduce;
mod rope;
mod router;
mod row_bias;
mod row_grid;
mod sources;
mod split_slots;
mod tensor_map;
#[cfg(test)]
mod test_support;
mod weighted_activation;

pub use attention::CapturedSequences;
pub use cache::folder as cache_folder;
pub use compile::{Compiled, Compiler, KernelResources};
pub use libraries::{NvidiaLibrary, folders as library_folders};
pub use modules::{KernelCacheStats, architecture};
pub use nvml::{GpuHealth, NvmlDevice, bus_id, throttle_reasons};
pub use sources::{SOURCES, Source, Variant, variants};

use args::DeviceType;
use ferrotron_tensor::{Device, Error, Launch, Result};
use gemm_cache::GemmCache;
use modules::Modules;

/// The kernels of a GPU.
pub struct CudaKernels {
    modules: Modules,
    gemm_cache: GemmCache,
    /// Tile tables of packed sequences.
    tables: attention::TileTables,
    multiprocessors: u32,
    /// Compute capability that the kernels are chosen for.
    capability: (u32, u32),
}

/// A kernel: a function of a compiled source.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernel {
    /// Name of the source, as `attention/forward` for attention/forward.cu.
    pub(crate) source: &'static str,
    /// What the source is compiled for.
    pub(crate) variant: Variant,
    /// Name of the function.
    pub(crate) name: &'static str,
}

impl Kernel {
    /// A kernel of a source's base variant.
    pub(crate) const fn new(source: &'static str, name: &'static str) -> Kernel {
        Kernel { source, variant: Variant::Base, name }
    }

    /// A kernel of a source's f16 variant.
    pub(crate) const fn f16(source: &'static str, name: &'static str) -> Kernel {
        Kernel { source, variant: Variant::F16, name }
    }

    /// This attention kernel with probabilities rounded to E4M3. There is no f16 kernel of that kind: those stay as
    /// they are.
    pub(crate) fn with_fp8_probs(self) -> Kernel {
        match self.variant {
            Variant::Base => Kernel { variant: Variant::Fp8Probs, ..self },
            _ => self,
        }
    }
}

/// Grid and block of a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LaunchConfig {
    /// Blocks along x, y, z.
    pub(crate) blocks: [u32; 3],
    /// Threads of a block.
    pub(crate) threads: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub(crate) shared: u32,
}

impl CudaKernels {
    /// Loads the kernels for a CUDA device, from the cache or by compiling them.
    pub fn load(device: &Device) -> Result<CudaKernels> {
        let Some(card) = device.gpu() else {
            return Err(Error::NoCuda("the device is the CPU".into()));
        };
        // Creating a stream makes the context current on this thread.
        let _stream = device.stream("loading")?;
        Ok(CudaKernels {
            modules: Modules::load(card)?,
            gemm_cache: GemmCache::open(card)?,
            tables: Default::default(),
            multiprocessors: card.multiprocessors,
            capability: card.capability,
        })
    }

    /// How many sources were compiled, and how many were cached.
    pub fn cache_stats(&self) -> KernelCacheStats {
        self.modules.cache_stats()
    }

    /// Multiprocessors (SMs) of the GPU.
    pub(crate) fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// Whether this source is compiled for the GPU.
    pub(crate) fn has(&self, source: &'static str) -> bool {
        self.modules.has(source)
    }

    /// Launches a kernel on the launch's stream with one struct of arguments (see `kernel_args!`). A grid without blocks does
    /// nothing.
    fn launch_kernel<A: DeviceType>(
        &self,
        l: &Launch,
        kernel: Kernel,
        grid: LaunchConfig,
        args: &A,
    ) -> Result<()> {
        self.modules.launch_kernel(l, kernel, grid, args)
    }
}

/// The kernel for f32, bf16 or f16: `typed!(OP, dtype, "norm/forward", "norm_1")`. The one for f16 is in the source's
/// f16 variant.
macro_rules! typed {
    ($op:expr, $dtype:expr, $source:literal, $name:literal) => {
        match $dtype {
            ferrotron_tensor::DType::F32 => Ok($crate::cuda::Kernel::new($source, concat!($name, "_f32"))),
            ferrotron_tensor::DType::BF16 => Ok($crate::cuda::Kernel::new($source, concat!($name, "_bf16"))),
            ferrotron_tensor::DType::F16 => Ok($crate::cuda::Kernel::f16($source, concat!($name, "_f16"))),
            found => {
                Err(ferrotron_tensor::Error::DType { op: $op, found, wanted: ferrotron_tensor::DType::F32 })
            }
        }
    };
}
pub(crate) use typed;

impl crate::Kernels for CudaKernels {}
