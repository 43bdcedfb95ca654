//! Dequantization, transposition, and the FP8 GEMMs that cuBLASLt does not take.

use crate::cuda::args::kernel_args;
use crate::cuda::grid::{aligned16, blocks, line};
use crate::cuda::{CudaKernels, Kernel, typed};
use crate::quant::check::{check_transpose, matrix};
use crate::{ALIGN, BLOCK, Fp8Gemm, Fp8Tensor, ScalingMode};
use ferrotron_tensor::{DType, Launch, Result, Stream, Tensor, read, write};

/// As in generic.cu and matrix.cuh.
const THREADS: u32 = 256;
const SIDE: usize = 64;

kernel_args! {
    header "args/quant_generic.cuh", includes [];

    /// An FP8 matrix `[r, c]` with its scales; rows are padded to 16 bytes.
    pub(in crate::cuda) struct Fp8Matrix {
        data: u64,
        /// f32; see `ScalingMode`.
        scale: u64,
        r: i64,
        c: i64,
        /// 0: one scale; 1: one for 1×128 along c; 2: one for 128×128.
        scaling: u32,
        e5m2: u32,
    }

    /// Dequantizes an FP8 matrix.
    struct DequantizeArgs {
        q: Fp8Matrix,
        out: u64,
        stride: i64,
        /// Tiles along the columns.
        across: u32,
        vectorized: u32,
    }

    /// c = a·bᵀ (+ bias) (+ c) of FP8 operands.
    struct Fp8GemmArgs {
        a: Fp8Matrix,
        b: Fp8Matrix,
        c: u64,
        /// bf16 `[n]`, or 0.
        bias: u64,
        ldc: i64,
        accumulate: u32,
        pad: u32,
    }

    /// Transposes an FP8 matrix with one scale.
    struct Fp8TransposeArgs {
        from: u64,
        to: u64,
        scale: u64,
        to_scale: u64,
        r: i64,
        c: i64,
        /// Tiles along the columns.
        across: u32,
        pad: u32,
    }
}

impl Fp8Matrix {
    /// Data and scales are arguments `at` and `at + 1`.
    pub(in crate::cuda) fn argument(l: &Launch, b: &Fp8Tensor, at: usize) -> Result<Fp8Matrix> {
        Ok(Fp8Matrix {
            data: l.address(at)?,
            scale: l.address(at + 1)?,
            r: b.rows() as i64,
            c: b.cols as i64,
            scaling: match b.scaling {
                ScalingMode::PerTensor => 0,
                ScalingMode::Block1x128 => 1,
                ScalingMode::Block128x128 => 2,
            },
            e5m2: (b.data.dtype() == DType::E5M2).into(),
        })
    }
}

impl CudaKernels {
    pub(super) fn launch_dequantize(&self, s: &Stream, q: &Fp8Tensor, out: &Tensor) -> Result<()> {
        const OP: &str = "dequantize";
        let view = matrix(OP, out)?;
        let (r, c) = (view.outer, view.width);
        q.check(OP, [r, c])?;
        let kernel = typed!(OP, out.dtype(), "quant/generic", "dequantize")?;
        if r * c == 0 {
            return Ok(());
        }
        s.launch(OP, &[read(&q.data), read(&q.scale_inv), write(out)], |l| {
            let (q, out_at) = (Fp8Matrix::argument(l, q, 0)?, l.address(2)?);
            let even = r <= 1 || (view.outer_stride * out.dtype().size()).is_multiple_of(16);
            let across = blocks(OP, c, BLOCK)?;
            let args = DequantizeArgs {
                q,
                out: out_at,
                stride: view.outer_stride as i64,
                across,
                vectorized: (aligned16(&[q.data, out_at]) && even).into(),
            };
            let all = blocks(OP, r.div_ceil(BLOCK) * across as usize, 1)?;
            self.launch_kernel(l, kernel, line(all, THREADS), &args)
        })
    }

    pub(super) fn launch_transpose(&self, s: &Stream, q: &Fp8Tensor, out: &Fp8Tensor) -> Result<()> {
        const OP: &str = "fp8_transpose";
        let [r, c] = check_transpose(OP, q, out)?;
        let args = [read(&q.data), read(&q.scale_inv), write(&out.data), write(&out.scale_inv)];
        s.launch(OP, &args, |l| {
            // Padding of the result is zero, and the scale of an empty matrix is still written.
            let across = blocks(OP, c.max(1), SIDE)?;
            let args = Fp8TransposeArgs {
                from: l.address(0)?,
                to: l.address(2)?,
                scale: l.address(1)?,
                to_scale: l.address(3)?,
                r: r as i64,
                c: c as i64,
                across,
                pad: 0,
            };
            let all = blocks(OP, r.next_multiple_of(ALIGN).max(1).div_ceil(SIDE) * across as usize, 1)?;
            let kernel = Kernel::new("quant/generic", "transpose_fp8");
            self.launch_kernel(l, kernel, line(all, THREADS), &args)
        })
    }

    /// Generic FP8 GEMM. It has a label of its own in profiles, because it is slow.
    pub(super) fn launch_generic_fp8_gemm(&self, s: &Stream, g: &Fp8Gemm, ldc: usize) -> Result<()> {
        let kernel = typed!("fp8_gemm", g.c.dtype(), "quant/generic", "fp8_gemm")?;
        let args = [
            read(&g.a.data),
            read(&g.a.scale_inv),
            read(&g.b.data),
            read(&g.b.scale_inv),
            write(g.c),
            read(g.bias.unwrap_or(&g.a.data)),
        ];
        s.launch("gemm (slow fp8)", &args[..if g.bias.is_some() { 6 } else { 5 }], |l| {
            let args = Fp8GemmArgs {
                a: Fp8Matrix::argument(l, g.a, 0)?,
                b: Fp8Matrix::argument(l, g.b, 2)?,
                c: l.address(4)?,
                bias: if g.bias.is_some() { l.address(5)? } else { 0 },
                ldc: ldc as i64,
                accumulate: g.accumulate.into(),
                pad: 0,
            };
            let tiles = g.a.rows().div_ceil(SIDE) * g.b.rows().div_ceil(SIDE);
            self.launch_kernel(l, kernel, line(blocks("fp8_gemm", tiles, 1)?, THREADS), &args)
        })
    }
}
