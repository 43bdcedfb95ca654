//! Benchmark of single kernels at the shapes of a model.

use super::cases::{KernelCase, cases};
use super::ceiling::{MemoryProbe, gemm_ceiling, median, time_back_to_back};
use crate::Result;
use crate::config::Resolved;
use crate::plan::GemmShape;
use ferrotron_engine::Rank;
use std::time::Instant;

/// Work of one call of a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KernelWork {
    /// Floating-point operations; compared with a large GEMM.
    Flops(f64),
    /// Bytes that must be read or written once; compared with memory traffic of that size.
    Bytes(f64),
}

/// Measurements of one kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelBench {
    /// Family, module and pass, such as `gemm.mlp_up.weight_grad`.
    pub name: String,
    /// The sizes, for display.
    pub shape: String,
    /// Work of one call.
    pub work: KernelWork,
    /// Of GEMMs.
    pub gemm: Option<GemmShape>,
    /// Timed calls.
    pub calls: usize,
    /// Median seconds of a call.
    pub seconds: f64,
    /// Median CPU launch overhead of a call in seconds; on the CPU, the call itself.
    pub host_s: f64,
    /// GFLOP/s or GB/s of the ceiling, measured in the same run.
    pub ceiling: f64,
}

impl KernelBench {
    /// Achieved GFLOP/s or GB/s.
    pub fn rate(&self) -> f64 {
        let (KernelWork::Flops(x) | KernelWork::Bytes(x)) = self.work;
        x / self.seconds / 1e9
    }

    /// Achieved rate as a fraction of the ceiling.
    pub fn share(&self) -> f64 {
        self.rate() / self.ceiling
    }
}

/// Names of a model's kernels that contain `filter`.
pub fn names(r: &Resolved, filter: &str) -> Vec<String> {
    cases(r).into_iter().map(|c| c.name).filter(|n| n.contains(filter)).collect()
}

/// Times every kernel of the recipe's model whose name contains `filter`, each for about `budget` seconds. `done` is
/// called after each.
pub fn kernels(
    rank: &Rank,
    r: &Resolved,
    filter: &str,
    budget: f64,
    done: &mut dyn FnMut(&KernelBench),
) -> Result<Vec<KernelBench>> {
    kernels_named(rank, r, &|name| name.contains(filter), budget, done)
}

/// The same for kernels whose name `chosen` takes.
pub(super) fn kernels_named(
    rank: &Rank,
    r: &Resolved,
    chosen: &dyn Fn(&str) -> bool,
    budget: f64,
    done: &mut dyn FnMut(&KernelBench),
) -> Result<Vec<KernelBench>> {
    let dtype = r.config.precision.dtype.dtype();
    let mut product = None;
    let mut out = Vec::new();
    for case in cases(r).into_iter().filter(|c| chosen(&c.name)) {
        let moves = match case.work {
            KernelWork::Flops(_) => None,
            KernelWork::Bytes(bytes) => Some(MemoryProbe::of(rank, bytes as usize)?),
        };
        let timed = time(rank, &case, moves.as_ref(), budget)?;
        let ceiling = match (moves, product) {
            (Some(moves), _) => moves.bytes() / timed.moved / 1e9,
            (None, Some(known)) => known,
            (None, None) => *product.insert(gemm_ceiling(rank, dtype)? * 1e3),
        };
        let Timed { calls, seconds, host_s, .. } = timed;
        let KernelCase { name, shape, work, gemm, .. } = case;
        let measured = KernelBench { name, shape, work, gemm, calls, seconds, host_s, ceiling };
        done(&measured);
        out.push(measured);
    }
    Ok(out)
}

struct Timed {
    calls: usize,
    /// Medians: on the device, of the launch on the host, and of memory traffic of the same size.
    seconds: f64,
    host_s: f64,
    moved: f64,
}

/// Times a kernel, alternating with memory traffic of the same size: GPU clocks change within a tenth of a second.
fn time(rank: &Rank, case: &KernelCase, moves: Option<&MemoryProbe>, budget: f64) -> Result<Timed> {
    let mut run = (case.prepare)(rank)?;
    // The first call pages memory in and may autotune.
    run(rank)?;
    let begin = Instant::now();
    let (mut times, mut copies, mut in_place) = (Vec::new(), Vec::new(), Vec::new());
    while times.len() < 3 || (begin.elapsed().as_secs_f64() < budget && times.len() < 100_000) {
        time_back_to_back(rank, &mut times, || run(rank))?;
        if let Some(moves) = moves {
            time_back_to_back(rank, &mut copies, || moves.copy(rank))?;
            time_back_to_back(rank, &mut in_place, || moves.in_place(rank))?;
        }
    }
    let (calls, seconds) = (times.len(), median(times));
    let moved = if moves.is_some() { median(copies).min(median(in_place)) } else { 0.0 };
    if rank.device().gpu().is_none() {
        return Ok(Timed { calls, seconds, host_s: seconds, moved });
    }
    // Back to back, as in a training step: a host that has just waited for the GPU launches more slowly.
    rank.compute.synchronize()?;
    let mut host = Vec::new();
    for _ in 0..32 {
        let start = Instant::now();
        run(rank)?;
        host.push(start.elapsed().as_secs_f64());
    }
    rank.compute.synchronize()?;
    Ok(Timed { calls, seconds, host_s: median(host), moved })
}
