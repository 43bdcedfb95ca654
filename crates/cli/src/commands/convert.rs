//! `convert`: Hugging Face folder to checkpoint and back.

use crate::args::Global;
use crate::progress::JobProgress;
use crate::{format, output};
use anyhow::Result;
use ferrotron_bridge::conversion::{ConvertOptions, convert};
use ferrotron_core::config::Precision;
use ferrotron_core::model::upcycle::UpcycleConfig;
use ferrotron_tensor::format_bytes;
use std::path::PathBuf;
use std::process::ExitCode;

/// The long help.
pub const LONG: &str = "\
Convert between a Hugging Face folder and a checkpoint of ours.

The direction follows from what FROM is: a folder with config.json and .safetensors files becomes a checkpoint; a
checkpoint, or a run folder (its newest checkpoint), becomes a Hugging Face folder, with the names and tokenizer of the
folder it was trained or converted from where that is known. TO must not exist unless --overwrite is given, and is only
there once it is complete. A checkpoint made here holds weights and no run: `train --set model.hf=CHECKPOINT` starts one
from it, `generate` writes with it.

--upcycle cuts every MLP of a dense model into `granularity` pieces and makes `experts` experts of them, copies of each
other where there are more; tokens go to `topk` of them (two whole MLPs' worth unless given). With granularity=1 the new
model computes what the dense one did, until training makes the copies different; with more, nearly.";

const AFTER: &str = "\
Examples:
  ferrotron convert models/Qwen3-0.6B qwen3.ckpt
  ferrotron convert runs/tiny exported
  ferrotron convert runs/tuned exported --like models/Llama-3.2-1B    with the tokenizer and names of that folder
  ferrotron convert models/Qwen3-0.6B qwen3x8.ckpt --upcycle experts=8";

/// What to convert.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub struct Args {
    /// Hugging Face folder, checkpoint or run folder
    pub from: PathBuf,
    /// What to write
    pub to: PathBuf,
    /// Element type to store weights in: f32 or bf16 [default: as they are]
    #[arg(long, value_name = "DTYPE")]
    pub dtype: Option<Precision>,
    /// A Hugging Face folder to take the family's names, config.json and tokenizer from
    #[arg(long, value_name = "DIR")]
    pub like: Option<PathBuf>,
    /// Make a dense Hugging Face model one of experts: experts=8,topk=2,granularity=1
    #[arg(long, value_name = "KEY=N,...")]
    pub upcycle: Option<UpcycleConfig>,
    /// Replace TO if it exists
    #[arg(long)]
    pub overwrite: bool,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<ExitCode> {
    let gauge = JobProgress::new(global, "converting");
    let options = ConvertOptions {
        dtype: args.dtype.map(Precision::dtype),
        like: args.like.as_deref(),
        upcycle: args.upcycle,
        overwrite: args.overwrite,
        progress: &|done, total| gauge.set(done, total),
    };
    let done = convert(&args.from, &args.to, &options)?;
    drop(gauge);
    if global.json {
        output::print_json(&serde_json::json!({
            "from": done.from,
            "to": args.to,
            "kind": if done.hugging_face { "huggingface" } else { "checkpoint" },
            "family": done.family,
            "parameters": done.parameters,
            "bytes": done.bytes,
            "like": done.like,
            "tokenizer": done.tokenizer,
        }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let kind = if done.hugging_face { "Hugging Face folder" } else { "checkpoint" };
    let like = done.like.map(|l| format!(", with the files of {}", l.display())).unwrap_or_default();
    let tokenizer = if done.tokenizer { "" } else { "; no tokenizer came with it" };
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
