//! `--trace`: the trace has every rank and the requested steps, and does not change the run.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // all of it is test

mod common;

use common::*;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Duration events of a trace.
fn events(file: &Path) -> Vec<Value> {
    let json: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    json["traceEvents"].as_array().unwrap().iter().filter(|e| e["ph"] == "X").cloned().collect()
}

/// Calls of each kernel on each rank.
fn calls(events: &[Value]) -> BTreeMap<(u64, String), usize> {
    let mut out = BTreeMap::new();
    for e in events {
        let name = e["name"].as_str().unwrap().to_string();
        *out.entry((e["pid"].as_u64().unwrap(), name)).or_default() += 1;
    }
    out
}

fn losses(run: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(run.join("events.jsonl")).unwrap();
    let steps = text.lines().map(|l| serde_json::from_str::<Value>(l).unwrap());
    steps.filter(|v| v["kind"] == "step").map(|v| v["loss"].to_string()).collect()
}

#[test]
fn a_run_shows_its_last_steps() {
    let (dir, recipe) = folder();
    let at = |name: &str| dir.path().join(name);
    let train = |out: &str, more: &[&str]| {
        let out = at(out);
        let mut args = vec!["train", path(&recipe), "--out", path(&out), "--device", "cpu", "--steps", "5"];
        // Evaluation and checkpoints between the steps are no part of the timeline.
        args.extend(["--set", "parallel.tp=2", "--ranks", "2", "--set", "eval.every=1"]);
        args.extend(["--set", "checkpoint.every=2", "--threads", "1"]);
        args.extend(more);
        ok(&args)
    };
    train("plain", &[]);
    let text = train("one", &["--trace", path(&at("one.json")), "--trace-steps", "1"]);
    assert!(text.contains("trace: ") && text.contains("2 ranks") && text.contains("adam"), "{text}");
    assert!(text.contains("overlapped by own compute") && text.contains("tp: '"), "{text}");
    let lines = train("three", &["--trace", path(&at("three.json")), "--json"]);
    assert_eq!(losses(&at("plain")), losses(&at("one")));
    assert_eq!(losses(&at("plain")), losses(&at("three")));

    let (one, three) = (events(&at("one.json")), events(&at("three.json")));
    let ranks: BTreeSet<u64> = one.iter().map(|e| e["pid"].as_u64().unwrap()).collect();
    assert_eq!(ranks, BTreeSet::from([0, 1]));
    assert!(one.iter().any(|e| e["cat"] == "collective"));
    let thrice: BTreeMap<_, _> = calls(&one).into_iter().map(|(k, n)| (k, 3 * n)).collect();
    assert_eq!(calls(&three), thrice);
    // Both ranks do the same work.
    let of = |rank: u64| -> BTreeMap<String, usize> {
        calls(&one).into_iter().filter(|((r, _), _)| *r == rank).map(|((_, k), n)| (k, n)).collect()
    };
    assert_eq!(of(0), of(1));

    let last: Value = serde_json::from_str(lines.lines().last().unwrap()).unwrap();
    let trace = &last["trace"];
    assert_eq!(trace["ranks"], 2);
    let listed: u64 =
        trace["collectives"].as_array().unwrap().iter().map(|c| c["calls"].as_u64().unwrap()).sum();
    assert_eq!(listed as usize, three.iter().filter(|e| e["cat"] == "collective").count());
    let spans = &trace["communication"]["spans"];
    let [all, own, any] =
        ["ms", "under_own_compute_ms", "under_any_compute_ms"].map(|k| spans[k].as_f64().unwrap());
    assert!(all > 0.0 && own <= any && any <= all, "{spans}");
}

#[test]
fn a_benchmark_shows_steps_beside_the_timed_ones() {
    let (dir, recipe) = folder();
    let file = dir.path().join("b.json");
    let args = ["bench", "train", "--work", path(&recipe), "--steps", "1", "--peak", "1", "--device", "cpu"];
    let v = json(&[&args[..], &["--trace", path(&file), "--trace-steps", "2"]].concat());
    let kernels = v["trace"]["kernels"].as_array().unwrap();
    let calls: u64 = kernels.iter().map(|k| k["calls"].as_u64().unwrap()).sum();
    // Spans of layers and what the host reads on a stream of its own are no kernels of the step.
    let all = events(&file);
    let gemm = all.iter().find(|e| e["name"].as_str().unwrap().starts_with("gemm")).unwrap();
    let computes = |e: &&Value| e["cat"] == "kernel" && e["tid"] == gemm["tid"];
    assert_eq!(calls as usize, all.iter().filter(computes).count());
    assert!(kernels.iter().any(|k| k["name"].as_str().unwrap().starts_with("gemm")));
    assert_eq!(json(&args)["trace"], Value::Null);
}

#[test]
fn a_run_without_a_step_keeps_the_trace_of_the_one_before() {
    let (dir, recipe) = folder();
    let (out, file) = (dir.path().join("run"), dir.path().join("t.json"));
    let train = ["train", path(&recipe), "--out", path(&out), "--device", "cpu", "--trace", path(&file)];
    ok(&train);
    let traced = std::fs::read(&file).unwrap();
    assert!(!events(&file).is_empty());
    let text = ok(&train);
    assert!(text.contains("no step was traced"), "{text}");
    assert!(std::fs::read(&file).unwrap() == traced);
}

#[test]
fn a_file_that_cannot_be_written_is_found_first() {
    let (dir, recipe) = folder();
    let (out, file) = (dir.path().join("run"), dir.path().join("no/folder.json"));
    let error = fails(&["train", path(&recipe), "--out", path(&out), "--trace", path(&file)], 1);
    assert!(error.contains("folder.json: cannot write the trace"), "{error}");
    assert!(!out.exists());
    // The check leaves nothing behind where a run does not begin.
    let (file, no_folder) = (dir.path().join("t.json"), recipe.join("run"));
    fails(&["train", path(&recipe), "--out", path(&no_folder), "--trace", path(&file)], 1);
    assert!(!file.exists());
    fails(&["train", path(&recipe), "--trace", path(&file), "--trace-steps", "0"], 2);
}
