//! Every file-system call of `train`, `convert` and `data build` as the point of a crash: nothing that was there is lost,
//! nothing half-written is taken for whole, and the same command ends as if nothing had happened.
//!
//! A shared library (`crash.c`, built here with the C compiler) is preloaded and kills the program at the N-th call. The
//! tests take a seeded sample of N; with FERROTRON_SOAK set they take every N.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../support/mod.rs"]
mod support;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::{Finished, SeededRng, copy, ferrotron, files, losses, recipe, run, wait};

/// Points of a sample.
const SAMPLE: usize = 10;

/// The preloaded library.
struct Crasher {
    library: PathBuf,
    count: PathBuf,
}

impl Crasher {
    fn build(dir: &Path) -> Crasher {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/crash_points/crash.c");
        let library = dir.join("crash.so");
        let built = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-Wall", "-o"])
            .args([&library, &source])
            .arg("-ldl")
            .output()
            .expect("no C compiler `cc`");
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        Crasher { library, count: dir.join("count") }
    }

    fn run(&self, args: &[String], at: usize) -> Finished {
        let mut command = ferrotron(args);
        command.env("LD_PRELOAD", &self.library);
        command.env("FERROTRON_TEST_CRASH_AT", at.to_string());
        command.env("FERROTRON_TEST_CRASH_COUNT", &self.count);
        wait(command.spawn().unwrap())
    }

    /// Number of calls of a command that ends by itself.
    fn calls(&self, args: &[String]) -> usize {
        let e = self.run(args, 0);
        assert_eq!(e.code, Some(0), "{args:?}: {}", e.err);
        std::fs::read_to_string(&self.count).unwrap().parse().unwrap()
    }
}

/// Runs `args` in fresh copies of `before`, killed at each point. `whole` says whether what the crash left is acceptable;
/// then the same command must end well, and `same` compares the folder with that of an uninterrupted run.
fn crash_everywhere(
    name: &str,
    before: &Path,
    args: &dyn Fn(&Path) -> Vec<String>,
    whole: &dyn Fn(&Path, &str),
    same: &dyn Fn(&Path, &Path),
) {
    let dir = tempfile::tempdir().unwrap();
    let crasher = Crasher::build(dir.path());
    let fresh = |name: &str| {
        let at = dir.path().join(name);
        std::fs::create_dir_all(&at).unwrap();
        copy(before, &at);
        at
    };
    let reference = fresh("reference");
    let calls = crasher.calls(&args(&reference));
    assert!(calls > 5, "{name}: {calls} calls; is the library preloaded?");
    let mut dice = SeededRng(7);
    let points: Vec<usize> = match std::env::var_os("FERROTRON_SOAK") {
        Some(_) => (1..=calls).collect(),
        None => (0..SAMPLE).map(|_| 1 + dice.below(calls)).collect(),
    };
    let mut crashes = 0;
    for at in points {
        let here = fresh("crashed");
        let e = crasher.run(&args(&here), at);
        let what = format!("{name} at call {at} of {calls}");
        // Another order of threads may take fewer calls.
        assert!(e.code.is_none() || e.code == Some(0), "{what}: {}", e.err);
        crashes += usize::from(e.code.is_none());
        whole(&here, &what);
        let e = run(&args(&here));
        assert_eq!(e.code, Some(0), "{what}, then again: {}", e.err);
        assert!(!e.err.contains("panicked"), "{what}: {}", e.err);
        same(&reference, &here);
        std::fs::remove_dir_all(&here).unwrap();
    }
    assert!(crashes > 0, "{name}: no crash");
    println!("{name}: {crashes} crashes at {calls} calls");
}

fn strings(args: &[&str]) -> Vec<String> {
    args.iter().map(|s| s.to_string()).collect()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Folders hold the same files with the same bytes, locks and logs left aside.
fn assert_same_files(a: &Path, b: &Path) {
    let kept = |dir: &Path| -> BTreeMap<PathBuf, Vec<u8>> {
        files(dir).into_iter().filter(|(name, _)| !text(name).ends_with("lock")).collect()
    };
    let (a, b) = (kept(a), kept(b));
    assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>());
    assert!(a == b, "contents differ");
}

/// The last checkpoint and the losses of two finished runs.
fn assert_same_run(a: &Path, b: &Path) {
    assert_same_files(&a.join("run/checkpoints"), &b.join("run/checkpoints"));
    assert_eq!(losses(&a.join("run")), losses(&b.join("run")));
    let left: Vec<_> = files(&b.join("run")).into_keys().filter(|n| text(n).contains("tmp")).collect();
    assert!(left.is_empty(), "left over: {left:?}");
}

