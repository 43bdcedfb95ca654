//! The regression suite: it passes on this program, and names what was broken on purpose.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use serde_json::Value;
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, MutexGuard};

/// One test at a time: times are measured.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Runs `regress` on the CPU; whether it passed, and its report.
fn regress(folder: &Path, args: &[&str]) -> (bool, Value) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrotron"));
    command.args(["regress", "--device", "cpu", "--json", "--out"]).arg(folder.join("runs")).args(args);
    let done = command.output().unwrap();
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    let report = serde_json::from_str(&text);
    let report = report.unwrap_or_else(|e| panic!("{e}: {text}{}", String::from_utf8_lossy(&done.stderr)));
    (done.status.success(), report)
}

/// Metrics of a case that differ, each with its first step.
fn differences(report: &Value, case: &str) -> Vec<(String, Option<u64>)> {
    let cases = report["cases"].as_array().unwrap();
    let of = cases.iter().find(|c| c["case"] == case).unwrap_or_else(|| panic!("no {case} in {report}"));
    assert!(of["error"].is_null(), "{of}");
    let list = of["differences"].as_array().unwrap();
    list.iter().map(|d| (d["metric"].as_str().unwrap().to_string(), d["step"].as_u64())).collect()
}

#[test]
fn every_case_is_as_recorded() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let (passed, report) = regress(folder.path(), &["--no-time"]);
    assert!(passed, "{report:#}");
    let cases = report["cases"].as_array().unwrap();
    assert!(cases.len() >= 16, "{report:#}");
    for case in cases {
        // Without times there is nothing to say of kernels.
        let expected = if case["case"] == "gemm" { Value::Null } else { Value::Bool(true) };
        assert_eq!(case["passed"], expected, "{case:#}");
    }
}

#[test]
fn a_learning_rate_that_is_off_by_one_percent_is_found() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let (passed, report) = regress(folder.path(), &["dense", "--no-time", "--set", "optimizer.lr=1.01e-3"]);
    assert!(!passed);
    let found = differences(&report, "dense");
    assert_eq!(found[0], ("lr".into(), Some(1)), "{found:?}");
    // The losses tell it as well, should the rate be wrong only inside of the optimizer.
    let loss = found.iter().find(|(metric, _)| metric == "loss").unwrap_or_else(|| panic!("{found:?}"));
    assert!(loss.1.is_some_and(|step| (2..=12).contains(&step)), "{found:?}");
}

#[test]
fn a_gradient_scale_that_is_lost_is_found() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let (passed, report) =
        regress(folder.path(), &["dense", "moe", "--no-time", "--set", "fault.inject=scale:step=5,factor=4"]);
    assert!(!passed);
    for case in ["dense", "moe"] {
        assert_eq!(differences(&report, case)[0], ("grad_norm".into(), Some(5)), "{report:#}");
    }
}

#[test]
fn a_leak_of_a_mebibyte_a_step_is_found() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let (passed, report) =
        regress(folder.path(), &["dense", "--no-time", "--set", "fault.inject=leak:step=1"]);
    assert!(!passed);
    assert_eq!(differences(&report, "dense"), [("resident memory per step".into(), None)], "{report:#}");
    // What the allocator accounts for is found by its step.
    let (passed, report) = regress(folder.path(), &["dense", "--no-time", "--set", "train.micro_batch=4"]);
    let found = differences(&report, "dense");
    assert!(!passed && found.contains(&("memory".into(), Some(1))), "{found:?}");
}

/// Records the GEMMs of this program, measures them again, and compares them with times that are 1/1.1 of the recorded ones: this program
/// is ten percent slower than that. Whether the second measurement passed, and whether the third was found to be slower.
fn slower_gemms(folder: &Path) -> (bool, bool) {
    let path = folder.join("times.toml");
    let file = path.to_str().unwrap();
    // On one thread: two would wait for each other whenever another process takes a core. In f16, which is not multiplied by AMX:
    // virtual machines share that unit with others.
    let how = ["gemm", "--threads", "1", "--set", "precision.dtype=f16"];
    let again = [&how[..], &["--expected", file]].concat();
    assert!(regress(folder, &[&how[..], &["--record", file]].concat()).0);
    let (same, _) = regress(folder, &again);
    let mut recorded: toml::Table = std::fs::read_to_string(&path).unwrap().parse().unwrap();
    let times = recorded["case"]["gemm"]["time"].as_table_mut().unwrap();
    assert!(times.len() >= 9, "{times:?}");
    times.iter_mut().for_each(|(_, t)| *t = (t.as_float().unwrap() / 1.1).into());
    std::fs::write(&path, recorded.to_string()).unwrap();
    let (passed, report) = regress(folder, &again);
    let found = differences(&report, "gemm");
    (same, !passed && found.iter().any(|(metric, _)| metric == "time of all kernels, mean"))
}

#[test]
fn a_gemm_that_is_ten_percent_slower_is_found() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    // A machine that changes its speed in between says nothing about the suite, but does not do so every time.
    let attempt = |_| Some(slower_gemms(folder.path())).filter(|outcome| *outcome != (true, true));
    let attempts: Vec<_> = (0..5).map_while(attempt).collect();
    assert!(attempts.len() < 5, "(passed, found): {attempts:?}");
}
