//! The kernels' second home: CUDA. Each family is a `.cu` source beside the `.rs` that launches it. Sources are
//! compiled for the card by NVRTC at the first start and kept on disk; products go through cuBLASLt.

mod activation;
mod args;
mod attention;
mod attention_merge;
mod autotune;
mod cache;
mod compile;
mod copy;
mod cublaslt;
mod elementwise;
mod embedding;
mod energy;
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
mod norm;
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
mod tensor_map;
mod weighted_activation;

pub use cache::folder as cache_folder;
pub use compile::{Compiled, Compiler, KernelResources};
pub use energy::EnergyCounter;
pub use libraries::{NvidiaLibrary, folders as library_folders};
pub use modules::{KernelCacheStats, architecture};
pub use sources::{SOURCES, Source, Variant, variants};

use args::DeviceType;
use ferrotron_tensor::{Device, Error, Launch, Result};
use gemm_cache::GemmCache;
use modules::Modules;

/// The kernels of a card.
pub struct CudaKernels {
    modules: Modules,
    gemm_cache: GemmCache,
    /// Tables of tiles of packed sequences.
    tables: attention::TileTables,
    multiprocessors: u32,
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
    /// A kernel of a source as it is written.
    pub(crate) const fn new(source: &'static str, name: &'static str) -> Kernel {
        Kernel { source, variant: Variant::Base, name }
    }

    /// A kernel of a source's f16 variant.
    pub(crate) const fn f16(source: &'static str, name: &'static str) -> Kernel {
        Kernel { source, variant: Variant::F16, name }
    }

    /// This attention kernel with probabilities rounded to E4M3. f16 variants have no such sibling, and stay as they are.
    pub(crate) fn with_fp8_probs(self) -> Kernel {
        match self.variant {
            Variant::Base => Kernel { variant: Variant::Fp8Probs, ..self },
            _ => self,
        }
    }
}

/// How many threads run a kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LaunchConfig {
    /// Blocks along x, y, z.
    pub(crate) blocks: [u32; 3],
    /// Threads of a block.
    pub(crate) threads: u32,
    /// Dynamic shared memory of a block, bytes.
    pub(crate) shared: u32,
}

impl CudaKernels {
    /// Makes the kernels of a CUDA device ready: from the cache, or compiled now.
    pub fn load(device: &Device) -> Result<CudaKernels> {
        let Some(card) = device.gpu() else {
            return Err(Error::NoCuda("the device is the CPU".into()));
        };
        // A stream makes the card's context current on this thread.
        let _stream = device.stream("loading")?;
        Ok(CudaKernels {
            modules: Modules::load(card)?,
            gemm_cache: GemmCache::open(card)?,
            tables: Default::default(),
            multiprocessors: card.multiprocessors,
        })
    }

    /// How many sources were compiled, how many were in the cache.
    pub fn cache_stats(&self) -> KernelCacheStats {
        self.modules.cache_stats()
    }

    /// Multiprocessors of the card.
    pub(crate) fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// Is there this source for the card?
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

/// The instance of a kernel for f32, bf16 or f16: `typed!(OP, dtype, "norm/forward", "norm_1")`. That for f16 is in the
/// source's f16 variant.
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
