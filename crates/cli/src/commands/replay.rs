//! `replay`: run a step again that a run has rejected and kept.

use crate::args::Global;
use crate::{output, ranks};
use anyhow::Result;
use ferrotron_core::checkpoint;
use ferrotron_core::config::Recipe;
use ferrotron_core::train::{
    CHECKPOINTS, CONFIG, LogicalValues, SavedBatch, StepReport, Trainer, gather_all_stages, replay_folder,
};
use ferrotron_engine::Rank;
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;

/// Text of `--help`.
pub const LONG: &str = "\
Run a step again that a run has rejected and kept.

A run with fault.rerun keeps a step whose loss or gradient is not finite, or spikes, and is the same when it is run again: its
batch, and the state before it, in replay/step-N of the run folder. This command runs that step, in the run's layout or another
one, and prints its loss, the gradient norm, the norm of every tensor's gradient and the first that is not finite. Nothing is
changed.";

const AFTER: &str = "\
Examples:
  ferrotron replay 1200 --out runs/llama-1b
  ferrotron replay 1200 --out runs/llama-1b --set parallel.dp=1 --set precision.dtype=f32";

/// Arguments of `replay`.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub struct Args {
    /// Step to run again: N of replay/step-N
    #[arg(value_name = "STEP")]
    pub step: u64,
    /// Run folder
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub out: PathBuf,
    /// Change a key of the run's recipe, such as parallel.dp=1
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<ExitCode> {
    let folder = replay_folder(&args.out, args.step);
    let batch = SavedBatch::read(&folder)?;
    let mut recipe = Recipe::read_stored(&args.out.join(CONFIG))?;
    // The step alone, undisturbed.
    recipe.set_all(&[
        "fault.inject=[]",
        "fault.rerun=false",
        "fault.verify_every=0",
        "fault.hash_every=0",
    ])?;
    recipe.set_all(&args.set)?;
    let (resolved, base) = ferrotron_bridge::recipe::resolve_with(&mut recipe, &|_, _, _| {})?;
    let layout = resolved.config.parallel.layout();
    let work = |rank: Rank| -> ferrotron_core::Result<(StepReport, Vec<LogicalValues>)> {
        let mut trainer = Trainer::new(rank.clone(), &resolved)?;
        if resolved.config.has_lora() {
            base.as_ref().map_or(Ok(()), |weights| weights.fill(&trainer))?;
        }
        let saved = checkpoint::latest(&folder.join(CHECKPOINTS))?;
        let saved = saved.ok_or_else(|| ferrotron_core::Error::Missing {
            path: folder.clone(),
            what: "the state before the step is not here".into(),
        })?;
        trainer.restore(&checkpoint::load(&saved)?)?;
        let report = trainer.step_whatever_comes(&batch)?;
        let gradients = gather_all_stages(&rank, trainer.model.decoder.config(), trainer.gradients()?)?;
        Ok((report, gradients))
    };
    let results = ranks::run(global, &layout, resolved.config.train.seed, work)?;
    if let Some((report, gradients)) = results.into_iter().next().filter(|_| global.launch.leads()) {
        show(&report, &gradients, global)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Norm of a tensor, and elements that are not finite.
fn norm(t: &LogicalValues) -> (f64, usize) {
    let squares: f64 = t.values.iter().map(|x| f64::from(*x).powi(2)).sum();
    (squares.sqrt(), t.values.iter().filter(|x| !x.is_finite()).count())
}

fn show(report: &StepReport, gradients: &[LogicalValues], global: &Global) -> Result<()> {
    let norms: Vec<(&str, f64, usize)> = gradients
        .iter()
        .map(|t| {
            let (norm, bad) = norm(t);
            (t.name.as_str(), norm, bad)
        })
        .collect();
    let first = norms.iter().find(|(_, _, bad)| *bad > 0).map(|(name, ..)| *name);
    if global.json {
        let tensors: Vec<_> =
            norms.iter().map(|(n, norm, bad)| json!({"name": n, "norm": norm, "nonfinite": bad})).collect();
        let line = json!({
            "step": report.step, "loss": report.loss, "grad_norm": report.grad_norm, "lr": report.lr,
            "tokens": report.tokens, "first_nonfinite": first, "gradients": tensors,
        });
        output::print(&format!("{line}\n"))?;
        return Ok(());
    }
    let mut rows = vec![["gradient", "norm", "not finite"].map(String::from).to_vec()];
    rows.extend(norms.iter().map(|(name, norm, bad)| {
        vec![name.to_string(), format!("{norm:.6e}"), if *bad > 0 { bad.to_string() } else { String::new() }]
    }));
    let head = format!("step {}  loss {}  gradient norm {}\n", report.step, report.loss, report.grad_norm);
    let tail = match first {
        Some(name) => format!("the first gradient that is not finite, in model order, is that of {name}\n"),
        None => "every gradient is finite\n".into(),
    };
    output::print(&format!("{head}{}{tail}", output::table(&rows)))?;
    Ok(())
}
