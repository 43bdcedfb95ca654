//! `chat`: a conversation with a model, turn by turn.

use super::generate::{MAX_PROMPT, Writer};
use super::sampling_args::SamplingArgs;
use crate::args::Global;
use crate::layout::Layout;
use crate::output::{self, UsageError};
use crate::ranks;
use anyhow::Result;
use ferrotron_bridge::{ChatTemplate, Message, ModelSource, TextIo};
use ferrotron_core::config::Precision;
use ferrotron_core::model::generate::{Prompt, Sampling, generate};
use ferrotron_engine::Rank;
use serde_json::{Value, json};
use std::io::{BufRead, IsTerminal, Read};
use std::path::PathBuf;
use std::process::ExitCode;

/// Tokens of a conversation where no flag says otherwise.
const CONTEXT: usize = 4096;

/// Text of `--help`.
pub const LONG: &str = "\
Talk to a model in the terminal, turn by turn.

Every line is a message; the answer appears token by token, and the conversation so far goes through the model's chat
template before each. /reset begins anew, /exit or Ctrl-D ends. Lines may also come from a pipe, one turn each.";

const AFTER: &str = "\
Examples:
  ferrotron chat models/Qwen3-0.6B --system \"Answer in one sentence.\"
  ferrotron chat runs/sft --temperature 0
  printf 'Hello\\nAnd in French?\\n' | ferrotron chat models/Qwen3-0.6B";

/// Arguments of `chat`.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub struct Args {
    /// Run folder, checkpoint or Hugging Face folder
    #[arg(value_name = "MODEL")]
    pub model: PathBuf,
    /// System prompt
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Maximum number of tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub tokens: usize,
    /// Tokens that the model sees; older turns are left out [default: the model's maximum, at most 4096]
    #[arg(long, value_name = "N")]
    pub context: Option<usize>,
    /// How tokens are sampled
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Compute precision: f32, bf16 or f16 [default: the model's if bf16, otherwise f32]
    #[arg(long, value_name = "DTYPE")]
    pub dtype: Option<Precision>,
    /// Folder with tokenizer.json, or the file itself [default: the model's own]
    #[arg(long, value_name = "PATH")]
    pub tokenizer: Option<PathBuf>,
    /// Chat template, a Jinja file [default: the model's own]
    #[arg(long, value_name = "FILE")]
    pub chat_template: Option<PathBuf>,
    /// Parallel layout; chat supports tensor parallelism only, such as tp=2
    #[arg(long, value_name = "LAYOUT", default_value = "", hide_default_value = true)]
    pub layout: Layout,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<ExitCode> {
    let sampling = args.sampling.sampling()?;
    let found = ModelSource::open(&args.model)?;
    let text = found.text(args.tokenizer.as_deref())?;
    let Some(template) = text.template(args.chat_template.as_deref())? else {
        return Err(UsageError::new(format!(
            "{} has no chat template; give one with --chat-template FILE, or continue text with `ferrotron generate`",
            args.model.display()
        ))
        .into());
    };
    let longest = found.model().max_positions;
    let context = args.context.unwrap_or(CONTEXT.min(longest));
    if context < 2 || context > longest || args.tokens == 0 {
        let what = format!(
            "--context must be between 2 and the model's {longest} positions, and --tokens at least 1"
        );
        return Err(UsageError::new(what).into());
    }
    let dtype = found.compute_dtype(args.dtype.map(Precision::dtype))?;
    let layout = args.layout.grid();
    if layout.world()? != layout.tp || layout.vp != 1 {
        return Err(UsageError::new("chat supports tensor parallelism only; use --layout tp=N").into());
    }
    let one = |rank: Rank| -> Result<Vec<Value>> {
        // Rank 0 talks; the others compute along.
        let first = rank.world.rank() == 0;
        let mut conversation =
            first.then(|| Conversation::new(&args, &text, &template, context, global.json));
        let model = found.load(rank, dtype, context)?;
        if let Some(c) = &conversation {
            c.welcome();
        }
        for turn in 0u64.. {
            let next = conversation.as_mut().map_or(Ok(None), Conversation::next_prompt);
            let asked = next.as_ref().map_or(&[][..], |ids| ids.as_deref().unwrap_or_default());
            let mine: Vec<u8> = asked.iter().flat_map(|id| id.to_le_bytes()).collect();
            let all = model.rank.world.all().all_gather_bytes(&mine, "the next turn")?;
            // The error of rank 0 ends the others, too.
            next?;
            let ids: Vec<i32> = all.first().map_or(Vec::new(), |bytes| {
                bytes.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b)).collect()
            });
            if ids.is_empty() {
                break;
            }
            let mut writer = Writer::new(&text, first && !global.json);
            let sampling = Sampling { seed: sampling.seed.wrapping_add(turn), ..sampling };
            let max_new = args.tokens.min(context - ids.len().min(context));
            let prompt = Prompt { tokens: &ids, max_new, stop: &text.stop };
            let mut on_token = |id| writer.push(id);
            let new = generate(&model.decoder, &model.pass(), prompt, sampling, &mut on_token)?;
            let answer = writer.finish()?;
            if let Some(c) = &mut conversation {
                c.answered(answer, ids.len(), new.len());
            }
        }
        Ok(conversation.map_or(Vec::new(), |c| c.turns))
    };
    let all = ranks::run(global, &layout, sampling.seed, |rank| one(rank).map_err(ranks::to_core_error))?;
    if global.json && global.launch.leads() {
        let turns = all.into_iter().next().unwrap_or_default();
        output::print_json(&json!({ "model": found.folder(), "dtype": dtype.name(), "turns": turns }))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The conversation so far.
struct Conversation<'a> {
    text: &'a TextIo,
    template: &'a ChatTemplate,
    /// The system prompt, if there is one, then turns.
    messages: Vec<Message>,
    /// How many of them stay with `/reset`: the system prompt.
    fixed: usize,
    context: usize,
    answer_tokens: usize,
    terminal: bool,
    /// What was said and answered, for `--json`.
    turns: Vec<Value>,
}

