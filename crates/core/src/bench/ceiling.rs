//! What this machine can do at most, measured in the same run as what is compared with it.

use super::cases::random;
use crate::Result;
use ferrotron_engine::Rank;
use ferrotron_kernels::Gemm;
use ferrotron_tensor::{Category, DType};
use std::time::Instant;

/// Seconds of what `work` queues, on the device's own clock.
pub(super) fn seconds(rank: &Rank, mut work: impl FnMut() -> Result<()>) -> Result<f64> {
    let start = rank.compute.record()?;
    work()?;
    Ok(rank.compute.record()?.since(&start)?.as_secs_f64())
}

/// Rows and columns of the product that is the ceiling: large enough to fill the device.
pub fn product_size(rank: &Rank) -> usize {
    if rank.device().card().is_some() { 8192 } else { 1536 }
}

/// TFLOP/s of a large matrix product of random numbers, best of several.
pub fn product_ceiling(rank: &Rank, dtype: DType) -> Result<f64> {
    let n = product_size(rank);
    let s = &rank.compute;
    let (a, b) = (random(rank, &[n, n], dtype)?, random(rank, &[n, n], dtype)?);
    let c = s.zeros(&[n, n], dtype, Category::Workspace)?;
    let g = Gemm { a: &a, trans_a: false, b: &b, trans_b: true, bias: None, accumulate: false, c: &c };
    let mut best = f64::MAX;
    for _ in 0..8 {
        best = best.min(seconds(rank, || Ok(rank.kernels.gemm(s, &g)?))?);
    }
    Ok(2.0 * (n as f64).powi(3) / best / 1e12)
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
            let pass = || if copy { k.copy(s, &from, &to) } else { k.scale(s, &from, 1.0) };
            best = best.min(seconds(rank, || Ok(pass()?))?);
            count += 1;
        }
    }
    Ok((2 * rows * ROW * DType::F32.size()) as f64 / best.max(1e-9) / 1e9)
}
