//! Drills: runs of four processes and a spare that are disturbed at random end with the bytes of an undisturbed run.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use support::{ferrotron, soak};

const RECIPE: &str = "[model]\nlayers = 2\nhidden = 64\nheads = 4\nkv_heads = 2\nffn = 64\nvocab = 256\n\
     [data]\npath = \"embedded\"\nseq_len = 32\n\
     [train]\nglobal_batch = 8\nmicro_batch = 1\nlog_every = 1\n\
     [checkpoint]\nevery = 10\nkeep = 0\n[fault]\nheartbeat_timeout = 3\nhard_timeout = 10\n";

/// Processes whose command line names `folder`.
fn processes_of(folder: &Path) -> Vec<String> {
    let lines = std::fs::read_dir("/proc").unwrap().filter_map(|entry| {
        let line = std::fs::read(entry.ok()?.path().join("cmdline")).ok()?;
        Some(String::from_utf8_lossy(&line).replace('\0', " "))
    });
    lines.filter(|line| line.contains(folder.to_str().unwrap())).collect()
}

#[test]
fn runs_disturbed_at_random_end_as_undisturbed_ones() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = dir.path().join("drill.toml");
    std::fs::write(&recipe, RECIPE).unwrap();
    let out = dir.path().join("drill");
    let rounds = soak::rounds(6);
    let mut command: Command = ferrotron(&["drill", recipe.to_str().unwrap(), "--device", "cpu", "--json"]);
    command.args([
        "--ranks",
        "4",
        "--spares",
        "1",
        "--steps",
        "80",
        "--every",
        "8..20steps",
        "--timeout",
        "5",
    ]);
    command.args(["--limit", "240", "--rounds", &rounds.to_string(), "--out", out.to_str().unwrap()]);
    let done = command.output().unwrap();
    let text = String::from_utf8_lossy(&done.stdout);
    let reports: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let log = std::fs::read_to_string(out.join("disturbed.log")).unwrap_or_default();
    assert!(done.status.success(), "{text}\n{}\n{log}", String::from_utf8_lossy(&done.stderr));
    assert_eq!(reports.len(), rounds);
    let faults = reports.iter().flat_map(|r| r["faults"].as_array().unwrap());
    let kinds: BTreeSet<&str> = faults.filter_map(|f| f.as_str()?.split(':').next()).collect();
    let all = ["corrupt", "disk", "flip", "hang", "kill", "lose", "nan", "slow", "stop"];
    assert_eq!(kinds, BTreeSet::from(all), "kinds of faults: {text}");
    for report in &reports {
        // Faults that pass unnoticed would prove nothing.
        assert!(!report["events"].as_object().unwrap().is_empty(), "{report}");
    }
    assert_eq!(processes_of(dir.path()), Vec::<String>::new(), "processes are left");
}

#[test]
fn a_drill_says_what_differs() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = dir.path().join("drill.toml");
    std::fs::write(&recipe, RECIPE).unwrap();
    let out = dir.path().join("drill");
    // Without verification nobody notices a wrong bit, and the checkpoint differs.
    let mut command: Command = ferrotron(&["drill", recipe.to_str().unwrap(), "--device", "cpu"]);
    command
        .args(["--ranks", "2", "--spares", "0", "--steps", "60", "--every", "20steps", "--faults", "flip"]);
    command.args(["--set", "fault.verify_every=0", "--set", "fault.rerun=false"]);
    let done = command.args(["--out", out.to_str().unwrap()]).output().unwrap();
    let text = String::from_utf8_lossy(&done.stdout);
    assert_eq!(done.status.code(), Some(1), "{text}\n{}", String::from_utf8_lossy(&done.stderr));
    assert!(text.contains("FAILED") && text.contains("differs from the undisturbed run's"), "{text}");
}
