//! `data build`: text to token files.

use crate::args::Global;
use anyhow::Result;
use std::path::PathBuf;
use std::process::ExitCode;

const LONG: &str = "\
Turn text or JSONL into a .bin/.idx pair that `train` maps into memory.

Each line of a .jsonl file is a document (its --field holds the text); each other file is one document. The same input
gives the same bytes, whatever the number of threads.";

const AFTER: &str = "\
Examples:
  ferrotron data build corpus.jsonl --output corpus/mine --tokenizer models/Qwen3-0.6B
  ferrotron data build book.txt --output book              bytes as tokens, for a model with a vocabulary of 256
  ferrotron train my.toml --data corpus/mine";

/// What to do with data.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do with data.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Turn text or JSONL into a .bin/.idx pair
    #[command(long_about = LONG)]
    Build(Build),
}

/// What to build from what.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub struct Build {
    /// Text or .jsonl files
    #[arg(required = true, value_name = "FILE")]
    pub input: Vec<PathBuf>,
    /// Prefix of the pair: PREFIX.bin and PREFIX.idx
    #[arg(long, value_name = "PREFIX")]
    pub output: PathBuf,
    /// A folder with tokenizer.json, or the file itself [default: a byte is a token]
    #[arg(long, value_name = "PATH")]
    pub tokenizer: Option<PathBuf>,
    /// The field of a JSONL line that holds the text
    #[arg(long, value_name = "NAME", default_value = "text")]
    pub field: String,
    /// Id of the end-of-document token [default: the tokenizer's; 0 for bytes]
    #[arg(long, value_name = "ID")]
    pub eod: Option<u32>,
    /// Put no end-of-document token after documents
    #[arg(long, conflicts_with = "eod")]
    pub no_eod: bool,
    /// Replace the pair if it exists
    #[arg(long)]
    pub overwrite: bool,
}

/// Runs the command.
pub fn run(args: Args, _global: &Global) -> Result<ExitCode> {
    let Command::Build(_args) = args.command;
    anyhow::bail!("this build cannot prepare data yet")
}
