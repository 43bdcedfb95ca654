//! `bench`: training steps, kernels and collectives.

mod report;
mod train;

use crate::args::Global;
use crate::trace;
use anyhow::Result;
use ferrotron_core::bench;
use ferrotron_core::config::{Precision, Resolved};
pub use report::precision_text;
use std::process::ExitCode;
pub use train::peak_by_datasheet;
pub(super) use train::{balanced, profiled};

const AFTER: &str = "\
Examples:
  ferrotron bench train                              the recipe `tiny`
  ferrotron bench train --work my.toml --steps 20
  ferrotron bench train --dtype f32 --json
  ferrotron bench train --work llama-1b --profile    profile.html: where the time goes, and what to change
  ferrotron bench train --work custom/L=4/d=1024/h=16/kv=4/hd=64/ffn=2816/V=32000/T=1536/B=3
  ferrotron bench train --work moe-8l --force-balance     also with balanced routing
  ferrotron bench train --work llama-1b --set parallel.tp=2 --ranks 4   several ranks: communication hidden and exposed
  mpirun -n 4 ferrotron bench train --set parallel.pp=2
  ferrotron bench kernels --filter gemm
  ferrotron bench comm --ranks 4                     time and bandwidth of collectives
  ferrotron bench calibrate --out my-gpu.toml        the GPU's curves for `ferrotron plan --gpus 8xmy-gpu.toml`";

/// Arguments of `bench`.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub struct Args {
    /// The subcommand.
    #[command(subcommand)]
    pub command: Command,
}

/// Subcommands of `bench`.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Benchmark training steps on random tokens: tokens/s, MFU, memory, communication hidden and exposed
    Train(Train),
    /// Benchmark each kernel of a training step against measured GEMM and memory ceilings
    Kernels(Kernels),
    /// Benchmark every collective: time, algorithm bandwidth and bus bandwidth
    Comm(super::bench_comm::Args),
    /// Measure a GPU for `plan`: GEMMs, attention, memory, link to the host; writes a hardware file; takes about a minute
    Calibrate(super::bench_calibrate::Args),
}

/// Arguments of `bench train`.
#[derive(Debug, clap::Args)]
pub struct Train {
    /// Workload: a benchmark model, a recipe, a custom/... shape or a TOML file
    #[arg(long, value_name = "NAME or FILE.toml", default_value = "tiny")]
    pub work: String,
    /// Number of ranks, as threads of this process; sets parallel.dp to N / (tp x cp x pp) [default: tp x cp x pp x dp]
    #[arg(long, value_name = "N")]
    pub ranks: Option<usize>,
    /// Number of timed steps; the median is reported
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub steps: usize,
    /// Number of warm-up steps before timing starts
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub warmup: usize,
    /// Compute precision: f32, bf16 or f16 [default: the recipe's]
    #[arg(long, value_name = "DTYPE")]
    pub dtype: Option<Precision>,
    /// Pack each sequence with documents of this many tokens; attention does not cross documents
    #[arg(long, value_name = "TOKENS")]
    pub packed: Option<std::num::NonZeroUsize>,
    /// Also benchmark an MoE model with random, nearly balanced routing
    #[arg(long)]
    pub force_balance: bool,
    /// Peak TFLOP/s for MFU [default: the GPU's datasheet, otherwise a measured large GEMM]
    #[arg(long, value_name = "TFLOPS")]
    pub peak: Option<f64>,
    /// Override a recipe key; can be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Trace options.
    #[command(flatten)]
    pub trace: trace::TraceArgs,
}

/// Arguments of `bench kernels`.
#[derive(Debug, clap::Args)]
pub struct Kernels {
    /// Workload whose shapes are used: a benchmark model, a recipe, a custom/... shape or a TOML file
    #[arg(long, value_name = "NAME or FILE.toml", default_value = "tiny")]
    pub work: String,
    /// Only kernels whose name contains TEXT
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub filter: String,
    /// Seconds to time each kernel
    #[arg(long, value_name = "S", default_value_t = 0.5)]
    pub seconds: f64,
    /// Compute precision: f32, bf16 or f16 [default: the recipe's]
    #[arg(long, value_name = "DTYPE")]
    pub dtype: Option<Precision>,
    /// Override a recipe key; can be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<ExitCode> {
    match args.command {
        Command::Train(args) => train::run(&args, global),
        Command::Kernels(args) => super::bench_kernels::run(&args, global),
        Command::Comm(args) => super::bench_comm::run(&args, global),
        Command::Calibrate(args) => super::bench_calibrate::run(&args, global),
    }
}

/// The workload with the overrides of the command line.
pub(super) fn resolve(
    work: &str,
    set: &[String],
    dtype: Option<Precision>,
    ranks: Option<usize>,
) -> Result<Resolved> {
    let mut recipe = bench::workload(work)?;
    recipe.set_all(set)?;
    if let Some(dtype) = dtype {
        recipe.put_key("precision.dtype", dtype.name())?;
    }
    crate::commands::train::args::set_ranks(&mut recipe, ranks)?;
    let given = |key: &str| set.iter().any(|s| s.split('=').next().is_some_and(|k| k.trim() == key));
    let dp = recipe.config.parallel.dp;
    if dp > 1 && bench::fixes_batch(work) && !given("train.global_batch") {
        // The batch that a workload fixes is that of one data-parallel rank.
        let batch = recipe.config.train.global_batch.saturating_mul(dp);
        recipe.put_key("train.global_batch", i64::try_from(batch).unwrap_or(i64::MAX))?;
    }
    Ok(ferrotron_bridge::recipe::resolve(&mut recipe)?.0)
}
