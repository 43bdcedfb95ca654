//! Devices and ranks of a command: on the CPU or a GPU, as threads or as the processes of a launcher.

use crate::args::{Device, Global};
use crate::log::{self, LogRank};
use crate::output::{self, UsageError};
use anyhow::Result;
use ferrotron_core::grid::RankLayout;
use ferrotron_core::ranks::{
    Faults, GenerationStart, LaunchEnv, ReduceKernels, StepCount, on_one_device, on_threads_with,
};
use ferrotron_core::train::Snapshots;
use ferrotron_engine::Rank;
use ferrotron_kernels::cpu::Isa;
use ferrotron_kernels::cuda::{KernelCacheStats, cache_folder};
use ferrotron_tensor::{Instrumentation, gpus};
use std::time::{Duration, Instant};

impl Global {
    /// A single rank on the device of `--device`; `auto` is the first GPU if it works, otherwise the CPU.
    pub fn rank(&self, seed: u64, watch: Instrumentation) -> Result<Rank> {
        let watch = Instrumentation {
            race_check: self.check || watch.race_check,
            trace: self.trace || watch.trace,
            ..watch
        };
        match self.device {
            Device::Cpu => Ok(Rank::cpu_instrumented(self.threads, seed, watch)?),
            Device::Cuda(ordinal) => self.cuda_rank(ordinal, seed, watch),
            Device::Auto if gpus().is_ok_and(|all| !all.is_empty()) => {
                self.cuda_rank(0, seed, watch).or_else(|why| {
                    output::note(format_args!(
                        "warning: using the CPU, because the GPU cannot be used: {}",
                        output::describe(&why)
                    ));
                    Ok(Rank::cpu_instrumented(self.threads, seed, watch)?)
                })
            }
            Device::Auto => Ok(Rank::cpu_instrumented(self.threads, seed, watch)?),
        }
    }

    /// The world size that `--ranks` or the launcher asks for; an error if they contradict each other.
    pub fn world_size(&self, asked: Option<usize>) -> Result<Option<usize>> {
        match (asked, self.launch.job()?) {
            (Some(n), Some(job)) if n != job.size => {
                let what = format!("--ranks {n}, but a launcher started {} processes", job.size);
                Err(UsageError::new(format!("{what}, one rank each; leave --ranks out")).into())
            }
            (_, Some(job)) => Ok(Some(job.size)),
            (asked, None) => Ok(asked),
        }
    }

    /// The rank of a launched process: on the GPU of its local rank, or on its share of the host's cores.
    fn job_rank(&self, job: &LaunchEnv, seed: u64) -> Result<Rank> {
        let gpu_count = || gpus().map_or(0, |all| all.len());
        let ordinal = match self.device {
            Device::Cpu => None,
            Device::Auto if gpu_count() == 0 => None,
            // A launcher that sets CUDA_VISIBLE_DEVICES to one GPU per process has chosen already.
            Device::Auto | Device::Cuda(0) => Some(if gpu_count() == 1 { 0 } else { job.local_rank }),
            Device::Cuda(n) if n == job.local_rank => Some(n),
            Device::Cuda(n) => {
                let what = format!(
                    "--device cuda:{n}: a launched process uses the GPU of its local rank, here {}; use --device cuda",
                    job.local_rank
                );
                return Err(UsageError::new(what).into());
            }
        };
        let watch =
            Instrumentation { race_check: self.check, trace: self.trace, ..Instrumentation::default() };
        match ordinal {
            Some(n) if n >= gpu_count() => Err(UsageError::new(format!(
                "rank {} has local rank {n}, but its host has {} GPUs; start one process per GPU, or use --device cpu",
                job.rank,
                gpu_count()
            ))
            .into()),
            Some(n) => self.cuda_rank(n, seed, watch),
            None => {
                let cores = std::thread::available_parallelism().map_or(1, usize::from);
                let threads =
                    if self.threads == 0 { (cores / job.local_size).max(1) } else { self.threads };
                Ok(Rank::cpu_instrumented(threads, seed, watch)?)
            }
        }
    }

    fn cuda_rank(&self, ordinal: usize, seed: u64, watch: Instrumentation) -> Result<Rank> {
        let begin = Instant::now();
        let (rank, KernelCacheStats { compiled, cached }) = Rank::cuda(ordinal, self.threads, seed, watch)?;
        if compiled > 0 && !self.json && self.launch.leads() {
            let kept = cache_folder().map_or(String::new(), |f| format!("; cached in {}", f.display()));
            let seconds = begin.elapsed().as_secs_f64();
            let all = compiled + cached;
            output::note(format_args!(
                "compiled {compiled} of {all} kernel sources for this GPU in {seconds:.1} s{kept}"
            ));
        }
        Ok(rank)
    }
}

