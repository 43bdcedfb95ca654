use super::groups::{blocks, line};
use super::{CudaKernels, Kernel, typed};
use crate::mix::{check, matrix};
use crate::philox::RandomStream;
use crate::{DropoutKey, MixKernels};
use ferrotron_tensor::{Arg, DType, Result, Stream, Tensor, read, write};

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct MixArgs {
    a: u64,
    b: u64,
    c: u64,
    n: i64,
    width: i64,
    key: [u32; 2],
    lane: [u32; 2],
    x: f32,
    y: f32,
    own: i32,
    copies: i32,
}

const THREADS: usize = 256;

fn plain(name: &'static str) -> Kernel {
    Kernel { source: "mix", name }
}

impl CudaKernels {
    /// One thread for each of `threads` elements; the arguments' addresses are filled in.
    fn mix(
        &self,
        s: &Stream,
        (op, kernel): (&'static str, Kernel),
        tensors: &[Arg],
        threads: usize,
        args: MixArgs,
    ) -> Result<()> {
        let grid = line(blocks(op, threads, THREADS)?, THREADS as u32);
        s.launch(op, tensors, |l| {
            let mut args = args;
            for (i, slot) in
                [&mut args.a, &mut args.b, &mut args.c].into_iter().enumerate().take(tensors.len())
            {
                *slot = l.address(i)?;
            }
            self.queue(l, kernel, grid, &args)
        })
    }
}

impl MixKernels for CudaKernels {
    fn leave_out(&self, s: &Stream, segments: &Tensor, index: &Tensor, probs: &Tensor) -> Result<()> {
        const OP: &str = "leave_out";
        let [t, k] = matrix(OP, index)?;
        check(OP, &[(segments, DType::I32, t), (index, DType::I32, t * k), (probs, DType::F32, t * k)])?;
        let args = MixArgs { n: t as i64, width: k as i64, ..MixArgs::default() };
        self.mix(s, (OP, plain(OP)), &[read(segments), write(index), write(probs)], t * k, args)
    }

    fn copy_choices(
        &self,
        s: &Stream,
        index: &Tensor,
        own: usize,
        copies: usize,
        wide: &Tensor,
    ) -> Result<()> {
        const OP: &str = "copy_choices";
        let [t, k] = matrix(OP, index)?;
        check(OP, &[(index, DType::I32, t * k), (wide, DType::I32, t * k * copies)])?;
        let args =
            MixArgs { n: (t * k) as i64, own: own as i32, copies: copies as i32, ..MixArgs::default() };
        self.mix(s, (OP, plain(OP)), &[read(index), write(wide)], t * k * copies, args)
    }

    fn jitter(
        &self,
        s: &Stream,
        eps: f32,
        key: DropoutKey,
        rows: &Tensor,
        x: &Tensor,
        y: &Tensor,
    ) -> Result<()> {
        const OP: &str = "jitter";
        let [t, h] = matrix(OP, x)?;
        check(OP, &[(rows, DType::I32, t), (y, x.dtype(), t * h)])?;
        let RandomStream { key, lane } = RandomStream::dropout(key);
        let args = MixArgs { n: (t * h) as i64, width: h as i64, key, lane, x: eps, ..MixArgs::default() };
        let kernel = typed!(OP, x.dtype(), "mix", "jitter")?;
        self.mix(s, (OP, kernel), &[read(rows), read(x), write(y)], t * h, args)
    }

    fn split_halves(&self, s: &Stream, x: &Tensor, out: &Tensor) -> Result<()> {
        const OP: &str = "split_halves";
        let [t, n] = matrix(OP, x)?;
        check(OP, &[(x, DType::F32, t * n), (out, DType::BF16, 2 * t * n)])?;
        let args = MixArgs { n: (t * n) as i64, width: n as i64, ..MixArgs::default() };
        self.mix(s, (OP, plain(OP)), &[read(x), write(out)], t * n, args)
    }

    fn add_row(&self, s: &Stream, bias: &Tensor, x: &Tensor) -> Result<()> {
        const OP: &str = "add_row";
        let [t, n] = matrix(OP, x)?;
        check(OP, &[(x, DType::F32, t * n), (bias, bias.dtype(), n)])?;
        let args = MixArgs { n: (t * n) as i64, width: n as i64, ..MixArgs::default() };
        let kernel = typed!(OP, bias.dtype(), "mix", "add_row")?;
        self.mix(s, (OP, kernel), &[read(bias), write(x)], t * n, args)
    }

    fn add_counts(&self, s: &Stream, counts: &Tensor, total: &Tensor, steps: &Tensor) -> Result<()> {
        const OP: &str = "add_counts";
        let n = counts.numel();
        check(OP, &[(counts, DType::I64, n), (total, DType::I64, n), (steps, DType::F32, 1)])?;
        let args = MixArgs { n: n as i64, ..MixArgs::default() };
        self.mix(s, (OP, plain(OP)), &[read(counts), write(total), write(steps)], n.max(1), args)
    }

    fn add_totals(&self, s: &Stream, x: &Tensor, total: &Tensor) -> Result<()> {
        const OP: &str = "add_totals";
        let n = x.numel();
        check(OP, &[(x, DType::F64, n), (total, DType::F64, n)])?;
        self.mix(
            s,
            (OP, plain(OP)),
            &[read(x), write(total)],
            n,
            MixArgs { n: n as i64, ..MixArgs::default() },
        )
    }

    fn update_quantiles(
        &self,
        s: &Stream,
        keep: f32,
        mean: f32,
        found: &Tensor,
        beta: &Tensor,
    ) -> Result<()> {
        const OP: &str = "update_quantiles";
        let n = beta.numel();
        check(OP, &[(found, DType::F32, n), (beta, DType::F32, n)])?;
        let args = MixArgs { n: n as i64, x: keep, y: mean, ..MixArgs::default() };
        s.launch(OP, &[read(found), write(beta)], |l| {
            let args = MixArgs { a: l.address(0)?, b: l.address(1)?, ..args };
            self.queue(l, plain(OP), line(1, 1), &args)
        })
    }
}
