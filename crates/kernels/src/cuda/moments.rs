//! Packs and unpacks optimizer moments, splits and joins master weights.

use super::args::kernel_args;
use super::grid::{blocks, line};
use super::{CudaKernels, Kernel};
use crate::optimizer::{check_halves, check_values};
use crate::{Moment, MomentOrder};
use ferrotron_tensor::{Arg, DType, Error, Result, Stream, Tensor, read, write};

const THREADS: u32 = 256;

kernel_args! {
    header "args/moments.cuh", includes [];

    /// Packs or unpacks an optimizer moment.
    struct MomentArgs {
        /// f32 `[n]`.
        values: u64,
        /// The packed moment, and u8 scales of blocks of 32 where it has them.
        codes: u64,
        scales: u64,
        n: i64,
    }

    /// Splits an f32 master weight into a bf16 and 16 more bits, or joins them.
    struct SplitMasterArgs {
        master: u64,
        high: u64,
        low: u64,
        n: i64,
    }
}

/// The kernel between f32 and a moment's format.
macro_rules! moments {
    ($op:expr, $moment:expr, $order:expr, $name:literal) => {
        match ($moment.values.dtype(), $order) {
            (DType::F32, _) => Ok(concat!($name, "_f32")),
            (DType::BF16, _) => Ok(concat!($name, "_bf16")),
            (DType::F16, MomentOrder::First) => Ok(concat!($name, "_first_f16")),
            (DType::F16, MomentOrder::Second) => Ok(concat!($name, "_second_f16")),
            (DType::U8, MomentOrder::First) => Ok(concat!($name, "_first_fp8")),
            (DType::U8, MomentOrder::Second) => Ok(concat!($name, "_second_fp8")),
            (found, _) => Err(Error::DType { op: $op, found, wanted: DType::F32 }),
        }
        .map(|name| Kernel::new("moments", name))
    };
}

impl CudaKernels {
    /// Packs f32 `values` as a moment.
    pub(super) fn pack_values(
        &self,
        s: &Stream,
        order: MomentOrder,
        values: &Tensor,
        moment: Moment,
    ) -> Result<()> {
        const OP: &str = "pack_moment";
        check_values(OP, &moment, values)?;
        let kernel: Result<Kernel> = moments!(OP, moment, order, "pack");
        let tensors = [read(values), write(moment.values)].into_iter().chain(moment.scales.map(write));
        self.launch_moment(s, OP, kernel?, &tensors.collect::<Vec<_>>(), values.numel())
    }

    /// Unpacks a moment to f32 `values`.
    pub(super) fn unpack_values(
        &self,
        s: &Stream,
        order: MomentOrder,
        moment: Moment,
        values: &Tensor,
    ) -> Result<()> {
        const OP: &str = "unpack_moment";
        check_values(OP, &moment, values)?;
        let kernel: Result<Kernel> = moments!(OP, moment, order, "unpack");
        let tensors = [write(values), read(moment.values)].into_iter().chain(moment.scales.map(read));
        self.launch_moment(s, OP, kernel?, &tensors.collect::<Vec<_>>(), values.numel())
    }

    /// Splits f32 master weights into bf16 weights and 16 more bits.
    pub(super) fn split_master_weights(
        &self,
        s: &Stream,
        master: &Tensor,
        high: &Tensor,
        low: &Tensor,
    ) -> Result<()> {
        const OP: &str = "split_master";
        check_halves(OP, master, high, low)?;
        self.launch_split(s, OP, &[read(master), write(high), write(low)], master.numel())
    }

    /// Joins split master weights.
    pub(super) fn join_master_weights(
        &self,
        s: &Stream,
        high: &Tensor,
        low: &Tensor,
        master: &Tensor,
    ) -> Result<()> {
        const OP: &str = "join_master";
        check_halves(OP, master, high, low)?;
        self.launch_split(s, OP, &[write(master), read(high), read(low)], master.numel())
    }

    /// One thread to each of `n` elements of values, codes and, where there are any, scales.
    fn launch_moment(
        &self,
        s: &Stream,
        op: &'static str,
        kernel: Kernel,
        tensors: &[Arg],
        n: usize,
    ) -> Result<()> {
        s.launch(op, tensors, |l| {
            let scales = if tensors.len() > 2 { l.address(2)? } else { 0 };
            let args = MomentArgs { values: l.address(0)?, codes: l.address(1)?, scales, n: n as i64 };
            self.launch_kernel(l, kernel, line(blocks(op, n, THREADS as usize)?, THREADS), &args)
        })
    }

    /// One thread to each of `n` elements of master, high and low; the kernel has the operation's name.
    fn launch_split(&self, s: &Stream, op: &'static str, tensors: &[Arg], n: usize) -> Result<()> {
        s.launch(op, tensors, |l| {
            let (master, high, low) = (l.address(0)?, l.address(1)?, l.address(2)?);
            let args = SplitMasterArgs { master, high, low, n: n as i64 };
            let config = line(blocks(op, n, THREADS as usize)?, THREADS);
            self.launch_kernel(l, Kernel::new("moments", op), config, &args)
        })
    }
}
