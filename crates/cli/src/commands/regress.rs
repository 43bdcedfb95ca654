//! `regress`: train small named cases and compare them with what was recorded.

mod cases;
mod measure;
mod results;

use crate::args::Global;
use crate::output::{self, UsageError};
use anyhow::{Context, Result};
use cases::{Case, Cases};
use ferrotron_core::bench::{reference_seconds, relative_times};
use ferrotron_core::config::Recipe;
use ferrotron_engine::Rank;
use ferrotron_tensor::Instrumentation;
use measure::Training;
use results::{Difference, Recorded, Results};
use serde::Serialize;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Text of `--help`.
pub const LONG: &str = "\
Train small named cases (dense, MoE, MTP, FP8 recipes, resume, LoRA, offload, FSDP, ...) and compare every step with what was
recorded: losses, gradient norm, learning rate, peak memory, growth of memory, and the time of steps and GEMMs.

A case that differs names the first step and metric that does. The program carries results for the CPU (without times, which
depend on the machine) and for one GPU; --record FILE records your own, --expected FILE compares with them.";

const AFTER: &str = "\
Examples:
  ferrotron regress --device cpu                     all cases on the CPU
  ferrotron regress --device cuda                    all cases on a GPU
  ferrotron regress moe mtp                          two of them
  ferrotron regress --record before.toml             record this program on this machine, times included
  ferrotron regress --expected before.toml           and compare a changed program with it
  ferrotron regress dense --set optimizer.lr=1.01e-3 what a setting changes";

const RECORDED_CPU: &str = include_str!("../../../../tests/regression/cpu.toml");
const RECORDED_GPU: &str = include_str!("../../../../tests/regression/cuda.toml");

/// Seconds for each kernel.
const KERNEL_SECONDS: f64 = 0.4;
/// Times that are recorded, and times that are over their limit, are measured so often, and the least counts: another process
/// on the machine goes away, a slow kernel stays.
const TIMES: usize = 3;

/// Arguments of `regress`.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub struct Args {
    /// Cases to run [default: all]
    #[arg(value_name = "CASE")]
    pub cases: Vec<String>,
    /// List the cases
    #[arg(long)]
    pub list: bool,
    /// Record the results in this file in place of comparing them; cases that are not run stay as they are in it
    #[arg(long, value_name = "FILE", conflicts_with = "expected")]
    pub record: Option<PathBuf>,
    /// Compare with this file in place of the built-in results
    #[arg(long, value_name = "FILE")]
    pub expected: Option<PathBuf>,
    /// Neither record nor compare times
    #[arg(long)]
    pub no_time: bool,
    /// Folder of the runs
    #[arg(long, value_name = "DIR", default_value = "runs/regress")]
    pub out: PathBuf,
    /// Override a recipe key in every case; can be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

