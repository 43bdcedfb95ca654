//! `train`: the main job.

use crate::args::Global;
use crate::format;
use crate::output::{self, Usage};
use anyhow::Result;
use ferrotron_core::config::{Recipe, Resolved};
use std::path::PathBuf;
use std::process::ExitCode;

/// The long help.
pub const LONG: &str = "\
Train a model from a recipe.

Without an argument: a small model on the corpus inside the program, done in a minute, ending with a sample and a
summary. A run writes one folder: events.jsonl (one line per step), checkpoints and the resolved configuration.
Ctrl-C saves and ends; the same command resumes.";

const AFTER: &str = "\
Examples:
  ferrotron train
  ferrotron train tiny --steps 20 --out runs/trial
  ferrotron train gpt2-124m --data corpus/fineweb_text_document
  ferrotron train finetune-hf --set model.hf=models/Llama-3.2-1B --data my_text_document
  ferrotron train my.toml --set optimizer.lr=3e-4 --set precision.dtype=f32
  ferrotron train my.toml --dry-run        what would run, and why each derived value is what it is

`ferrotron recipes` lists the recipes, `ferrotron explain` every key.";

/// What to train.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub struct Args {
    /// A recipe's name or a TOML file
    #[arg(value_name = "RECIPE or FILE.toml", default_value = "tiny")]
    pub recipe: String,
    /// The run folder; an unfinished run in it is resumed [default: runs/RECIPE]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Optimizer steps (train.steps)
    #[arg(long, value_name = "N")]
    pub steps: Option<u64>,
    /// Ranks in this process; 1 in this version
    #[arg(long, value_name = "N", default_value_t = 1, hide_default_value = true)]
    pub ranks: usize,
    /// Prefix of a .bin/.idx pair, or "embedded" (data.path); several are blended
    #[arg(long, value_name = "PATH")]
    pub data: Vec<String>,
    /// Change a key of the recipe; may be given many times
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Start over: throw away what the run folder holds of this run
    #[arg(long)]
    pub fresh: bool,
    /// Show the resolved configuration and what was derived, then stop
    #[arg(long)]
    pub dry_run: bool,
}

impl Args {
    /// The recipe with everything the command line says laid over it.
    pub fn load(&self) -> Result<Recipe> {
        if self.ranks != 1 {
            let what = format!("--ranks {}: this version trains on one rank; leave --ranks out", self.ranks);
            return Err(Usage::new(what).into());
        }
        let mut recipe = Recipe::open(&self.recipe)?;
        for assignment in &self.set {
            recipe.set(assignment)?;
        }
        if let Some(steps) = self.steps {
            recipe.put_key("train.steps", i64::try_from(steps).unwrap_or(i64::MAX))?;
        }
        if !self.data.is_empty() {
            recipe.put_key("data.path", self.data.clone())?;
        }
        Ok(recipe)
    }

    /// The run folder.
    pub fn out(&self, recipe: &Recipe) -> PathBuf {
        self.out.clone().unwrap_or_else(|| PathBuf::from("runs").join(&recipe.name))
    }
}

/// What was derived, for people: one line each.
pub fn derived(resolved: &Resolved) -> String {
    let rows: Vec<_> = resolved
        .derived
        .iter()
        .map(|d| vec![format!("  {} = {}", d.key, d.value), format!("({})", d.reason)])
        .collect();
    if rows.is_empty() { String::new() } else { format!("derived:\n{}", output::table(&rows)) }
}

/// `--dry-run`: everything that is known before anything is allocated.
fn show(args: &Args, recipe: &Recipe, resolved: &Resolved, global: &Global) -> Result<ExitCode> {
    if global.json {
        output::print_json(&serde_json::json!({
            "recipe": recipe.name,
            "out": args.out(recipe),
            "config": resolved.config,
            "plan": resolved.plan,
            "derived": resolved.derived,
        }))?;
    } else {
        let p = &resolved.plan;
        output::print(&format!(
            "{}\n# {} steps, {} sequences, {} tokens\n{}",
            resolved.config.to_toml(),
            format::thousands(p.steps),
            format::count(p.samples),
            format::count(p.tokens),
            derived(resolved).lines().map(|l| format!("# {l}\n")).collect::<String>(),
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<ExitCode> {
    global.require_cpu()?;
    let recipe = args.load()?;
    let resolved = recipe.resolve(None)?;
    if args.dry_run {
        return show(&args, &recipe, &resolved, global);
    }
    anyhow::bail!("this build cannot train yet; --dry-run shows what it would do")
}
