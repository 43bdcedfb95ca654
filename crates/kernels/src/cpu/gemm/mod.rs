//! GEMM on the CPU, accumulated in f32.
//!
//! One driver (`driver`) splits C into 32x32 blocks and feeds them to a block kernel: AMX for bf16 where the CPU has it (`amx`),
//! otherwise f32 SIMD (`vector`), for which bf16 operands are converted while they are packed. f32 GEMMs on AVX2 and above have
//! a driver and kernels of their own (`f32_driver`, `f32_strip`). The order of every sum depends on the shape alone, so results do
//! not depend on the number of threads.
//!
//! AMX treats subnormal inputs as zero and flushes subnormal sums to zero; all else follows IEEE on every level.

#[cfg(target_arch = "x86_64")]
mod amx;
mod driver;
mod epilogue;
mod f32_driver;
mod f32_strip;
mod scratch;
mod tiling;
#[cfg(target_arch = "x86_64")]
pub(crate) mod transpose;
mod vector;

pub(crate) use driver::PackedOperands;
pub use epilogue::Epilogue;

use super::{CpuContext, Isa};
use ferrotron_tensor::{Float, bf16, f16};

/// Sizes and layout of a GEMM `C[m, n] = op(A)·op(B)`. All matrices are row-major; leading dimensions are in elements and may
/// be larger than a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmShape {
    /// Rows of C.
    pub m: usize,
    /// Columns of C.
    pub n: usize,
    /// Contracted dimension.
    pub k: usize,
    /// A is stored as `[k, m]` instead of `[m, k]`.
    pub trans_a: bool,
    /// B is stored as `[n, k]` instead of `[k, n]`.
    pub trans_b: bool,
    /// Leading dimension of A.
    pub lda: usize,
    /// Leading dimension of B.
    pub ldb: usize,
    /// Leading dimension of C.
    pub ldc: usize,
}

impl GemmShape {
    /// Checks that the slices hold what the shape says. The kernels use raw pointers, so a wrong length must stop here; callers
    /// with tensors have already returned an error.
    fn check(&self, a: usize, b: usize, bias: Option<usize>, c: usize) {
        let fits = |rows: usize, cols: usize, stride: usize, len: usize| {
            rows == 0 || cols == 0 || (stride >= cols && (rows - 1) * stride + cols <= len)
        };
        let swap = |t: bool, r: usize, c: usize| if t { (c, r) } else { (r, c) };
        let (ar, ac) = swap(self.trans_a, self.m, self.k);
        let (br, bc) = swap(self.trans_b, self.k, self.n);
        assert!(fits(ar, ac, self.lda, a), "gemm: A has {a} elements, too few for {self:?}");
        assert!(fits(br, bc, self.ldb, b), "gemm: B has {b} elements, too few for {self:?}");
        assert!(fits(self.m, self.n, self.ldc, c), "gemm: C has {c} elements, too few for {self:?}");
        assert!(
            bias.is_none_or(|len| len >= self.n),
            "gemm: bias has {bias:?} elements, too few for {self:?}"
        );
    }
}

/// `C[m, n] = op(A)·op(B)`, followed by the epilogue, in f32.
///
/// With `k == 0` the sums are zero. Elements between the rows of C are not written.
///
/// # Panics
/// If a slice is shorter than the shape says, or a stride shorter than its row.
pub fn gemm_f32(
    cpu: CpuContext,
    shape: GemmShape,
    a: &[f32],
    b: &[f32],
    epilogue: Epilogue<'_, f32>,
    c: &mut [f32],
) {
    shape.check(a.len(), b.len(), epilogue.bias.map(<[f32]>::len), c.len());
    match f32_strip::strips(cpu.isa) {
        Some(kernels) if shape.m * shape.n * shape.k > 0 => {
            f32_driver::run(cpu, kernels, shape, [a, b], epilogue, c);
        }
        _ => vector::run(cpu, driver::Job::new(shape, a, b, epilogue, c)),
    }
}

/// As [`gemm_f32`] with f16 operands; C is f16 (rounded once, at the end) or f32.
///
/// # Panics
/// If a slice is shorter than the shape says, or a stride shorter than its row.
pub fn gemm_f16<C: Float>(
    cpu: CpuContext,
    shape: GemmShape,
    a: &[f16],
    b: &[f16],
    epilogue: Epilogue<'_, f16>,
    c: &mut [C],
) {
    shape.check(a.len(), b.len(), epilogue.bias.map(<[f16]>::len), c.len());
    // AMX multiplies bf16, which has fewer mantissa bits.
    vector::run(cpu, driver::Job::new(shape, a, b, epilogue, c));
}

/// As [`gemm_f32`] with bf16 operands; C is bf16 (rounded once, at the end) or f32.
///
/// # Panics
/// If a slice is shorter than the shape says, or a stride shorter than its row.
pub fn gemm_bf16<C: Float>(
    cpu: CpuContext,
    shape: GemmShape,
    a: &[bf16],
    b: &[bf16],
    epilogue: Epilogue<'_, bf16>,
    c: &mut [C],
) {
    shape.check(a.len(), b.len(), epilogue.bias.map(<[bf16]>::len), c.len());
    let job = driver::Job::new(shape, a, b, epilogue, c);
    match cpu.isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Amx => amx::run(cpu.threads, job),
        _ => vector::run(cpu, job),
    }
}
