//! A run that is killed or interrupted and resumed ends with the same bits as an uninterrupted one.
#![cfg(unix)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use support::soak::rounds;
use support::{Finished, SeededRng, ferrotron, files, losses, recipe, run, wait};

/// Arguments of one training command.
fn train(recipe: &Path, out: &Path) -> Vec<String> {
    ["train", recipe.to_str().unwrap(), "--out", out.to_str().unwrap()].map(String::from).to_vec()
}

fn finished(e: &Finished) {
    assert_eq!(e.code, Some(0), "{}", e.err);
    assert!(!e.err.contains("panicked"), "{}", e.err);
}

/// The last checkpoint and the log of two finished runs.
fn assert_same_end(a: &Path, b: &Path) {
    let checkpoints = [a, b].map(|d| files(&d.join("checkpoints")));
    let names = |c: &std::collections::BTreeMap<_, _>| c.keys().cloned().collect::<Vec<std::path::PathBuf>>();
    assert_eq!(names(&checkpoints[0]), names(&checkpoints[1]));
    assert!(names(&checkpoints[0]).len() >= 3);
    for (name, bytes) in &checkpoints[0] {
        assert!(*bytes == checkpoints[1][name], "{} differs", name.display());
    }
    assert_eq!(losses(a), losses(b));
}

/// Configurations that are killed: what is added to the command line.
const CONFIGURATIONS: [&[&str]; 17] = [
    &[],
    &["--set", "precision.dtype=f32", "--set", "checkpoint.every=1", "--set", "checkpoint.keep=1"],
    &["--set", "precision.dtype=f16"],
    &["--set", "precision.recipe=fp8-delayed"],
    &["--set", "precision.recipe=fp8-current", "--set", "train.recompute=full"],
    &["--set", "optimizer.state_dtype=bf16"],
    &["--set", "optimizer.kind=sgd", "--set", "train.ramp=[2, 2, 20]"],
    &["--set", "mtp.layers=1"],
    &["--set", "moe.experts=4"],
    &["--set", "moe.experts=4", "--set", "parallel.ep=2", "--ranks", "2"],
    &["--set", "parallel.tp=2", "--ranks", "2"],
    &["--set", "parallel.cp=2", "--ranks", "2"],
    &["--set", "parallel.pp=2", "--ranks", "2"],
    &["--set", "parallel.zero=1", "--ranks", "2"],
    &["--set", "parallel.zero=2", "--set", "parallel.tp=2", "--ranks", "4"],
    &["--set", "offload.activations=auto", "--set", "offload.min_bytes=1", "--set", "offload.optimizer=1"],
    &[
        "--set",
        "parallel.zero=3",
        "--set",
        "offload.weights=true",
        "--set",
        "offload.gradients=true",
        "--ranks",
        "2",
    ],
];

/// At least 45 kills over all configurations; FERROTRON_SOAK multiplies them.
#[test]
fn killed_at_any_moment_it_ends_the_same() {
    const STEPS: usize = 24;
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), STEPS, "[checkpoint]\nevery = 2\n[eval]\nevery = 7\nbatches = 1\n");
    let mut dice = SeededRng(20_240_711);
    for (number, configuration) in CONFIGURATIONS.iter().enumerate() {
        let train = |out: &Path| {
            let more = configuration.iter().map(|s| s.to_string());
            train(&recipe, out).into_iter().chain(more).collect::<Vec<String>>()
        };
        let whole = dir.path().join(format!("whole-{number}"));
        let start = Instant::now();
        finished(&run(&train(&whole)));
        let length = start.elapsed();
        assert_eq!(losses(&whole).len(), STEPS);
        let mut kills = 0;
        for round in 0.. {
            let out = dir.path().join(format!("killed-{number}-{round}"));
            for attempt in 0.. {
                let mut child = ferrotron(&train(&out)).spawn().unwrap();
                // Longer from kill to kill: it must end on a machine that has become slow, too.
                let share = 0.6 * dice.below(1000) as f64 / 1000.0 + 0.05 * f64::from(attempt);
                std::thread::sleep(length.mul_f64(share));
                let ended = child.try_wait().unwrap().is_some();
                child.kill().unwrap();
                wait(child);
                if ended {
                    break;
                }
                kills += 1;
            }
            finished(&run(&train(&out)));
            assert_same_end(&whole, &out);
            std::fs::remove_dir_all(&out).unwrap();
            if kills >= rounds(3) {
                break;
            }
            assert!(round < 20 * rounds(3), "{configuration:?}: {kills} kills came before the end");
        }
        println!("{configuration:?}: {kills} kills");
    }
}

