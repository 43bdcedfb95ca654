//! `doctor`: the hardware and libraries that were found, and what the missing ones cost.

use crate::args::Global;
use crate::format;
use crate::machine::{Cpu, Disk, Libraries, Memory};
use crate::output;
use anyhow::Result;
use ferrotron_core::ranks::{LaunchEnv, Launcher};
use ferrotron_kernels::cpu::Isa;
use ferrotron_tensor::{GpuInfo, format_bytes, gpus};
use serde::Serialize;
use std::process::ExitCode;

const AFTER: &str = "\
Examples:
  ferrotron doctor
  ferrotron doctor --json";

/// Bytes per parameter when training in bf16: weights 2, master weights 4, gradients 4, two Adam moments 8.
const BYTES_PER_PARAMETER: u64 = 18;

/// Arguments of `doctor`: none.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub struct Args {}

#[derive(Serialize)]
struct Report {
    version: &'static str,
    target: String,
    cpu: Cpu,
    instructions: &'static str,
    threads: usize,
    memory: Memory,
    disk: Option<Disk>,
    gpus: Vec<Gpu>,
    /// Why no GPU can be used.
    no_gpu: Option<String>,
    libraries: Libraries,
    device: &'static str,
    /// The launcher that started this process; absent if none did.
    launcher: Option<Started>,
    /// Why the launcher's variables cannot be used.
    launcher_error: Option<String>,
}

#[derive(Serialize)]
struct Started {
    name: &'static str,
    rank: usize,
    size: usize,
    local_rank: usize,
    /// Where the ranks meet.
    rendezvous: Option<String>,
    /// They meet through the store of torchrun's agent.
    store: bool,
    supported: bool,
}

impl From<LaunchEnv> for Started {
    fn from(job: LaunchEnv) -> Started {
        Started {
            name: job.launcher.name(),
            rank: job.rank,
            size: job.size,
            local_rank: job.local_rank,
            rendezvous: job.rendezvous,
            store: job.store_key.is_some(),
            supported: job.launcher != Launcher::Mpich,
        }
    }
}

#[derive(Serialize)]
struct Gpu {
    name: String,
    memory: usize,
    compute_capability: String,
    /// Where the card stands for an older one.
    #[serde(skip_serializing_if = "Option::is_none")]
    own_compute_capability: Option<String>,
    multiprocessors: u32,
    driver: String,
    /// How GEMMs of each low-precision recipe run.
    low_precision: &'static str,
}

/// How a card runs the GEMMs of `precision.recipe`.
fn low_precision(capability: (u32, u32)) -> &'static str {
    match capability {
        c if c < (8, 9) => "mxfp8 and nvfp4 are emulated in bf16; FP8 recipes need compute capability 8.9",
        (9, 0) => "FP8 recipes on tensor cores; mxfp8 and nvfp4 are emulated in bf16",
        c if c < (10, 0) => {
            "fp8-current and fp8-delayed on tensor cores; fp8-block is slow; mxfp8 and nvfp4 are emulated in bf16"
        }
        _ => {
            "FP8 recipes, mxfp8 and nvfp4 on tensor cores, where cuBLASLt takes the GEMM; otherwise emulated"
        }
    }
}

impl From<GpuInfo> for Gpu {
    fn from(c: GpuInfo) -> Gpu {
        let own = c.stands_for_another().then(|| format!("{}.{}", c.native.0, c.native.1));
        Gpu {
            name: c.name,
            memory: c.memory,
            compute_capability: format!("{}.{}", c.capability.0, c.capability.1),
            own_compute_capability: own,
            multiprocessors: c.multiprocessors,
            driver: format!("{}.{}", c.driver / 1000, c.driver % 1000 / 10),
            low_precision: low_precision(c.capability),
        }
    }
}

/// Runs the command.
pub fn run(_args: Args, global: &Global) -> Result<ExitCode> {
    let cpu = Cpu::look();
    let libraries = Libraries::look();
    let (gpus, no_gpu) = match gpus() {
        Ok(all) => (all.into_iter().map(Gpu::from).collect(), None),
        Err(why) => (Vec::new(), Some(why.to_string())),
    };
    let ready = !gpus.is_empty() && libraries.list.iter().all(|l| l.path.is_some() || !l.needed);
    let (launcher, launcher_error) = match LaunchEnv::detect() {
        Ok(job) => (job.map(Started::from), None),
        Err(why) => (None, Some(why.to_string())),
    };
    let report = Report {
        version: env!("CARGO_PKG_VERSION"),
        target: format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS),
        instructions: Isa::detect().name(),
        threads: if global.threads == 0 { cpu.usable } else { global.threads },
        cpu,
        memory: Memory::look(),
        disk: Disk::look(),
        gpus,
        no_gpu,
        libraries,
        device: if ready { "cuda:0" } else { "cpu" },
        launcher,
        launcher_error,
    };
    if global.json {
        output::print_json(&report)?
    } else {
        output::print(&page(&report))?
    }
    Ok(ExitCode::SUCCESS)
}

