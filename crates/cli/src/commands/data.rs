//! `data build`: tokenize text into an indexed dataset.

use crate::args::Global;
use crate::progress::JobProgress;
use crate::{format, output};
use anyhow::Result;
use ferrotron_bridge::dataset::{DatasetOptions, Eod, build, pair_paths};
use ferrotron_core::config::DataFormat;
use ferrotron_tensor::format_bytes;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

const LONG: &str = "\
Tokenize text or JSONL files into a .bin/.idx pair (the format of Megatron's IndexedDataset) that `train` reads.
PREFIX.dataset.json beside it names the tokenizer, which `train` compares with its own. `train --data FILE` does the same by
itself, into a cache.

Inputs are files, folders (every .jsonl, .ndjson, .txt and .text in them) and globs, also compressed (.gz, .zst). Each line of a
.jsonl file is one document, whose text is in the field --field; every other file is one document (.json, .csv and .tsv only with
--format text). Lines with \"messages\",
\"conversations\" (ShareGPT) or \"prompt\" and \"completion\" are conversations: the tokenizer's chat template renders them, and
only the assistant's turns have a loss. `train`
shuffles documents and holds some of them out for validation, so use many documents rather than one large one. The same input
gives the same bytes.";

const AFTER: &str = "\
Examples:
  ferrotron data build corpus.jsonl --output corpus/mine --tokenizer models/Qwen3-0.6B
  ferrotron data build 'chats/*.jsonl.gz' --output chats --tokenizer models/Qwen3-0.6B
  ferrotron data build book.txt --output book              byte-level tokens, for a model with a vocabulary of 256
  ferrotron train my.toml --data corpus/mine";

/// Arguments of `data`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The subcommand.
    #[command(subcommand)]
    pub command: Command,
}

/// Subcommands of `data`.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Tokenize text or JSONL files into a .bin/.idx pair
    #[command(long_about = LONG)]
    Build(Build),
}

/// Arguments of `data build`.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub struct Build {
    /// Text or .jsonl files, folders or globs to tokenize
    #[arg(required = true, value_name = "FILE")]
    pub input: Vec<PathBuf>,
    /// Output prefix: writes PREFIX.bin, PREFIX.idx and PREFIX.dataset.json
    #[arg(long, value_name = "PREFIX")]
    pub output: PathBuf,
    /// Folder with tokenizer.json, or the file itself [default: byte-level, one token per byte]
    #[arg(long, value_name = "PATH")]
    pub tokenizer: Option<PathBuf>,
    /// JSONL field that holds the text
    #[arg(long, value_name = "NAME", default_value = "text")]
    pub field: String,
    /// What lines of a .jsonl are: auto, text or chat (data.format)
    #[arg(long, value_name = "FORMAT", default_value = "auto")]
    pub format: DataFormat,
    /// Chat template: a Jinja file, or "none" [default: that of the tokenizer's folder]
    #[arg(long, value_name = "FILE")]
    pub chat_template: Option<String>,
    /// Id of the end-of-document token [default: the tokenizer's; 0 for byte-level]
    #[arg(long, value_name = "ID")]
    pub eod: Option<u32>,
    /// Do not append an end-of-document token
    #[arg(long, conflicts_with = "eod")]
    pub no_eod: bool,
    /// Replace existing output files
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
        format: args.format,
        chat_template: args.chat_template.as_deref(),
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
            "chat": built.chat,
            "without_loss": s.without_loss,
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
    let mut skipped = match s.skipped {
        0 => String::new(),
        n => format!(" ({} empty documents skipped)", format::thousands(n)),
    };
    if s.without_loss > 0 {
        skipped += &format!(" ({} without an assistant's turn skipped)", format::thousands(s.without_loss));
    }
    let documents = if built.chat { "conversations" } else { "documents" };
    let row = |name: &str, value: String| vec![format!("  {name}"), value];
    let rows = [
        row(documents, format!("{}{skipped}", format::thousands(s.documents))),
        row("tokens", format!("{} as {}", format::thousands(s.tokens), built.token_type.name())),
        row("vocabulary", format::thousands(built.vocab.into())),
        row(
            "end of document",
            match built.chat {
                true => "as the chat template has it".into(),
                false => built.eod.map_or("none".into(), |id| id.to_string()),
            },
        ),
        row("read", format!("{} in {}", format_bytes(s.bytes as usize), format::seconds(seconds))),
    ];
    output::print(&format!("{} and {}\n{}", bin.display(), idx.display(), output::table(&rows)))?;
    Ok(ExitCode::SUCCESS)
}
