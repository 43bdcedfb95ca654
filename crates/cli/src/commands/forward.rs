//! `forward`: run a model over token ids, so that its numerics can be checked against another system's.

use crate::args::Global;
use crate::layout::Layout;
use crate::{output, ranks};
use anyhow::Result;
use ferrotron_bridge::forward::ForwardOptions;
use ferrotron_bridge::{ModelSource, forward};
use ferrotron_core::config::Precision;
use ferrotron_core::model::PipelineLayout;
use std::path::PathBuf;
use std::process::ExitCode;

/// Text of `--help`.
pub const LONG: &str = "\
Run a Hugging Face folder, a checkpoint or the newest checkpoint of a run over token ids, forward and optionally backward.

The input is a .safetensors file with `input_ids` [batch, sequence] and, for the loss, `labels` of the same shape (not
shifted: position t predicts labels[t+1]; -100 is ignored). `position_ids` and, for one packed row, `cu_seqlens` are read
where they are present. All are I64 or I32.

The output is a .safetensors file with `logits` [batch, sequence, vocab], `loss` (mean cross-entropy over the valid labels) and,
with --backward, `grad.NAME` for every parameter under its Hugging Face name (of a checkpoint, the one that `convert` gives
it) and `expert_load.LAYER` (tokens per expert) for every MoE layer. It appears only once it is complete. A model with NaN or
infinite weights is refused.

With --layout the model runs on several ranks: threads of this process, or the processes of a launcher (see `train --help`).
Rows of the batch are dealt over the data-parallel ranks.";

const AFTER: &str = "\
Examples:
  ferrotron forward --model models/Qwen3-0.6B --input ids.safetensors --output out.safetensors
  ferrotron forward --model runs/tiny --input ids.safetensors --output out.safetensors --backward --dtype bf16
  mpirun -n 4 ferrotron forward --model DIR --input ids.safetensors --output out.safetensors --layout tp=2";

/// Arguments of `forward`.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub struct Args {
    /// Hugging Face folder, checkpoint or run folder
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// Input file (.safetensors) with `input_ids` and optionally `labels`
    #[arg(long, value_name = "FILE")]
    pub input: PathBuf,
    /// Output file (.safetensors)
    #[arg(long, value_name = "FILE")]
    pub output: PathBuf,
    /// Run the backward pass and write every gradient
    #[arg(long)]
    pub backward: bool,
    /// Compute precision: f32, bf16 or f16
    #[arg(long, value_name = "DTYPE", default_value = "f32")]
    pub dtype: Precision,
    /// Parallel layout, such as tp=2,pp=2 (keys: tp, cp, pp, vp, dp, ep, etp)
    #[arg(long, value_name = "LAYOUT", default_value = "", hide_default_value = true)]
    pub layout: Layout,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<ExitCode> {
    let found = ModelSource::open(&args.model)?;
    let input = forward::read_input(&args.input)?;
    forward::check_output(&args.output, &found.weights, &args.input)?;
    let layout = args.layout.grid();
    forward::check_layout(found.model(), &layout)?;
    forward::check_dtype(found.model(), args.dtype.dtype())?;
    let options = ForwardOptions {
        dtype: args.dtype.dtype(),
        stages: PipelineLayout { vp: layout.vp, layout: None },
        backward: args.backward,
        ulp_seed: None,
    };
    let one = |rank| {
        forward::forward(rank, &found.weights, &input, &options).map_err(|e| ranks::to_core_error(e.into()))
    };
    let mut all = ranks::run(global, &layout, 0, one)?;
    let out = all.swap_remove(0);
    if !global.launch.leads() {
        return Ok(ExitCode::SUCCESS);
    }
    forward::write_output(&args.output, &out)?;
    if global.json {
        output::print_json(&serde_json::json!({
            "loss": out.loss,
            "logits": out.shape,
            "gradients": out.gradients.len(),
            "output": args.output,
        }))?;
    } else {
        let loss =
            out.loss.map_or_else(|| "no loss (the input has no labels)".into(), |l| format!("loss {l:.6}"));
        let gradients =
            if args.backward { format!(", {} gradients", out.gradients.len()) } else { String::new() };
        output::print(&format!("{loss}; logits {:?}{gradients} -> {}\n", out.shape, args.output.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}
