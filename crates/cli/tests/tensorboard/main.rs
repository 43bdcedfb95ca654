//! TensorBoard's own reader finds in our event files what `events.jsonl` says.

// The lints see a test only where `#[test]` stands; everything here is one.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../support/mod.rs"]
mod support;

use std::path::{Path, PathBuf};
use std::process::Command;
use support::{files, recipe, run};

/// The reader that scripts/tensorboard.sh installs, which CI requires; elsewhere tests print that they are skipped.
fn reader(test: &str) -> Option<PathBuf> {
    let named = std::env::var_os("FERROTRON_TENSORBOARD").map(PathBuf::from);
    let installed = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/tensorboard");
    let found = named.unwrap_or(installed);
    if found.join("tensorboard").is_dir() {
        return Some(found);
    }
    assert!(std::env::var_os("CI").is_none(), "{test} needs TensorBoard: scripts/tensorboard.sh");
    eprintln!("SKIPPED: {test}: no TensorBoard, scripts/tensorboard.sh installs it");
    None
}

/// Numbers of scalars and histograms that TensorBoard reads as the log has them.
fn compare(reader: &Path, run: &Path, folder: &Path) -> [usize; 2] {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tensorboard/read.py");
    let out =
        Command::new("python3").arg(script).args([run, folder]).env("PYTHONPATH", reader).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(out.status.success(), "{}{}", text(&out.stdout), text(&out.stderr));
    let counts: Vec<usize> = text(&out.stdout).split_whitespace().map(|n| n.parse().unwrap()).collect();
    counts.try_into().unwrap()
}

/// An MoE run with everything that is plotted.
const MORE: &str = "[moe]\nexperts = 4\ntopk = 2\nlog = \"all\"\n\
    [eval]\nevery = 2\nbatches = 1\n[checkpoint]\nevery = 3\nkeep = 0\n\
    [precision]\nrecipe = \"fp8-current\"\nstats_every = 2\n[logging]\ntensorboard = true\n";

fn train(recipe: &Path, out: &Path, more: &[&str]) {
    let mut args = vec!["train", recipe.to_str().unwrap(), "--out", out.to_str().unwrap(), "--device", "cpu"];
    args.extend(more);
    let e = run(&args);
    assert_eq!(e.code, Some(0), "{e:?}");
}

fn event_files(folder: &Path) -> Vec<PathBuf> {
    files(folder).into_keys().collect()
}

#[test]
fn tensorboard_reads_what_the_log_says_also_after_a_resume() {
    let Some(reader) = reader("tensorboard_reads_what_the_log_says_also_after_a_resume") else { return };
    let dir = tempfile::tempdir().unwrap();
    let (recipe, out) = (recipe(dir.path(), 5, MORE), dir.path().join("run"));
    let folder = out.join("tensorboard");
    train(&recipe, &out, &[]);
    let [scalars, histograms] = compare(&reader, &out, &folder);
    assert!(scalars > 5 * 10 && histograms > 5 * 2, "{scalars} {histograms}");
    // Steps 4 and 5 are done again, as after a crash, and the run goes further.
    std::fs::remove_dir_all(out.join("checkpoints/step-00000005")).unwrap();
    let before = event_files(&folder);
    train(&recipe, &out, &["--steps", "8"]);
    let [later, _] = compare(&reader, &out, &folder);
    assert!(later > scalars, "{later} {scalars}");
    let after = event_files(&folder);
    assert!(before.len() == 1 && after.len() == 1 && after > before, "{before:?} {after:?}");
    // Another run in its place has nothing of this one.
    train(&recipe, &out, &["--fresh", "--set", "train.seed=9"]);
    assert_eq!(compare(&reader, &out, &folder)[0], scalars);
}

#[test]
fn an_export_has_what_the_run_would_have_written() {
    let Some(reader) = reader("an_export_has_what_the_run_would_have_written") else { return };
    let dir = tempfile::tempdir().unwrap();
    let (recipe, out) = (recipe(dir.path(), 4, MORE), dir.path().join("run"));
    train(&recipe, &out, &[]);
    let written =
        std::fs::read(out.join("tensorboard").join(&event_files(&out.join("tensorboard"))[0])).unwrap();
    let export = |more: &[&str]| {
        let mut args = vec!["runs", "export", out.to_str().unwrap(), "--format", "tensorboard", "--json"];
        args.extend(more);
        let e = run(&args);
        assert_eq!(e.code, Some(0), "{e:?}");
        let json: serde_json::Value = serde_json::from_str(&e.out).unwrap();
        std::fs::read(json["path"].as_str().unwrap()).unwrap()
    };
    let elsewhere = dir.path().join("elsewhere/deep");
    let exported = export(&["--output", elsewhere.to_str().unwrap()]);
    compare(&reader, &out, &elsewhere);
    // The same records; a run stamps the head of its file before its first event.
    assert_eq!(exported.len(), written.len());
    assert_eq!(export(&[]), exported);
    assert_eq!(event_files(&out.join("tensorboard")).len(), 1);
}
