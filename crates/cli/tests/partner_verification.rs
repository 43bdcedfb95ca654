//! Verification by other processes: ranks change places, the result has the same bytes, wrong bits are found and named, also
//! those of a process that computes them every time.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use serde_json::Value;
use std::path::Path;
use support::{Finished, ferrotron, files, wait};

const RECIPE: &str = "[model]\nlayers = 2\nhidden = 64\nheads = 4\nkv_heads = 2\nffn = 64\nvocab = 256\n\
     [data]\npath = \"embedded\"\nseq_len = 32\n\
     [train]\nsteps = 30\nglobal_batch = 8\nmicro_batch = 1\nlog_every = 1\n\
     [checkpoint]\nevery = 10\nkeep = 0\n[eval]\nevery = 6\nbatches = 1\n";

const PARTNER: [&str; 8] = [
    "--set",
    "fault.snapshot_every=10",
    "--set",
    "fault.verify_every=10",
    "--set",
    "fault.verify_on_partner=true",
    "--set",
    "fault.restarts=3",
];

/// Trains with 4 processes in `dir/name`.
fn train(dir: &Path, name: &str, more: &[&str]) -> Finished {
    let recipe = dir.join("job.toml");
    std::fs::write(&recipe, RECIPE).unwrap();
    let mut command = ferrotron(&["launch", "-n", "4", "train", recipe.to_str().unwrap(), "--device", "cpu"]);
    command.args(["--timeout", "20", "--out", dir.join(name).to_str().unwrap()]).args(more);
    wait(command.spawn().unwrap())
}

fn events(run: &Path, kind: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(run.join("events.jsonl")).unwrap();
    let all = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    all.filter(|e| e["kind"] == kind).collect()
}

/// Steps and losses in the log.
fn losses(run: &Path) -> Vec<(u64, u64)> {
    let step = |e: Value| (e["step"].as_u64().unwrap(), e["loss"].as_f64().unwrap().to_bits());
    events(run, "step").into_iter().map(step).collect()
}

fn checkpoint(run: &Path) -> Vec<(std::path::PathBuf, Vec<u8>)> {
    files(&run.join("checkpoints/step-00000030")).into_iter().collect()
}

#[test]
fn other_processes_come_to_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for more in [&["--set", "parallel.tp=2"][..], &["--set", "parallel.zero=3"], &[]] {
        assert_eq!(train(dir, "a", &[more, &["--fresh"]].concat()).code, Some(0));
        let done = train(dir, "b", &[&PARTNER[..], more, &["--fresh"]].concat());
        assert_eq!(done.code, Some(0), "{}", done.err);
        let (a, b) = (dir.join("a"), dir.join("b"));
        assert!(checkpoint(&a) == checkpoint(&b), "{more:?}: checkpoints differ");
        assert_eq!(losses(&a), losses(&b), "{more:?}: the log reads like that of one run");
        assert_eq!(events(&a, "eval").len(), events(&b, "eval").len());
        assert_eq!(events(&b, "restart").len() + events(&b, "resume").len(), 0);
        let reruns = events(&b, "rerun");
        let by_others = reruns.iter().filter(|e| e["reason"] == "verification by other processes").count();
        assert_eq!(by_others, 3, "{reruns:?}");
        assert!(reruns.iter().all(|e| e["outcome"] == "the same bits"), "{reruns:?}");
    }
}

#[test]
fn wrong_bits_are_found_undone_and_named() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    assert_eq!(train(dir, "a", &[]).code, Some(0));
    // In gradients and in optimizer state.
    for (i, flip) in
        ["rank=2,step=7,target=gradient,bit=20", "rank=1,step=13,target=optimizer,bit=20"].iter().enumerate()
    {
        let (name, inject) = (format!("b{i}"), format!("fault.inject=[\"flip:{flip}\"]"));
        let done = train(dir, &name, &[&PARTNER[..], &["--set", &inject]].concat());
        assert_eq!(done.code, Some(0), "{}", done.err);
        let b = dir.join(&name);
        assert!(checkpoint(&dir.join("a")) == checkpoint(&b), "{flip}: checkpoints differ");
        let faults = events(&b, "fault");
        assert_eq!(faults.len(), 1, "{faults:?}");
        let rank: u64 = flip[5..6].parse().unwrap();
        assert_eq!(
            (faults[0]["rank"].as_u64(), faults[0]["fault"].as_str()),
            (Some(rank), Some("transient"))
        );
        // Lines of wrong steps are followed by right ones.
        let last: std::collections::BTreeMap<u64, u64> = losses(&b).into_iter().collect();
        assert_eq!(last.into_iter().collect::<Vec<_>>(), losses(&dir.join("a")));
    }
}

#[test]
fn hardware_that_is_broken_for_good_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let inject = "fault.inject=[\"flip:process=1,step=4,target=gradient,bit=20\"]";
    let done = train(dir.path(), "b", &[&PARTNER[..], &["--set", inject]].concat());
    assert_eq!(done.code, Some(16), "{}", done.err);
    let faults = events(&dir.path().join("b"), "fault");
    assert_eq!(faults.len(), 1, "{faults:?}");
    assert_eq!(faults[0]["fault"], "persistent");
    assert!(done.err.contains("whatever its rank"), "{}", done.err);
    // Ranks as threads stay where they are, and the run says so.
    let recipe = dir.path().join("job.toml");
    let mut command =
        ferrotron(&["train", recipe.to_str().unwrap(), "--device", "cpu", "--ranks", "2", "--steps", "10"]);
    let threads = wait(
        command.args(&PARTNER[..6]).args(["--out", dir.path().join("t").to_str().unwrap()]).spawn().unwrap(),
    );
    assert_eq!(threads.code, Some(0), "{}", threads.err);
    assert!(threads.err.contains("verified in place"), "{}", threads.err);
    // A second run in place does not see it.
    let in_place = [&PARTNER[..4], &["--set", inject, "--fresh"]].concat();
    assert_eq!(train(dir.path(), "b", &in_place).code, Some(0));
    assert!(events(&dir.path().join("b"), "fault").is_empty());
}