fn page(r: &Report) -> String {
    let row = |a: &str, b: String, c: String| vec![a.to_string(), b, c];
    let mut rows = vec![
        row("", "found".into(), "meaning".into()),
        row("program", format!("{} for {}", r.version, r.target), String::new()),
        row("CPU", r.cpu.model.clone().unwrap_or_else(|| "unknown".into()), String::new()),
        row("cores", cores(&r.cpu), format!("{} compute threads; results do not depend on it", r.threads)),
        row("instructions", r.instructions.into(), instructions(Isa::detect()).into()),
        row("memory", memory(&r.memory), room(&r.memory)),
    ];
    if let Some(disk) = &r.disk {
        let found =
            format!("{} free of {}", format_bytes(disk.free as usize), format_bytes(disk.total as usize));
        rows.push(row("disk here", found, "a checkpoint is about 12 bytes per parameter".into()));
    }
    for (i, gpu) in r.gpus.iter().enumerate() {
        let found = format!(
            "{}, {}, compute capability {}{}",
            gpu.name,
            format_bytes(gpu.memory),
            gpu.compute_capability,
            gpu.own_compute_capability
                .as_ref()
                .map_or(String::new(), |own| format!(" (as asked; its own is {own})"))
        );
        rows.push(row(&format!("cuda:{i}"), found, fits(gpu.memory as u64)));
    }
    match (r.gpus.first(), &r.no_gpu) {
        (Some(gpu), _) => {
            rows.push(row("low precision", gpu.low_precision.into(), "GEMMs of precision.recipe".into()));
            rows.push(row(
                "driver",
                format!("CUDA {}", gpu.driver),
                "highest CUDA version the driver supports".into(),
            ));
        }
        (None, why) => {
            let found = if why.is_some() { "none" } else { "none visible to the driver" };
            rows.push(row("GPU", found.into(), "everything runs on the CPU".into()));
        }
    }
    for library in &r.libraries.list {
        let version = library.version.as_ref().map_or(String::new(), |v| format!(" ({v})"));
        let found = library.path.as_ref().map_or("not found".into(), |p| format!("{}{version}", p.display()));
        rows.push(row(library.file, found, library.meaning()));
    }
    rows.push(launcher_row(r));
    let looked: Vec<_> = r.libraries.looked_in.iter().map(|p| p.display().to_string()).collect();
    let looked = if looked.is_empty() {
        "no folder: none of the library folders exists".into()
    } else {
        looked.join(", ")
    };
    format!(
        "{}\nLooked for GPU libraries in {looked}.\nDefault device: {}.\n",
        output::table(&rows),
        r.device
    )
}

fn launcher_row(r: &Report) -> Vec<String> {
    let (found, meaning) = match (&r.launcher, &r.launcher_error) {
        (_, Some(why)) => ("unusable".into(), why.clone()),
        (None, None) => ("none".into(), "a single process; --ranks N makes ranks of its threads".into()),
        (Some(job), None) => {
            let meaning = match &job.rendezvous {
                _ if !job.supported => {
                    "not supported; use Open MPI's mpirun, srun, torchrun or RANK and WORLD_SIZE".into()
                }
                Some(at) if job.store => format!("the ranks meet through torchrun's store at {at}"),
                Some(at) => format!("the ranks meet at {at}, where rank 0 listens"),
                None if job.name == Launcher::OpenMpi.name() => "the ranks meet through MPI".into(),
                None => "set MASTER_ADDR and MASTER_PORT to where rank 0 can be reached".into(),
            };
            (
                format!("{}: rank {} of {}, local rank {}", job.name, job.rank, job.size, job.local_rank),
                meaning,
            )
        }
    };
    vec!["launcher".into(), found, meaning]
}

fn cores(cpu: &Cpu) -> String {
    match cpu.total {
        Some(total) if total != cpu.usable => format!("{} of {total} usable by this process", cpu.usable),
        _ => cpu.usable.to_string(),
    }
}

fn instructions(isa: Isa) -> &'static str {
    match isa {
        Isa::Amx => "bf16 matrix unit: fast bf16 GEMMs",
        Isa::Avx512 => "no AMX: bf16 saves memory but little time",
        Isa::Avx2 => "no AVX-512: bf16 saves memory but no time",
        Isa::Portable => "no supported SIMD: slow, for tests only",
    }
}

fn memory(m: &Memory) -> String {
    match (m.available, m.total) {
        (Some(available), Some(total)) => {
            format!("{} free of {}", format_bytes(available as usize), format_bytes(total as usize))
        }
        _ => "unknown".into(),
    }
}

fn room(m: &Memory) -> String {
    match m.available {
        Some(bytes) => fits(bytes),
        None => String::new(),
    }
}

fn fits(bytes: u64) -> String {
    format!(
        "trains up to about {} parameters at {BYTES_PER_PARAMETER} bytes each, plus activations",
        format::count(bytes / BYTES_PER_PARAMETER)
    )
}
