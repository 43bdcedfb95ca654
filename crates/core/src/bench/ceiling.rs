//! Ceilings of this machine: GEMM, attention and memory rates, measured in the same run as what is compared with them.

use super::cases::{bytes, cases_of, random};
use super::kernels::KernelWork;
use crate::Result;
use crate::config::Resolved;
use crate::cost::roofline::Ceilings;
use ferrotron_engine::Rank;
use ferrotron_engine::quant::Role;
use ferrotron_kernels::{Fp8Gemm, Gemm};
use ferrotron_tensor::{Category, DType, Tensor};
use std::time::Instant;

/// Seconds of calls of `work` by the device's clock, appended to `times`. On a GPU several calls are queued back to
/// back, as in a training step: a call on an idle GPU includes some microseconds of launch latency. (So does any
/// kernel shorter than its own launch overhead.)
pub(super) fn time_back_to_back(
    rank: &Rank,
    times: &mut Vec<f64>,
    mut work: impl FnMut() -> Result<()>,
) -> Result<()> {
    let calls = if rank.device().gpu().is_some() { 8 } else { 1 };
    let mut events = vec![rank.compute.record()?];
    for _ in 0..calls {
        work()?;
        events.push(rank.compute.record()?);
    }
    for pair in events.windows(2) {
        times.push(pair[1].since(&pair[0])?.as_secs_f64());
    }
    Ok(())
}

/// Bytes to measure memory bandwidth with: far more than any cache, and on a GPU enough to make launch latency
/// negligible.
fn memory_bytes(rank: &Rank) -> usize {
    if rank.device().gpu().is_some() { 4 << 30 } else { 1 << 30 }
}

/// The ceilings of a step on documents of `context` tokens, each measured alone, now. Takes about a second.
pub fn ceilings(rank: &Rank, r: &Resolved, context: usize) -> Result<Ceilings> {
    Ok(Ceilings {
        gemm: gemm_ceiling(rank, r.config.precision.dtype.dtype())?,
        fp8_gemm: fp8_gemm_ceiling(rank, r)?,
        attention: attention_ceiling(rank, r, context)?,
        memory: memory_ceiling(rank, memory_bytes(rank))?,
    })
}

/// Rows and columns of the GEMM that is the ceiling: large enough to fill the device.
pub fn gemm_ceiling_size(rank: &Rank) -> usize {
    if rank.device().gpu().is_some() { 8192 } else { 1536 }
}

/// Median seconds of a call of `work`, once the device has run it for a while: the clock rate that a training step
/// sustains, which a few calls after a pause can exceed.
pub(super) fn sustained_seconds(rank: &Rank, mut work: impl FnMut() -> Result<()>) -> Result<f64> {
    const WARM: f64 = 0.05;
    const LOOK: f64 = 0.2;
    let begin = Instant::now();
    let mut times = Vec::new();
    while times.len() < 5 || begin.elapsed().as_secs_f64() < WARM + LOOK {
        if begin.elapsed().as_secs_f64() < WARM {
            times.clear();
        }
        time_back_to_back(rank, &mut times, &mut work)?;
    }
    Ok(median(times))
}

/// The median; at least a nanosecond, since the clock may not resolve a call on an empty tensor.
pub(super) fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2].max(1e-9)
}

/// Sustained TFLOP/s of a large GEMM of random values.
pub fn gemm_ceiling(rank: &Rank, dtype: DType) -> Result<f64> {
    let n = gemm_ceiling_size(rank);
    let s = &rank.compute;
    let (a, b) = (random(rank, &[n, n], dtype)?, random(rank, &[n, n], dtype)?);
    let c = s.zeros(&[n, n], dtype, Category::Workspace)?;
    let g = Gemm { a: &a, trans_a: false, b: &b, trans_b: true, bias: None, accumulate: false, c: &c };
    // The first call may autotune.
    rank.kernels.gemm(s, &g)?;
    let seconds = sustained_seconds(rank, || Ok(rank.kernels.gemm(s, &g)?))?;
    Ok(2.0 * (n as f64).powi(3) / seconds / 1e12)
}

