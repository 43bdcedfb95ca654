//! The same results under every layout and launcher.

use super::support::{files, losses, run};
use super::{mpi, recipe, text};
use serde_json::Value;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(120);

/// Layouts of four ranks, as one side of `parity`.
const FOUR: [&str; 8] =
    ["tp=2,dp=2", "tp=2", "tp=4", "dp=4", "pp=2,dp=2", "tp=2,pp=2", "tp=2,cp=2", "pp=2,cp=2"];

/// Asserts that a layout agrees with one rank, and that only rank 0 printed the report.
pub fn agrees(o: &mpi::Outcome, layout: &str) {
    let whole: Vec<&String> = o.out.iter().filter(|t| !t.is_empty()).collect();
    assert!(whole.len() == 1 && !o.out[0].is_empty(), "only rank 0 shows results: {}", o.text);
    let v: Value = serde_json::from_str(whole[0]).unwrap();
    assert_eq!(v["agree"], true, "{layout}: {v}");
    assert!(v["tensors"].as_u64().unwrap() > 40, "{layout}: {v}");
    // The bound of the claim, not what parity allows by itself.
    for r in v["report"].as_array().unwrap().iter().filter(|r| r["kind"] != "weight") {
        assert!(r["relative"].as_f64().unwrap() <= 1e-5, "{layout}: {r}");
    }
    let [a, b] = [0, 1].map(|i| v["loss"][i].as_f64().unwrap());
    assert!((a / b - 1.0).abs() < 1e-6, "{layout}: {a} and {b}");
}

#[test]
fn loss_and_gradients_of_four_processes_are_those_of_one_rank() {
    if !mpi::installed("loss_and_gradients_of_four_processes_are_those_of_one_rank") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), 2);
    for layout in FOUR {
        let args = ["parity", "dp=1", layout, "--recipe", text(&recipe), "--json"];
        agrees(&mpi::ferrotron(4, &[], &args).wait(LIMIT).succeeded(), layout);
    }
    // A difference is seen and ends all of them.
    let args = ["parity", "dp=1", "tp=2", "--recipe", text(&recipe), "--tolerance", "0"];
    assert_eq!(mpi::ferrotron(4, &[], &args).wait(LIMIT).code, Some(1));
}

#[test]
fn a_run_of_processes_is_that_of_threads_to_the_last_bit() {
    if !mpi::installed("a_run_of_processes_is_that_of_threads_to_the_last_bit") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), 7);
    let [threads, processes] = ["threads", "processes"].map(|n| dir.path().join(n));
    let base = ["train", text(&recipe), "--set", "parallel.tp=2", "--out"];
    let e = run(&[&base[..], &[text(&threads), "--ranks", "4", "--device", "cpu"]].concat());
    assert_eq!(e.code, Some(0), "{}", e.err);
    assert!(e.err.contains("4 ranks (tp=2, dp=2)"), "{}", e.err);
    let o = mpi::ferrotron(4, &[], &[&base[..], &[text(&processes)]].concat()).wait(LIMIT).succeeded();
    assert!(o.err[0].contains("4 ranks (tp=2, dp=2)"), "{}", o.text);
    assert!((1..4).all(|r| o.out[r].is_empty() && o.err[r].is_empty()), "{}", o.text);
    assert_eq!(losses(&threads), losses(&processes));
    assert_eq!(losses(&threads).len(), 7);
    let [a, b] = [&threads, &processes].map(|d| files(&d.join("checkpoints")));
    assert!(a.len() >= 3 && a == b, "checkpoints differ");
    // What is sent is shown, and the same whatever carries it. Ranks agree that a save is done, with an all-gather of bytes, in the step
    // in which they find that it is.
    assert!(o.out[0].contains("communication") && e.out.contains("sent per step by rank 0"), "{}", o.text);
    let sent = |run: &std::path::Path| -> Vec<Value> {
        let text = std::fs::read_to_string(run.join("events.jsonl")).unwrap();
        let lines = text.lines().map(|l| serde_json::from_str::<Value>(l).unwrap());
        let sent = lines.filter(|v| v["kind"] == "step").map(|v| v["sent"].clone());
        let without_saves = |mut v: Value| {
            v["world"].as_object_mut().unwrap().remove("all-gather of bytes");
            v
        };
        sent.map(without_saves).collect()
    };
    assert_eq!(sent(&threads), sent(&processes));
    assert!(
        sent(&threads).iter().all(|s| s["tp"].is_object() && s["dp_cp"].is_object()),
        "{:?}",
        sent(&threads)
    );
    // Started again it has nothing to do; --fresh begins anew.
    let o = mpi::ferrotron(4, &[], &[&base[..], &[text(&processes)]].concat()).wait(LIMIT).succeeded();
    assert!(o.err[0].contains("is finished"), "{}", o.text);
    let again = [&base[..], &[text(&processes), "--fresh"]].concat();
    mpi::ferrotron(4, &[], &again).wait(LIMIT).succeeded();
    assert_eq!(losses(&threads), losses(&processes));
}

