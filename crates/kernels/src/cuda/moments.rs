//! Moments in the ways they are kept, and masters in halves, from f32 and back.

use super::grid::{blocks, line};
use super::{CudaKernels, Kernel};
use crate::optimizer::{check_halves, check_values};
use crate::{Moment, MomentOrder};
use ferrotron_tensor::{Arg, DType, Error, Result, Stream, Tensor, read, write};

const THREADS: u32 = 256;

/// Values, codes, scales; or master, high, low.
#[repr(C)]
#[derive(Clone, Copy)]
struct MomentArgs {
    three: [u64; 3],
    n: i64,
}

/// The kernel between f32 and a moment.
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
        .map(|name| Kernel { source: "moments", name })
    };
}

impl CudaKernels {
    /// The moment of f32 `values`.
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
        let args = [read(values), write(moment.values)].into_iter().chain(moment.scales.map(write));
        self.element_wise(s, OP, kernel?, &args.collect::<Vec<_>>(), values.numel())
    }

    /// The f32 `values` of a moment.
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
        let args = [write(values), read(moment.values)].into_iter().chain(moment.scales.map(read));
        self.element_wise(s, OP, kernel?, &args.collect::<Vec<_>>(), values.numel())
    }

    /// A master as the two halves of its bits.
    pub(super) fn split_bf16x2(
        &self,
        s: &Stream,
        master: &Tensor,
        high: &Tensor,
        low: &Tensor,
    ) -> Result<()> {
        const OP: &str = "split_master";
        check_halves(OP, master, high, low)?;
        let kernel = Kernel { source: "moments", name: OP };
        self.element_wise(s, OP, kernel, &[read(master), write(high), write(low)], master.numel())
    }

    /// The master of two halves.
    pub(super) fn join_halves(&self, s: &Stream, high: &Tensor, low: &Tensor, master: &Tensor) -> Result<()> {
        const OP: &str = "join_master";
        check_halves(OP, master, high, low)?;
        let kernel = Kernel { source: "moments", name: OP };
        self.element_wise(s, OP, kernel, &[write(master), read(high), read(low)], master.numel())
    }

    /// A kernel with a thread for each of `n` elements of up to three tensors.
    fn element_wise(
        &self,
        s: &Stream,
        op: &'static str,
        kernel: Kernel,
        args: &[Arg],
        n: usize,
    ) -> Result<()> {
        s.launch(op, args, |l| {
            let mut three = [0; 3];
            for (i, at) in three.iter_mut().enumerate().take(args.len()) {
                *at = l.address(i)?;
            }
            let grid = line(blocks(op, n, THREADS as usize)?, THREADS);
            self.launch_kernel(l, kernel, grid, &MomentArgs { three, n: n as i64 })
        })
    }
}
