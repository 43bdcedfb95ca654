//! `convert`: a Hugging Face folder to a checkpoint, or back.

use crate::args::Global;
use crate::progress::JobProgress;
use crate::{format, output};
use anyhow::Result;
use ferrotron_bridge::conversion::{ConvertOptions, ConvertedKind, convert};
use ferrotron_core::config::Precision;
use ferrotron_core::model::upcycle::UpcycleConfig;
use ferrotron_tensor::format_bytes;
use std::path::PathBuf;
use std::process::ExitCode;

/// Text of `--help`.
pub const LONG: &str = "\
Convert a Hugging Face folder to a native checkpoint, or a native checkpoint to a Hugging Face or PEFT folder.

The direction follows from FROM. A folder with config.json and .safetensors files becomes a checkpoint. A checkpoint, or the
newest checkpoint of a run folder, becomes a Hugging Face folder, with the tensor names and tokenizer of the folder that it was
trained or converted from, where that is known. A run of adapters (lora.rank) becomes a PEFT folder; with --merge, adapters and
their base model become a Hugging Face folder, and FROM may be a PEFT folder, too. TO must not exist or be empty, and appears
only once it is complete.

With --overwrite TO is replaced if it is what an earlier conversion of the same direction wrote: a checkpoint of weights, or a
folder of config.json, weights and tokenizer files. If anything else is in it, or it is a checkpoint of a run, it is refused.
The old folder is complete until the new one takes its place in one step. One conversion at a time writes TO.

Weights that are NaN or infinite are refused, with the first such tensor; --allow-nonfinite converts them and lists all.

A converted checkpoint holds weights but no optimizer state: `train --set model.hf=CHECKPOINT` starts a run from it,
and `generate` samples from it.

--upcycle turns a dense model into an MoE model: every MLP is split into `granularity` parts, which are replicated to
`experts` experts, of which the router selects `topk` per token (2 x granularity unless given). With granularity=1 the MoE
model computes exactly what the dense model did, until training makes the replicas differ; with more, approximately.";

const AFTER: &str = "\
Examples:
  ferrotron convert models/Qwen3-0.6B qwen3.ckpt
  ferrotron convert runs/tiny exported
  ferrotron convert runs/tuned exported --like models/Llama-3.2-1B    use the tensor names and tokenizer of that folder
  ferrotron convert runs/lora adapter                                 adapters as a PEFT folder
  ferrotron convert runs/lora merged --merge                          adapters merged into their base model
  ferrotron convert models/Qwen3-0.6B qwen3x8.ckpt --upcycle experts=8";

/// Arguments of `convert`.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub struct Args {
    /// Hugging Face folder, checkpoint, run folder, or PEFT folder with --merge
    pub from: PathBuf,
    /// Folder to write
    pub to: PathBuf,
    /// Dtype to store weights in: f32, bf16 or f16 [default: unchanged]
    #[arg(long, value_name = "DTYPE")]
    pub dtype: Option<Precision>,
    /// Hugging Face folder whose tensor names, config.json and tokenizer the output follows
    #[arg(long, value_name = "DIR")]
    pub like: Option<PathBuf>,
    /// Merge adapters into their base model
    #[arg(long)]
    pub merge: bool,
    /// Turn a dense Hugging Face model into an MoE model, for example experts=8,topk=2,granularity=1
    #[arg(long, value_name = "KEY=N,...")]
    pub upcycle: Option<UpcycleConfig>,
    /// Replace TO if an earlier conversion wrote it
    #[arg(long)]
    pub overwrite: bool,
    /// Convert weights that are NaN or infinite, too
    #[arg(long)]
    pub allow_nonfinite: bool,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<ExitCode> {
    let gauge = JobProgress::new(global, "converting");
    let options = ConvertOptions {
        dtype: args.dtype.map(Precision::dtype),
        like: args.like.as_deref(),
        merge: args.merge,
        upcycle: args.upcycle,
        overwrite: args.overwrite,
        allow_non_finite: args.allow_nonfinite,
        progress: &|done, total| gauge.set(done, total),
    };
    let done = convert(&args.from, &args.to, &options)?;
    drop(gauge);
    if !done.non_finite.is_empty() {
        let shown: Vec<String> =
            done.non_finite.iter().take(8).map(|(name, n)| format!("{name} ({n})")).collect();
        let more = done.non_finite.len() - shown.len();
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        eprintln!("warning: tensors with NaN or infinite values: {}{more}", shown.join(", "));
    }
    if global.json {
        output::print_json(&serde_json::json!({
            "from": done.from,
            "to": args.to,
            "kind": match done.kind {
                ConvertedKind::Checkpoint => "checkpoint",
                ConvertedKind::HuggingFace => "huggingface",
                ConvertedKind::Peft => "peft",
            },
            "family": done.family,
            "parameters": done.parameters,
            "bytes": done.bytes,
            "like": done.like,
            "tokenizer": done.tokenizer,
            "non_finite": done.non_finite.iter().cloned().collect::<std::collections::BTreeMap<_, _>>(),
        }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let kind = match done.kind {
        ConvertedKind::Checkpoint => "checkpoint",
        ConvertedKind::HuggingFace => "Hugging Face folder",
        ConvertedKind::Peft => "PEFT folder",
    };
    let like = done.like.map(|l| format!(", with the files of {}", l.display())).unwrap_or_default();
    let tokenizer = if done.tokenizer { "" } else { "; FROM has no tokenizer" };
    output::print(&format!(
        "{} -> {}: {kind} of the family {}, {} parameters, {}{like}{tokenizer}\n",
        done.from.display(),
        args.to.display(),
        done.family,
        format::count(done.parameters),
        format_bytes(done.bytes as usize),
    ))?;
    Ok(ExitCode::SUCCESS)
}