/// Runs `work` on the ranks of a layout that this process has: its one rank of a launched job, otherwise all ranks, as
/// threads. Returns their results in rank order.
pub fn run<T: Send>(
    global: &Global,
    layout: &RankLayout,
    seed: u64,
    work: impl Fn(Rank) -> ferrotron_core::Result<T> + Sync,
) -> Result<Vec<T>> {
    let timeout = Duration::from_secs(global.timeout);
    // The error itself is shown when all ranks have ended.
    let work = |rank| work(rank).inspect_err(|e| tracing::error!(shown = true, "{e}"));
    // The rank of a process logs as the process does.
    let as_thread = |rank: Rank| {
        let of = LogRank { rank: rank.world.rank(), size: rank.world.size() };
        log::for_rank(global.log_level, of, || work(rank))
    };
    if let Some(job) = global.launch.job()? {
        let make = || global.job_rank(&job, seed).map_err(to_core_error);
        return Ok(vec![global.launch.run(&job, layout, timeout, make, work)?]);
    }
    let ranks = layout.world()?;
    if ranks == 1 {
        return run_single(global, seed, work);
    }
    let cuda = match global.device {
        Device::Cpu => false,
        Device::Cuda(_) => true,
        Device::Auto => gpus().is_ok_and(|all| !all.is_empty()),
    };
    if cuda {
        let first = global.rank(seed, Instrumentation::default())?;
        if first.device().gpu().is_some() {
            return Ok(on_one_device(layout, timeout, &first, as_thread)?);
        }
    }
    // The ranks share the compute threads.
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let all = if global.threads == 0 { cores } else { global.threads };
    let watch =
        Instrumentation { race_check: global.check, trace: global.trace, ..Instrumentation::default() };
    let make = || Ok(Rank::cpu_instrumented((all / ranks).max(1), seed, watch)?);
    Ok(on_threads_with(layout, timeout, ReduceKernels::default(), make, as_thread)?)
}

/// [`run`] for work that survives faults: as a process of a launched job it goes on after them as `faults` say.
pub fn run_generations<T: Send>(
    global: &Global,
    layout: &RankLayout,
    seed: u64,
    faults: Option<&Faults>,
    work: impl Fn(Rank, GenerationStart) -> ferrotron_core::Result<T> + Sync,
) -> Result<Vec<T>> {
    let (Some(faults), Some(job)) = (faults, global.launch.job()?) else {
        let alone = |rank| {
            let steps = StepCount::default();
            work(rank, GenerationStart { restarted: None, snapshots: Snapshots::default(), steps: &steps })
        };
        return run(global, layout, seed, alone);
    };
    let timeout = Duration::from_secs(global.timeout);
    let make = || global.job_rank(&job, seed).map_err(to_core_error);
    let work = |rank, start: GenerationStart| {
        work(rank, start).inspect_err(|e| match e {
            ferrotron_core::Error::ChangeRanks => tracing::info!("{e}"),
            _ => tracing::error!(shown = true, "{e}"),
        })
    };
    let done = global.launch.run_generations(&job, (layout, timeout), faults, make, work)?;
    Ok(done.into_iter().collect())
}

/// Runs `work` on a single rank without communication, even in a launched job.
pub fn run_single<T>(
    global: &Global,
    seed: u64,
    work: impl Fn(Rank) -> ferrotron_core::Result<T>,
) -> Result<Vec<T>> {
    // Made outside `work`, so that an error keeps its hint.
    Ok(vec![work(global.rank(seed, Instrumentation::default())?)?])
}

/// Converts an error for code that returns core's.
pub fn to_core_error(e: anyhow::Error) -> ferrotron_core::Error {
    match e.downcast::<ferrotron_core::Error>() {
        Ok(e) => e,
        Err(e) => ferrotron_core::Error::Invalid(output::describe(&e)),
    }
}

/// The device of a rank, such as `CPU (AMX)` or `cuda:0 (NVIDIA H200)`.
pub fn device_name(rank: &Rank) -> String {
    match rank.device().gpu() {
        Some(card) => format!("cuda:{} ({})", card.ordinal, card.name),
        None => format!("CPU ({})", Isa::detect().name()),
    }
}

/// The device with its ranks and threads, such as `4 ranks (tp=2, dp=2) on CPU (AMX) x 8 threads`.
pub fn device_description(rank: &Rank) -> String {
    let sizes = [("tp", &rank.tp), ("cp", &rank.cp), ("pp", &rank.pp), ("dp", &rank.dp)];
    let sizes: Vec<String> =
        sizes.iter().filter(|(_, g)| g.size() > 1).map(|(name, g)| format!("{name}={}", g.size())).collect();
    let ranks = match rank.world.size() {
        1 => String::new(),
        n => format!("{n} ranks ({}) on ", sizes.join(", ")),
    };
    match rank.device().gpu() {
        Some(_) => format!("{ranks}{}", device_name(rank)),
        None => format!("{ranks}{} x {} threads", device_name(rank), rank.device().threads().count()),
    }
}