/// Waits until the log of a run holds `steps` steps.
fn wait_for_steps(out: &Path, steps: usize) {
    let log = out.join("events.jsonl");
    let start = Instant::now();
    let seen = || {
        std::fs::read_to_string(&log)
            .map_or(0, |t| t.lines().filter(|l| l.contains("\"kind\":\"step\"")).count())
    };
    while seen() < steps {
        assert!(start.elapsed() < Duration::from_secs(60), "no {steps} steps after a minute");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn signal(name: &str, pid: u32) {
    let status = Command::new("sh").arg("-c").arg(format!("kill -{name} {pid}")).status().unwrap();
    assert!(status.success());
}

#[test]
fn a_signal_saves_ends_well_and_the_same_command_goes_on() {
    const STEPS: usize = 400;
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), STEPS, "");
    let (whole, out) = (dir.path().join("whole"), dir.path().join("stopped"));
    let mut at = 0;
    for name in ["INT", "TERM"] {
        let child = ferrotron(&train(&recipe, &out)).spawn().unwrap();
        wait_for_steps(&out, at + 3);
        signal(name, child.id());
        let e = wait(child);
        assert_eq!(e.code, Some(0), "{name}: {}", e.err);
        assert!(e.out.is_empty(), "{name}: {}", e.out);
        if at > 0 {
            assert!(e.err.contains(&format!("after step {at} of {STEPS}")), "{name}: {}", e.err);
            assert!(e.err.contains("resuming small"), "{name}: {}", e.err);
        }
        let last = e.err.lines().last().unwrap();
        let step =
            last.strip_prefix("interrupted after step ").unwrap_or_else(|| panic!("{name}: {}", e.err));
        let (step, rest) = step.split_once(';').unwrap();
        assert_eq!(rest, " the same command resumes");
        let step: usize = step.parse().unwrap();
        assert!((at + 3..STEPS).contains(&step), "{name}: stopped after {step}");
        at = step;
        assert!(out.join(format!("checkpoints/step-{at:08}/manifest.json")).is_file());
        assert_eq!(losses(&out).len(), at);
    }
    let e = run(&train(&recipe, &out));
    finished(&e);
    assert!(e.err.contains(&format!("resuming small after step {at} of {STEPS}")), "{}", e.err);
    finished(&run(&train(&recipe, &whole)));
    // Checkpoints on the way differ; the last does not.
    let end = format!("checkpoints/step-{STEPS:08}");
    let [a, b] = [&whole, &out].map(|d| files(&d.join(&end)));
    assert!(a.len() >= 3 && a == b, "the last checkpoints differ");
    assert_eq!(losses(&whole), losses(&out));
    // Once more: nothing is left to do, and it says so.
    let e = run(&train(&recipe, &out));
    finished(&e);
    assert!(e.err.contains(&format!("small is finished: all {STEPS} steps are done")), "{}", e.err);
    assert!(files(&out.join(&end)) == b);
}

#[test]
fn json_says_interrupted() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), 100_000, "");
    let out = dir.path().join("run");
    let mut args = train(&recipe, &out);
    args.push("--json".into());
    let child = ferrotron(&args).spawn().unwrap();
    wait_for_steps(&out, 2);
    signal("TERM", child.id());
    let e = wait(child);
    assert_eq!((e.code, e.err.as_str()), (Some(0), ""));
    let last: serde_json::Value = serde_json::from_str(e.out.lines().last().unwrap()).unwrap();
    assert_eq!((last["kind"].as_str(), last["ending"].as_str()), (Some("run_end"), Some("interrupted")));
}

#[test]
fn a_second_process_is_kept_out() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), 100_000, "");
    let out = dir.path().join("run");
    let child = ferrotron(&train(&recipe, &out)).spawn().unwrap();
    wait_for_steps(&out, 1);
    let e = run(&train(&recipe, &out));
    support::assert_one_sentence_error(&e, "a second process");
    signal("INT", child.id());
    finished(&wait(child));
}
