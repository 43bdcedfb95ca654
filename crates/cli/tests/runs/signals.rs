//! Signals are answered at once, pipes may break, and piped lines follow the recipe.

use super::support::{binary, ferrotron, losses, recipe, run, wait};
use super::{of_kind, signal, train, wait_for_steps, wait_until};
use std::io::{BufRead, BufReader};
use std::process::Command;

/// A recipe whose steps take long enough to be interrupted.
fn endless(dir: &std::path::Path) -> std::path::PathBuf {
    recipe(dir, 1_000_000, "[checkpoint]\nkeep = 0\n")
}

#[test]
fn sigusr1_saves_and_goes_on_and_sighup_saves_and_ends() {
    let dir = tempfile::tempdir().unwrap();
    let (recipe, out) = (endless(dir.path()), dir.path().join("run"));
    // These tests may themselves run under nohup, which the program would respect.
    let mut command = Command::new("env");
    command.arg("--default-signal=HUP").arg(binary()).args(train(&recipe, &out, &["--threads", "1"]));
    let child =
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap();
    wait_for_steps(&out, 3);
    signal("USR1", child.id());
    wait_until("a checkpoint", || of_kind(&out, "checkpoint").len() == 1);
    let step = of_kind(&out, "checkpoint")[0]["step"].as_u64().unwrap();
    assert!(out.join(format!("checkpoints/step-{step:08}/manifest.json")).is_file());
    wait_for_steps(&out, step as usize + 3);
    signal("HUP", child.id());
    // A terminal that closes may send it twice.
    signal("HUP", child.id());
    let e = wait(child);
    assert_eq!(e.code, Some(0), "{}", e.err);
    assert!(
        e.err.contains("SIGUSR1: saving after step ") && e.err.contains("SIGHUP: finishing step "),
        "{}",
        e.err
    );
    let last = losses(&out).len();
    assert!(out.join(format!("checkpoints/step-{last:08}/manifest.json")).is_file());
    assert!(
        e.err.ends_with(&format!("interrupted after step {last}; the same command resumes\n")),
        "{}",
        e.err
    );
}

#[test]
fn nohup_is_respected() {
    let dir = tempfile::tempdir().unwrap();
    let (recipe, out) = (endless(dir.path()), dir.path().join("run"));
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' HUP; exec \"$@\"", "sh"]).arg(binary()).args(train(
        &recipe,
        &out,
        &["--threads", "1"],
    ));
    let child =
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap();
    wait_for_steps(&out, 2);
    signal("HUP", child.id());
    let steps = losses(&out).len();
    wait_for_steps(&out, steps + 5);
    signal("TERM", child.id());
    assert_eq!(wait(child).code, Some(0));
}

#[test]
fn ctrl_c_is_answered_and_the_second_ends_at_once() {
    let dir = tempfile::tempdir().unwrap();
    // A step of many micro-batches takes a second or more.
    let recipe = recipe(dir.path(), 1000, "");
    let text = std::fs::read_to_string(&recipe).unwrap().replace("global_batch = 4", "global_batch = 4000");
    std::fs::write(&recipe, text).unwrap();
    let out = dir.path().join("run");
    let mut child = ferrotron(&train(&recipe, &out, &[])).spawn().unwrap();
    wait_for_steps(&out, 1);
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    signal("INT", child.id());
    let answer = lines.find(|l| l.as_ref().is_ok_and(|l| l.contains("Ctrl-C"))).unwrap().unwrap();
    assert!(
        answer.starts_with("finishing step ") && answer.ends_with("press Ctrl-C again to stop now"),
        "{answer}"
    );
    // Sooner it would be taken for the same one, forwarded by a launcher.
    std::thread::sleep(std::time::Duration::from_millis(600));
    signal("INT", child.id());
    let status = child.wait().unwrap();
    // Slow machines end by the second Ctrl-C; fast ones may have saved by then.
    assert!(matches!(status.code(), Some(130 | 0)), "{status:?}");
}