/// The verdict on a case.
#[derive(Serialize)]
struct Verdict {
    case: String,
    /// None where nothing was recorded to compare with.
    passed: Option<bool>,
    loss: Option<f64>,
    memory: Option<u64>,
    /// Time over the recorded one: of the step, or of kernels in the geometric mean.
    time: Option<f64>,
    /// Where it differs, the earliest step first.
    differences: Vec<Difference>,
    /// Why it could not run.
    error: Option<String>,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<ExitCode> {
    let cases = Cases::built_in()?;
    if args.list {
        return list(&cases, global);
    }
    if let Some(unknown) = args.cases.iter().find(|name| !cases.all.contains_key(*name)) {
        let all: Vec<&str> = cases.all.keys().map(String::as_str).collect();
        let hint = format!("the cases are {}", all.join(", "));
        return Err(UsageError::new(format!("there is no case {unknown:?}")).hint(hint).into());
    }
    let suite = Suite::new(&args, global, cases)?;
    let chosen =
        suite.cases.all.iter().filter(|(name, _)| args.cases.is_empty() || args.cases.contains(name));
    let mut verdicts = Vec::new();
    let mut record = match &args.record {
        Some(path) if path.exists() => Recorded::read(path)?,
        _ => Recorded::default(),
    };
    let live = !global.json && std::io::stderr().is_terminal();
    for (name, case) in chosen {
        if live {
            eprint!("\r\x1b[2K{name}: {}", case.about);
        }
        let measured = suite.measure(name, case);
        if let Ok(results) = &measured {
            record.case.insert(name.clone(), results.rounded());
        }
        verdicts.push(suite.verdict(name, case, measured));
    }
    if live {
        eprint!("\r\x1b[2K");
    }
    let failed = verdicts.iter().any(|v| v.error.is_some() || v.passed == Some(false));
    if let Some(path) = &args.record {
        record.device.clone_from(&suite.device);
        record.write(path)?;
    }
    match global.json {
        true => output::print_json(&serde_json::json!({ "device": suite.device, "cases": verdicts }))?,
        false => output::print(&suite.report(&verdicts, args.record.as_deref()))?,
    }
    Ok(if failed { ExitCode::from(output::FAILED) } else { ExitCode::SUCCESS })
}

fn list(cases: &Cases, global: &Global) -> Result<ExitCode> {
    if global.json {
        let all: Vec<_> =
            cases.all.iter().map(|(name, c)| serde_json::json!({"case": name, "about": c.about})).collect();
        output::print_json(&all)?;
        return Ok(ExitCode::SUCCESS);
    }
    let rows: Vec<_> = cases.all.iter().map(|(name, case)| vec![name.clone(), case.about.clone()]).collect();
    output::print(&output::table(&rows))?;
    Ok(ExitCode::SUCCESS)
}

struct Suite<'a> {
    args: &'a Args,
    cases: Cases,
    rank: Rank,
    device: String,
    recorded: Recorded,
    /// The recipe that all cases share.
    recipe: PathBuf,
    /// Options of every process.
    options: Vec<String>,
}

