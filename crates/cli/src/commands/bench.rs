//! `bench`: the yardsticks.

use crate::args::Global;
use crate::{format, output};
use anyhow::Result;
use ferrotron_core::bench;
use ferrotron_core::config::{Precision, Recipe, Resolved};
use ferrotron_engine::Rank;
use ferrotron_tensor::{Category, Watch, human};
use std::process::ExitCode;

const AFTER: &str = "\
Examples:
  ferrotron bench train                              the default model
  ferrotron bench train --work my.toml --steps 20
  ferrotron bench train --dtype f32 --json
  ferrotron bench kernels --filter gemm";

/// What to measure.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub struct Args {
    /// What to measure.
    #[command(subcommand)]
    pub command: Command,
}

/// What to measure.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Whole training steps on random tokens: tokens/s, TFLOP/s, MFU, memory by category
    Train(Train),
    /// Single kernels against the speed of memory and of matrix products
    Kernels(Kernels),
}

/// Whole training steps.
#[derive(Debug, clap::Args)]
pub struct Train {
    /// A yardstick's or recipe's name, or a TOML file
    #[arg(long, value_name = "NAME or FILE.toml", default_value = "tiny")]
    pub work: String,
    /// Timed steps; the median is reported
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub steps: usize,
    /// Steps before timing begins
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub warmup: usize,
    /// Element type of compute: f32 or bf16 [default: the recipe's]
    #[arg(long, value_name = "DTYPE")]
    pub dtype: Option<Precision>,
    /// Show time by kernel
    #[arg(long)]
    pub profile: bool,
    /// Peak TFLOP/s to count MFU against [default: measured by a large matrix product]
    #[arg(long, value_name = "TFLOPS")]
    pub peak: Option<f64>,
    /// Change a key of the recipe; may be given many times
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

/// Single kernels.
#[derive(Debug, clap::Args)]
pub struct Kernels {
    /// The yardstick whose shapes are used
    #[arg(long, value_name = "NAME or FILE.toml", default_value = "tiny")]
    pub work: String,
    /// Only kernels whose name contains this
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub filter: String,
    /// Seconds per kernel
    #[arg(long, value_name = "S", default_value_t = 0.5)]
    pub seconds: f64,
    /// Element type of compute: f32 or bf16 [default: the recipe's]
    #[arg(long, value_name = "DTYPE")]
    pub dtype: Option<Precision>,
    /// Change a key of the recipe; may be given many times
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<ExitCode> {
    global.require_cpu()?;
    match args.command {
        Command::Train(args) => train(&args, global),
        Command::Kernels(args) => super::bench_kernels::run(&args, global),
    }
}

/// The work, with what the command line says laid over it.
pub(super) fn resolve(work: &str, set: &[String], dtype: Option<Precision>) -> Result<Resolved> {
    let mut recipe = Recipe::open(work)?;
    for assignment in set {
        recipe.set(assignment)?;
    }
    if let Some(dtype) = dtype {
        recipe.put_key("precision.dtype", dtype.name())?;
    }
    Ok(ferrotron_bridge::recipe::resolve(&mut recipe)?.0)
}

fn train(args: &Train, global: &Global) -> Result<ExitCode> {
    let resolved = resolve(&args.work, &args.set, args.dtype)?;
    let dtype = resolved.config.precision.dtype;
    let rank = Rank::cpu_watched(global.threads, 1234, Watch { order: false, time: args.profile })?;
    let peak = match args.peak {
        Some(peak) => peak,
        None => bench::product_ceiling(&rank, dtype.dtype())?,
    };
    let b = bench::train(rank.clone(), &resolved, args.warmup, args.steps.max(1))?;
    let mfu = b.tflops() / peak;
    let categories: serde_json::Map<_, _> =
        Category::ALL.iter().zip(b.memory.peak).map(|(c, bytes)| (c.name().into(), bytes.into())).collect();
    if global.json {
        output::print_json(&serde_json::json!({
            "work": args.work,
            "device": "cpu",
            "threads": rank.device().threads().count(),
            "dtype": dtype.name(),
            "step_ms": b.median() * 1e3,
            "tok_s": b.tokens_per_s(),
            "best_tok_s": b.tokens as f64 / b.step_s[0],
            "tflops": b.tflops(),
            "peak_tflops": peak,
            "mfu": mfu,
            "peak_bytes": b.memory.total_peak,
            "peak_bytes_by_category": categories,
            "start_s": b.start_s,
            "steps": b.step_s.len(),
            "loss": b.loss,
        }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut rows = vec![
        vec!["step".into(), format!("{:.1} ms (median of {})", b.median() * 1e3, b.step_s.len())],
        vec!["tokens/s".into(), format::thousands(b.tokens_per_s() as u64)],
        vec![
            "TFLOP/s".into(),
            format!(
                "{:.3} ({:.2} MFLOP per token, forward and backward)",
                b.tflops(),
                b.flops_per_token / 1e6
            ),
        ],
        vec![
            "MFU".into(),
            format!(
                "{:.1} % of {peak:.2} TFLOP/s{}",
                mfu * 1e2,
                if args.peak.is_some() { "" } else { ", a 1536x1536x1536 product measured here" }
            ),
        ],
        vec!["start".into(), format::seconds(b.start_s)],
    ];
    for (c, bytes) in Category::ALL.iter().zip(b.memory.peak).filter(|(_, bytes)| *bytes > 0) {
        rows.push(vec![format!("peak {}", c.name()), human(bytes)]);
    }
    rows.push(vec!["peak in all".into(), human(b.memory.total_peak)]);
    output::print(&format!(
        "{} in {} on {} CPU threads\n{}",
        args.work,
        dtype.name(),
        rank.device().threads().count(),
        output::table(&rows)
    ))?;
    if args.profile {
        output::print(&profile(&b))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Time by kernel, most first, and what is left for everything between kernels.
fn profile(b: &bench::TrainBench) -> String {
    let steps = b.step_s.len() as f64;
    let total: f64 = b.step_s.iter().sum();
    let mut kernels: Vec<_> = b.profile.iter().collect();
    kernels.sort_by_key(|k| std::cmp::Reverse(k.1.1));
    let mut rows = vec![vec!["kernel".to_string(), "calls/step".into(), "ms/step".into(), "share".into()]];
    let line = |name: &str, calls: String, s: f64| {
        vec![name.to_string(), calls, format!("{:.2}", s / steps * 1e3), format!("{:.1} %", s / total * 1e2)]
    };
    let inside: f64 = kernels.iter().map(|k| k.1.1.as_secs_f64()).sum();
    rows.extend(kernels.iter().map(|(name, (calls, time))| {
        line(name, format!("{:.0}", *calls as f64 / steps), time.as_secs_f64())
    }));
    rows.push(line("between kernels", String::new(), total - inside));
    format!("\n{}", output::table(&rows))
}
