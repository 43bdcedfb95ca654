//! Times of kernels that can be compared with those of another day. On the CPU they are CPU times of the process, in units of a
//! plain matrix product that is measured in turn with the kernel, so that clock rate and other processes cancel as far as they can;
//! on a GPU they are milliseconds.

use super::cases::{KernelCase, cases};
use super::ceiling::{median, time_back_to_back};
use crate::Result;
use crate::config::Resolved;
use ferrotron_engine::Rank;
use ferrotron_kernels::cpu::reference_loop;
use ferrotron_tensor::Threads;
use std::time::Instant;

/// The time of one kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct RelativeTime {
    /// The kernel, as `bench kernels` names it.
    pub name: String,
    /// Multiples of the reference loop on the CPU, milliseconds (the median) on a GPU.
    pub time: f64,
}

/// Times every kernel of the recipe's model whose name begins with `prefix`, each for about `budget` seconds.
pub fn relative_times(rank: &Rank, r: &Resolved, prefix: &str, budget: f64) -> Result<Vec<RelativeTime>> {
    let chosen = cases(r).into_iter().filter(|case| case.name.starts_with(prefix));
    chosen
        .map(|case| {
            let time = match rank.device().gpu() {
                Some(_) => gpu_milliseconds(rank, &case, budget)?,
                None => multiples_of_reference(rank, &case, budget)?,
            };
            Ok(RelativeTime { name: case.name, time })
        })
        .collect()
}

/// Seconds of the reference loop on one thread, uninterrupted.
pub fn reference_seconds() -> f64 {
    let timed = |_| {
        let start = Instant::now();
        reference_loop();
        start.elapsed().as_secs_f64()
    };
    tenth((0..50).map(timed).collect())
}

fn gpu_milliseconds(rank: &Rank, case: &KernelCase, budget: f64) -> Result<f64> {
    let mut run = (case.prepare)(rank)?;
    // The first call may autotune.
    run(rank)?;
    let (begin, mut times) = (Instant::now(), Vec::new());
    while times.len() < 25 || begin.elapsed().as_secs_f64() < budget {
        time_back_to_back(rank, &mut times, || run(rank))?;
    }
    Ok(1e3 * median(times))
}

/// Kernel and reference loop take turns, so that both meet the same clock rate. Of each the time that a tenth of its calls stay
/// below: those that no other process interrupted.
fn multiples_of_reference(rank: &Rank, case: &KernelCase, budget: f64) -> Result<f64> {
    let mut run = (case.prepare)(rank)?;
    let mut timed = || -> Result<f64> {
        let start = cpu_seconds();
        run(rank)?;
        rank.compute.synchronize()?;
        Ok(cpu_seconds() - start)
    };
    // The first call pages memory in.
    timed()?;
    let (begin, mut times, mut references) = (Instant::now(), Vec::new(), Vec::new());
    while times.len() < 25 || begin.elapsed().as_secs_f64() < budget {
        times.push(timed()?);
        references.push(reference(rank.device().threads()));
    }
    Ok(tenth(times) / tenth(references))
}

/// What a tenth of the values stay below.
fn tenth(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 10]
}

/// CPU seconds of the loop on every thread at once.
fn reference(threads: &Threads) -> f64 {
    let start = cpu_seconds();
    threads.parallel_for(threads.count(), &|_| reference_loop());
    cpu_seconds() - start
}

/// Seconds that the threads of this process have run so far; time in which another process had the core is not in it.
fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}
