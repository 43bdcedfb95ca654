//! `--fresh` replaces a run only by a run.

use super::support::soak::rounds;
use super::support::{SeededRng, ferrotron, files, recipe, run, wait};
use super::{signal, train, wait_for_steps};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The files of a run folder, without locks, whose text names the last process.
fn contents(out: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    files(out).into_iter().filter(|(p, _)| !p.ends_with(".lock")).collect()
}

/// Every file but the log, which a resumed run appends to.
fn state(out: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let is_log = |p: &Path| p.ends_with("events.jsonl") || p.starts_with("logs");
    contents(out).into_iter().filter(|(p, _)| !is_log(p)).collect()
}

#[test]
fn what_fails_before_the_first_step_costs_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), 4, "");
    let out = dir.path().join("run");
    assert_eq!(run(&train(&recipe, &out, &[])).code, Some(0));
    let before = contents(&out);
    for wrong in [
        &["--data", "no/such/data"][..],
        &["--set", "model.hf=no/such/model"],
        &["--set", "data.tokenizer=no/such/tokenizer"],
        &["--set", "model.heads=3"],
        &["--set", "model.vocab=200"],
        &["--set", "parallel.tp=3"],
    ] {
        let e = run(&train(&recipe, &out, &[&["--fresh"], wrong].concat()));
        assert!(matches!(e.code, Some(1 | 2)), "{wrong:?}: {e:?}");
        assert_eq!(contents(&out), before, "{wrong:?}");
    }
    // A new run then replaces it, checkpoints included.
    let e = run(&train(&recipe, &out, &["--fresh", "--steps", "3"]));
    assert_eq!(e.code, Some(0), "{}", e.err);
    assert!(e.err.contains(".replaced until the first checkpoint"), "{}", e.err);
    assert!(
        out.join("checkpoints/step-00000003").is_dir() && !out.join("checkpoints/step-00000004").exists()
    );
    assert!(!out.join(".replaced").exists());
}

#[test]
fn a_live_run_is_refused_by_its_process() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), 100_000, "[checkpoint]\nevery = 5\n");
    let out = dir.path().join("run");
    let child = ferrotron(&train(&recipe, &out, &[])).spawn().unwrap();
    wait_for_steps(&out, 6);
    for more in [&["--fresh"][..], &[]] {
        let e = run(&train(&recipe, &out, more));
        assert_eq!(e.code, Some(1), "{}", e.err);
        assert!(e.err.contains(&format!("process {}", child.id())), "{more:?}: {}", e.err);
    }
    let steps = super::of_kind(&out, "step").len();
    wait_for_steps(&out, steps + 5);
    signal("TERM", child.id());
    let e = wait(child);
    assert_eq!(e.code, Some(0), "{}", e.err);
    // It has lost nothing: its log is whole and it resumes.
    let steps = super::support::losses(&out);
    assert!(steps.iter().map(|(n, _)| *n).eq(1..=steps.len() as u64));
    let e = run(&train(&recipe, &out, &["--steps", &(steps.len() + 2).to_string()]));
    assert!(e.code == Some(0) && e.err.contains("resuming small"), "{}", e.err);
}

#[test]
fn a_run_replaced_by_one_that_saved_nothing_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), 100_000, "");
    let out = dir.path().join("run");
    assert_eq!(run(&train(&recipe, &out, &["--steps", "4"])).code, Some(0));
    let before = state(&out);
    // Twice: the second time over the remains of the first.
    for _ in 0..2 {
        let mut child = ferrotron(&train(&recipe, &out, &["--fresh"])).spawn().unwrap();
        let aside = out.join(".replaced/checkpoints/step-00000004");
        super::wait_until("the new run", || aside.is_dir() && super::of_kind(&out, "step").len() >= 2);
        child.kill().unwrap();
        wait(child);
    }
    let e = run(&train(&recipe, &out, &["--steps", "4"]));
    assert_eq!(e.code, Some(0), "{}", e.err);
    assert!(e.err.contains("is back: the new one had saved no checkpoint"), "{}", e.err);
    assert!(e.err.contains("small is finished: all 4 steps are done"), "{}", e.err);
    assert_eq!(state(&out), before);
}

#[test]
fn killed_at_any_moment_the_old_or_the_new_run_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), 8, "[checkpoint]\nevery = 3\n");
    let out = dir.path().join("run");
    let begin = std::time::Instant::now();
    assert_eq!(run(&train(&recipe, &out, &[])).code, Some(0));
    let length = begin.elapsed();
    let end = files(&out.join("checkpoints/step-00000008"));
    assert!(end.len() >= 3);
    let mut dice = SeededRng(77);
    let mut restored = 0;
    for round in 0..rounds(12) {
        let mut child = ferrotron(&train(&recipe, &out, &["--fresh"])).spawn().unwrap();
        std::thread::sleep(length.mul_f64(dice.below(1000) as f64 / 1000.0));
        child.kill().unwrap();
        wait(child);
        let checkpoints = |of: &str| {
            let entries = std::fs::read_dir(out.join(of)).into_iter().flatten();
            entries.filter(|e| e.as_ref().unwrap().file_name().to_string_lossy().starts_with("step-")).count()
        };
        let [here, aside] = [checkpoints("checkpoints"), checkpoints(".replaced/checkpoints")];
        assert!(here + aside > 0, "round {round}: every checkpoint is lost");
        // Both runs are of the same recipe, so either one ends with the same bytes.
        let e = run(&train(&recipe, &out, &[]));
        assert_eq!(e.code, Some(0), "round {round}: {}", e.err);
        restored += usize::from(e.err.contains("is back"));
        assert!(files(&out.join("checkpoints/step-00000008")) == end, "round {round}");
        assert!(!out.join(".replaced").exists());
    }
    println!("{restored} of {} kills restored the old run", rounds(12));
}
