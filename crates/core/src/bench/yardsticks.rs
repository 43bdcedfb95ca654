//! Workloads of the benchmarks: recipes with one step's batch fixed, so that results are comparable. Master weights and
//! gradients are f32, moments bf16.

use super::custom;
use crate::config::{RECIPES, Recipe, nearest};
use crate::{Error, Result};

/// A workload: its name, the recipe it starts from, and what it changes.
struct Yardstick {
    name: &'static str,
    recipe: &'static str,
    changes: &'static [&'static str],
}

const YARDSTICKS: &[Yardstick] = &[
    Yardstick {
        name: "gpt2-124m",
        recipe: "gpt2-124m",
        changes: &[
            "model.vocab=50304",
            "train.micro_batch=64",
            "train.global_batch=64",
            "optimizer.state_dtype=bf16",
        ],
    },
    Yardstick {
        name: "llama-1b",
        recipe: "llama-1b",
        changes: &["train.micro_batch=4", "train.global_batch=4", "optimizer.state_dtype=bf16"],
    },
    Yardstick {
        name: "llama-8b-8l",
        recipe: "llama-8b",
        changes: &[
            "model.layers=8",
            "train.micro_batch=1",
            "train.global_batch=1",
            "train.recompute=none",
            "optimizer.state_dtype=bf16",
        ],
    },
    Yardstick {
        name: "moe-8l",
        recipe: "llama-1b",
        changes: &[
            "model.preset=qwen3-30b-a3b",
            "model.layers=8",
            "model.qk_norm=false",
            "data.seq_len=4096",
            "train.micro_batch=4",
            "train.global_batch=4",
            "optimizer.state_dtype=bf16",
        ],
    },
    Yardstick {
        name: "llama-8b",
        recipe: "llama-8b",
        changes: &["train.micro_batch=1", "train.global_batch=16"],
    },
];

/// The workload of that name, a `custom/…` shape, or else the recipe or file.
pub fn workload(name: &str) -> Result<Recipe> {
    if name.starts_with(custom::PREFIX) {
        return custom::recipe(name);
    }
    let yardstick = YARDSTICKS.iter().find(|y| y.name == name);
    let mut recipe = Recipe::open(yardstick.map_or(name, |y| y.recipe)).map_err(|e| match e {
        Error::Config { file: None, key: None, .. } => unknown(name),
        other => other,
    })?;
    // Tokens are random; a recipe only has to name some data.
    if yardstick.is_some() || recipe.config.data.path.0.is_empty() {
        recipe.set("data.path=embedded")?;
    }
    for change in yardstick.iter().flat_map(|y| y.changes) {
        recipe.set(change)?;
    }
    Ok(recipe)
}

/// Whether a workload fixes the batch of a step, as recipes and files do not.
pub fn fixes_batch(name: &str) -> bool {
    name.starts_with(custom::PREFIX) || YARDSTICKS.iter().any(|y| y.name == name)
}

/// The error for a name that is neither a workload, a recipe nor a file.
fn unknown(name: &str) -> Error {
    let mut all: Vec<&str> = YARDSTICKS.iter().map(|y| y.name).collect();
    all.extend(RECIPES.iter().map(|r| r.name).filter(|r| YARDSTICKS.iter().all(|y| y.name != *r)));
    let near = nearest(name, all.iter().copied()).map(|n| format!("; did you mean {n}?")).unwrap_or_default();
    let what = format!("no workload is called {name:?}{near}");
    let hint =
        format!("the workloads are {}, {}KEY=N/... shapes and .toml files", all.join(", "), custom::PREFIX);
    Error::Config { file: None, line: None, key: None, what, hint: Some(hint) }
}
