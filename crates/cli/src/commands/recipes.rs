//! `recipes`: list or print the built-in recipes, and say which of them a machine runs.

use super::plan::parse_machine;
use super::train::derived;
use crate::args::Global;
use crate::{format, output};
use anyhow::Result;
use ferrotron_core::config::{EmbeddedRecipe, RECIPES, Recipe, Resolved};
use ferrotron_core::plan::{Machine, StepTime, of_recipe};
use ferrotron_tensor::format_bytes;
use serde_json::{Value, json};
use std::process::ExitCode;

const AFTER: &str = "\
Examples:
  ferrotron recipes
  ferrotron recipes llama-8b               the recipe, and as comments every value that follows from it
  ferrotron recipes tiny > my.toml         copy a recipe to edit
  ferrotron recipes --for 8xH100           those that 8 H100s run as they stand
  ferrotron train my.toml";

/// Arguments of `recipes`.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub struct Args {
    /// Recipe to print; without it, list all
    #[arg(value_name = "RECIPE")]
    pub name: Option<String>,
    /// Only recipes that these GPUs run as they stand, with as many replicas as there are GPUs for
    #[arg(long = "for", value_name = "NxGPU", conflicts_with = "name")]
    pub machine: Option<String>,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<ExitCode> {
    match (args.name, args.machine) {
        (Some(name), _) => {
            // The error for an unknown name is the one `train` gives.
            let recipe = Recipe::named(&name)?;
            for r in RECIPES.iter().filter(|r| r.name == recipe.name) {
                if global.json {
                    output::print_json(&as_json(r)?)?;
                } else {
                    output::print(&format!("{}\n{}", r.text.trim_end(), in_full(r)?))?;
                }
            }
        }
        (None, Some(machine)) => for_machine(&parse_machine(&machine)?, global)?,
        (None, None) if global.json => {
            output::print_json(&RECIPES.iter().map(as_json).collect::<Result<Vec<_>>>()?)?;
        }
        (None, None) => {
            let rows: Vec<_> =
                RECIPES.iter().map(|r| vec![r.name.to_string(), r.summary().to_string()]).collect();
            let more = "`ferrotron recipes NAME` prints one, `ferrotron recipes --for 8xH100` those for a machine, \
                        `ferrotron train NAME` runs it.";
            output::print(&format!("{}\n{more}\n", output::table(&rows)))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The recipe with every derived value; none where that depends on a Hugging Face folder.
fn resolved(name: &str, machine: Option<&Machine>) -> Result<Option<Resolved>> {
    let mut recipe = Recipe::named(name)?;
    let has_data = recipe.is_set("data.path");
    if !has_data {
        recipe.set("data.path=embedded")?;
    }
    if let Some(machine) = machine {
        let p = &recipe.config.parallel;
        let replica = p.tp * p.cp * p.pp;
        if !machine.gpus.is_multiple_of(replica) {
            return Ok(None);
        }
        recipe.put_key("parallel.dp", i64::try_from(machine.gpus / replica)?)?;
    }
    // Fine-tuning recipes know their model once a folder is named.
    let needs_model = RECIPES.iter().any(|r| r.name == name && r.text.contains("model.hf"));
    if needs_model {
        return Ok(None);
    }
    let mut resolved = recipe.resolve(None)?;
    // What follows from the data is not known without it.
    resolved.derived.retain(|d| has_data || !d.key.starts_with("data."));
    Ok(Some(resolved))
}

/// As comments: the whole configuration, and what was derived and why.
fn in_full(r: &EmbeddedRecipe) -> Result<String> {
    let Some(resolved) = resolved(r.name, None)? else {
        return Ok(
            "\n# The other values follow from model.hf: `ferrotron train ... --dry-run` shows them.\n".into(),
        );
    };
    let shown = |line: &&str| !line.starts_with("path = \"embedded\"");
    let toml = resolved.config.to_toml();
    let text = format!("Every value of the run:\n\n{}\n{}", toml.trim(), derived(&resolved));
    let lines = text.lines().filter(shown).map(|l| format!("# {l}").trim_end().to_string() + "\n");
    Ok(format!("\n{}", lines.collect::<String>()))
}

fn as_json(r: &EmbeddedRecipe) -> Result<Value> {
    let resolved = resolved(r.name, None)?;
    Ok(json!({
        "name": r.name,
        "summary": r.summary(),
        "toml": r.text,
        "config": resolved.as_ref().map(|r| &r.config),
        "derived": resolved.as_ref().map(|r| &r.derived),
    }))
}

/// Recipes that a machine runs as they stand, fastest models last, as they are listed.
fn for_machine(machine: &Machine, global: &Global) -> Result<()> {
    let hw = &machine.hardware;
    let (mut fit, mut others) = (Vec::new(), Vec::new());
    for r in RECIPES {
        // A layout that the number of GPUs or the batch does not divide is another machine's.
        let Ok(Some(resolved)) = resolved(r.name, Some(machine)) else {
            others.push(r.name);
            continue;
        };
        let (time, memory) = of_recipe(&resolved, hw)?;
        match memory.total() <= hw.usable_memory() {
            true => fit.push((r, resolved, time, memory.total())),
            false => others.push(r.name),
        }
    }
    let rate = |r: &Resolved, t: &StepTime| {
        (r.config.train.global_batch * r.plan.seq_len) as f64 / t.total.max(f64::MIN_POSITIVE)
    };
    if global.json {
        return output::print_json(&json!({
            "gpus": machine.gpus,
            "gpu": hw.name,
            "recipes": fit.iter().map(|(r, resolved, time, bytes)| json!({
                "name": r.name,
                "dp": resolved.config.parallel.dp,
                "step_s": time.total,
                "tokens_per_s": rate(resolved, time),
                "memory_bytes": bytes,
            })).collect::<Vec<_>>(),
            "others": others,
        }));
    }
    let mut rows = vec![["recipe", "tokens/s", "memory", "layout"].map(String::from).to_vec()];
    rows.extend(fit.iter().map(|(r, resolved, time, bytes)| {
        vec![
            r.name.into(),
            format::thousands(rate(resolved, time) as u64),
            format_bytes(*bytes),
            resolved.config.parallel.layout().to_string(),
        ]
    }));
    output::print(&format!(
        "On {} x {} as they stand, by the planner's estimate:\n{}\nwith another layout, a Hugging Face folder, or more GPUs: {}\n\
         `ferrotron plan NAME --gpus {}x{}` finds a layout.\n",
        machine.gpus,
        hw.name,
        output::table(&rows),
        others.join(", "),
        machine.gpus,
        hw.name
    ))
}
