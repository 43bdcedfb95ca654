//! `runs`, `runs diff` and `runs export --format csv` on real and made-up run folders.

// The lints see a test only where `#[test]` stands; everything here is one.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use ferrotron_core::events::{Ending, Event, EventLog, RunEnd, RunStart, Step};
use serde_json::Value;
use std::path::Path;
use support::{assert_one_sentence_error, losses, recipe, run, run as ferrotron};

fn train(recipe: &Path, out: &Path, more: &[&str]) {
    let mut args = vec!["train", recipe.to_str().unwrap(), "--out", out.to_str().unwrap(), "--device", "cpu"];
    args.extend(more);
    let e = run(&args);
    assert_eq!(e.code, Some(0), "{e:?}");
}

fn text(args: &[&str]) -> String {
    let e = ferrotron(args);
    assert_eq!(e.code, Some(0), "{args:?}: {e:?}");
    e.out
}

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&text(&[args, &["--json"]].concat())).unwrap()
}

/// A run folder with a log of `steps` steps and perhaps an end.
fn made_up(dir: &Path, steps: u64, ending: Option<Ending>) {
    std::fs::create_dir_all(dir).unwrap();
    let mut log = EventLog::create(dir).unwrap();
    let start = RunStart { recipe: "made-up".into(), steps: 10, ..RunStart::default() };
    log.write(&Event::RunStart(start)).unwrap();
    for step in 1..=steps {
        let e = Step { step, loss: 2.0, tokens_per_s: 100.0 * step as f64, ..Step::default() };
        log.write(&Event::Step(e)).unwrap();
    }
    if let Some(ending) = ending {
        let reason = Some("a \u{1b}[31mred reason".into());
        let end = RunEnd { step: steps, ending, reason, ..RunEnd::default() };
        log.write(&Event::RunEnd(end)).unwrap();
    }
}

#[test]
fn runs_are_listed_with_their_state() {
    let dir = tempfile::tempdir().unwrap();
    let all = dir.path().join("runs");
    made_up(&all.join("failed"), 3, Some(Ending::Failed));
    made_up(&all.join("stopped"), 4, Some(Ending::Interrupted));
    made_up(&all.join("killed"), 5, None);
    // A log that is longer than what is read of it.
    made_up(&all.join("long\u{1b}[2J"), 20_000, Some(Ending::Finished));
    std::fs::create_dir(all.join("not-a-run")).unwrap();
    let held = ferrotron_core::train::lock_run(&all.join("stopped")).unwrap();
    let list = json(&["runs", all.to_str().unwrap()]);
    let list = list.as_array().unwrap();
    assert_eq!(list.len(), 4, "{list:?}");
    let find = |name: &str| list.iter().find(|r| r["name"].as_str().unwrap().starts_with(name)).unwrap();
    assert_eq!(find("failed")["state"], "failed");
    assert_eq!(find("stopped")["state"], "running");
    assert_eq!(find("killed")["state"], "interrupted");
    assert_eq!((&find("killed")["step"], &find("killed")["steps"]), (&5.into(), &10.into()));
    let long = find("long");
    assert_eq!((&long["state"], &long["step"]), (&"finished".into(), &20_000.into()));
    // The mean of the newest twenty.
    assert_eq!(long["tokens_per_s"], 100.0 * (20_000.0 - 9.5));
    assert_eq!((&long["recipe"], &long["last_event"]["kind"]), (&"made-up".into(), &"run_end".into()));
    drop(held);
    let shown = text(&["runs", all.to_str().unwrap()]);
    assert!(!shown.contains('\u{1b}'), "{shown}");
    let line = shown.lines().find(|l| l.starts_with("killed")).unwrap();
    let words: Vec<&str> = line.split_whitespace().collect();
    assert_eq!(words[..7], ["killed", "made-up", "interrupted", "5/10", "2.0000", "-", "300"], "{shown}");
    assert!(line.contains("step, "), "{line}");
    // A run folder itself, an empty folder, and none.
    assert_eq!(json(&["runs", all.join("failed").to_str().unwrap()])[0]["step"], 3);
    assert!(text(&["runs", all.join("not-a-run").to_str().unwrap()]).contains("no runs"));
    assert_one_sentence_error(&ferrotron(&["runs", dir.path().join("none").to_str().unwrap()]), "no folder");
}

