//! `runs`: list run folders, compare two of them, export their metrics.

mod diff;
mod export;
mod plot;
mod summary;

use crate::args::Global;
use crate::{format, output};
use anyhow::Result;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};
use summary::Summary;

pub const LONG: &str = "\
List the runs in a folder, the one with the newest event first: recipe, steps, loss, tokens/s, state, last event. A run is
running while its process holds the folder, and otherwise finished, failed or interrupted as its log says; one that was
killed says nothing and counts as interrupted.

`runs diff A B` shows which keys differ and the curves of both; `runs export RUN` writes metrics for TensorBoard or as CSV.
Everything is read from events.jsonl and config.toml of the run folders.";

const AFTER: &str = "\
Examples:
  ferrotron runs                                  those in runs/
  ferrotron runs /scratch/experiments
  ferrotron runs diff runs/a runs/b               keys that differ, and the losses of both
  ferrotron runs export runs/a --format csv       runs/a/metrics.csv
  ferrotron runs export runs/a --format tensorboard && tensorboard --logdir runs";

/// Arguments of `runs`.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER, args_conflicts_with_subcommands = true)]
pub struct Args {
    /// Folder of run folders, or one of them
    #[arg(value_name = "DIR", default_value = "runs")]
    pub dir: PathBuf,
    /// The subcommand.
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// Subcommands of `runs`.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Compare two runs: keys that differ, and their curves
    Diff(diff::Args),
    /// Write the metrics of a run for TensorBoard or as CSV
    Export(export::Args),
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<ExitCode> {
    match args.command {
        Some(Command::Diff(args)) => diff::run(args, global),
        Some(Command::Export(args)) => export::run(args, global),
        None => list(&args.dir, global),
    }
}

fn list(dir: &std::path::Path, global: &Global) -> Result<ExitCode> {
    let runs = summary::find(dir)?;
    if global.json {
        output::print_json(&runs)?;
        return Ok(ExitCode::SUCCESS);
    }
    if runs.is_empty() {
        output::print(&format!("{}: no runs\n", dir.display()))?;
        return Ok(ExitCode::SUCCESS);
    }
    let heads = ["run", "recipe", "state", "steps", "loss", "validation", "tokens/s", "last event"];
    let mut rows = vec![heads.map(String::from).to_vec()];
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64());
    rows.extend(runs.iter().map(|run| row(run, now)));
    output::print(&output::table(&rows))?;
    Ok(ExitCode::SUCCESS)
}

fn row(run: &Summary, now: f64) -> Vec<String> {
    let none = || "-".to_string();
    let last = match &run.last_event {
        Some(last) => format!("{}, {} ago", last.kind, format::seconds((now - last.time).max(0.0))),
        None => none(),
    };
    vec![
        format::printable(&run.name).replace(['\n', '\t'], " "),
        format::printable(&run.recipe).replace(['\n', '\t'], " "),
        run.state.to_string(),
        run.steps.map_or_else(|| run.step.to_string(), |steps| format!("{}/{steps}", run.step)),
        run.loss.map_or_else(none, format::loss),
        run.eval_loss.map_or_else(none, format::loss),
        run.tokens_per_s.map_or_else(none, |rate| format::thousands(rate as u64)),
        last,
    ]
}
