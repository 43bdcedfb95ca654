//! Checkpoints that cannot be written, and runs that fail.

use super::support::{Finished, assert_one_sentence_error, binary, ferrotron, recipe, run, wait};
use super::{of_kind, train, wait_for_steps};
use std::path::Path;
use std::process::{Command, Stdio};

/// A recipe whose checkpoints are larger than the limit of [`limited`].
fn large(dir: &Path, more: &str) -> std::path::PathBuf {
    let path = recipe(dir, 6, more);
    let text = std::fs::read_to_string(&path).unwrap().replace("hidden = 16", "hidden = 64");
    // Steps that take longer than a failing write.
    let text = text.replace("ffn = 32", "ffn = 256").replace("global_batch = 4", "global_batch = 128");
    std::fs::write(&path, text).unwrap();
    path
}

/// Trains where no file may be longer than 64 KiB, as if the disk were full.
fn limited(args: &[String]) -> Finished {
    let child = Command::new("sh")
        .args(["-c", "trap '' XFSZ; ulimit -f 128; exec \"$@\"", "sh"])
        .arg(binary())
        .args(args)
        .args(["--threads", "1"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    wait(child)
}

#[test]
fn a_failed_save_is_told_at_once_and_training_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = large(dir.path(), "[checkpoint]\nevery = 2\n");
    let out = dir.path().join("run");
    let e = limited(&train(&recipe, &out, &[]));
    // All steps were made; but the last checkpoint is missing, so it is no success.
    assert_eq!(e.code, Some(1), "{}", e.err);
    assert!(!e.err.contains("saved checkpoints/") && !e.err.contains("panicked"), "{}", e.err);
    assert_eq!(e.err.matches("the checkpoint could not be saved").count(), 3, "{}", e.err);
    assert_eq!(of_kind(&out, "step").len(), 6);
    assert!(of_kind(&out, "checkpoint").is_empty());
    let failed = of_kind(&out, "save_failed");
    let steps: Vec<u64> = failed.iter().map(|f| f["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [2, 4, 6]);
    assert!(failed[0]["reason"].as_str().unwrap().contains("cannot write"), "{failed:?}");
    // Told before the next checkpoint is due.
    let all = super::events(&out);
    let at = |kind: &str, step: u64| all.iter().position(|e| e["kind"] == kind && e["step"] == step).unwrap();
    assert!(at("save_failed", 2) < at("step", 4));
    let end = &of_kind(&out, "run_end")[0];
    assert_eq!(end["ending"], "failed");
    assert!(end["reason"].as_str().unwrap().contains("cannot write"), "{end}");
}

#[test]
fn a_failed_save_stops_the_run_if_the_recipe_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = large(dir.path(), "[checkpoint]\nevery = 2\non_failure = \"stop\"\n");
    let out = dir.path().join("run");
    let e = limited(&train(&recipe, &out, &[]));
    assert_eq!(e.code, Some(1), "{}", e.err);
    assert!(e.err.contains("step 2  the checkpoint could not be saved"), "{}", e.err);
    let steps = of_kind(&out, "step").len();
    assert!((2..6).contains(&steps), "{steps}");
    assert_eq!(of_kind(&out, "run_end")[0]["ending"], "failed");
    assert_eq!(std::fs::read_dir(out.join("checkpoints")).unwrap().count(), 1, "only the lock");
}

#[test]
fn data_truncated_under_a_run_ends_it_with_its_steps_saved() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let text: String = (0..200_000u64).map(|i| char::from(b'a' + (i * i % 23) as u8)).collect();
    std::fs::write(at("text.txt"), text).unwrap();
    let (data, out) = (at("data"), at("run"));
    let [input, prefix] = [at("text.txt"), data.clone()].map(|p| p.to_str().unwrap().to_string());
    let build = ["data", "build", &input, "--output", &prefix].map(String::from);
    assert_eq!(run(&build).code, Some(0));
    let args = train(&recipe(dir.path(), 1_000_000, ""), &out, &["--data", &prefix]);
    let child = ferrotron(&args).spawn().unwrap();
    wait_for_steps(&out, 5);
    let bin = std::fs::OpenOptions::new().write(true).open(data.with_extension("bin")).unwrap();
    bin.set_len(1000).unwrap();
    let ended = wait(child);
    assert_one_sentence_error(&ended, "truncated data");
    assert!(ended.err.contains("data.bin: has 1000 bytes, but had "), "{}", ended.err);
    let steps = of_kind(&out, "step").len();
    assert!(
        steps >= 5 && out.join(format!("checkpoints/step-{steps:08}/manifest.json")).is_file(),
        "{steps}"
    );
    let end = &of_kind(&out, "run_end")[0];
    assert_eq!((&end["ending"], &end["step"]), (&"failed".into(), &steps.into()));
    assert!(end["reason"].as_str().unwrap().contains("truncated while in use"), "{end}");
}
