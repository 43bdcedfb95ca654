//! A checkpoint of many ranks has more files than shells let a program open: the limit is raised.

use super::support::{Finished, binary, recipe, run, wait};
use super::train;
use std::process::{Command, Stdio};

/// Runs a command under limits of open files, as `ulimit` sets them.
fn limited(limits: &str, args: &[String]) -> Finished {
    let script = format!("{limits}; exec \"$0\" \"$@\" --threads 1");
    let mut command = Command::new("sh");
    command.args(["-c", &script]).arg(binary()).args(args);
    wait(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
}

#[test]
fn a_run_of_many_ranks_resumes_under_a_low_limit_of_open_files() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), 2, "");
    let out = dir.path().join("run");
    let more = |steps| ["--ranks", "8", "--steps", steps, "--set", "train.global_batch=16"];
    let e = run(&train(&recipe, &out, &more("2")));
    assert_eq!(e.code, Some(0), "{}", e.err);
    // Eight ranks open sixteen files each.
    let e = limited("ulimit -Sn 96", &train(&recipe, &out, &more("3")));
    assert_eq!(e.code, Some(0), "{}", e.err);
    // Where it cannot be raised, that is what the error says; the checkpoint is good.
    let e = limited("ulimit -n 96", &train(&recipe, &out, &more("4")));
    assert_eq!(e.code, Some(1), "{}", e.err);
    assert!(e.err.contains("raise the limit of open files (ulimit -n)"), "{}", e.err);
    assert!(!e.err.contains("older checkpoint"), "{}", e.err);
}
