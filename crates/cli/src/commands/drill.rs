//! `drill`: train a recipe twice on this machine, undisturbed and with injected faults, and compare the results bit by bit.

mod schedule;

use super::launch::{self, Job};
use crate::args::Global;
use crate::output::{self, UsageError};
use anyhow::{Context, Result};
use ferrotron_core::events::{self, Event, Line};
use ferrotron_core::train::CHECKPOINTS;
use schedule::{Interval, Schedule};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Text of `--help`.
pub const LONG: &str = "\
Train a recipe on this machine twice, undisturbed and with faults injected at random steps, and compare.

Ranks are processes, on the CPU or sharing the GPU. Faults are those of fault.inject (docs/faults.md): a rank is killed,
stopped or hangs, loses a collective, computes wrong bits or slowly, a save meets a full disk, a checkpoint is damaged. The
verdict is good if the job ended by itself, no process is left, and its last checkpoint is that of the undisturbed run, byte
for byte. Goodput is the time of the undisturbed run over that of the disturbed one.";

const AFTER: &str = "\
Examples:
  ferrotron drill tiny
  ferrotron drill tiny --ranks 4 --steps 300 --every 20..60
  ferrotron drill my.toml --faults kill,stop --rounds 10 --set parallel.tp=2";

/// Arguments of `drill`.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub struct Args {
    /// Built-in recipe or TOML file
    #[arg(value_name = "RECIPE or FILE.toml", default_value = "tiny")]
    pub recipe: String,
    /// Ranks
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub ranks: u16,
    /// Spare processes; without one a process that dies is started again
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub spares: u16,
    /// Optimizer steps (train.steps)
    #[arg(long, value_name = "N")]
    pub steps: Option<u64>,
    /// Seconds between two faults, or steps (10..30steps)
    #[arg(long, value_name = "MIN..MAX", default_value = "20..60")]
    pub every: Interval,
    /// Kinds of faults to inject [default: all]
    #[arg(long, value_name = "KIND", value_delimiter = ',')]
    pub faults: Vec<String>,
    /// Drills in a row, each with other faults
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub rounds: u64,
    /// Seed of the faults
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Seconds after which a drill counts as hung
    #[arg(long, value_name = "SECONDS", default_value_t = 1800)]
    pub limit: u64,
    /// Folder of the runs
    #[arg(long, value_name = "DIR", default_value = "runs/drill")]
    pub out: PathBuf,
    /// Override a recipe key; can be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

/// The result of one drill.
#[derive(Debug, Serialize)]
struct Report {
    round: u64,
    /// The faults that were injected.
    faults: Vec<String>,
    /// Kinds of events that the run logged about them, with their numbers.
    events: BTreeMap<&'static str, usize>,
    /// Steps done again.
    steps_lost: u64,
    /// Processes started again.
    processes_restarted: u64,
    seconds: f64,
    undisturbed_seconds: f64,
    goodput: f64,
    /// What is wrong; empty if the drill was passed.
    problems: Vec<String>,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<ExitCode> {
    let kinds = schedule::kinds(&args.faults).map_err(UsageError::new)?;
    std::fs::create_dir_all(&args.out).with_context(|| format!("cannot create {}", args.out.display()))?;
    let reference = args.out.join("undisturbed");
    let start = Instant::now();
    let ended = train(&args, global, &reference, args.ranks, &[])?;
    anyhow::ensure!(ended.code == Some(0), "the undisturbed run failed; see {}", ended.log.display());
    let (steps, seconds) = steps_and_seconds(&reference)?;
    if !global.json {
        let total = start.elapsed().as_secs_f64();
        output::note(format_args!(
            "undisturbed: {steps} steps in {seconds:.1} s, {total:.1} s with start and end"
        ));
    }
    let saves = saves(&reference)?;
    let mut passed = true;
    for round in 0..args.rounds {
        let schedule = Schedule {
            kinds: &kinds,
            every: args.every,
            ranks: args.ranks,
            steps,
            saves: &saves,
            step_seconds: seconds / steps.max(1) as f64,
            seed: args.seed + round,
        };
        let report = drill(&args, global, round, &schedule, (&reference, seconds))?;
        passed &= report.problems.is_empty();
        match global.json {
            true => output::print(&format!("{}\n", serde_json::to_string(&report)?))?,
            false => output::print(&text(&report))?,
        }
    }
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::from(output::FAILED) })
}

fn drill(
    args: &Args,
    global: &Global,
    round: u64,
    schedule: &Schedule,
    (reference, undisturbed_seconds): (&Path, f64),
) -> Result<Report> {
    let out = args.out.join("disturbed");
    let faults = schedule.faults();
    let ended = train(args, global, &out, args.ranks + args.spares, &faults)?;
    let mut problems = Vec::new();
    match ended.code {
        Some(0) => {}
        None => problems.push(format!("it did not end within {} s", args.limit)),
        Some(code) => problems.push(format!("it exited with code {code}; see {}", ended.log.display())),
    }
    problems.extend(compare(&reference.join(CHECKPOINTS), &out.join(CHECKPOINTS), schedule.steps)?);
    let lines = events::read(&out).unwrap_or_default();
    let mut counts = BTreeMap::new();
    let mut steps_lost = 0;
    for Line { event, .. } in &lines {
        if let Some(name) = told(event) {
            *counts.entry(name).or_default() += 1;
        }
        if let Event::Restart(restart) = event {
            steps_lost += restart.steps_lost;
        }
    }
    let seconds = match (lines.first(), lines.last()) {
        (Some(first), Some(last)) => last.time - first.time,
        _ => 0.0,
    };
    let goodput = if seconds > 0.0 { (undisturbed_seconds / seconds).min(1.0) } else { 0.0 };
    let processes_restarted = ended.restarts;
    Ok(Report {
        round,
        faults,
        events: counts,
        steps_lost,
        processes_restarted,
        seconds,
        undisturbed_seconds,
        goodput,
        problems,
    })
}

