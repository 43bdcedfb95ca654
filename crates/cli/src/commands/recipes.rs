//! `recipes`: list or print the built-in recipes.

use crate::args::Global;
use crate::output;
use anyhow::Result;
use ferrotron_core::config::{EmbeddedRecipe, RECIPES, Recipe};
use serde_json::json;
use std::process::ExitCode;

const AFTER: &str = "\
Examples:
  ferrotron recipes
  ferrotron recipes tiny > my.toml         copy a recipe to edit
  ferrotron train my.toml";

/// Arguments of `recipes`.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub struct Args {
    /// Recipe to print; without it, list all
    #[arg(value_name = "RECIPE")]
    pub name: Option<String>,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<ExitCode> {
    let as_json = |r: &EmbeddedRecipe| json!({ "name": r.name, "summary": r.summary(), "toml": r.text });
    match args.name {
        Some(name) => {
            // The error for an unknown name is the one `train` gives.
            let recipe = Recipe::named(&name)?;
            for r in RECIPES.iter().filter(|r| r.name == recipe.name) {
                if global.json {
                    output::print_json(&as_json(r))?;
                } else {
                    output::print(r.text)?;
                }
            }
        }
        None if global.json => output::print_json(&RECIPES.iter().map(as_json).collect::<Vec<_>>())?,
        None => {
            let rows: Vec<_> =
                RECIPES.iter().map(|r| vec![r.name.to_string(), r.summary().to_string()]).collect();
            let more = "`ferrotron recipes NAME` prints one, `ferrotron train NAME` runs it.";
            output::print(&format!("{}\n{more}\n", output::table(&rows)))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
