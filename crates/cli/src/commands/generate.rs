//! `generate`: continue a text.

use crate::args::Global;
use anyhow::Result;
use ferrotron_core::config::Precision;
use std::path::PathBuf;
use std::process::ExitCode;

const AFTER: &str = "\
Examples:
  ferrotron generate --model runs/tiny --prompt \"Once upon a time\"
  ferrotron generate --model models/Qwen3-0.6B --prompt \"Why is the sky blue?\" --chat --tokens 200
  ferrotron generate --model runs/tiny --temperature 0        always the likeliest token";

/// What to continue, and how.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub struct Args {
    /// Run folder, checkpoint or Hugging Face folder
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// The text to continue; - reads standard input
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub prompt: String,
    /// Wrap the prompt as a user's message in the model's chat template
    #[arg(long)]
    pub chat: bool,
    /// Tokens to write
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub tokens: usize,
    /// 0 always takes the likeliest token, 1 draws from the model's own distribution
    #[arg(long, value_name = "T", default_value_t = 0.8)]
    pub temperature: f64,
    /// Draw from the K likeliest tokens; 0 means all
    #[arg(long, value_name = "K", default_value_t = 0)]
    pub top_k: usize,
    /// Draw from the likeliest tokens that hold this share of the probability
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    pub top_p: f64,
    /// Seed of the draws: the same seed writes the same text
    #[arg(long, value_name = "N", default_value_t = 1234)]
    pub seed: u64,
    /// Element type of compute: f32 or bf16 [default: as the model was trained]
    #[arg(long, value_name = "DTYPE")]
    pub dtype: Option<Precision>,
}

/// Runs the command.
pub fn run(_args: Args, global: &Global) -> Result<ExitCode> {
    global.require_cpu()?;
    anyhow::bail!("this build cannot run models yet")
}