impl Suite<'_> {
    fn new<'a>(args: &'a Args, global: &Global, cases: Cases) -> Result<Suite<'a>> {
        let rank = global.rank(1234, Instrumentation::default())?;
        let gpu = rank.device().gpu();
        let threads = rank.device().threads().count();
        let device = gpu.map_or_else(|| format!("CPU, {threads} threads"), |card| card.name.clone());
        let recorded = match &args.expected {
            Some(path) => Recorded::read(path)?,
            None => toml::from_str(if gpu.is_some() { RECORDED_GPU } else { RECORDED_CPU })
                .context("the built-in results")?,
        };
        if gpu.is_some() && recorded.device != device && args.record.is_none() {
            let what = format!("results were recorded on {}, and this is {device}", recorded.device);
            let hint = "record results of this device with `regress --record FILE`, then compare with `--expected FILE`";
            return Err(UsageError::new(what).hint(hint).into());
        }
        std::fs::create_dir_all(&args.out)
            .with_context(|| format!("cannot create {}", args.out.display()))?;
        let recipe = args.out.join("base.toml");
        std::fs::write(&recipe, cases.base()?)
            .with_context(|| format!("cannot write {}", recipe.display()))?;
        let on = gpu.map_or_else(|| "cpu".to_string(), |card| format!("cuda:{}", card.ordinal));
        let options = ["--device".to_string(), on, "--threads".into(), global.threads.to_string()].to_vec();
        Ok(Suite { args, cases, rank, device, recorded, recipe, options })
    }

    fn on_gpu(&self) -> bool {
        self.rank.device().gpu().is_some()
    }

    fn set(&self, case: &Case) -> Vec<String> {
        [self.cases.set(case, self.on_gpu()), self.args.set.clone()].concat()
    }

    /// Runs a case. Times that are recorded or over their limit are measured again.
    fn measure(&self, name: &str, case: &Case) -> Result<Results> {
        let mut results = self.measure_once(name, case)?;
        let tolerance = self.cases.tolerance(case, self.on_gpu());
        for _ in 1..TIMES {
            let is_over = |recorded: Results| {
                results.differences(&recorded, &tolerance).iter().any(|d| d.metric.starts_with("time"))
            };
            let is_recorded = self.args.record.is_some() && !results.time.is_empty();
            if !is_recorded && !self.recorded(name).is_some_and(is_over) {
                break;
            }
            let again = self.measure_once(name, case)?.time;
            results.time.iter_mut().for_each(|(key, t)| *t = again.get(key).map_or(*t, |x| t.min(*x)));
        }
        Ok(results)
    }

    fn measure_once(&self, name: &str, case: &Case) -> Result<Results> {
        let set = self.set(case);
        if let Some(prefix) = &case.kernels {
            let mut out = Results::default();
            if !self.args.no_time {
                let mut recipe = Recipe::open(&self.recipe.display().to_string())?;
                recipe.set_all(&set)?;
                let times = relative_times(&self.rank, &recipe.resolve(None)?, prefix, KERNEL_SECONDS)?;
                out.time = times.into_iter().map(|t| (t.name, t.time)).collect();
            }
            return Ok(out);
        }
        let folder = self.args.out.join(name);
        let training = Training { recipe: &self.recipe, set: &set, folder, options: &self.options };
        let before = self.unit();
        let mut out = training.results(case.killed_in)?;
        let unit = (before + self.unit()) / 2.0;
        out.time.values_mut().for_each(|t| *t /= unit);
        if self.args.no_time || (case.shares_gpu && self.on_gpu()) {
            out.time.clear();
        }
        Ok(out)
    }

    /// Seconds of the unit of time: the reference loop on the CPU, a millisecond on a GPU.
    fn unit(&self) -> f64 {
        if self.on_gpu() { 1e-3 } else { reference_seconds() }
    }

    /// What was recorded for a case; times only on this device.
    fn recorded(&self, name: &str) -> Option<Results> {
        let mut out = self.recorded.case.get(name).filter(|_| self.args.record.is_none())?.clone();
        if self.recorded.device != self.device || self.args.no_time {
            out.time.clear();
        }
        Some(out)
    }

    fn verdict(&self, name: &str, case: &Case, measured: Result<Results>) -> Verdict {
        let (results, error) = match measured {
            Ok(results) => (results, None),
            Err(e) => (Results::default(), Some(output::describe(&e))),
        };
        let recorded = self.recorded(name).filter(|_| error.is_none());
        let compared = recorded.filter(|r| !r.steps.is_empty() || !r.time.is_empty());
        let tolerance = self.cases.tolerance(case, self.on_gpu());
        let differences = compared.as_ref().map(|r| results.differences(r, &tolerance));
        let slower = compared.as_ref().and_then(|r| results.relative_time(r));
        Verdict {
            case: name.to_string(),
            passed: differences.as_ref().map(Vec::is_empty),
            loss: results.steps.get("loss").and_then(|l| l.last().copied()),
            memory: results.memory.last().copied(),
            time: slower,
            differences: differences.unwrap_or_default(),
            error,
        }
    }

    fn report(&self, verdicts: &[Verdict], record: Option<&Path>) -> String {
        let none = || "-".to_string();
        let mut rows = vec![["case", "last loss", "memory", "time", "verdict"].map(String::from).to_vec()];
        for v in verdicts {
            let verdict = match (&v.error, v.passed) {
                (Some(_), _) => "FAILED",
                (None, Some(true)) => "ok",
                (None, Some(false)) => "DIFFERS",
                (None, None) if record.is_some() => "recorded",
                (None, None) => "not recorded",
            };
            rows.push(vec![
                v.case.clone(),
                v.loss.map_or_else(none, |x| format!("{x:.5}")),
                v.memory.map_or_else(none, |b| ferrotron_tensor::format_bytes(b as usize)),
                v.time.map_or_else(none, |x| format!("x {x:.2}")),
                verdict.into(),
            ]);
        }
        let mut text = format!("{}\n\n{}\n", self.device, output::table(&rows));
        for v in verdicts {
            v.error.iter().for_each(|e| text += &format!("{}: {e}\n", v.case));
            v.differences.iter().for_each(|d| text += &format!("{}: {d}\n", v.case));
        }
        let count = |passed: Option<bool>| {
            verdicts.iter().filter(|v| v.error.is_none() && v.passed == passed).count()
        };
        let errors = verdicts.iter().filter(|v| v.error.is_some()).count();
        text += &match record {
            Some(path) => format!("{} cases recorded in {}, {errors} failed\n", count(None), path.display()),
            None => format!(
                "{} cases as recorded, {} differ, {errors} failed, {} not recorded\n",
                count(Some(true)),
                count(Some(false)),
                count(None)
            ),
        };
        text
    }
}