#[test]
fn a_broken_pipe_ends_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), 200, "[checkpoint]\nevery = 20\n");
    let text = std::fs::read_to_string(&recipe)
        .unwrap()
        .replace("micro_batch = 2", "micro_batch = 2\nlog_every = 1");
    std::fs::write(&recipe, text).unwrap();
    // A reader that goes after a line, and one that has gone before the run begins.
    for (name, more, reader, lines) in [
        ("text", "", "head -1", 1),
        ("json", "--json", "head -1", 1),
        ("no text", "", "true", 0),
        ("no json", "--json", "true", 0),
    ] {
        let out = dir.path().join(name);
        let script = format!(
            "(sleep 0.2; \"$0\" train {} --out '{}' --threads 1 {more} 2>&1; echo $? > {}/code) | {reader}",
            recipe.display(),
            out.display(),
            dir.path().display()
        );
        let head = Command::new("sh").args(["-c", &script]).arg(binary()).output().unwrap();
        assert_eq!(head.stdout.iter().filter(|b| **b == b'\n').count(), lines, "{head:?}");
        assert_eq!(std::fs::read_to_string(dir.path().join("code")).unwrap(), "0\n", "{name}");
        assert_eq!(losses(&out).len(), 200, "{name}");
        assert_eq!(of_kind(&out, "run_end")[0]["ending"], "finished", "{name}");
    }
}

#[test]
fn piped_lines_follow_log_every() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), 7, "");
    let e = run(&train(&recipe, &dir.path().join("run"), &["--set", "train.log_every=3"]));
    let steps: Vec<&str> = e
        .err
        .lines()
        .filter_map(|l| l.strip_prefix("step ")?.split_once("/7  loss"))
        .map(|(n, _)| n)
        .collect();
    assert_eq!(steps, ["3", "6", "7"], "{}", e.err);
}

#[test]
fn too_many_threads_are_refused_with_the_limit() {
    let e = Command::new(binary()).args(["train", "--threads", "100000"]).output().unwrap();
    let err = String::from_utf8(e.stderr).unwrap();
    assert!(e.status.code() == Some(2) && err.contains("at most 1024 threads"), "{err}");
}

#[test]
fn a_time_limit_saves_and_ends_and_the_same_command_resumes() {
    let dir = tempfile::tempdir().unwrap();
    let (recipe, out) = (endless(dir.path()), dir.path().join("run"));
    let args = train(&recipe, &out, &["--set", "train.exit_after=3s"]);
    let mut last = 0;
    for _ in 0..2 {
        let e = run(&args);
        assert_eq!(e.code, Some(0), "{}", e.err);
        assert!(e.err.contains("train.exit_after = 3s has passed: saving and ending"), "{}", e.err);
        let steps = losses(&out).len();
        assert!(steps > last, "{steps} steps after {last}");
        assert!(out.join(format!("checkpoints/step-{steps:08}/manifest.json")).is_file());
        assert_eq!(of_kind(&out, "run_end").last().unwrap()["ending"], "interrupted");
        last = steps;
    }
}

#[test]
fn a_slurm_job_ends_a_margin_before_its_time() {
    let dir = tempfile::tempdir().unwrap();
    let (recipe, out) = (endless(dir.path()), dir.path().join("run"));
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let mut command = ferrotron(&train(&recipe, &out, &["--ranks", "2", "--set", "fault.exit_margin=600"]));
    // So little is left that one step is done, and saved.
    let child = command.env("SLURM_JOB_END_TIME", (now + 60).to_string()).spawn().unwrap();
    let e = wait(child);
    assert_eq!(e.code, Some(0), "{}", e.err);
    assert!(e.err.contains("the Slurm job ends in 600 s (fault.exit_margin): saving"), "{}", e.err);
    assert_eq!(losses(&out).len(), 1);
    assert!(out.join("checkpoints/step-00000001/manifest.json").is_file());
}
