//! Element-wise kernels: sums, casts, soft cap, dropout.

use super::args::kernel_args;
use super::grid::{aligned16, blocks, line};
use super::philox::StepStream;
use super::{CudaKernels, Kernel, typed};
use crate::checks::{dtypes, same_contiguous};
use crate::elementwise::{check_dropout, check_iota};
use crate::philox::DOMAIN_DROPOUT;
use crate::{Dropout, ElementwiseKernels, NormalFill};
use ferrotron_tensor::{DType, Error, Launch, Result, Stream, Tensor, read, write};

/// As in elementwise.cu.
const THREADS: u32 = 256;
const UNROLL: usize = 4;
/// Vectors of a block.
const GROUPS: usize = THREADS as usize * UNROLL;

fn kernel(name: &'static str) -> Kernel {
    Kernel::new("elementwise", name)
}

kernel_args! {
    header "args/elementwise.cuh", includes ["args/philox.cuh"];

    /// An element-wise operation over contiguous tensors: out = f(a, b).
    struct MapArgs {
        a: u64,
        b: u64,
        out: u64,
        n: i64,
        /// Scale, or soft cap.
        factor: f32,
        vectorized: u32,
    }

    /// Dropout of `[n / width, width]`.
    struct DropoutArgs {
        x: u64,
        y: u64,
        /// i32 `[n / width]`: the number of each row among all rows of the step.
        rows: u64,
        n: i64,
        width: i64,
        stream: StepStream,
        /// 1/(1 - p).
        scale: f32,
        /// Random words below p·2³² drop their element.
        threshold: u32,
        vectorized: u32,
        pad: u32,
    }
}

impl CudaKernels {
    /// An element-wise operation on `n` elements from `a` (and `b`) to `out`, of which the widest dtype has `size`
    /// bytes.
    fn map(
        &self,
        l: &Launch,
        kernel: Kernel,
        [a, b, out]: [u64; 3],
        (n, size): (usize, usize),
        factor: f32,
    ) -> Result<()> {
        let args = MapArgs { a, b, out, n: n as i64, factor, vectorized: aligned16(&[a, b, out]).into() };
        self.launch_kernel(l, kernel, line(blocks(l.op(), n, GROUPS * (16 / size))?, THREADS), &args)
    }
}

impl ElementwiseKernels for CudaKernels {
    fn add(&self, s: &Stream, a: &Tensor, b: &Tensor, out: &Tensor) -> Result<()> {
        const OP: &str = "add";
        same_contiguous(OP, &[a, b, out])?;
        dtypes(OP, a.dtype(), &[b, out])?;
        let kernel = typed!(OP, a.dtype(), "elementwise", "add")?;
        s.launch(OP, &[read(a), read(b), write(out)], |l| {
            let at = [l.address(0)?, l.address(1)?, l.address(2)?];
            self.map(l, kernel, at, (a.numel(), a.dtype().size()), 0.0)
        })
    }

    fn add_assign(&self, s: &Stream, x: &Tensor, y: &Tensor) -> Result<()> {
        const OP: &str = "add_assign";
        same_contiguous(OP, &[x, y])?;
        let half = |name| Kernel::f16("elementwise", name);
        let kernel = match y.dtype() {
            DType::F16 if x.dtype() == DType::F32 => half("add_assign_f16_f32"),
            DType::F16 if x.dtype() == DType::F16 => half("add_assign_f16_f16"),
            DType::BF16 if x.dtype() == DType::F16 => {
                return Err(Error::DType { op: OP, found: DType::BF16, wanted: DType::F16 });
            }
            DType::F32 => typed!(OP, x.dtype(), "elementwise", "add_assign_f32")?,
            DType::BF16 => typed!(OP, x.dtype(), "elementwise", "add_assign_bf16")?,
            found => return Err(Error::DType { op: OP, found, wanted: DType::F32 }),
        };
        s.launch(OP, &[write(x), read(y)], |l| {
            let at = [l.address(0)?, l.address(1)?, l.address(0)?];
            self.map(l, kernel, at, (x.numel(), x.dtype().size().max(y.dtype().size())), 0.0)
        })
    }

    fn max_assign(&self, s: &Stream, x: &Tensor, y: &Tensor) -> Result<()> {
        const OP: &str = "max_assign";
        same_contiguous(OP, &[x, y])?;
        dtypes(OP, x.dtype(), &[y])?;
        let kernel = typed!(OP, x.dtype(), "elementwise", "max_assign")?;
        s.launch(OP, &[write(x), read(y)], |l| {
            let at = [l.address(0)?, l.address(1)?, l.address(0)?];
            self.map(l, kernel, at, (x.numel(), x.dtype().size()), 0.0)
        })
    }

