//! `kernels`: compile every CUDA kernel; needs NVRTC but no GPU.

use crate::args::{Device, Global};
use crate::output;
use anyhow::Result;
use ferrotron_kernels::cuda::{
    Compiler, CudaKernels, KernelCacheStats, KernelResources, SOURCES, Source, architecture,
};
use ferrotron_tensor::{Instrumentation, Threads, gpus};
use serde::Serialize;
use std::process::ExitCode;
use std::time::Instant;

/// Text of `--help`.
pub const LONG: &str = "\
Compile every built-in CUDA kernel with NVRTC and report its register use. No GPU is needed, only libnvrtc, which is looked for
in the folder FERROTRON_CUDA_LIB first. The exit code is 1 if a source does not compile, if a kernel spills registers that is
not marked as allowed to, or if ptxas serializes wgmma instructions of a kernel.";

const AFTER: &str = "\
Examples:
  ferrotron kernels                     for this machine's GPU, or for sm_90a without one
  ferrotron kernels --arch sm_80
  ferrotron kernels --load              time how long loading the kernels takes";

/// Arguments of `kernels`.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub struct Args {
    /// GPU architecture, such as sm_80 or sm_90a [default: this machine's GPU, or sm_90a]
    #[arg(long, value_name = "ARCH")]
    pub arch: Option<String>,
    /// List every kernel, not only source files
    #[arg(long)]
    pub all: bool,
    /// Load the kernels on the GPU as every command does, from the cache where possible, and print the time
    #[arg(long, conflicts_with_all = ["arch", "all"])]
    pub load: bool,
}

/// The result of compiling one source.
#[derive(Serialize)]
struct Row {
    source: &'static str,
    seconds: f64,
    kernels: usize,
    most_registers: usize,
    spilling: Vec<String>,
    serialized: Vec<String>,
    error: Option<String>,
    #[serde(skip)]
    each: Vec<KernelResources>,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<ExitCode> {
    if args.load {
        return load(global);
    }
    let compiler = Compiler::open()?;
    let card = gpus().ok().and_then(|all| all.first().map(architecture));
    let arch = args.arch.clone().or(card).unwrap_or_else(|| "sm_90a".into());
    let rows: Vec<Row> =
        SOURCES.iter().filter(|s| s.is_for(&arch)).map(|s| compile(&compiler, s, &arch)).collect();
    let failed = rows.iter().any(|r| r.error.is_some() || !r.spilling.is_empty() || !r.serialized.is_empty());
    if global.json {
        output::print_json(&serde_json::json!({ "arch": arch, "failed": failed, "sources": rows }))?;
    } else {
        output::print(&page(&rows, &arch, compiler.version(), args.all))?;
    }
    Ok(if failed { ExitCode::from(output::FAILED) } else { ExitCode::SUCCESS })
}

fn load(global: &Global) -> Result<ExitCode> {
    let ordinal = if let Device::Cuda(n) = global.device { n } else { 0 };
    let device =
        ferrotron_tensor::Device::cuda(ordinal, Threads::new(global.threads)?, Instrumentation::default())?;
    let begin = Instant::now();
    let KernelCacheStats { compiled, cached } = CudaKernels::load(&device)?.cache_stats();
    let seconds = begin.elapsed().as_secs_f64();
    if global.json {
        output::print_json(
            &serde_json::json!({ "seconds": seconds, "compiled": compiled, "cached": cached }),
        )?;
    } else {
        output::print(&format!(
            "kernels ready in {seconds:.2} s: {compiled} sources compiled, {cached} from the cache\n"
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn compile(compiler: &Compiler, source: &Source, arch: &str) -> Row {
    let begin = Instant::now();
    let (each, error) = match compiler.compile(source, arch) {
        Ok(compiled) => (compiled.kernels, None),
        Err(e) => (Vec::new(), Some(e.to_string())),
    };
    let spills =
        |u: &&KernelResources| u.spills > 0 && !source.may_spill.iter().any(|s| u.name.starts_with(s));
    Row {
        source: source.name,
        seconds: begin.elapsed().as_secs_f64(),
        kernels: each.len(),
        most_registers: each.iter().map(|u| u.registers).max().unwrap_or(0),
        spilling: each.iter().filter(spills).map(|u| format!("{} ({} bytes)", u.name, u.spills)).collect(),
        serialized: each.iter().filter(|u| u.serialized).map(|u| u.name.clone()).collect(),
        error,
        each,
    }
}

fn page(rows: &[Row], arch: &str, version: (i32, i32), all: bool) -> String {
    let text = |r: &Row| {
        let verdict = match (&r.error, r.spilling.as_slice(), r.serialized.as_slice()) {
            (Some(_), ..) => "does not compile".to_string(),
            (None, [], []) => "ok".into(),
            (None, [], list) => format!("wgmma serialized: {}", list.join(", ")),
            (None, list, _) => format!("spills: {}", list.join(", ")),
        };
        let name = format!("{}.cu", r.source);
        vec![
            name,
            r.kernels.to_string(),
            r.most_registers.to_string(),
            format!("{:.1} s", r.seconds),
            verdict,
        ]
    };
    let head = ["source", "kernels", "registers", "time", "verdict"].map(String::from).to_vec();
    let mut lines = vec![head];
    for r in rows {
        lines.push(text(r));
        let each = r.each.iter().filter(|_| all);
        lines.extend(each.map(|u| {
            let spills = if u.spills > 0 { format!("{} bytes spilled", u.spills) } else { String::new() };
            vec![format!("  {}", u.name), String::new(), u.registers.to_string(), String::new(), spills]
        }));
    }
    let errors: String = rows.iter().filter_map(|r| r.error.as_ref()).map(|e| format!("\n{e}\n")).collect();
    let total: f64 = rows.iter().map(|r| r.seconds).sum();
    format!(
        "{} sources for {arch} with NVRTC {}.{}, {total:.1} s\n\n{}{errors}",
        rows.len(),
        version.0,
        version.1,
        output::table(&lines)
    )
}
