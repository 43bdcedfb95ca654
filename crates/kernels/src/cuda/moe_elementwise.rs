//! Small kernels of MoE layers.

use super::args::kernel_args;
use super::grid::{blocks, line};
use super::philox::StepStream;
use super::{CudaKernels, Kernel, typed};
use crate::Jitter;
use crate::philox::DOMAIN_DROPOUT;
use crate::router::check::{elements, matrix};
use ferrotron_tensor::{Arg, DType, Result, Stream, Tensor, read, write};

kernel_args! {
    header "args/moe_elementwise.cuh", includes ["args/philox.cuh"];

    /// Small kernels of an MoE layer; each kernel says what a, b and c are.
    #[derive(Default)]
    struct MoeArgs {
        a: u64,
        b: u64,
        c: u64,
        n: i64,
        width: i64,
        stream: StepStream,
        x: f32,
        y: f32,
        /// Experts of a rank.
        own: i32,
        /// Ranks that share each expert.
        copies: i32,
    }
}

const THREADS: usize = 256;

fn moe_kernel(name: &'static str) -> Kernel {
    Kernel::new("moe_elementwise", name)
}

impl CudaKernels {
    /// One thread to each of `threads` elements; fills in the tensors' addresses.
    fn launch_moe(
        &self,
        s: &Stream,
        (op, kernel): (&'static str, Kernel),
        tensors: &[Arg],
        threads: usize,
        args: MoeArgs,
    ) -> Result<()> {
        let grid = line(blocks(op, threads, THREADS)?, THREADS as u32);
        s.launch(op, tensors, |l| {
            let mut args = args;
            for (i, slot) in
                [&mut args.a, &mut args.b, &mut args.c].into_iter().enumerate().take(tensors.len())
            {
                *slot = l.address(i)?;
            }
            self.launch_kernel(l, kernel, grid, &args)
        })
    }
}

impl CudaKernels {
    pub(super) fn launch_mask_padding(
        &self,
        s: &Stream,
        segments: &Tensor,
        index: &Tensor,
        probs: &Tensor,
    ) -> Result<()> {
        const OP: &str = "mask_padding";
        let [t, k] = matrix(OP, index)?;
        elements(OP, &[(segments, DType::I32, t), (index, DType::I32, t * k), (probs, DType::F32, t * k)])?;
        let args = MoeArgs { n: t as i64, width: k as i64, ..MoeArgs::default() };
        self.launch_moe(s, (OP, moe_kernel(OP)), &[read(segments), write(index), write(probs)], t * k, args)
    }

    pub(super) fn launch_expand_topk(
        &self,
        s: &Stream,
        index: &Tensor,
        own: usize,
        copies: usize,
        wide: &Tensor,
    ) -> Result<()> {
        const OP: &str = "expand_topk";
        let [t, k] = matrix(OP, index)?;
        elements(OP, &[(index, DType::I32, t * k), (wide, DType::I32, t * k * copies)])?;
        let args =
            MoeArgs { n: (t * k) as i64, own: own as i32, copies: copies as i32, ..MoeArgs::default() };
        self.launch_moe(s, (OP, moe_kernel(OP)), &[read(index), write(wide)], t * k * copies, args)
    }

    pub(super) fn launch_jitter(&self, s: &Stream, j: &Jitter) -> Result<()> {
        let &Jitter { eps, key, rows, x, y } = j;
        const OP: &str = "jitter";
        let [t, h] = matrix(OP, x)?;
        elements(OP, &[(rows, DType::I32, t), (y, x.dtype(), t * h)])?;
        key.check(OP)?;
        let kernel = typed!(OP, x.dtype(), "moe_elementwise", "jitter")?;
        let grid = line(blocks(OP, t * h, THREADS)?, THREADS as u32);
        let tensors: Vec<_> = [read(rows), read(x), write(y)].into_iter().chain(key.step.map(read)).collect();
        s.launch(OP, &tensors, |l| {
            let args = MoeArgs {
                a: l.address(0)?,
                b: l.address(1)?,
                c: l.address(2)?,
                n: (t * h) as i64,
                width: h as i64,
                stream: StepStream::new(l, key, 3, DOMAIN_DROPOUT)?,
                x: eps,
                ..MoeArgs::default()
            };
            self.launch_kernel(l, kernel, grid, &args)
        })
    }

    pub(super) fn launch_split_bf16x2(&self, s: &Stream, x: &Tensor, out: &Tensor) -> Result<()> {
        const OP: &str = "split_bf16x2";
        let [t, n] = matrix(OP, x)?;
        elements(OP, &[(x, DType::F32, t * n), (out, DType::BF16, 2 * t * n)])?;
        let args = MoeArgs { n: (t * n) as i64, width: n as i64, ..MoeArgs::default() };
        self.launch_moe(s, (OP, moe_kernel(OP)), &[read(x), write(out)], t * n, args)
    }

    pub(super) fn launch_add_router_bias(&self, s: &Stream, bias: &Tensor, x: &Tensor) -> Result<()> {
        const OP: &str = "add_router_bias";
        let [t, n] = matrix(OP, x)?;
        elements(OP, &[(x, DType::F32, t * n), (bias, bias.dtype(), n)])?;
        let args = MoeArgs { n: (t * n) as i64, width: n as i64, ..MoeArgs::default() };
        let kernel = typed!(OP, bias.dtype(), "moe_elementwise", "add_router_bias")?;
        self.launch_moe(s, (OP, kernel), &[read(bias), write(x)], t * n, args)
    }

    pub(super) fn launch_accumulate_counts(
        &self,
        s: &Stream,
        counts: &Tensor,
        total: &Tensor,
        steps: &Tensor,
    ) -> Result<()> {
        const OP: &str = "accumulate_counts";
        let n = counts.numel();
        elements(OP, &[(counts, DType::I64, n), (total, DType::I64, n), (steps, DType::F32, 1)])?;
        let args = MoeArgs { n: n as i64, ..MoeArgs::default() };
        self.launch_moe(s, (OP, moe_kernel(OP)), &[read(counts), write(total), write(steps)], n.max(1), args)
    }

    pub(super) fn launch_accumulate_f64(&self, s: &Stream, x: &Tensor, total: &Tensor) -> Result<()> {
        const OP: &str = "accumulate_f64";
        let n = x.numel();
        elements(OP, &[(x, DType::F64, n), (total, DType::F64, n)])?;
        self.launch_moe(
            s,
            (OP, moe_kernel(OP)),
            &[read(x), write(total)],
            n,
            MoeArgs { n: n as i64, ..MoeArgs::default() },
        )
    }

    pub(super) fn launch_update_quantiles(
        &self,
        s: &Stream,
        keep: f32,
        mean: f32,
        found: &Tensor,
        beta: &Tensor,
    ) -> Result<()> {
        const OP: &str = "update_quantiles";
        let n = beta.numel();
        elements(OP, &[(found, DType::F32, n), (beta, DType::F32, n)])?;
        let args = MoeArgs { n: n as i64, x: keep, y: mean, ..MoeArgs::default() };
        s.launch(OP, &[read(found), write(beta)], |l| {
            let args = MoeArgs { a: l.address(0)?, b: l.address(1)?, ..args };
            self.launch_kernel(l, moe_kernel(OP), line(1, 1), &args)
        })
    }
}
