//! Ranks as threads, with the race checker on.

use crate::device::test_on_gpu;
use ferrotron_comm::{Communicator, World};
use ferrotron_engine::attention::Layout;
use ferrotron_engine::{GroupRank, Rank, Tokens};
use ferrotron_kernels::Kernels;
use ferrotron_kernels::cpu::CpuKernels;
use ferrotron_kernels::cuda::CudaKernels;
use ferrotron_tensor::{Device, Instrumentation, Threads};
use std::sync::Arc;
use std::time::Duration;

/// The device that all ranks share, and its kernels: the CPU or, with `FERROTRON_TEST_DEVICE=cuda`, a GPU.
fn test_device() -> (Device, Arc<dyn Kernels>) {
    let (threads, watch) =
        (Threads::new(1).unwrap(), Instrumentation { race_check: true, ..Instrumentation::default() });
    match test_on_gpu() {
        true => {
            let device = Device::cuda(0, threads, watch).unwrap();
            let kernels = Arc::new(CudaKernels::load(&device).unwrap());
            (device, kernels)
        }
        false => (Device::cpu_instrumented(threads, watch), Arc::new(CpuKernels::detect())),
    }
}

/// `cp·tp` ranks, tp varying fastest.
#[derive(Clone, Copy, Debug)]
pub struct Grid {
    pub cp: usize,
    pub tp: usize,
    pub overlap: bool,
}

impl Grid {
    /// Runs `work` on every rank and returns the results in cp order.
    pub fn run<T: Send>(self, work: impl Fn(&Rank) -> T + Sync) -> Vec<T> {
        let Grid { cp, tp, overlap } = self;
        let (device, kernels) = test_device();
        let run = |world: World| {
            let alone = Rank::alone(&device, kernels.clone(), 1).unwrap();
            let group = |name, groups: Vec<Vec<usize>>| {
                let mut mine = Communicator::solo();
                for ranks in groups {
                    mine = world.group(name, &ranks).unwrap().unwrap_or(mine);
                }
                mine
            };
            let tps = (0..cp).map(|c| (0..tp).map(|t| c * tp + t).collect()).collect();
            let cps = (0..tp).map(|t| (0..cp).map(|c| c * tp + t).collect()).collect();
            work(&Rank { overlap, tp: group("tp", tps), cp: group("cp", cps), ..alone })
        };
        if cp * tp == 1 {
            return vec![run(World::solo())];
        }
        let worlds = World::threads(cp * tp, Duration::from_secs(60));
        std::thread::scope(|scope| {
            let run = &run;
            let threads: Vec<_> = worlds.into_iter().map(|w| scope.spawn(move || run(w))).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        })
    }
}

/// The tokens of a rank.
pub fn tokens(rank: &Rank, layout: &Layout) -> Tokens {
    Tokens::new(layout, GroupRank { rank: rank.cp.rank(), size: rank.cp.size() }, rank.tp.size()).unwrap()
}

/// This rank's rows of `[tokens, width]` of the full batch; padding rows are zero.
pub fn local(tokens: &Tokens, width: usize, all: &[f64]) -> Vec<f64> {
    let row = |r: &Option<usize>| r.map_or(vec![0.0; width], |i| all[i * width..(i + 1) * width].to_vec());
    tokens.rows().iter().flat_map(row).collect()
}
