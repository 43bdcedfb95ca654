//! Where a command computes: the CPU, or the card it found or was told.

use crate::args::{Device, Global};
use anyhow::Result;
use ferrotron_core::grid::Layout;
use ferrotron_core::ranks::on_threads;
use ferrotron_engine::Rank;
use ferrotron_kernels::cpu::Isa;
use ferrotron_kernels::cuda::{Readiness, cache_folder};
use ferrotron_tensor::{Watch, cards};
use std::time::Instant;

impl Global {
    /// A rank where `--device` says. `auto` is the first card if there is one that works.
    pub fn rank(&self, seed: u64, watch: Watch) -> Result<Rank> {
        let watch = Watch { order: self.check || watch.order, trace: self.trace || watch.trace, ..watch };
        match self.device {
            Device::Cpu => Ok(Rank::cpu_watched(self.threads, seed, watch)?),
            Device::Cuda(ordinal) => self.card(ordinal, seed, watch),
            Device::Auto if cards().is_ok_and(|all| !all.is_empty()) => {
                self.card(0, seed, watch).or_else(|why| {
                    eprintln!("warning: there is a GPU, but it cannot be used: {why:#}");
                    Ok(Rank::cpu_watched(self.threads, seed, watch)?)
                })
            }
            Device::Auto => Ok(Rank::cpu_watched(self.threads, seed, watch)?),
        }
    }

    fn card(&self, ordinal: usize, seed: u64, watch: Watch) -> Result<Rank> {
        let begin = Instant::now();
        let (rank, Readiness { compiled, cached }) = Rank::cuda(ordinal, self.threads, seed, watch)?;
        if compiled > 0 && !self.json {
            let kept = cache_folder().map_or(String::new(), |f| format!("; kept in {}", f.display()));
            let seconds = begin.elapsed().as_secs_f64();
            let all = compiled + cached;
            eprintln!("compiled {compiled} of {all} kernel sources for this card in {seconds:.1} s{kept}");
        }
        Ok(rank)
    }
}

/// Runs `work` on every rank of the layout, as threads of this process; compute threads are shared out.
pub fn run<T: Send>(
    global: &Global,
    layout: &Layout,
    seed: u64,
    work: impl Fn(Rank) -> ferrotron_core::Result<T> + Sync,
) -> Result<Vec<T>> {
    let ranks = layout.world()?;
    if ranks == 1 {
        // A rank made here says what it has to say before work begins, with all that is known of an error.
        return Ok(vec![work(global.rank(seed, Watch::default())?)?]);
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let all = if global.threads == 0 { cores } else { global.threads };
    let each = (all / ranks).max(1);
    if matches!(global.device, Device::Cuda(_)) {
        let what =
            "several ranks on one card are not possible in this version; say --device cpu, or use one rank";
        return Err(crate::output::Usage::new(what).into());
    }
    if matches!(global.device, Device::Auto) && !global.json && cards().is_ok_and(|all| !all.is_empty()) {
        eprintln!("note: several ranks compute on the CPU in this version; one rank would use the GPU");
    }
    let make = || {
        Ok(Rank::cpu_watched(
            each,
            seed,
            Watch { order: global.check, trace: global.trace, ..Watch::default() },
        )?)
    };
    Ok(on_threads(layout, make, work)?)
}

/// An error of presentation as one of the run.
pub fn told(e: anyhow::Error) -> ferrotron_core::Error {
    match e.downcast::<ferrotron_core::Error>() {
        Ok(e) => e,
        Err(e) => ferrotron_core::Error::Invalid(format!("{e:#}")),
    }
}

/// The device of a rank as people know it: `CPU (AMX)`, `cuda:0 (NVIDIA H200)`.
pub fn name(rank: &Rank) -> String {
    match rank.device().card() {
        Some(card) => format!("cuda:{} ({})", card.ordinal, card.name),
        None => format!("CPU ({})", Isa::detect().name()),
    }
}

/// The same with what decides its speed: `CPU (AMX) x 8 threads`.
pub fn full_name(rank: &Rank) -> String {
    let ranks = match rank.world.size() {
        1 => String::new(),
        n => format!("{n} ranks (tp={}, dp={}) on ", rank.tp.size(), rank.dp.size()),
    };
    match rank.device().card() {
        Some(_) => format!("{ranks}{}", name(rank)),
        None => format!("{ranks}{} x {} threads", name(rank), rank.device().threads().count()),
    }
}
