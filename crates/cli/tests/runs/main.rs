//! The life of a run: replaced, saved, interrupted, resumed with another configuration. Nothing is lost or silent.
#![cfg(unix)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod fresh;
mod hostile;
mod logs;
mod next_commands;
mod open_files;
mod resume;
mod sample;
mod saves;
mod signals;
#[path = "../support/mod.rs"]
mod support;

use serde_json::Value;
use std::path::Path;
use std::time::{Duration, Instant};

/// Arguments of one training command.
fn train(recipe: &Path, out: &Path, more: &[&str]) -> Vec<String> {
    let args = ["train", recipe.to_str().unwrap(), "--out", out.to_str().unwrap()];
    args.iter().chain(more).map(|a| a.to_string()).collect()
}

/// The events of a run folder.
fn events(out: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(out.join("events.jsonl")).unwrap_or_default();
    text.lines().filter_map(|l| serde_json::from_str(l).ok()).collect()
}

fn of_kind(out: &Path, kind: &str) -> Vec<Value> {
    events(out).into_iter().filter(|e| e["kind"] == kind).collect()
}

/// Waits until something holds, at most a minute.
fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what}: not within a minute");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn wait_for_steps(out: &Path, steps: usize) {
    wait_until("steps", || of_kind(out, "step").len() >= steps);
}

fn signal(name: &str, pid: u32) {
    let status = std::process::Command::new("kill").args([format!("-{name}"), pid.to_string()]).status();
    assert!(status.unwrap().success());
}
