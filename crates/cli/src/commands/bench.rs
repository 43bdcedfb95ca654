//! `bench`: the yardsticks.

use crate::args::Global;
use anyhow::Result;
use ferrotron_core::config::Precision;
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
}

/// Runs the command.
pub fn run(_args: Args, global: &Global) -> Result<ExitCode> {
    global.require_cpu()?;
    anyhow::bail!("this build cannot measure yet")
}
