//! `generate`: sample text from a model.

use super::sampling_args::SamplingArgs;
use crate::args::Global;
use crate::layout::Layout;
use crate::output::{self, UsageError};
use crate::{format, ranks};
use anyhow::Result;
use ferrotron_bridge::{ModelSource, TextIo, TextStream};
use ferrotron_core::config::Precision;
use ferrotron_core::model::generate::{Prompt, generate};
use ferrotron_engine::Rank;
use std::io::{ErrorKind, IsTerminal, Read, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

/// Longest prompt that is read from standard input: an endless one must not fill the memory.
pub(super) const MAX_PROMPT: u64 = 16 << 20;

/// Text of `--help`.
pub const LONG: &str = "\
Generate text with a model.

The generated text goes to standard output token by token, without the prompt. Generation stops at an end-of-text token,
after --tokens tokens, or at the model's maximum sequence length. Without a prompt the model starts from its
beginning-of-text token.";

const AFTER: &str = "\
Examples:
  ferrotron generate --model runs/tiny --prompt \"Once upon a time\"
  ferrotron generate --model models/Qwen3-0.6B --prompt \"Why is the sky blue?\" --chat --tokens 200
  ferrotron generate --model runs/tiny --temperature 0        greedy decoding";

/// Arguments of `generate`.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub struct Args {
    /// Run folder, checkpoint or Hugging Face folder
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// Text to continue; - reads it from standard input
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub prompt: String,
    /// Wrap the prompt as a user message in the model's chat template
    #[arg(long)]
    pub chat: bool,
    /// Maximum number of tokens to generate
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub tokens: usize,
    /// How tokens are sampled
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Compute precision: f32, bf16 or f16 [default: the model's if bf16, otherwise f32]
    #[arg(long, value_name = "DTYPE")]
    pub dtype: Option<Precision>,
    /// Folder with tokenizer.json, or the file itself [default: the model's own]
    #[arg(long, value_name = "PATH")]
    pub tokenizer: Option<PathBuf>,
    /// Parallel layout; generation supports tensor parallelism only, such as tp=2
    #[arg(long, value_name = "LAYOUT", default_value = "", hide_default_value = true)]
    pub layout: Layout,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<ExitCode> {
    if args.tokens == 0 {
        return Err(UsageError::new("--tokens must be at least 1").into());
    }
    let sampling = args.sampling.sampling()?;
    let prompt = read_prompt(&args.prompt)?;
    let found = ModelSource::open(&args.model)?;
    let text = found.text(args.tokenizer.as_deref())?;
    let ids = text.prompt(&prompt, args.chat)?;
    let dtype = found.compute_dtype(args.dtype.map(Precision::dtype))?;
    let layout = args.layout.grid();
    if layout.world()? != layout.tp || layout.vp != 1 {
        return Err(UsageError::new("generation supports tensor parallelism only; use --layout tp=N").into());
    }
    let one = |rank: Rank| -> Result<(Vec<i32>, String, f64)> {
        let first = rank.world.rank() == 0;
        let model = found.load(rank, dtype, ids.len().saturating_add(args.tokens))?;
        // All ranks sample the same tokens; rank 0 writes them.
        let mut writer = Writer::new(&text, first && !global.json);
        let begin = Instant::now();
        let pass = model.pass();
        let mut on_token = |id| writer.push(id);
        let new = generate(
            &model.decoder,
            &pass,
            Prompt { tokens: &ids, max_new: args.tokens, stop: &text.stop },
            sampling,
            &mut on_token,
        )?;
        let seconds = begin.elapsed().as_secs_f64();
        Ok((new, writer.finish()?, seconds))
    };
    let all = ranks::run(global, &layout, sampling.seed, |rank| one(rank).map_err(ranks::to_core_error))?;
    if !global.launch.leads() {
        return Ok(ExitCode::SUCCESS);
    }
    let (new, written, seconds) = all.into_iter().next().unwrap_or_default();
    let stopped = match new.last() {
        Some(last) if text.stop.contains(last) => "end",
        _ if new.len() < args.tokens => "positions",
        _ => "tokens",
    };
    let rate = new.len() as f64 / seconds.max(1e-9);
    if global.json {
        output::print_json(&serde_json::json!({
            "model": found.folder(),
            "dtype": dtype.name(),
            "prompt": prompt,
            "prompt_tokens": ids.len(),
            "text": written,
            "tokens": new,
            "stopped": stopped,
            "seconds": seconds,
            "tokens_per_s": rate,
        }))?;
    } else if std::io::stderr().is_terminal() {
        let ended = match stopped {
            "end" => "end-of-text token",
            "positions" => "maximum sequence length",
            _ => "--tokens reached",
        };
        output::note(format_args!("[{} tokens, {rate:.0} tokens/s; {ended}]", new.len()));
    }
    Ok(ExitCode::SUCCESS)
}

/// The prompt itself, or standard input for `-`.
fn read_prompt(prompt: &str) -> Result<String> {
    if prompt != "-" {
        return Ok(prompt.into());
    }
    let mut text = String::new();
    let read = std::io::stdin().take(MAX_PROMPT + 1).read_to_string(&mut text);
    read.map_err(|e| UsageError::new(format!("cannot read the prompt from standard input: {e}")))?;
    if text.len() as u64 > MAX_PROMPT {
        return Err(UsageError::new(format!(
            "the prompt on standard input is longer than {MAX_PROMPT} bytes"
        ))
        .into());
    }
    Ok(text)
}

/// Writes text token by token.
pub(super) struct Writer<'a> {
    stream: TextStream<'a>,
    /// The text so far.
    text: String,
    show: bool,
    /// A terminal must not get control characters; a file gets what the model wrote.
    terminal: bool,
    error: Option<anyhow::Error>,
}

impl<'a> Writer<'a> {
    pub(super) fn new(text: &'a TextIo, show: bool) -> Writer<'a> {
        let terminal = std::io::stdout().is_terminal();
        Writer { stream: text.tokenizer.stream(), text: String::new(), show, terminal, error: None }
    }

    /// Adds a token and writes the text it completes. False: stop generating, because nobody reads the output.
    pub(super) fn push(&mut self, id: i32) -> bool {
        let new = self.stream.push(id as u32).map_err(anyhow::Error::from);
        match new.and_then(|new| show(&new, self.show, self.terminal, &mut self.text)) {
            Ok(read) => read,
            Err(e) => {
                self.error = Some(e);
                false
            }
        }
    }

    /// Writes the rest and a final newline, and returns the whole text.
    pub(super) fn finish(mut self) -> Result<String> {
        if let Some(e) = self.error {
            return Err(e);
        }
        let rest = self.stream.finish()?;
        show(&rest, self.show, self.terminal, &mut self.text)?;
        if self.show {
            output::print("\n")?;
        }
        Ok(self.text)
    }
}

/// Appends `new` to `text` and writes it to standard output if `write` is set. False: the reader has gone away.
fn show(new: &str, write: bool, terminal: bool, text: &mut String) -> Result<bool> {
    text.push_str(new);
    if !write || new.is_empty() {
        return Ok(true);
    }
    let shown = if terminal { format::printable(new) } else { new.into() };
    let mut out = std::io::stdout().lock();
    match out.write_all(shown.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(false),
        other => Ok(other.map(|()| true)?),
    }
}
