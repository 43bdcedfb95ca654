//! What this machine can do at most, measured in the same run as what is compared with it.

use crate::Result;
use ferrotron_engine::Rank;
use ferrotron_kernels::Gemm;
use ferrotron_tensor::{Category, DType};
use std::time::Instant;

/// TFLOP/s of a large matrix product, best of several: the ceiling that MFU is counted against on a CPU.
pub fn product_ceiling(rank: &Rank, dtype: DType) -> Result<f64> {
    const N: usize = 1536;
    let s = &rank.compute;
    let [a, b] = [0, 1].map(|_| s.zeros(&[N, N], dtype, Category::Workspace));
    let (a, b, c) = (a?, b?, s.zeros(&[N, N], dtype, Category::Workspace)?);
    let g = Gemm { a: &a, trans_a: false, b: &b, trans_b: true, bias: None, accumulate: false, c: &c };
    let mut best = f64::MAX;
    for _ in 0..8 {
        let start = Instant::now();
        rank.kernels.gemm(s, &g)?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(2.0 * (N as f64).powi(3) / best / 1e12)
}

/// GB/s of memory, read and write counted, when `bytes` are moved in all: the faster of a copy and of a pass in
/// place, best of several. (A copy also fetches what it is about to overwrite; a pass in place does not.) What
/// fits in a cache moves at the speed of that cache, which is the ceiling of a kernel that touches as much.
pub fn memory_ceiling(rank: &Rank, bytes: usize) -> Result<f64> {
    const ROW: usize = 1024;
    let rows = (bytes / 2 / DType::F32.size() / ROW).max(1);
    let (s, k) = (&rank.compute, &rank.kernels);
    let from = s.zeros(&[rows, ROW], DType::F32, Category::Workspace)?;
    let to = s.zeros(&[rows, ROW], DType::F32, Category::Workspace)?;
    let mut best = f64::MAX;
    for copy in [true, false] {
        // Long enough that small ones are more than one glance at the clock.
        let (begin, mut count) = (Instant::now(), 0);
        while count < 8 || (begin.elapsed().as_secs_f64() < 0.02 && count < 10_000) {
            let start = Instant::now();
            if copy {
                k.copy(s, &from, &to)?
            } else {
                k.scale(s, &from, 1.0)?
            }
            best = best.min(start.elapsed().as_secs_f64());
            count += 1;
        }
    }
    Ok((2 * rows * ROW * DType::F32.size()) as f64 / best.max(1e-9) / 1e9)
}
