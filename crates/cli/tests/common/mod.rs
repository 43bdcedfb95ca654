//! Runs the binary, and a recipe small enough to train in a second.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)] // all of it is test

use serde_json::Value;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// The binary under test: `FERROTRON_BIN` if set (on a GPU host), otherwise the one just built.
pub fn binary() -> std::ffi::OsString {
    std::env::var_os("FERROTRON_BIN").unwrap_or_else(|| env!("CARGO_BIN_EXE_ferrotron").into())
}

pub fn ferrotron(args: &[&str]) -> Output {
    Command::new(binary()).args(args).stdin(Stdio::null()).output().unwrap()
}

/// Starts the binary with its output in pipes.
pub fn start(args: &[&str]) -> std::process::Child {
    let mut command = Command::new(binary());
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Runs the binary with standard input.
pub fn with_input(args: &[&str], input: &str) -> Output {
    let mut child = Command::new(binary())
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

/// Standard output of a command that must succeed.
pub fn ok(args: &[&str]) -> String {
    let out = ferrotron(args);
    let errors = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.success(), "{args:?}: {:?}\n{errors}", out.status);
    String::from_utf8(out.stdout).unwrap()
}

pub fn json(args: &[&str]) -> Value {
    serde_json::from_str(&ok(&[args, &["--json"]].concat())).unwrap()
}

/// Standard error of a command that must fail with `code`: one sentence, perhaps a hint, and no result.
pub fn fails(args: &[&str], code: i32) -> String {
    let out = ferrotron(args);
    let errors = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(code), "{args:?}: {errors}");
    assert!(out.stdout.is_empty(), "{args:?}: {}", String::from_utf8_lossy(&out.stdout));
    let lines: Vec<_> = errors.lines().collect();
    // What the argument parser refuses comes with its usage.
    let parser = code == 2 && errors.contains("try '--help'");
    let one = parser || lines.len() == 1 || (lines.len() == 2 && lines[1].starts_with("hint: "));
    assert!(one && errors.starts_with("error: "), "{args:?}: {errors}");
    errors
}

pub fn path(p: &Path) -> &str {
    p.to_str().unwrap()
}

/// A recipe whose run takes about a second.
pub const RECIPE: &str = "
[model]
layers = 1
hidden = 32
heads = 2
ffn = 64
vocab = 256
max_positions = 64
[data]
path = \"embedded\"
seq_len = 16
[train]
steps = 2
global_batch = 4
[generate]
tokens = 0
";

/// A folder with that recipe as `small.toml`.
pub fn folder() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let recipe = dir.path().join("small.toml");
    std::fs::write(&recipe, RECIPE).unwrap();
    (dir, recipe)
}

/// The same, trained: the folder, the recipe and the run folder `run`.
pub fn trained(set: &[&str]) -> (tempfile::TempDir, PathBuf, PathBuf) {
    let (dir, recipe) = folder();
    let run = dir.path().join("run");
    let mut args = vec!["train", path(&recipe), "--out", path(&run)];
    set.iter().for_each(|s| args.extend(["--set", s]));
    ok(&args);
    (dir, recipe, run)
}

#[path = "../../../../tests/support/golden.rs"]
pub mod golden;

/// The folders of the golden Hugging Face models of all sets.
pub fn golden_models() -> Vec<PathBuf> {
    golden::HfModel::all().into_iter().map(|m| m.dir).collect()
}

/// Names of everything in a folder, sorted.
pub fn names(dir: &Path) -> Vec<String> {
    let mut out: Vec<_> =
        std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    out.sort();
    out
}
