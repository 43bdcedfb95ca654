//! `runs diff`: which keys of two runs differ, and their curves beside each other.

use super::plot::{self, Curve};
use super::summary::Summary;
use crate::args::Global;
use crate::{format, output};
use anyhow::Result;
use ferrotron_core::config::{Config, Recipe};
use ferrotron_core::events::{self, Metrics};
use ferrotron_core::fs;
use ferrotron_core::train::CONFIG;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Size of a curve in characters.
const COLUMNS: usize = 60;
const ROWS: usize = 4;

/// Arguments of `runs diff`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Run folder
    #[arg(value_name = "A")]
    pub a: PathBuf,
    /// The run folder to compare it with
    #[arg(value_name = "B")]
    pub b: PathBuf,
    /// Curves to show, by name as in `runs export --format csv`; repeat for several
    #[arg(long = "metric", value_name = "NAME", default_values = ["train/loss", "eval/loss", "train/tokens_per_s"])]
    pub metrics: Vec<String>,
}

/// What is compared of a run.
struct Side {
    summary: Summary,
    config: Option<Config>,
    /// Values by metric and step; of steps that were done again the last.
    curves: BTreeMap<String, BTreeMap<u64, f64>>,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<ExitCode> {
    let [a, b] = [Side::read(&args.a)?, Side::read(&args.b)?];
    let known = |name: &String| a.curves.contains_key(name) || b.curves.contains_key(name);
    let is_default = |name: &str| matches!(name, "train/loss" | "eval/loss" | "train/tokens_per_s");
    if let Some(unknown) = args.metrics.iter().find(|name| !known(name) && !is_default(name)) {
        let mut all: Vec<&str> = a.curves.keys().chain(b.curves.keys()).map(String::as_str).collect();
        all.sort_unstable();
        all.dedup();
        let what = format!("--metric {unknown}: neither run has it");
        return Err(output::UsageError::new(what).hint(format!("they have {}", all.join(", "))).into());
    }
    let keys = match (&a.config, &b.config) {
        (Some(a), Some(b)) => Some(a.differing(b)),
        _ => None,
    };
    let metrics: Vec<&String> = args.metrics.iter().filter(|name| known(name)).collect();
    if global.json {
        let key = |(key, a, b): &(&str, String, String)| json!({ "key": key, "a": a, "b": b });
        output::print_json(&json!({
            "a": a.summary,
            "b": b.summary,
            "keys": keys.map(|all| all.iter().map(key).collect::<Vec<_>>()),
            "first_difference": first_difference(&a, &b),
            "curves": metrics.iter().map(|name| curve_json(name, &a, &b)).collect::<Vec<_>>(),
        }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut out = String::new();
    let rows = |label: &str, s: &Side| {
        let path = format::printable(&s.summary.path.display().to_string());
        let recipe = format::printable(&s.summary.recipe);
        vec![
            label.to_string(),
            path,
            recipe,
            s.summary.state.to_string(),
            format!("{} steps", s.summary.step),
        ]
    };
    out += &output::table(&[rows("A", &a), rows("B", &b)]);
    out += &match keys {
        None => format!("\nconfigurations are not compared: a run has no {CONFIG}\n"),
        Some(keys) if keys.is_empty() => "\nconfigurations are the same\n".into(),
        Some(keys) => {
            let mut rows = vec![["key", "A", "B"].map(String::from).to_vec()];
            rows.extend(
                keys.into_iter()
                    .map(|(key, a, b)| vec![key.into(), format::printable(&a), format::printable(&b)]),
            );
            format!("\n{}", output::table(&rows))
        }
    };
    out += &match first_difference(&a, &b) {
        Some(step) => format!("\nthe training loss differs from step {step} on\n"),
        None => "\nthe training loss is the same in all common steps\n".into(),
    };
    for name in metrics {
        out += &curve_text(name, &a, &b);
    }
    output::print(&out)?;
    Ok(ExitCode::SUCCESS)
}

impl Side {
    fn read(dir: &Path) -> Result<Side> {
        let summary = Summary::read(dir, &dir.display().to_string())?;
        let path = dir.join(CONFIG);
        let config = fs::exists(&path).then(|| Recipe::read_stored(&path)).transpose()?.map(|r| r.config);
        let mut curves: BTreeMap<String, BTreeMap<u64, f64>> = BTreeMap::new();
        for line in events::read(dir)? {
            let step = line.event.step();
            for (name, x) in Metrics::of(&line.event).scalars {
                curves.entry(name).or_default().insert(step, x);
            }
        }
        Ok(Side { summary, config, curves })
    }

    fn curve(&self, name: &str) -> Curve {
        self.curves.get(name).into_iter().flatten().map(|(step, x)| (*step as f64, *x)).collect()
    }
}

/// The first step that both runs have and whose losses are not the same bits.
fn first_difference(a: &Side, b: &Side) -> Option<u64> {
    let (a, b) = (a.curves.get("train/loss")?, b.curves.get("train/loss")?);
    let same = |x: f64, y: f64| x.to_bits() == y.to_bits() || (x.is_nan() && y.is_nan());
    a.iter().find(|(step, x)| b.get(step).is_some_and(|y| !same(**x, *y))).map(|(step, _)| *step)
}

fn curve_json(name: &str, a: &Side, b: &Side) -> Value {
    let points = |s: &Side| s.curves.get(name).into_iter().flatten().map(|(k, v)| json!([k, v])).collect();
    json!({ "metric": name, "a": Value::Array(points(a)), "b": Value::Array(points(b)) })
}

/// Both curves under each other, on the same axes, with their last values.
fn curve_text(name: &str, a: &Side, b: &Side) -> String {
    let curves = [a.curve(name), b.curve(name)];
    let both: Vec<&Curve> = curves.iter().collect();
    let (Some(x), Some(y)) = (plot::range(&both, |p| p.0), plot::range(&both, |p| p.1)) else {
        return format!("\n{name}: no finite value\n");
    };
    let mut out = format!("\n{} (steps {} to {})\n", format::printable(name), x[0], x[1]);
    for (label, curve) in ["A", "B"].into_iter().zip(&curves) {
        let last = curve.last().map_or_else(|| "none".into(), |(_, v)| short(*v));
        let ends = [short(y[1]), short(y[0])];
        for (i, line) in plot::draw(curve, x, y, COLUMNS, ROWS).iter().enumerate() {
            let axis = if i == 0 {
                &ends[0]
            } else if i + 1 == ROWS {
                &ends[1]
            } else {
                ""
            };
            let note = if i == 0 { format!("  {label}, last {last}") } else { String::new() };
            out += &format!("{axis:>10} |{line}|{note}\n");
        }
    }
    out
}

/// Six significant digits.
fn short(x: f64) -> String {
    match x.abs() {
        a if a >= 1e6 || (a > 0.0 && a < 1e-3) => format!("{x:.3e}"),
        a if a >= 1000.0 => format!("{x:.0}"),
        _ => format!("{x:.4}"),
    }
}
