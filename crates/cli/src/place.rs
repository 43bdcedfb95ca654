//! Where a command computes: the CPU, or the card it found or was told.

use crate::args::{Device, Global};
use anyhow::Result;
use ferrotron_engine::Rank;
use ferrotron_kernels::cpu::Isa;
use ferrotron_kernels::cuda::{Readiness, cache_folder};
use ferrotron_tensor::{Watch, cards};
use std::time::Instant;

impl Global {
    /// A rank where `--device` says. `auto` is the first card if there is one that works.
    pub fn rank(&self, seed: u64, watch: Watch) -> Result<Rank> {
        let watch = Watch { order: self.check || watch.order, ..watch };
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

/// The device of a rank as people know it: `CPU (AMX)`, `cuda:0 (NVIDIA H200)`.
pub fn name(rank: &Rank) -> String {
    match rank.device().card() {
        Some(card) => format!("cuda:{} ({})", card.ordinal, card.name),
        None => format!("CPU ({})", Isa::detect().name()),
    }
}

/// The same with what decides its speed: `CPU (AMX) x 8 threads`.
pub fn full_name(rank: &Rank) -> String {
    match rank.device().card() {
        Some(_) => name(rank),
        None => format!("{} x {} threads", name(rank), rank.device().threads().count()),
    }
}
