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

/// A run that is told to save while its folder is not what it was, and again when it is; `break_it` and `mend` get the run
/// folder.
fn save_in_a_broken_folder(
    args: &[String],
    out: &Path,
    break_it: &dyn Fn(&Path),
    mend: &dyn Fn(&Path),
) -> Finished {
    let child = plain_user(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_for_steps(out, 2);
    super::signal("USR1", child.id());
    super::wait_until("a checkpoint", || of_kind(out, "checkpoint").len() == 1);
    break_it(out);
    super::signal("USR1", child.id());
    // The log is in the run folder, wherever that is now.
    super::wait_until("the failed save", || of_kind(out, "save_failed").len() == 1);
    let steps = of_kind(out, "step").len();
    wait_for_steps(out, steps + 3);
    mend(out);
    super::signal("USR1", child.id());
    super::wait_until("another checkpoint", || of_kind(out, "checkpoint").len() == 2);
    super::signal("TERM", child.id());
    wait(child)
}

/// The program as a user whom permissions concern: root is made `nobody`.
fn plain_user(args: &[String]) -> Command {
    let is_root = std::fs::metadata("/proc/self").is_ok_and(|m| std::os::unix::fs::MetadataExt::uid(&m) == 0);
    let mut command = match is_root {
        true => {
            let mut command = Command::new("setpriv");
            command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(binary());
            command
        }
        false => Command::new(binary()),
    };
    command.args(args).args(["--threads", "1"]);
    command
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
}

/// A folder in which [`plain_user`] may write, and its files.
fn open_to_all(dir: &Path) {
    for entry in std::fs::read_dir(dir).unwrap() {
        set_mode(&entry.unwrap().path(), 0o666);
    }
    set_mode(dir, 0o777);
}

#[test]
fn a_read_only_folder_fails_saves_until_it_is_writable_again() {
    let dir = tempfile::tempdir().unwrap();
    let args =
        train(&recipe(dir.path(), 1_000_000, "[checkpoint]\nkeep = 0\n"), &dir.path().join("run"), &[]);
    open_to_all(dir.path());
    let out = dir.path().join("run");
    let checkpoints = |out: &Path| out.join("checkpoints");
    let e = save_in_a_broken_folder(&args, &out, &|out| set_mode(&checkpoints(out), 0o555), &|out| {
        set_mode(&checkpoints(out), 0o777)
    });
    assert_eq!(e.code, Some(0), "{}", e.err);
    let failed = of_kind(&out, "save_failed");
    let reason = failed[0]["reason"].as_str().unwrap();
    assert!(reason.contains("checkpoints") && reason.contains("check the permissions"), "{reason}");
    let first = of_kind(&out, "checkpoint")[0]["step"].as_u64().unwrap();
    assert!(
        out.join(format!("checkpoints/step-{first:08}/manifest.json")).is_file(),
        "the one before is intact"
    );
}

#[test]
fn a_folder_that_vanished_fails_saves_until_it_is_back() {
    for replaced in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("run");
        let args = train(&recipe(dir.path(), 1_000_000, ""), &out, &[]);
        open_to_all(dir.path());
        let (here, there) = (out.join("checkpoints"), dir.path().join("elsewhere"));
        let e = save_in_a_broken_folder(
            &args,
            &out,
            &|_| {
                std::fs::rename(&here, &there).unwrap();
                // Another run may have its checkpoints there now.
                if replaced {
                    std::fs::create_dir(&here).unwrap();
                    std::fs::write(here.join(".lock"), "").unwrap();
                    open_to_all(&here);
                }
            },
            &|_| {
                if replaced {
                    std::fs::remove_dir_all(&here).unwrap();
                }
                std::fs::rename(&there, &here).unwrap();
            },
        );
        assert_eq!(e.code, Some(0), "{}", e.err);
        let failed = of_kind(&out, "save_failed");
        let reason = failed[0]["reason"].as_str().unwrap();
        assert!(reason.contains("removed or replaced while the run was using it; move it back"), "{reason}");
    }
}

#[test]
fn a_run_folder_that_vanished_ends_a_run_whose_recipe_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let (out, gone) = (dir.path().join("run"), dir.path().join("gone"));
    let recipe = recipe(dir.path(), 1_000_000, "[checkpoint]\non_failure = \"stop\"\n");
    let child = ferrotron(&train(&recipe, &out, &[])).spawn().unwrap();
    wait_for_steps(&out, 2);
    std::fs::rename(&out, &gone).unwrap();
    super::signal("USR1", child.id());
    let e = wait(child);
    assert_eq!(e.code, Some(1), "{}", e.err);
    assert!(e.err.contains("removed or replaced") && !e.err.contains("panicked"), "{}", e.err);
    // The log went with the folder, and says how the run ended.
    assert_eq!(of_kind(&gone, "save_failed").len(), 1);
    assert_eq!(of_kind(&gone, "run_end")[0]["ending"], "failed");
}