    fn scale(&self, s: &Stream, x: &Tensor, factor: f32) -> Result<()> {
        const OP: &str = "scale";
        same_contiguous(OP, &[x])?;
        let kernel = typed!(OP, x.dtype(), "elementwise", "scale")?;
        s.launch(OP, &[write(x)], |l| {
            let at = l.address(0)?;
            self.map(l, kernel, [at, 0, at], (x.numel(), x.dtype().size()), factor)
        })
    }

    fn copy(&self, s: &Stream, x: &Tensor, out: &Tensor) -> Result<()> {
        const OP: &str = "copy";
        if x.dtype() == out.dtype() {
            return self.copy_same(s, x, out);
        }
        same_contiguous(OP, &[x, out])?;
        let name = match (x.dtype(), out.dtype()) {
            (DType::F32, DType::BF16) => "cast_f32_bf16",
            (DType::BF16, DType::F32) => "cast_bf16_f32",
            (DType::F32, DType::F16) => "cast_f32_f16",
            (DType::F16, DType::F32) => "cast_f16_f32",
            (DType::F16, DType::BF16) => "cast_f16_bf16",
            (DType::BF16, DType::F16) => "cast_bf16_f16",
            (found, wanted) => return Err(Error::DType { op: OP, found, wanted }),
        };
        s.launch(OP, &[read(x), write(out)], |l| {
            let at = [l.address(0)?, 0, l.address(1)?];
            self.map(l, kernel(name), at, (x.numel(), x.dtype().size().max(out.dtype().size())), 0.0)
        })
    }

    fn iota(&self, s: &Stream, out: &Tensor) -> Result<()> {
        const OP: &str = "iota";
        check_iota(out)?;
        let kernel = Kernel::new("elementwise", "iota");
        s.launch(OP, &[write(out)], |l| {
            self.map(l, kernel, [0, 0, l.address(0)?], (out.numel(), DType::I32.size()), 0.0)
        })
    }

    fn column_sum(&self, s: &Stream, x: &Tensor, accumulate: bool, sums: &Tensor) -> Result<()> {
        self.launch_column_sum(s, x, accumulate, sums)
    }

    fn dot(&self, s: &Stream, a: &Tensor, b: &Tensor, out: &Tensor) -> Result<()> {
        self.launch_dot(s, a, b, out)
    }

    fn softcap_forward(&self, s: &Stream, cap: f32, x: &Tensor) -> Result<()> {
        const OP: &str = "softcap_forward";
        same_contiguous(OP, &[x])?;
        let kernel = typed!(OP, x.dtype(), "elementwise", "softcap_forward")?;
        s.launch(OP, &[write(x)], |l| {
            let at = l.address(0)?;
            self.map(l, kernel, [at, 0, at], (x.numel(), x.dtype().size()), cap)
        })
    }

    fn softcap_backward(&self, s: &Stream, cap: f32, y: &Tensor, dy: &Tensor) -> Result<()> {
        const OP: &str = "softcap_backward";
        same_contiguous(OP, &[y, dy])?;
        dtypes(OP, y.dtype(), &[dy])?;
        let kernel = typed!(OP, y.dtype(), "elementwise", "softcap_backward")?;
        s.launch(OP, &[read(y), write(dy)], |l| {
            let at = [l.address(1)?, l.address(0)?, l.address(1)?];
            self.map(l, kernel, at, (y.numel(), y.dtype().size()), cap)
        })
    }

    fn dropout(&self, s: &Stream, d: &Dropout) -> Result<()> {
        let &Dropout { p, key, rows, x, y } = d;
        const OP: &str = "dropout";
        same_contiguous(OP, &[x, y])?;
        let width = check_dropout(p, rows, x)? as i64;
        dtypes(OP, x.dtype(), &[y])?;
        let kernel = typed!(OP, x.dtype(), "elementwise", "dropout")?;
        key.check(OP)?;
        let args: Vec<_> = [read(x), write(y), read(rows)].into_iter().chain(key.step.map(read)).collect();
        s.launch(OP, &args, |l| {
            let (from, to) = (l.address(0)?, l.address(1)?);
            let args = DropoutArgs {
                x: from,
                y: to,
                rows: l.address(2)?,
                width,
                n: x.numel() as i64,
                stream: StepStream::new(l, key, 3, DOMAIN_DROPOUT)?,
                scale: 1.0 / (1.0 - p),
                // p·2³² is below 2³² for every p < 1.
                threshold: (f64::from(p) * 4_294_967_296.0) as u32,
                vectorized: aligned16(&[from, to]).into(),
                pad: 0,
            };
            let grid = line(blocks(OP, x.numel(), GROUPS * (16 / x.dtype().size()))?, THREADS);
            self.launch_kernel(l, kernel, grid, &args)
        })
    }

    fn normal(&self, s: &Stream, runs: NormalFill, out: &Tensor) -> Result<()> {
        self.launch_normal(s, runs, out)
    }
}