#[test]
fn training() {
    let before = tempfile::tempdir().unwrap();
    recipe(before.path(), 6, "[checkpoint]\nevery = 2\nkeep = 1\n[eval]\nevery = 3\nbatches = 1\n");
    let args =
        |dir: &Path| strings(&["train", text(&dir.join("small.toml")), "--out", text(&dir.join("run"))]);
    crash_everywhere("train", before.path(), &args, &|_, _| {}, &assert_same_run);
    // Over a finished run: until the new one has saved something, the old one is there or comes back.
    assert_eq!(run(&args(before.path())).code, Some(0));
    let old = files(&before.path().join("run/checkpoints"));
    let fresh = |dir: &Path| [args(dir), strings(&["--fresh", "--set", "train.seed=5"])].concat();
    let some = |dir: &Path, what: &str| {
        let all = files(&dir.join("run"));
        let manifest = |n: &&PathBuf| n.ends_with("manifest.json");
        assert!(all.keys().any(|n| manifest(&n)), "{what}: no checkpoint is left");
        // The old one, wherever it was moved to, is whole as long as there is no new one.
        let new = dir.join("run/checkpoints");
        if !new.exists() || !files(&new).keys().any(|n| manifest(&n)) {
            let bytes: Vec<&Vec<u8>> = all.values().collect();
            assert!(old.values().all(|b| bytes.contains(&b)), "{what}: a file of the old run is gone");
        }
    };
    crash_everywhere("train --fresh", before.path(), &fresh, &some, &assert_same_run);
}

#[test]
fn converting() {
    let before = tempfile::tempdir().unwrap();
    let at = |name: &str| before.path().join(name);
    recipe(before.path(), 2, "");
    let train = |seed: &str, out: &Path| {
        strings(&["train", text(&at("small.toml")), "--out", text(out), "--set", seed])
    };
    for (seed, name) in [("train.seed=1", "one"), ("train.seed=2", "two")] {
        assert_eq!(run(&train(seed, &at(name))).code, Some(0));
        let hf = at(&format!("{name}-hf"));
        assert_eq!(run(&strings(&["convert", text(&at(name)), text(&hf)])).code, Some(0));
    }
    // Old contents of the targets.
    for (from, to) in [("two", "out-hf"), ("two-hf", "out-checkpoint")] {
        assert_eq!(run(&strings(&["convert", text(&at(from)), text(&at(to))])).code, Some(0));
    }
    for (from, to, old) in [
        ("one", "out-hf", true),
        ("one-hf", "out-checkpoint", true),
        ("one", "a", false),
        ("one-hf", "b", false),
    ] {
        let args = |dir: &Path| {
            let more: &[&str] = if old { &["--overwrite"] } else { &[] };
            strings(&[&["convert", text(&dir.join(from)), text(&dir.join(to))], more].concat())
        };
        let new = {
            let dir = tempfile::tempdir().unwrap();
            copy(before.path(), dir.path());
            assert_eq!(run(&args(dir.path())).code, Some(0));
            files(&dir.path().join(to))
        };
        let before_files = if old { files(&at(to)) } else { BTreeMap::new() };
        let whole = |dir: &Path, what: &str| {
            let now = if dir.join(to).exists() { files(&dir.join(to)) } else { BTreeMap::new() };
            assert!(now == before_files || now == new, "{what}: neither the old nor the new one");
            if !old && now == new {
                // It was complete: the same command refuses to replace it, which is no failure here.
                std::fs::remove_dir_all(dir.join(to)).unwrap();
            }
        };
        crash_everywhere(&format!("convert {from} {to}"), before.path(), &args, &whole, &assert_same_files);
    }
}

#[test]
fn building_data() {
    let before = tempfile::tempdir().unwrap();
    let lines = |salt: usize| -> String {
        (0..300).map(|i| format!("{{\"text\": \"document {} of many\"}}\n", i * salt)).collect()
    };
    std::fs::write(before.path().join("new.jsonl"), lines(3)).unwrap();
    let build = |dir: &Path, input: &str| {
        let (input, out) = (dir.join(input), dir.join("pair"));
        strings(&["data", "build", text(&input), "--output", text(&out), "--overwrite"])
    };
    crash_everywhere(
        "data build",
        before.path(),
        &|dir| build(dir, "new.jsonl"),
        &|_, _| {},
        &assert_same_files,
    );
    std::fs::write(before.path().join("old.jsonl"), lines(5)).unwrap();
    assert_eq!(run(&build(before.path(), "old.jsonl")).code, Some(0));
    let train = recipe(before.path(), 2, "[generate]\ntokens = 0\n");
    let whole = |dir: &Path, what: &str| {
        // An index is there only with its own tokens: training on what is left works or says that there is no dataset.
        if dir.join("pair.idx").exists() {
            let out = dir.join("run");
            let e = run(&strings(&[
                "train",
                text(&train),
                "--data",
                text(&dir.join("pair")),
                "--out",
                text(&out),
            ]));
            assert_eq!(e.code, Some(0), "{what}: {}", e.err);
            std::fs::remove_dir_all(out).unwrap();
        }
    };
    crash_everywhere(
        "data build --overwrite",
        before.path(),
        &|dir| build(dir, "new.jsonl"),
        &whole,
        &assert_same_files,
    );
}