/// Events that tell of faults.
fn told(event: &Event) -> Option<&'static str> {
    match event {
        Event::Restart(_) => Some("restart"),
        Event::SaveFailed(_) => Some("save_failed"),
        Event::Rerun(_) => Some("rerun"),
        Event::Fault(_) => Some("fault"),
        _ => None,
    }
}

struct Ended {
    /// The job's exit code; none if it did not end.
    code: Option<u8>,
    restarts: u64,
    log: PathBuf,
}

/// Trains in `out` with so many processes and these faults.
fn train(args: &Args, global: &Global, out: &Path, processes: u16, faults: &[String]) -> Result<Ended> {
    let mut command = vec!["train".to_string(), args.recipe.clone(), "--fresh".into(), "--out".into()];
    command.push(out.display().to_string());
    let mut set = |key: &str, value: &str| command.extend(["--set".to_string(), format!("{key}={value}")]);
    if !faults.is_empty() {
        set("fault.snapshot_every", "10");
        set("fault.restarts", "1000");
        set("fault.rank_failures", "1000");
        set("fault.rerun", "true");
        set("fault.verify_every", "10");
        set("fault.inject", &serde_json::to_string(faults)?);
    }
    args.set.iter().for_each(|pair| command.extend(["--set".to_string(), pair.clone()]));
    command.extend(args.steps.iter().flat_map(|n| ["--steps".to_string(), n.to_string()]));
    if processes > args.ranks {
        command.extend(["--spares".to_string(), (processes - args.ranks).to_string()]);
    }
    command.extend(["--timeout".to_string(), global.timeout.min(20).to_string()]);
    command.extend(["--threads".to_string(), global.threads.max(1).to_string()]);
    command.extend(["--device".to_string(), device(global).into()]);
    let log = out.with_extension("log");
    let file = File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
    let launch = launch::Args { processes, max_restarts: 1000, command };
    let mut job = Job::start(&launch, Some(file))?;
    let deadline = Instant::now() + Duration::from_secs(args.limit);
    loop {
        if let Some(code) = job.poll(true)? {
            return Ok(Ended { code: Some(code), restarts: job.restarts, log });
        }
        if Instant::now() > deadline {
            job.kill();
            return Ok(Ended { code: None, restarts: job.restarts, log });
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn device(global: &Global) -> &'static str {
    match global.device {
        crate::args::Device::Cpu => "cpu",
        crate::args::Device::Cuda(_) => "cuda",
        crate::args::Device::Auto => "auto",
    }
}

/// Steps of a finished run, and the seconds they took.
fn steps_and_seconds(run: &Path) -> Result<(u64, f64)> {
    let lines = events::read(run)?;
    let steps = lines.iter().map(|l| l.event.step()).max().unwrap_or(0);
    match (lines.first(), lines.last()) {
        (Some(first), Some(last)) => Ok((steps, last.time - first.time)),
        _ => Ok((steps, 0.0)),
    }
}

/// The steps after which a run saved a checkpoint.
fn saves(run: &Path) -> Result<Vec<u64>> {
    let save = |line: Line| match line.event {
        Event::Checkpoint(e) => Some(e.step),
        _ => None,
    };
    Ok(events::read(run)?.into_iter().filter_map(save).collect())
}

/// How the last checkpoint of two runs differs.
fn compare(expected: &Path, found: &Path, step: u64) -> Result<Option<String>> {
    let name = ferrotron_core::checkpoint::folder_name(step);
    let (expected, found) = (expected.join(&name), found.join(&name));
    if !found.is_dir() {
        return Ok(Some(format!("there is no {}", found.display())));
    }
    let list = |dir: &Path| -> Result<Vec<std::ffi::OsString>> {
        let mut names = std::fs::read_dir(dir)?.map(|e| Ok(e?.file_name())).collect::<Result<Vec<_>>>()?;
        names.sort();
        Ok(names)
    };
    let files = list(&expected)?;
    if files != list(&found)? {
        return Ok(Some(format!("{} holds other files than {}", found.display(), expected.display())));
    }
    for file in files {
        if std::fs::read(expected.join(&file))? != std::fs::read(found.join(&file))? {
            return Ok(Some(format!(
                "{} differs from the undisturbed run's: see ferrotron parity, or compare them with cmp",
                found.join(&file).display()
            )));
        }
    }
    Ok(None)
}

fn text(r: &Report) -> String {
    let events: Vec<String> = r.events.iter().map(|(name, n)| format!("{n} {name}")).collect();
    let verdict = match r.problems.is_empty() {
        true => "passed: the last checkpoint equals that of the undisturbed run".to_string(),
        false => format!("FAILED: {}", r.problems.join("; ")),
    };
    format!(
        "drill {}: {} faults ({})\n  logged   {}; {} steps again, {} processes started again\n  time     {:.1} s, undisturbed {:.1} s: goodput {:.1} %\n  verdict  {verdict}\n",
        r.round + 1,
        r.faults.len(),
        r.faults.join(" "),
        if events.is_empty() { "nothing".to_string() } else { events.join(", ") },
        r.steps_lost,
        r.processes_restarted,
        r.seconds,
        r.undisturbed_seconds,
        100.0 * r.goodput,
    )
}
