//! The commands and the options every command takes.

use crate::commands::{
    bench, chat, completions, convert, data, doctor, drill, eval, explain, forward, generate, kernels,
    launch, parity, plan, recipes, regress, replay, runs, train, watch,
};
use crate::log::LogLevel;
use clap::{Args, Parser, Subcommand};
use ferrotron_core::ranks::Launch;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Instant;

const AFTER: &str = "\
Examples:
  ferrotron train                          train a small model on the built-in corpus, about a minute
  ferrotron train my.toml --out runs/a     train your recipe; the same command resumes an interrupted run
  ferrotron recipes                        list the built-in recipes
  ferrotron explain train.micro_batch      explain a recipe key
  ferrotron doctor                         show the hardware and libraries that were found

Exit codes: 0 success, or interrupted and saved; 1 failure or, for parity and regress, a difference; 2 wrong usage or
configuration; 16 faulty hardware; 17 a rejected result that is reproducible; 75 start it again; 76 excluded from its job.";

/// Train transformer language models on one CPU, one GPU or many
#[derive(Debug, Parser)]
#[command(name = "ferrotron", version, after_help = AFTER, arg_required_else_help = true)]
pub struct Cli {
    /// Options that every command takes.
    #[command(flatten)]
    pub global: Global,
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// The heading of options that only some commands use.
const COMPUTE: &str = "Device and rank options (ignored by commands that do not compute)";

/// Options that every command takes.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = COMPUTE)]
pub struct Global {
    /// Write results to standard output as JSON
    #[arg(long, global = true, help_heading = "Options of every command")]
    pub json: bool,
    /// Log level: error, warn, info, debug, trace; also FERROTRON_LOG [default: warn; info in log files]
    #[arg(
        long,
        global = true,
        value_name = "LEVEL",
        value_enum,
        hide_possible_values = true,
        help_heading = "Options of every command"
    )]
    pub log_level: Option<LogLevel>,
    /// Device to compute on: auto (a GPU if there is one), cpu, cuda or cuda:N
    #[arg(long, global = true, value_name = "DEVICE", default_value = "auto")]
    pub device: Device,
    /// Run as an older GPU (sm_80, sm_86, sm_89): its kernels and shared-memory limit; also FERROTRON_AS
    #[arg(long = "as", global = true, value_name = "ARCH", value_parser = ["sm_80", "sm_86", "sm_89"], hide_possible_values = true)]
    pub stand_in: Option<String>,
    /// Check that events order every conflicting memory access of different streams; slower
    #[arg(long, global = true)]
    pub check: bool,
    /// CPU threads, 0 for one per core; the results do not depend on it
    #[arg(long, global = true, value_name = "N", default_value_t = 0, hide_default_value = true, value_parser = threads)]
    pub threads: usize,
    /// Record a trace of kernels and collectives; set by commands with `--trace`.
    #[arg(skip)]
    pub trace: bool,
    /// Seconds a rank waits in a collective before the run fails and names the missing rank
    #[arg(long, global = true, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..))]
    pub timeout: u64,
    /// When the process started.
    #[arg(skip = Instant::now())]
    pub started: Instant,
    /// This process's rank in a job, where a launcher (mpirun, srun, torchrun) started it.
    #[arg(skip)]
    pub launch: Arc<Launch>,
}

/// Most CPU threads: more than any machine has cores.
const MAX_THREADS: usize = 1024;

fn threads(text: &str) -> Result<usize, String> {
    let n: usize = text.parse().map_err(|_| "expected a whole number".to_string())?;
    if n > MAX_THREADS {
        return Err(format!("at most {MAX_THREADS} threads; 0 means one per core"));
    }
    Ok(n)
}

/// The device that `--device` names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// The first GPU if one works, otherwise the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// The CUDA GPU of that ordinal.
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

/// The commands.
#[derive(Debug, Subcommand)]
#[allow(clippy::large_enum_variant)] // the program makes one of them
pub enum Command {
    /// Train a model from a recipe, or resume an interrupted run
    #[command(long_about = train::LONG)]
    Train(train::Args),
    /// Start the processes of a job on this machine, and start those again that die
    #[command(long_about = launch::LONG)]
    Launch(launch::Args),
    /// Train a recipe with injected faults on this machine, and check that the result is the same
    #[command(long_about = drill::LONG)]
    Drill(drill::Args),
    /// Run a step again that a run has rejected and kept
    #[command(long_about = replay::LONG)]
    Replay(replay::Args),
    /// Run a model over token ids and write logits, loss and gradients
    #[command(long_about = forward::LONG)]
    Forward(forward::Args),
    /// Compare one training step under two layouts, precisions or devices, tensor by tensor
    #[command(long_about = parity::LONG)]
    Parity(parity::Args),
    /// Convert a Hugging Face folder to a checkpoint, or back
    #[command(long_about = convert::LONG)]
    Convert(convert::Args),
    /// Evaluate a model: perplexity on text, accuracy on multiple-choice questions
    #[command(long_about = eval::LONG)]
    Eval(eval::Args),
    /// Generate text with a trained model
    #[command(long_about = generate::LONG)]
    Generate(generate::Args),
    /// Talk to a model in the terminal, turn by turn
    #[command(long_about = chat::LONG)]
    Chat(chat::Args),
    /// Prepare training data
    Data(data::Args),
    /// Benchmark training steps, kernels or collectives
    Bench(bench::Args),
    /// Compile every CUDA kernel; needs NVRTC but no GPU
    #[command(long_about = kernels::LONG)]
    Kernels(kernels::Args),
    /// Show the hardware and libraries that were found, and what the missing ones cost
    Doctor(doctor::Args),
    /// Find the fastest layout of a recipe on some GPUs, before anything runs
    #[command(long_about = plan::LONG)]
    Plan(plan::Args),
    /// List runs, compare two of them, export their metrics
    #[command(long_about = runs::LONG)]
    Runs(runs::Args),
    /// Train small named cases and compare them with recorded results
    #[command(long_about = regress::LONG)]
    Regress(regress::Args),
    /// List or print the built-in recipes
    Recipes(recipes::Args),
    /// Show runs live, in the terminal or in a browser
    #[command(long_about = watch::LONG)]
    Watch(watch::Args),
    /// Explain a recipe key
    Explain(explain::Args),
    /// Print a completion script for a shell
    Completions(completions::CompletionsArgs),
    /// Write man pages
    Man(completions::ManArgs),
}