#[test]
fn a_difference_names_keys_and_the_first_step() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), 6, "[eval]\nevery = 3\nbatches = 1\n");
    let [a, b, c] = ["a", "b", "c"].map(|name| dir.path().join(name));
    train(&recipe, &a, &[]);
    train(&recipe, &b, &["--set", "optimizer.lr=4e-3", "--set", "train.log_every=2"]);
    train(&recipe, &c, &[]);
    let [a, b, c] = [&a, &b, &c].map(|p| p.to_str().unwrap());
    let v = json(&["runs", "diff", a, b]);
    let keys: Vec<&str> = v["keys"].as_array().unwrap().iter().map(|k| k["key"].as_str().unwrap()).collect();
    assert_eq!(keys, ["train.log_every", "optimizer.lr", "optimizer.min_lr"], "{v}");
    assert_eq!(v["keys"][1]["b"], "0.004");
    // The first update is the second step's difference.
    assert_eq!(v["first_difference"], 2);
    let loss = v["curves"].as_array().unwrap().iter().find(|c| c["metric"] == "train/loss").unwrap();
    let logged: Vec<String> = losses(Path::new(a)).into_iter().map(|(_, loss)| loss).collect();
    let shown: Vec<String> = loss["a"].as_array().unwrap().iter().map(|p| p[1].to_string()).collect();
    assert_eq!(shown, logged);
    assert_eq!(loss["b"].as_array().unwrap().len(), 3);
    let shown = text(&["runs", "diff", a, b]);
    for words in ["optimizer.lr", "0.004", "differs from step 2", "train/loss (steps 1 to 6)", "B, last"] {
        assert!(shown.contains(words), "{words}:\n{shown}");
    }
    assert!(shown.contains("eval/loss (steps 3 to 6)"), "{shown}");
    // Two runs of the same command are the same.
    let same = text(&["runs", "diff", a, c]);
    assert!(
        same.contains("configurations are the same") && same.contains("the same in all common"),
        "{same}"
    );
    let e = ferrotron(&["runs", "diff", a, b, "--metric", "train/los"]);
    assert_one_sentence_error(&e, "an unknown metric");
    assert!(e.err.contains("train/loss"), "{e:?}");
}

#[test]
fn csv_has_a_row_for_every_step() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    train(&recipe(dir.path(), 4, "[eval]\nevery = 2\nbatches = 1\n"), &out, &[]);
    let run = out.to_str().unwrap();
    let piped = text(&["runs", "export", run, "--format", "csv", "--output", "-"]);
    let said = text(&["runs", "export", run, "--format", "csv"]);
    assert_eq!(said, format!("wrote {}\n", out.join("metrics.csv").display()));
    assert_eq!(std::fs::read_to_string(out.join("metrics.csv")).unwrap(), piped);
    let mut lines = piped.lines();
    let head: Vec<&str> = lines.next().unwrap().split(',').collect();
    let column = |name: &str| head.iter().position(|h| *h == name).unwrap();
    let rows: Vec<Vec<&str>> = lines.map(|l| l.split(',').collect()).collect();
    let of = |name: &str| rows.iter().map(|r| r[column(name)].to_string()).collect::<Vec<_>>();
    let logged: Vec<String> = losses(&out).into_iter().map(|(_, loss)| loss).collect();
    assert_eq!(of("train/loss"), logged);
    assert_eq!(of("step"), ["1", "2", "3", "4"]);
    let evaluated: Vec<bool> = of("eval/loss").iter().map(|x| !x.is_empty()).collect();
    assert_eq!(evaluated, [false, true, false, true]);
    assert_eq!(ferrotron(&["runs", "export", run]).code, Some(2), "it does not say which format");
}
