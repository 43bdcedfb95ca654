//! `parity`: the same step twice, compared tensor by tensor.

use crate::args::Global;
use crate::layout::Side;
use anyhow::Result;
use std::path::PathBuf;
use std::process::ExitCode;

/// The long help.
pub const LONG: &str = "\
One training step under two settings, compared tensor by tensor: loss, every gradient, every updated weight.

A side is a list of f32 or bf16, cpu, threads=N, micro_batch=N and layout keys (tp=2). The report names each tensor with
its relative error and a verdict. Exit code 0: the sides agree, 1: they do not.";

const AFTER: &str = "\
Examples:
  ferrotron parity threads=1 threads=8               must agree to the last bit
  ferrotron parity f32 bf16                          must agree within the precision of bf16
  ferrotron parity micro_batch=1 micro_batch=4 --recipe my.toml
  ferrotron parity f32 bf16 --model models/Qwen3-0.6B --input ids.safetensors";

/// What to compare.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub struct Args {
    /// One side, such as f32 or threads=1
    pub a: Side,
    /// The other side
    pub b: Side,
    /// The recipe whose first step is made
    #[arg(long, value_name = "RECIPE or FILE.toml", default_value = "tiny", conflicts_with = "model")]
    pub recipe: String,
    /// A Hugging Face folder instead of a recipe
    #[arg(long, value_name = "DIR", requires = "input")]
    pub model: Option<PathBuf>,
    /// Token ids for --model, as in `forward`
    #[arg(long, value_name = "FILE")]
    pub input: Option<PathBuf>,
    /// Largest relative error that counts as agreement [default: 0 for equal element types, else that of bf16]
    #[arg(long, value_name = "X")]
    pub tolerance: Option<f64>,
    /// Change a key of the recipe; may be given many times
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

/// Runs the command.
pub fn run(_args: Args, global: &Global) -> Result<ExitCode> {
    global.require_cpu()?;
    anyhow::bail!("this build cannot compare yet")
}
