//! The commands and the options every command takes.

use crate::commands::{
    bench, convert, data, doctor, explain, forward, generate, kernels, parity, recipes, train,
};
use clap::{Args, Parser, Subcommand};
use ferrotron_core::ranks::Launch;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Instant;

const AFTER: &str = "\
Examples:
  ferrotron train                          a small model on the corpus inside the program, in a minute
  ferrotron train my.toml --out runs/a     your recipe; the same command resumes after an interruption
  ferrotron recipes                        recipes to start from
  ferrotron explain train.micro_batch      what a key means
  ferrotron doctor                         what this machine has and what that costs

Exit codes: 0 done (or interrupted and saved), 1 failed or, for parity, different, 2 wrong usage or configuration.";

/// Train transformer language models, from a laptop's CPU up
#[derive(Debug, Parser)]
#[command(name = "ferrotron", version, after_help = AFTER, arg_required_else_help = true)]
pub struct Cli {
    /// Options of every command.
    #[command(flatten)]
    pub global: Global,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Options of every command.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Options of every command")]
pub struct Global {
    /// Write machine-readable JSON to standard output
    #[arg(long, global = true)]
    pub json: bool,
    /// Where to compute: auto, cpu, cuda or cuda:N
    #[arg(long, global = true, value_name = "DEVICE", default_value = "auto")]
    pub device: Device,
    /// Check that events order all memory accesses of streams; slower
    #[arg(long, global = true)]
    pub check: bool,
    /// CPU threads; 0 means one per core. Results do not depend on it
    #[arg(long, global = true, value_name = "N", default_value_t = 0, hide_default_value = true)]
    pub threads: usize,
    /// Devices are made for a trace; commands that can write one say so.
    #[arg(skip)]
    pub trace: bool,
    /// Seconds that a rank waits for another before the run ends with an error that names it
    #[arg(long, global = true, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..))]
    pub timeout: u64,
    /// When the process began.
    #[arg(skip = Instant::now())]
    pub started: Instant,
    /// This process's part of a job, where a launcher started it.
    #[arg(skip)]
    pub launch: Arc<Launch>,
}

/// Where to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// The best there is.
    Auto,
    /// The CPU.
    Cpu,
    /// A CUDA card.
    Cuda(usize),
}

impl FromStr for Device {
    type Err = String;
    fn from_str(text: &str) -> Result<Device, String> {
        match text {
            "auto" => Ok(Device::Auto),
            "cpu" => Ok(Device::Cpu),
            "cuda" => Ok(Device::Cuda(0)),
            _ => text
                .strip_prefix("cuda:")
                .and_then(|n| n.parse().ok())
                .map(Device::Cuda)
                .ok_or_else(|| "expected auto, cpu, cuda or cuda:N".into()),
        }
    }
}

/// What to do.
#[derive(Debug, Subcommand)]
#[allow(clippy::large_enum_variant)] // there is one of it in the whole program
pub enum Command {
    /// Train a model from a recipe; the same command resumes
    #[command(long_about = train::LONG)]
    Train(train::Args),
    /// One pass of a Hugging Face folder over given token ids: logits, loss, gradients
    #[command(long_about = forward::LONG)]
    Forward(forward::Args),
    /// One step under two precisions, devices or layouts, compared tensor by tensor
    #[command(long_about = parity::LONG)]
    Parity(parity::Args),
    /// Hugging Face folder to checkpoint and back
    #[command(long_about = convert::LONG)]
    Convert(convert::Args),
    /// Continue a text
    #[command(long_about = generate::LONG)]
    Generate(generate::Args),
    /// Prepare training data
    Data(data::Args),
    /// Measure speed on the yardsticks
    Bench(bench::Args),
    /// Compile every GPU kernel, with or without a GPU
    #[command(long_about = kernels::LONG)]
    Kernels(kernels::Args),
    /// What this machine has, what is missing and what that costs
    Doctor(doctor::Args),
    /// The recipes inside the program
    Recipes(recipes::Args),
    /// What a recipe's key means
    Explain(explain::Args),
}
