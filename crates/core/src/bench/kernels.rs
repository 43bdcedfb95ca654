//! Measuring single kernels at the shapes a model gives them.

use super::cases::{Case, cases};
use super::ceiling::{in_line, memory_ceiling, product_ceiling};
use crate::Result;
use crate::config::Resolved;
use ferrotron_engine::Rank;
use ferrotron_tensor::DType;
use std::collections::BTreeMap;
use std::time::Instant;

/// What one call of a kernel does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Work {
    /// Multiplications and additions; counted against a large matrix product.
    Flops(f64),
    /// Bytes that have to be read or written once; counted against moving as many.
    Bytes(f64),
}

/// What was measured of one kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelBench {
    /// Family, place and direction, such as `gemm.mlp_up.weight_grad`.
    pub name: String,
    /// The sizes, for people.
    pub shape: String,
    /// Work of one call.
    pub work: Work,
    /// Timed calls.
    pub calls: usize,
    /// Median seconds of a call.
    pub seconds: f64,
    /// Median seconds that queueing a call keeps the host busy; on the CPU that is the call.
    pub host_s: f64,
    /// GFLOP/s or GB/s of the ceiling, measured in the same run.
    pub ceiling: f64,
}

impl KernelBench {
    /// GFLOP/s or GB/s.
    pub fn rate(&self) -> f64 {
        let (Work::Flops(x) | Work::Bytes(x)) = self.work;
        x / self.seconds / 1e9
    }

    /// Rate as a part of the ceiling.
    pub fn share(&self) -> f64 {
        self.rate() / self.ceiling
    }
}

/// Names of the kernels of a model that `filter` is part of.
pub fn names(r: &Resolved, filter: &str) -> Vec<String> {
    cases(r).into_iter().map(|c| c.name).filter(|n| n.contains(filter)).collect()
}

/// Times every kernel of the recipe's model whose name contains `filter`, each for about `budget` seconds. `done` hears
/// of each as it is finished.
pub fn kernels(
    rank: &Rank,
    r: &Resolved,
    filter: &str,
    budget: f64,
    done: &mut dyn FnMut(&KernelBench),
) -> Result<Vec<KernelBench>> {
    let dtype = r.config.precision.dtype.dtype();
    let mut ceilings = Ceilings { product: None, memory: BTreeMap::new() };
    let mut out = Vec::new();
    for case in cases(r).into_iter().filter(|c| c.name.contains(filter)) {
        let ceiling = ceilings.of(rank, dtype, case.work)?;
        let (calls, seconds, host_s) = time(rank, &case, budget)?;
        let Case { name, shape, work, .. } = case;
        let measured = KernelBench { name, shape, work, calls, seconds, host_s, ceiling };
        done(&measured);
        out.push(measured);
    }
    Ok(out)
}

/// Ceilings, each measured when it is first needed.
struct Ceilings {
    product: Option<f64>,
    memory: BTreeMap<usize, f64>,
}

impl Ceilings {
    fn of(&mut self, rank: &Rank, dtype: DType, work: Work) -> Result<f64> {
        Ok(match (work, self.product) {
            (Work::Flops(_), Some(known)) => known,
            (Work::Flops(_), None) => *self.product.insert(product_ceiling(rank, dtype)? * 1e3),
            (Work::Bytes(bytes), _) => match self.memory.get(&(bytes as usize)) {
                Some(known) => *known,
                None => {
                    let measured = memory_ceiling(rank, bytes as usize)?;
                    self.memory.insert(bytes as usize, measured);
                    measured
                }
            },
        })
    }
}

/// Calls, and the medians of their seconds on the device and on the host.
fn time(rank: &Rank, case: &Case, budget: f64) -> Result<(usize, f64, f64)> {
    let mut run = (case.prepare)(rank)?;
    // The first call pages memory in, and chooses between ways to do it.
    run(rank)?;
    let begin = Instant::now();
    let mut times = Vec::new();
    while times.len() < 3 || (begin.elapsed().as_secs_f64() < budget && times.len() < 100_000) {
        in_line(rank, &mut times, || run(rank))?;
    }
    let calls = times.len();
    // The clock may not see a call on an empty tensor.
    let device = median(times).max(1e-9);
    if rank.device().card().is_none() {
        return Ok((calls, device, device));
    }
    // One after the other, as in a step: a host that has just waited for the card is slower.
    rank.compute.synchronize()?;
    let mut host = Vec::new();
    for _ in 0..32 {
        let start = Instant::now();
        run(rank)?;
        host.push(start.elapsed().as_secs_f64());
    }
    rank.compute.synchronize()?;
    Ok((calls, device, median(host)))
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}
