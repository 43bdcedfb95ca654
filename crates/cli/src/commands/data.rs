//! `data build`: text to token files.

use crate::args::Global;
use crate::progress::JobProgress;
use crate::{format, output};
use anyhow::Result;
use ferrotron_bridge::dataset::{DatasetOptions, Eod, build, pair_paths};
use ferrotron_tensor::format_bytes;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

const LONG: &str = "\
Turn text or JSONL into a .bin/.idx pair that `train` maps into memory.

Each line of a .jsonl file is a document (its --field holds the text); each other file is one document. `train` shuffles
documents and sets whole ones aside for validation, so many small ones are better than one that is everything. The same
input gives the same bytes.";

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
pub fn run(args: Args, global: &Global) -> Result<ExitCode> {
    let Command::Build(args) = args.command;
    let gauge = JobProgress::new(global, "tokenizing");
    let options = DatasetOptions {
        inputs: &args.input,
        prefix: &args.output,
        tokenizer: args.tokenizer.as_deref(),
        field: &args.field,
        eod: match (args.no_eod, args.eod) {
            (true, _) => Eod::None,
            (false, Some(id)) => Eod::Id(id),
            (false, None) => Eod::Derived,
        },
        overwrite: args.overwrite,
    };
    let begin = Instant::now();
    let built = build(&options, &|done, total| gauge.set(done, total))?;
    drop(gauge);
    let (seconds, s) = (begin.elapsed().as_secs_f64(), built.summary);
    if global.json {
        output::print_json(&serde_json::json!({
            "files": pair_paths(&args.output),
            "documents": s.documents,
            "skipped": s.skipped,
            "tokens": s.tokens,
            "bytes": s.bytes,
            "vocab": built.vocab,
            "eod": built.eod,
            "token_type": built.token_type.name(),
            "seconds": seconds,
        }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let [bin, idx] = pair_paths(&args.output);
    let skipped = match s.skipped {
        0 => String::new(),
        n => format!(" ({} empty ones left out)", format::thousands(n)),
    };
    let row = |name: &str, value: String| vec![format!("  {name}"), value];
    let rows = [
        row("documents", format!("{}{skipped}", format::thousands(s.documents))),
        row("tokens", format!("{} as {}", format::thousands(s.tokens), built.token_type.name())),
        row("vocabulary", format::thousands(built.vocab.into())),
        row("end of document", built.eod.map_or("none".into(), |id| id.to_string())),
        row("read", format!("{} in {}", format_bytes(s.bytes as usize), format::seconds(seconds))),
    ];
    output::print(&format!("{} and {}\n{}", bin.display(), idx.display(), output::table(&rows)))?;
    Ok(ExitCode::SUCCESS)
}
