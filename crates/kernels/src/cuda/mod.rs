//! The kernels' second home: CUDA. Each family is a `.cu` source beside the `.rs` that launches it. Sources are
//! compiled for the card by NVRTC at the first start and kept on disk; products go through cuBLASLt.

mod activation;
mod attention;
mod blas;
mod cache;
mod columns;
mod compile;
mod copy;
mod elementwise;
mod embedding;
mod energy;
mod fastest;
mod fused;
mod gemm;
mod grad_norm;
mod grouped;
mod groups;
mod latent;
mod libraries;
mod loss;
mod measured;
mod merge;
mod mix;
mod modules;
mod moments;
mod norm;
mod normal;
mod optim;
mod optim_list;
mod permute;
mod permute_maps;
mod plans;
mod product;
mod quant;
mod rope;
mod router;
mod row_bias;
mod rows;
mod sources;
mod tensor_map;
#[cfg(test)]
mod ways;
mod weighted;

pub use cache::folder as cache_folder;
pub use compile::{Compiled, Compiler, Usage};
pub use energy::EnergyCounter;
pub use libraries::{NvidiaLibrary, folders as library_folders};
pub use modules::{Readiness, architecture};
pub use sources::{SOURCES, Source, Variant, variants};

use ferrotron_tensor::{Device, Error, Launch, Result};
use modules::Modules;
use plans::Plans;

/// The kernels of a card.
pub struct CudaKernels {
    modules: Modules,
    plans: Plans,
    /// Tables of tiles of packed sequences.
    tables: attention::Tables,
    multiprocessors: u32,
}

/// A kernel of a source.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernel {
    /// Source, as `loss` for `loss.cu`.
    pub(crate) source: &'static str,
    /// Name of the function.
    pub(crate) name: &'static str,
}

/// How many threads run a kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
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
        let Some(card) = device.card() else {
            return Err(Error::NoCuda("the device is the CPU".into()));
        };
        // A stream makes the card's context current on this thread.
        let _stream = device.stream("loading")?;
        Ok(CudaKernels {
            modules: Modules::load(card)?,
            plans: Plans::open(card)?,
            tables: Default::default(),
            multiprocessors: card.multiprocessors,
        })
    }

    /// How many sources were compiled, how many were in the cache.
    pub fn readiness(&self) -> Readiness {
        self.modules.readiness()
    }

    /// Multiprocessors of the card.
    pub(crate) fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// Is there this source for the card?
    pub(crate) fn has(&self, source: &str) -> bool {
        self.modules.has(source)
    }

    /// Queues a kernel on the launch's stream with one struct of arguments, laid out as the source's. A grid with
    /// a zero does nothing.
    pub(crate) fn queue<A: Copy>(&self, l: &Launch, kernel: Kernel, grid: Grid, args: &A) -> Result<()> {
        self.modules.queue(l, kernel, grid, args)
    }
}

/// The instance of a kernel for f32, bf16 or f16: `typed!(OP, dtype, "norm", "norm_forward")`. That for f16 is the bf16 one
/// of the source compiled with f16 numbers.
macro_rules! typed {
    ($op:expr, $dtype:expr, $source:literal, $name:literal) => {
        match $dtype {
            ferrotron_tensor::DType::F32 => {
                Ok($crate::cuda::Kernel { source: $source, name: concat!($name, "_f32") })
            }
            ferrotron_tensor::DType::BF16 => {
                Ok($crate::cuda::Kernel { source: $source, name: concat!($name, "_bf16") })
            }
            ferrotron_tensor::DType::F16 => {
                Ok($crate::cuda::Kernel { source: concat!($source, ".half"), name: concat!($name, "_bf16") })
            }
            found => {
                Err(ferrotron_tensor::Error::DType { op: $op, found, wanted: ferrotron_tensor::DType::F32 })
            }
        }
    };
}
pub(crate) use typed;

impl crate::Kernels for CudaKernels {}
