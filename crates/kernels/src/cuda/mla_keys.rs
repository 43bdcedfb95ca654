//! Keys of multi-head latent attention.

use super::args::kernel_args;
use super::row_grid::{blocks, columns, rows_aligned16};
use super::{CudaKernels, Kernel, LaunchConfig, typed};
use crate::attention::mla::check_keys;
use crate::cpu::rows::Rows;
use ferrotron_tensor::{DType, Launch, Result, Stream, Tensor, read, write};

/// As in mla_keys.cu.
const VECTORIZED_OWN: u32 = 1;
const VECTORIZED_SHARED: u32 = 2;
const THREADS: u32 = 256;

kernel_args! {
    header "args/mla_keys.cuh", includes [];

    /// Keys of multi-head latent attention: k `[tokens, heads, a + b]` from own `[tokens, heads, a]` and shared `[tokens, b]`.
    struct MlaKeysArgs {
        own: u64,
        shared: u64,
        k: u64,
        /// Strides in elements.
        own_token: i64,
        own_head: i64,
        shared_token: i64,
        k_token: i64,
        k_head: i64,
        heads: i32,
        a: i32,
        b: i32,
        /// `Flag` of mla_keys.cu.
        flags: u32,
    }
}

impl CudaKernels {
    /// Launches a kernel; `places` are the launch's arguments own, shared and k.
    fn keys(
        &self,
        l: &Launch,
        (op, kernel): (&'static str, Kernel),
        dtype: DType,
        [own, shared, k]: [Rows; 3],
        places: [usize; 3],
    ) -> Result<()> {
        let [own_at, shared_at, k_at] = places;
        let mut args = MlaKeysArgs {
            own: l.address(own_at)?,
            shared: l.address(shared_at)?,
            k: l.address(k_at)?,
            own_token: own.outer_stride as i64,
            own_head: own.inner_stride as i64,
            shared_token: shared.outer_stride as i64,
            k_token: k.outer_stride as i64,
            k_head: k.inner_stride as i64,
            heads: columns(op, own.inner)?,
            a: columns(op, own.width)?,
            b: columns(op, shared.width)?,
            flags: 0,
        };
        // Kernels count the channels of all heads in 32 bits.
        columns(op, k.inner * k.width)?;
        let second = args.k + (own.width * dtype.size()) as u64;
        for (flag, views) in [
            (VECTORIZED_OWN, [(args.own, own), (args.k, k)]),
            (VECTORIZED_SHARED, [(args.shared, shared), (second, k)]),
        ] {
            if rows_aligned16(dtype, &views) {
                args.flags |= flag;
            }
        }
        let grid = LaunchConfig { blocks: [blocks(op, own.outer)?, 1, 1], threads: THREADS, shared: 0 };
        self.launch_kernel(l, kernel, grid, &args)
    }
}

impl CudaKernels {
    pub(super) fn launch_mla_concat_keys(
        &self,
        s: &Stream,
        own: &Tensor,
        shared: &Tensor,
        k: &Tensor,
    ) -> Result<()> {
        const OP: &str = "mla_concat_keys";
        let rows = check_keys(OP, own, shared, k)?;
        let kernel = (OP, typed!(OP, k.dtype(), "mla_keys", "mla_concat_keys")?);
        s.launch(OP, &[read(own), read(shared), write(k)], |l| {
            self.keys(l, kernel, k.dtype(), rows, [0, 1, 2])
        })
    }

    pub(super) fn launch_mla_split_keys(
        &self,
        s: &Stream,
        k: &Tensor,
        own: &Tensor,
        shared: &Tensor,
    ) -> Result<()> {
        const OP: &str = "mla_split_keys";
        let rows = check_keys(OP, own, shared, k)?;
        let kernel = (OP, typed!(OP, k.dtype(), "mla_keys", "mla_split_keys")?);
        s.launch(OP, &[read(k), write(own), write(shared)], |l| {
            self.keys(l, kernel, k.dtype(), rows, [1, 2, 0])
        })
    }
}
