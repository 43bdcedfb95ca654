//! Where a command computes: the CPU, or the card it found or was told.

use crate::args::{Device, Global};
use crate::output::Usage;
use anyhow::Result;
use ferrotron_core::grid::Layout;
use ferrotron_core::ranks::{Arithmetic, Job, on_one_device, on_threads_with};
use ferrotron_engine::Rank;
use ferrotron_kernels::cpu::Isa;
use ferrotron_kernels::cuda::{Readiness, cache_folder};
use ferrotron_tensor::{Watch, cards};
use std::time::{Duration, Instant};

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

    /// How many ranks there are to be, where `--ranks` or a launcher says so; not where they contradict each other.
    pub fn ranks(&self, said: Option<usize>) -> Result<Option<usize>> {
        match (said, self.launch.job()?) {
            (Some(n), Some(job)) if n != job.size => {
                let what = format!("--ranks {n}, but a launcher started {} processes", job.size);
                Err(Usage::new(format!("{what}, one rank each; leave --ranks out")).into())
            }
            (_, Some(job)) => Ok(Some(job.size)),
            (said, None) => Ok(said),
        }
    }

    /// The rank of a process of a job: on the card of its local number, or on its share of the host's cores.
    fn seat(&self, job: &Job, seed: u64) -> Result<Rank> {
        let cards = || cards().map_or(0, |all| all.len());
        let card = match self.device {
            Device::Cpu => None,
            Device::Auto if cards() == 0 => None,
            // A launcher that shows each process one card has chosen it already.
            Device::Auto | Device::Cuda(0) => Some(if cards() == 1 { 0 } else { job.local_rank }),
            Device::Cuda(n) if n == job.local_rank => Some(n),
            Device::Cuda(n) => {
                let what = format!(
                    "--device cuda:{n}: a process of a job takes the card of its local rank, here {}; say --device cuda",
                    job.local_rank
                );
                return Err(Usage::new(what).into());
            }
        };
        let watch = Watch { order: self.check, trace: self.trace, ..Watch::default() };
        match card {
            Some(n) if n >= cards() => Err(Usage::new(format!(
                "rank {} is number {n} on its host (from 0), which has {} cards; start one process for each card, or say \
                 --device cpu",
                job.rank,
                cards()
            ))
            .into()),
            Some(n) => self.card(n, seed, watch),
            None => {
                let cores = std::thread::available_parallelism().map_or(1, usize::from);
                let threads =
                    if self.threads == 0 { (cores / job.local_size).max(1) } else { self.threads };
                Ok(Rank::cpu_watched(threads, seed, watch)?)
            }
        }
    }

    fn card(&self, ordinal: usize, seed: u64, watch: Watch) -> Result<Rank> {
        let begin = Instant::now();
        let (rank, Readiness { compiled, cached }) = Rank::cuda(ordinal, self.threads, seed, watch)?;
        if compiled > 0 && !self.json && self.launch.leads() {
            let kept = cache_folder().map_or(String::new(), |f| format!("; kept in {}", f.display()));
            let seconds = begin.elapsed().as_secs_f64();
            let all = compiled + cached;
            eprintln!("compiled {compiled} of {all} kernel sources for this card in {seconds:.1} s{kept}");
        }
        Ok(rank)
    }
}

/// Runs `work` on this process's ranks of the layout: on its one rank of a job that a launcher started, else on all of
/// them as threads. Returns what each made.
pub fn run<T: Send>(
    global: &Global,
    layout: &Layout,
    seed: u64,
    work: impl Fn(Rank) -> ferrotron_core::Result<T> + Sync,
) -> Result<Vec<T>> {
    let patience = Duration::from_secs(global.patience);
    if let Some(job) = global.launch.job()? {
        let make = || global.seat(&job, seed).map_err(told);
        return Ok(vec![global.launch.run(&job, layout, patience, make, work)?]);
    }
    let ranks = layout.world()?;
    if ranks == 1 {
        return alone(global, seed, work);
    }
    let cuda = match global.device {
        Device::Cpu => false,
        Device::Cuda(_) => true,
        Device::Auto => cards().is_ok_and(|all| !all.is_empty()),
    };
    if cuda {
        let first = global.rank(seed, Watch::default())?;
        if first.device().card().is_some() {
            return Ok(on_one_device(layout, patience, &first, work)?);
        }
    }
    // Compute threads are shared out.
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let all = if global.threads == 0 { cores } else { global.threads };
    let watch = Watch { order: global.check, trace: global.trace, ..Watch::default() };
    let make = || Ok(Rank::cpu_watched((all / ranks).max(1), seed, watch)?);
    Ok(on_threads_with(layout, patience, Arithmetic::default(), make, work)?)
}

/// Runs `work` on one rank that has nobody to talk to, whatever started this process.
pub fn alone<T>(
    global: &Global,
    seed: u64,
    work: impl Fn(Rank) -> ferrotron_core::Result<T>,
) -> Result<Vec<T>> {
    // A rank made here says what it has to say before work begins, with all that is known of an error.
    Ok(vec![work(global.rank(seed, Watch::default())?)?])
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
    let sizes = [("tp", &rank.tp), ("cp", &rank.cp), ("pp", &rank.pp), ("dp", &rank.dp)];
    let sizes: Vec<String> =
        sizes.iter().filter(|(_, g)| g.size() > 1).map(|(name, g)| format!("{name}={}", g.size())).collect();
    let ranks = match rank.world.size() {
        1 => String::new(),
        n => format!("{n} ranks ({}) on ", sizes.join(", ")),
    };
    match rank.device().card() {
        Some(_) => format!("{ranks}{}", name(rank)),
        None => format!("{ranks}{} x {} threads", name(rank), rank.device().threads().count()),
    }
}
