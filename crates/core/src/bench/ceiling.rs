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

/// GB/s of copying, read and write counted, with `bytes` moved in all; best of several. What fits in a cache is
/// copied at the speed of that cache, which is also the ceiling of a kernel that touches as much.
pub fn copy_ceiling(rank: &Rank, bytes: usize) -> Result<f64> {
    const ROW: usize = 1024;
    let rows = (bytes / 2 / DType::F32.size() / ROW).max(1);
    let s = &rank.compute;
    let from = s.zeros(&[rows, ROW], DType::F32, Category::Workspace)?;
    let to = s.zeros(&[rows, ROW], DType::F32, Category::Workspace)?;
    // At least this long, so that small copies are not one glance at the clock.
    let (begin, mut best, mut count) = (Instant::now(), f64::MAX, 0);
    while count < 8 || (begin.elapsed().as_secs_f64() < 0.02 && count < 10_000) {
        let start = Instant::now();
        rank.kernels.copy(s, &from, &to)?;
        best = best.min(start.elapsed().as_secs_f64());
        count += 1;
    }
    Ok((2 * rows * ROW * DType::F32.size()) as f64 / best.max(1e-9) / 1e9)
}
