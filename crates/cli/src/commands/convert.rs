//! `convert`: Hugging Face folder to checkpoint and back.

use crate::args::Global;
use anyhow::Result;
use ferrotron_core::config::Precision;
use std::path::PathBuf;
use std::process::ExitCode;

/// The long help.
pub const LONG: &str = "\
Convert between a Hugging Face folder and a checkpoint of ours.

The direction follows from what FROM is: a folder with config.json and .safetensors files becomes a checkpoint; a
checkpoint, or a run folder (its newest checkpoint), becomes a Hugging Face folder. TO must not exist unless
--overwrite is given, and is only there once it is complete.";

const AFTER: &str = "\
Examples:
  ferrotron convert models/Qwen3-0.6B qwen3.ckpt
  ferrotron convert runs/tiny exported
  ferrotron convert runs/tuned exported --like models/Llama-3.2-1B    with the tokenizer and names of that folder";

/// What to convert.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub struct Args {
    /// Hugging Face folder, checkpoint or run folder
    pub from: PathBuf,
    /// What to write
    pub to: PathBuf,
    /// Element type to store weights in: f32 or bf16 [default: as they are]
    #[arg(long, value_name = "DTYPE")]
    pub dtype: Option<Precision>,
    /// A Hugging Face folder to take the family's names, config.json and tokenizer from
    #[arg(long, value_name = "DIR")]
    pub like: Option<PathBuf>,
    /// Replace TO if it exists
    #[arg(long)]
    pub overwrite: bool,
}

/// Runs the command.
pub fn run(_args: Args, _global: &Global) -> Result<ExitCode> {
    anyhow::bail!("this build cannot convert yet")
}
