//! What this machine can do at most, measured in the same run as what is compared with it.

use super::cases::{bytes, cases_of, random};
use super::kernels::KernelWork;
use crate::Result;
use crate::config::Resolved;
use ferrotron_engine::Rank;
use ferrotron_engine::quant::Role;
use ferrotron_kernels::{Fp8Gemm, Gemm};
use ferrotron_tensor::{Category, DType, Tensor};
use std::time::Instant;

/// Seconds of calls of `work` on the device's own clock, added to `times`. On a card there are several in line, as in a
/// step: of a call that finds the card idle the clock counts the host's way to it as well, some microseconds. (So it does
/// of kernels that take less time than giving them to the card.)
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

/// Rows and columns of the product that is the ceiling: large enough to fill the device.
pub fn gemm_ceiling_size(rank: &Rank) -> usize {
    if rank.device().gpu().is_some() { 8192 } else { 1536 }
}

/// Seconds of one of many calls of `work` in a row, the median, once the device has been at it for a while: what it can
/// keep up in a step, which a few calls after a pause can exceed.
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

/// The middle one of some seconds; the clock may not see a call on an empty tensor.
pub(super) fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2].max(1e-9)
}

/// TFLOP/s that a large matrix product of random numbers keeps up.
pub fn gemm_ceiling(rank: &Rank, dtype: DType) -> Result<f64> {
    let n = gemm_ceiling_size(rank);
    let s = &rank.compute;
    let (a, b) = (random(rank, &[n, n], dtype)?, random(rank, &[n, n], dtype)?);
    let c = s.zeros(&[n, n], dtype, Category::Workspace)?;
    let g = Gemm { a: &a, trans_a: false, b: &b, trans_b: true, bias: None, accumulate: false, c: &c };
    // The first call may choose between ways to do it.
    rank.kernels.gemm(s, &g)?;
    let seconds = sustained_seconds(rank, || Ok(rank.kernels.gemm(s, &g)?))?;
    Ok(2.0 * (n as f64).powi(3) / seconds / 1e12)
}

/// TFLOP/s that large 8-bit products keep up as a recipe makes them: of outputs, and of gradients.
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

/// TFLOP/s that attention keeps up forward and backward, alone, over documents of `context` tokens; where layers differ,
/// as they mix.
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

/// Ways to move memory, the least that a kernel which touches as many bytes has to do. What fits in a cache moves at the
/// speed of that cache, which is the ceiling of such a kernel.
pub(super) struct MemoryProbe {
    from: Tensor,
    to: Tensor,
}

impl MemoryProbe {
    /// Ways to move `bytes` in all, read and write counted.
    pub(super) fn of(rank: &Rank, bytes: usize) -> Result<MemoryProbe> {
        const ROW: usize = 1024;
        let shape = [(bytes / 2 / DType::F32.size() / ROW).max(1), ROW];
        let make = || rank.compute.zeros(&shape, DType::F32, Category::Workspace);
        Ok(MemoryProbe { from: make()?, to: make()? })
    }

    /// Bytes that a call of either way reads and writes.
    pub(super) fn bytes(&self) -> f64 {
        (2 * self.from.numel() * DType::F32.size()) as f64
    }

    /// A copy; it also fetches what it is about to overwrite.
    pub(super) fn copy(&self, rank: &Rank) -> Result<()> {
        Ok(rank.kernels.copy(&rank.compute, &self.from, &self.to)?)
    }

    /// A pass in place, which does not.
    pub(super) fn in_place(&self, rank: &Rank) -> Result<()> {
        Ok(rank.kernels.scale(&rank.compute, &self.from, 1.0)?)
    }
}

/// GB/s of memory that the faster way to move `bytes` keeps up.
pub fn memory_ceiling(rank: &Rank, bytes: usize) -> Result<f64> {
    let moves = MemoryProbe::of(rank, bytes)?;
    let copy = sustained_seconds(rank, || moves.copy(rank))?;
    let in_place = sustained_seconds(rank, || moves.in_place(rank))?;
    Ok(moves.bytes() / copy.min(in_place) / 1e9)
}