fn message(role: &str, content: String) -> Message {
    Message { role: role.into(), content }
}

impl<'a> Conversation<'a> {
    fn new(args: &Args, text: &'a TextIo, template: &'a ChatTemplate, context: usize, json: bool) -> Self {
        let messages: Vec<Message> = args.system.iter().map(|s| message("system", s.clone())).collect();
        Conversation {
            text,
            template,
            fixed: messages.len(),
            messages,
            context,
            answer_tokens: args.tokens,
            terminal: !json && std::io::stdin().is_terminal() && std::io::stdout().is_terminal(),
            turns: Vec::new(),
        }
    }

    fn welcome(&self) {
        if self.terminal {
            output::note("/reset begins anew, /exit or Ctrl-D ends");
        }
    }

    /// Reads a message and returns the ids of the conversation up to its answer; `None` at the end.
    fn next_prompt(&mut self) -> Result<Option<Vec<i32>>> {
        loop {
            if self.terminal {
                output::print("> ")?;
            }
            let Some(line) = read_line()? else {
                if self.terminal {
                    output::print("\n")?;
                }
                return Ok(None);
            };
            match line.trim() {
                "" => continue,
                "/exit" => return Ok(None),
                "/reset" => {
                    self.messages.truncate(self.fixed);
                    continue;
                }
                said => self.messages.push(message("user", said.into())),
            }
            if let Some(ids) = self.prompt_that_fits()? {
                return Ok(Some(ids));
            }
        }
    }

    /// The ids of the conversation, without its oldest turns where they and an answer do not fit in the context. A
    /// message that does not fit alone is taken back.
    fn prompt_that_fits(&mut self) -> Result<Option<Vec<i32>>> {
        let mut left_out = 0;
        loop {
            let ids = self.text.answer_prompt(self.template, &self.messages)?;
            let alone = self.messages.len() <= self.fixed + 1;
            if ids.len() + self.answer_tokens <= self.context || (alone && ids.len() < self.context) {
                if left_out > 0 {
                    let all = self.context;
                    output::note(format_args!(
                        "[the oldest {left_out} messages do not fit in --context {all} and are left out]"
                    ));
                }
                return Ok(Some(ids));
            }
            if alone {
                self.messages.truncate(self.fixed);
                output::note(format_args!(
                    "[the message makes a prompt of {} tokens, which do not fit in --context {}; it is left out]",
                    ids.len(),
                    self.context
                ));
                return Ok(None);
            }
            // A question and its answer.
            let end = (self.fixed + 2).min(self.messages.len() - 1);
            left_out += self.messages.drain(self.fixed..end).count();
        }
    }

    fn answered(&mut self, answer: String, prompt_tokens: usize, tokens: usize) {
        let said = self.messages.last().map_or(String::new(), |m| m.content.clone());
        self.turns.push(json!({
            "user": said, "assistant": answer, "prompt_tokens": prompt_tokens, "tokens": tokens,
        }));
        self.messages.push(message("assistant", answer));
    }
}

/// The next line of standard input; `None` at its end.
fn read_line() -> Result<Option<String>> {
    let mut line = Vec::new();
    let read = std::io::stdin().lock().take(MAX_PROMPT + 1).read_until(b'\n', &mut line);
    let read = read.map_err(|e| UsageError::new(format!("cannot read standard input: {e}")))?;
    if read as u64 > MAX_PROMPT {
        return Err(UsageError::new(format!("a message is longer than {MAX_PROMPT} bytes")).into());
    }
    if read == 0 {
        return Ok(None);
    }
    let line = String::from_utf8(line).map_err(|_| UsageError::new("a message is not UTF-8"))?;
    Ok(Some(line))
}