/// The default recipe, whose run ends with a sample where the layout supports generation.
#[test]
fn every_kind_of_layout_trains_to_its_end() {
    let dir = tempfile::tempdir().unwrap();
    for set in ["tp=2", "cp=2", "pp=2", "dp=2"] {
        let out = dir.path().join(set);
        let key = format!("parallel.{set}");
        let args =
            ["train", "--steps", "2", "--ranks", "2", "--device", "cpu", "--set", &key, "--out", text(&out)];
        let e = run(&args);
        assert_eq!(e.code, Some(0), "{set}: {}", e.err);
        assert!(e.out.contains("run folder"), "{set}: {}", e.out);
        assert_eq!(losses(&out).len(), 2, "{set}");
    }
    let drawn = run(&["train", "--dry-run", "--ranks", "2", "--set", "parallel.pp=2"]);
    assert!(drawn.out.contains("bubble") && drawn.out.contains("stages: Ett|ttL"), "{}", drawn.out);
}

#[test]
fn sizes_that_do_not_fit_are_refused_with_those_that_do() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), 1);
    let refused = |args: &[&str], words: &[&str]| {
        let e = run(&[&["train", text(&recipe), "--dry-run"], args].concat());
        assert_eq!(e.code, Some(2), "{args:?}: {}", e.err);
        assert!(words.iter().all(|w| e.err.contains(w)), "{args:?}: {}", e.err);
        assert_eq!(e.err.lines().count(), 1, "{args:?}: {}", e.err);
    };
    refused(&["--ranks", "6", "--set", "parallel.tp=4"], &["6 ranks", "4 or 8 ranks", "tp=3"]);
    refused(&["--ranks", "6", "--set", "parallel.dp=4"], &["dp=4", "6 ranks", "dp=6"]);
    refused(&["--ranks", "0"], &["at least 1"]);
    refused(&["--ranks", "4", "--set", "parallel.tp=2", "--set", "parallel.cp=4"], &["4 ranks", "8"]);
    // What is left of the ranks has other data.
    let e = run(&["train", text(&recipe), "--dry-run", "--json", "--ranks", "8", "--set", "parallel.tp=2"]);
    let v: Value = serde_json::from_str(&e.out).unwrap();
    assert_eq!(v["config"]["parallel"]["dp"], 4);
    if !mpi::installed("sizes_that_do_not_fit_are_refused_with_those_that_do") {
        return;
    }
    let refused = |args: &[&str], words: &[&str]| {
        let o = mpi::ferrotron(2, &[], &[&["train", text(&recipe), "--out", "/nowhere"], args].concat());
        let o = o.wait(LIMIT);
        assert_eq!(o.code, Some(2), "{}", o.text);
        // Whoever is first ends the others.
        let said = |r: usize| o.says(r, &[&[&*format!("error: rank {r}: ")], words].concat());
        assert!(said(0) || said(1), "{}", o.text);
    };
    refused(&["--ranks", "4"], &["--ranks 4", "2 processes", "leave --ranks out"]);
    refused(&["--set", "parallel.tp=3"], &["2 ranks", "tp=2"]);
    refused(&["--set", "parallel.dp=3"], &["2 ranks", "dp=2"]);
}

#[test]
fn an_error_of_one_rank_ends_all_of_them() {
    if !mpi::installed("an_error_of_one_rank_ends_all_of_them") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), 50);
    // Only the first rank writes, so only it fails.
    let file = dir.path().join("file");
    std::fs::write(&file, "in the way").unwrap();
    let args = ["train", text(&recipe), "--out", text(&file)];
    let o = mpi::ferrotron(4, &[], &args).wait(LIMIT);
    assert_eq!(o.code, Some(1), "{}", o.text);
    assert!(o.says(0, &["error: rank 0: ", "the run folder"]), "{}", o.text);
    for rank in 1..4 {
        let me = format!("error: rank {rank}: ");
        assert!(o.says(rank, &[&me, "rank 0 failed", "the run folder"]), "rank {rank}: {}", o.text);
    }
    assert!(o.seconds < 20.0, "{}", o.seconds);
}