/// Sustained TFLOP/s of large FP8 GEMMs under the recipe: of fprop, and of dgrad and wgrad.
pub fn fp8_gemm_ceiling(rank: &Rank, r: &Resolved) -> Result<Option<(f64, f64)>> {
    let Some(recipe) = r.policy().recipe.filter(|recipe| !recipe.emulated()) else { return Ok(None) };
    let n = gemm_ceiling_size(rank);
    let operand = |role| bytes(rank, [n, n], recipe.format(role), recipe.scaling(role));
    let c = rank.compute.zeros(&[n, n], DType::BF16, Category::Workspace)?;
    let weight = operand(Role::Weight)?;
    let rate = |role, fast| -> Result<f64> {
        let a = operand(role)?;
        let (bias, accumulate, name) = (None, false, "gemm (fp8)");
        let g = Fp8Gemm { a: &a, b: &weight, bias, accumulate, fast, name, c: &c };
        rank.kernels.fp8_gemm(&rank.compute, &g)?;
        let seconds = sustained_seconds(rank, || Ok(rank.kernels.fp8_gemm(&rank.compute, &g)?))?;
        Ok(2.0 * (n as f64).powi(3) / seconds / 1e12)
    };
    Ok(Some((rate(Role::Input, recipe.fast_forward())?, rate(Role::Gradient, false)?)))
}

/// Sustained TFLOP/s of attention forward and backward over documents of `context` tokens; the mean of local and
/// global layers where a model has both.
pub fn attention_ceiling(rank: &Rank, r: &Resolved, context: usize) -> Result<(f64, f64)> {
    let m = &r.model;
    let local = (0..m.layers).filter(|i| m.is_local(*i)).count();
    let narrow = r.policy().attention;
    let mut rates = [0.0; 2];
    for (rate, kind) in rates.iter_mut().zip(["forward", "backward"]) {
        let (mut all, mut took) = (0.0, 0.0);
        for case in cases_of(r, context) {
            let name = if narrow && kind == "forward" { "fp8.attention" } else { "attention" };
            let (true, KernelWork::Flops(flops)) = (case.name.starts_with(name), case.work) else {
                continue;
            };
            if !case.name.ends_with(kind) {
                continue;
            }
            let layers = if case.name.contains("window") { local } else { m.layers - local } as f64;
            let mut run = (case.prepare)(rank)?;
            run(rank)?;
            took += layers * sustained_seconds(rank, || run(rank))?;
            all += layers * flops;
        }
        *rate = all / took.max(1e-12) / 1e12;
    }
    Ok(rates.into())
}

/// Memory traffic of a given size: the least that a kernel touching as many bytes has to do. Sizes that fit in a
/// cache run at the speed of that cache, which then is the kernel's ceiling.
pub(super) struct MemoryProbe {
    from: Tensor,
    to: Tensor,
}

impl MemoryProbe {
    /// Buffers for `bytes` of traffic, reads and writes counted.
    pub(super) fn of(rank: &Rank, bytes: usize) -> Result<MemoryProbe> {
        const ROW: usize = 1024;
        let shape = [(bytes / 2 / DType::F32.size() / ROW).max(1), ROW];
        let make = || rank.compute.zeros(&shape, DType::F32, Category::Workspace);
        Ok(MemoryProbe { from: make()?, to: make()? })
    }

    /// Bytes that one call reads and writes.
    pub(super) fn bytes(&self) -> f64 {
        (2 * self.from.numel() * DType::F32.size()) as f64
    }

    /// A copy, which on a CPU also reads the lines it overwrites.
    pub(super) fn copy(&self, rank: &Rank) -> Result<()> {
        Ok(rank.kernels.copy(&rank.compute, &self.from, &self.to)?)
    }

    /// An in-place pass, which does not.
    pub(super) fn in_place(&self, rank: &Rank) -> Result<()> {
        Ok(rank.kernels.scale(&rank.compute, &self.from, 1.0)?)
    }
}

/// Sustained GB/s of memory at `bytes` of traffic, by the faster of copy and in-place pass.
pub fn memory_ceiling(rank: &Rank, bytes: usize) -> Result<f64> {
    let moves = MemoryProbe::of(rank, bytes)?;
    let copy = sustained_seconds(rank, || moves.copy(rank))?;
    let in_place = sustained_seconds(rank, || moves.in_place(rank))?;
    Ok(moves.bytes() / copy.min(in_place) / 1e9)
}
