//! `eval`: perplexity on text and accuracy on multiple-choice questions.

use crate::args::Global;
use crate::layout::Layout;
use crate::output::{self, UsageError};
use crate::progress::JobProgress;
use crate::{format, ranks};
use anyhow::{Context, Result};
use ferrotron_bridge::evaluate::{
    Accuracy, Document, PROMPT, Perplexity, Question, QuestionScores, accuracy, documents, questions,
    requests, rolling, score,
};
use ferrotron_bridge::forward::check_layout;
use ferrotron_bridge::{ModelSource, TextIo};
use ferrotron_core::config::Precision;
use ferrotron_core::model::Sequence;
use ferrotron_engine::Rank;
use serde_json::{Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

/// Longest window where neither a flag nor the run says otherwise.
const LONGEST_WINDOW: usize = 4096;

/// Text of `--help`.
pub const LONG: &str = "\
Evaluate a model on text and on multiple-choice questions.

For every --data it prints the number of tokens, their mean loss, the perplexity and the bits per byte. Every document is
scored apart, from the model's beginning-of-text token, in windows of --seq-len tokens; of conversations the
assistant's turns are scored, in the model's chat template.

For every --tasks it prints the share of questions whose likeliest choice is the right one: by log-probability (acc), by
log-probability per character (acc_norm) and per byte (acc_bytes), with standard errors. A line of the file is
  {\"question\": \"...\", \"choices\": [\"...\", ...], \"answer\": 0}
or a record of ARC (choices with labels, answerKey) or HellaSwag (ctx, endings, label). Prompts and tokens are those of
lm-evaluation-harness without examples.";

const AFTER: &str = "\
Examples:
  ferrotron eval runs/tiny --data valid.jsonl --data book.txt
  ferrotron eval models/Qwen3-0.6B --tasks arc_easy.jsonl --limit 200 --json
  ferrotron eval runs/tiny --data valid.jsonl --layout dp=4";

/// Arguments of `eval`.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub struct Args {
    /// Run folder, checkpoint or Hugging Face folder
    #[arg(value_name = "MODEL")]
    pub model: PathBuf,
    /// Text or conversations to score: a file, folder or glob; repeat it for more datasets
    #[arg(long, value_name = "PATH")]
    pub data: Vec<PathBuf>,
    /// Multiple-choice questions, one JSON object per line; repeat it for more tasks
    #[arg(long, value_name = "FILE")]
    pub tasks: Vec<PathBuf>,
    /// Score only the first N documents or questions of each
    #[arg(long, value_name = "N")]
    pub limit: Option<usize>,
    /// Longest sequence [default: that of the run, otherwise the model's, at most 4096]
    #[arg(long, value_name = "N")]
    pub seq_len: Option<usize>,
    /// Tokens of a forward pass
    #[arg(long, value_name = "N", default_value_t = 16_384)]
    pub batch_tokens: usize,
    /// Field of JSON lines that holds the text
    #[arg(long, value_name = "NAME", default_value = "text")]
    pub field: String,
    /// Prompt of a record with a question; {question} stands for it [default: "Question: {question}\nAnswer:"]
    #[arg(long, value_name = "TEXT", requires = "tasks")]
    pub prompt: Option<String>,
    /// Write the score of every choice of every question to this file, as JSON lines
    #[arg(long, value_name = "FILE", requires = "tasks")]
    pub log_samples: Option<PathBuf>,
    /// Compute precision: f32, bf16 or f16 [default: the model's if bf16, otherwise f32]
    #[arg(long, value_name = "DTYPE")]
    pub dtype: Option<Precision>,
    /// Folder with tokenizer.json, or the file itself [default: the model's own]
    #[arg(long, value_name = "PATH")]
    pub tokenizer: Option<PathBuf>,
    /// Chat template, a Jinja file [default: that of the model's run, otherwise of its folder]
    #[arg(long, value_name = "FILE")]
    pub chat_template: Option<String>,
    /// Parallel layout: tp splits the model, dp shares the work, ep spreads experts; such as tp=2,dp=4
    #[arg(long, value_name = "LAYOUT", default_value = "", hide_default_value = true)]
    pub layout: Layout,
}

/// What is to be scored, in order: datasets, then tasks.
struct Work {
    name: String,
    items: EvalItems,
    sequences: Vec<Sequence>,
}

enum EvalItems {
    Data(Vec<Document>),
    Task(Vec<Question>),
}

/// What a dataset or task came to.
enum Outcome {
    Data(Perplexity),
    Task(Accuracy, Vec<QuestionScores>),
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<ExitCode> {
    if args.data.is_empty() && args.tasks.is_empty() {
        return Err(UsageError::new("nothing to evaluate on; give --data PATH or --tasks FILE").into());
    }
    if args.seq_len == Some(0) || args.batch_tokens == 0 || args.limit == Some(0) {
        return Err(UsageError::new("--seq-len, --batch-tokens and --limit must be at least 1").into());
    }
    if args.prompt.as_ref().is_some_and(|p| !p.contains("{question}")) {
        return Err(UsageError::new("--prompt has no {question} for the question to go to").into());
    }
    let found = ModelSource::open(&args.model)?;
    let text = found.text(args.tokenizer.as_deref())?;
    let dtype = found.compute_dtype(args.dtype.map(Precision::dtype))?;
    let layout = args.layout.grid();
    if layout.cp != 1 || layout.pp != 1 || layout.vp != 1 {
        let what = "evaluation needs whole sequences and a whole model: cp=1, pp=1 and vp=1";
        return Err(UsageError::new(what)
            .hint("use --layout tp=N to split the model, dp=N to share the work")
            .into());
    }
    check_layout(found.model(), &layout)?;
    let longest = found.model().max_positions;
    let trained = found.config.as_ref().and_then(|c| c.data.seq_len);
    let length = args.seq_len.or(trained).unwrap_or(LONGEST_WINDOW.min(longest));
    if length > longest {
        return Err(UsageError::new(format!(
            "--seq-len {length} is longer than the {longest} positions of the model"
        ))
        .into());
    }
    let work = all_work(&args, &text, length)?;
    let total: usize = work.iter().map(|w| w.sequences.len()).sum();
    let begin = Instant::now();
    let one = |rank: Rank| -> Result<Vec<Outcome>> {
        let gauge = (rank.world.rank() == 0).then(|| JobProgress::new(global, "scoring"));
        let model = found.load(rank, dtype, length)?;
        let (mut out, mut before) = (Vec::new(), 0);
        for w in &work {
            let progress = |done: usize| {
                if let Some(gauge) = &gauge {
                    gauge.set((before + done) as u64, total as u64);
                }
            };
            let losses = score(&model, &w.sequences, args.batch_tokens, &progress)?;
            before += w.sequences.len();
            out.push(match &w.items {
                EvalItems::Data(documents) => Outcome::Data(Perplexity::of(documents, &losses)),
                EvalItems::Task(questions) => {
                    let mut rest = &losses[..];
                    let mut scores = Vec::with_capacity(questions.len());
                    for q in questions {
                        let (own, others) = rest.split_at(q.choices.len().min(rest.len()));
                        scores.push(QuestionScores::new(q, own));
                        rest = others;
                    }
                    Outcome::Task(accuracy(&scores), scores)
                }
            });
        }
        Ok(out)
    };
    let all = ranks::run(global, &layout, 0, |rank| one(rank).map_err(ranks::to_core_error))?;
    if !global.launch.leads() {
        return Ok(ExitCode::SUCCESS);
    }
    let outcomes = all.into_iter().next().unwrap_or_default();
    if let Some(path) = &args.log_samples {
        write_samples(path, &work, &outcomes).with_context(|| format!("cannot write {}", path.display()))?;
    }
    let named: Vec<(&str, &Outcome)> = work.iter().map(|w| w.name.as_str()).zip(&outcomes).collect();
    if global.json {
        output::print_json(&json!({
            "model": found.folder(),
            "dtype": dtype.name(),
            "seq_len": length,
            "seconds": begin.elapsed().as_secs_f64(),
            "data": named.iter().filter_map(|(name, o)| o.dataset(name)).collect::<Vec<_>>(),
            "tasks": named.iter().filter_map(|(name, o)| o.task(name)).collect::<Vec<_>>(),
        }))?;
    } else {
        output::print(&tables(&named))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Reads and tokenizes everything before the model is loaded.
fn all_work(args: &Args, text: &TextIo, length: usize) -> Result<Vec<Work>> {
    let mut out = Vec::new();
    let name = |path: &Path| path.display().to_string();
    for path in &args.data {
        let documents = documents(path, text, &args.field, args.chat_template.as_deref(), args.limit)?;
        let start = text.start.ok_or_else(|| {
            UsageError::new(
                "the tokenizer has neither a beginning nor an end of text, which documents start from",
            )
        })?;
        let sequences = documents.iter().flat_map(|d| rolling(d, start, length)).collect();
        out.push(Work { name: name(path), items: EvalItems::Data(documents), sequences });
    }
    for path in &args.tasks {
        let questions = questions(path, args.prompt.as_deref().unwrap_or(PROMPT), args.limit)?;
        let mut sequences = Vec::new();
        for q in &questions {
            sequences.extend(requests(q, text, length)?);
        }
        out.push(Work { name: name(path), items: EvalItems::Task(questions), sequences });
    }
    Ok(out)
}

impl Outcome {
    fn dataset(&self, name: &str) -> Option<Value> {
        let Outcome::Data(p) = self else { return None };
        Some(json!({
            "name": name, "documents": p.documents, "tokens": p.tokens, "loss": p.loss,
            "perplexity": p.perplexity, "bits_per_byte": p.bits_per_byte,
        }))
    }

    fn task(&self, name: &str) -> Option<Value> {
        let Outcome::Task(a, _) = self else { return None };
        Some(json!({
            "name": name, "questions": a.questions, "acc": a.acc, "acc_stderr": a.acc_stderr,
            "acc_norm": a.acc_norm, "acc_norm_stderr": a.acc_norm_stderr,
            "acc_bytes": a.acc_bytes, "acc_bytes_stderr": a.acc_bytes_stderr,
        }))
    }
}

fn tables(outcomes: &[(&str, &Outcome)]) -> String {
    let row = |cells: &[&str]| cells.iter().map(|s| s.to_string()).collect::<Vec<_>>();
    let mut data = vec![row(&["data", "documents", "tokens", "loss", "perplexity", "bits per byte"])];
    let mut tasks = vec![row(&["task", "questions", "acc", "acc_norm", "acc_bytes"])];
    for (name, outcome) in outcomes {
        match outcome {
            Outcome::Data(p) => data.push(vec![
                name.to_string(),
                format::thousands(p.documents),
                format::thousands(p.tokens),
                format::loss(p.loss),
                format!("{:.3}", p.perplexity),
                p.bits_per_byte.map_or("-".into(), |b| format!("{b:.4}")),
            ]),
            Outcome::Task(a, _) => {
                let share = |x: f64, error: Option<f64>| match error {
                    Some(e) => format!("{x:.4} ± {e:.4}"),
                    None => format!("{x:.4}"),
                };
                tasks.push(vec![
                    name.to_string(),
                    format::thousands(a.questions),
                    share(a.acc, a.acc_stderr),
                    share(a.acc_norm, a.acc_norm_stderr),
                    share(a.acc_bytes, a.acc_bytes_stderr),
                ]);
            }
        }
    }
    let shown = [data, tasks].into_iter().filter(|t| t.len() > 1);
    shown.map(|t| output::table(&t)).collect::<Vec<_>>().join("\n")
}

/// A line for every question: its task, number, context, choices and their scores.
fn write_samples(path: &Path, work: &[Work], outcomes: &[Outcome]) -> Result<()> {
    let mut out = std::io::BufWriter::new(std::fs::File::create(path)?);
    for (w, outcome) in work.iter().zip(outcomes) {
        let (EvalItems::Task(questions), Outcome::Task(_, scores)) = (&w.items, outcome) else { continue };
        for (i, (q, s)) in questions.iter().zip(scores).enumerate() {
            let line = json!({
                "task": w.name, "question": i, "context": q.context, "choices": q.choices, "answer": q.answer,
                "scores": s.scores, "predicted": s.predicted, "predicted_norm": s.predicted_norm,
                "predicted_bytes": s.predicted_bytes,
            });
            writeln!(out, "{line}")?;
        }
    }
    Ok(out.flush()?)
}
