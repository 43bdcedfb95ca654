//! Generic GEMM, for what cuBLASLt does not take.

use super::args::kernel_args;
use super::grid::{blocks, line};
use super::{CudaKernels, Kernel};
use crate::{Gemm, GemmSizes};
use ferrotron_tensor::{DType, Error, Launch, Result};

/// As in gemm.cu.
const SIDE: usize = 64;
const THREADS: u32 = 256;

kernel_args! {
    header "args/gemm.cuh", includes [];

    /// c `[m, n]` = op(a)·op(b) (+ bias) (+ c), row-major.
    struct GemmArgs {
        a: u64,
        b: u64,
        c: u64,
        /// `[n]`, or 0.
        bias: u64,
        m: i64,
        n: i64,
        k: i64,
        lda: i64,
        ldb: i64,
        ldc: i64,
        trans_a: u32,
        trans_b: u32,
        accumulate: u32,
        pad: u32,
    }
}

impl CudaKernels {
    /// GEMM of any sizes and alignments with FMA instructions; the launch's arguments are a, b, c and the bias if
    /// there is one.
    pub(crate) fn generic_gemm(&self, l: &Launch, g: &Gemm, z: &GemmSizes) -> Result<()> {
        let name = match (g.a.dtype(), g.c.dtype()) {
            (DType::F32, DType::F32) => "gemm_f32",
            (DType::BF16, DType::BF16) => "gemm_bf16",
            (DType::BF16, DType::F32) => "gemm_bf16_f32",
            (DType::F16, DType::F16) => "gemm_f16",
            (DType::F16, DType::F32) => "gemm_f16_f32",
            (DType::F32 | DType::BF16 | DType::F16, found) => {
                return Err(Error::DType { op: "gemm", found, wanted: DType::F32 });
            }
            (found, _) => return Err(Error::DType { op: "gemm", found, wanted: DType::F32 }),
        };
        let args = GemmArgs {
            a: l.address(0)?,
            b: l.address(1)?,
            c: l.address(2)?,
            bias: if g.bias.is_some() { l.address(3)? } else { 0 },
            m: z.m as i64,
            n: z.n as i64,
            k: z.k as i64,
            lda: z.lda as i64,
            ldb: z.ldb as i64,
            ldc: z.ldc as i64,
            trans_a: g.trans_a.into(),
            trans_b: g.trans_b.into(),
            accumulate: g.accumulate.into(),
            pad: 0,
        };
        let tiles = z.m.div_ceil(SIDE) * z.n.div_ceil(SIDE);
        let grid = line(blocks("gemm", tiles, 1)?, THREADS);
        let f16 = g.a.dtype() == DType::F16;
        let kernel = if f16 { Kernel::f16("gemm", name) } else { Kernel::new("gemm", name) };
        self.launch_kernel(l, kernel, grid, &args)
    }
}
