//! A job whose processes die goes on, in the same processes and to the same bits: with a spare, with a process that the
//! launcher starts again, with fewer ranks.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use serde_json::Value;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use support::{ferrotron, files};

const LIMIT: Duration = Duration::from_secs(150);

fn recipe(dir: &Path) -> PathBuf {
    let text = "[model]\nlayers = 2\nhidden = 64\nheads = 4\nkv_heads = 2\nffn = 64\nvocab = 256\n\
         [data]\npath = \"embedded\"\nseq_len = 32\n\
         [train]\nsteps = 120\nglobal_batch = 8\nmicro_batch = 1\nlog_every = 1\n\
         [checkpoint]\nevery = 50\nkeep = 0\n[fault]\nsnapshot_every = 10\nrestarts = 20\nheartbeat_timeout = 3\n";
    let path = dir.join("job.toml");
    std::fs::write(&path, text).unwrap();
    path
}

/// A launched job that is killed when the test ends.
struct Job(Child);

impl Drop for Job {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Job {
    fn start(dir: &Path, out: &str, processes: usize, launch: &[&str], train: &[&str]) -> Job {
        let recipe = recipe(dir);
        let out_dir = dir.join(out);
        let mut command: Command = ferrotron(&["launch", "-n", &processes.to_string()]);
        command.args(launch).args(["train", recipe.to_str().unwrap(), "--device", "cpu", "--threads", "1"]);
        command.args(["--out", out_dir.to_str().unwrap()]).args(train);
        if !train.contains(&"--timeout") {
            command.args(["--timeout", "20"]);
        }
        let log = std::fs::File::create(dir.join(format!("{out}.log"))).unwrap();
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        // As a shell starts a job in a terminal.
        command.process_group(0);
        Job(command.spawn().unwrap())
    }

    /// The launched processes, in order of their start.
    fn pids(&self) -> Vec<i32> {
        let id = self.0.id();
        let text = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap_or_default();
        text.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
    }

    fn signal(&self, index: usize, signal: &str) {
        let pid = self.pids()[index].to_string();
        assert!(Command::new("kill").args([&format!("-{signal}"), &pid]).status().unwrap().success());
    }

    fn wait(&mut self, log: &Path) -> i32 {
        let end = Instant::now() + LIMIT;
        while Instant::now() < end {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status.code().unwrap_or(-1);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("the job hangs:\n{}", std::fs::read_to_string(log).unwrap_or_default());
    }
}

fn events(run: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(run.join("events.jsonl")).unwrap_or_default();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

fn wait_for_step(run: &Path, step: u64) {
    let end = Instant::now() + LIMIT;
    while !events(run).iter().any(|e| e["kind"] == "step" && e["step"].as_u64() >= Some(step)) {
        assert!(Instant::now() < end, "step {step} was not reached");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Runs undisturbed, then with a signal to a process at a step; the ends must be the same. Returns the restart event.
fn survives(spares: usize, train: &[&str], (index, signal, step): (usize, &str, u64)) -> Value {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let log = dir.join("b.log");
    let code = Job::start(dir, "a", 4, &[], train).wait(&dir.join("a.log"));
    assert_eq!(code, 0, "{train:?}: {}", std::fs::read_to_string(dir.join("a.log")).unwrap());
    let number = spares.to_string();
    let with_spares = [train, &["--spares", &number]].concat();
    let mut job = Job::start(dir, "b", 4 + spares, &[], &with_spares);
    wait_for_step(&dir.join("b"), step);
    job.signal(index, signal);
    let code = job.wait(&log);
    assert_eq!(code, 0, "{}", std::fs::read_to_string(&log).unwrap());
    let ends = ["a", "b"].map(|run| files(&dir.join(run).join("checkpoints/step-00000120")));
    assert!(ends[0].len() >= 2 && ends[0] == ends[1], "{train:?}: the last checkpoints differ");
    let restarts: Vec<Value> =
        events(&dir.join("b")).into_iter().filter(|e| e["kind"] == "restart").collect();
    assert_eq!(restarts.len(), 1, "{}", std::fs::read_to_string(&log).unwrap());
    let steps = events(&dir.join("b")).iter().filter(|e| e["kind"] == "step").count();
    assert_eq!(steps, 120, "the log reads like that of one run");
    restarts.into_iter().next().unwrap()
}

#[test]
fn a_spare_takes_over_from_a_killed_rank() {
    let restart = survives(1, &[], (2, "KILL", 33));
    assert_eq!((restart["from"].as_str(), &restart["replaced"][0]), (Some("memory"), &Value::from(2)));
    assert!(restart["step"].as_u64() >= Some(20), "{restart}");
    assert!(restart["reason"].as_str().unwrap().contains("rank 2"), "{restart}");
}

#[test]
fn a_killed_rank_0_is_replaced_too() {
    let restart = survives(1, &["--set", "precision.dtype=f32"], (0, "KILL", 25));
    assert_eq!((restart["from"].as_str(), &restart["replaced"][0]), (Some("memory"), &Value::from(0)));
}

#[test]
fn without_a_spare_the_launcher_starts_the_process_again() {
    for (train, index) in [
        (&["--set", "parallel.tp=2", "--set", "precision.recipe=fp8-delayed"][..], 1),
        (&["--set", "parallel.pp=2", "--set", "moe.experts=4", "--set", "parallel.ep=2"][..], 0),
        (&["--set", "parallel.zero=3", "--set", "precision.dtype=f16"][..], 3),
        (&["--set", "optimizer.master_dtype=remainder", "--set", "optimizer.state_dtype=fp8"][..], 2),
        (&["--set", "parallel.cp=2", "--set", "parallel.zero=0"][..], 2),
    ] {
        let restart = survives(0, train, (index, "KILL", 41));
        assert_eq!(restart["from"], "memory", "{train:?}");
    }
}

#[test]
fn a_stopped_process_is_noticed_ended_and_replaced() {
    // Any of them may be the coordinator, which the others must notice themselves.
    for process in 0..4 {
        let restart = survives(1, &[], (process, "STOP", 30));
        assert_eq!(
            (&restart["from"], &restart["replaced"][0]),
            (&"memory".into(), &process.into()),
            "{restart}"
        );
    }
}

#[test]
fn fewer_ranks_go_on_where_that_is_allowed() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let set = ["--set", "fault.shrink=true", "--set", "fault.soft_timeout=1"];
    let mut job = Job::start(dir, "run", 4, &["--max-restarts", "0"], &set);
    let run = dir.join("run");
    wait_for_step(&run, 60);
    job.signal(3, "KILL");
    assert_eq!(job.wait(&dir.join("run.log")), 0);
    let restart = events(&run).into_iter().find(|e| e["kind"] == "restart").unwrap();
    // Two of the three ranks that are left: three do not divide the global batch.
    assert_eq!((restart["from"].as_str(), restart["step"].as_u64()), (Some("checkpoint"), Some(50)));
    assert_eq!(events(&run).iter().filter(|e| e["kind"] == "step").count(), 120);
}

#[test]
fn a_job_without_restarts_ends_and_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let set = ["--set", "fault.restarts=1", "--set", "fault.soft_timeout=1", "--set", "fault.backoff=0"];
    let mut job = Job::start(dir, "run", 2, &["--max-restarts", "0"], &set);
    wait_for_step(&dir.join("run"), 20);
    job.signal(1, "KILL");
    let code = job.wait(&dir.join("run.log"));
    let log = std::fs::read_to_string(dir.join("run.log")).unwrap();
    assert_eq!(code, 75, "{log}");
    assert!(log.contains("--spares") && log.contains("fault.soft_timeout"), "{log}");
}

#[test]
fn a_signal_to_the_launcher_saves_and_ends_all_processes() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    assert_eq!(Job::start(dir, "a", 2, &[], &[]).wait(&dir.join("a.log")), 0);
    let mut job = Job::start(dir, "b", 3, &[], &["--spares", "1"]);
    wait_for_step(&dir.join("b"), 15);
    let pids = job.pids();
    assert_eq!(pids.len(), 3);
    let launcher = job.0.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &launcher]).status().unwrap().success());
    let log = std::fs::read_to_string(dir.join("b.log")).unwrap();
    assert_eq!(job.wait(&dir.join("b.log")), 0, "{log}");
    assert!(pids.iter().all(|pid| !Path::new(&format!("/proc/{pid}")).exists()));
    // The same command resumes.
    assert_eq!(Job::start(dir, "b", 3, &[], &["--spares", "1"]).wait(&dir.join("b.log")), 0);
    let ends = ["a", "b"].map(|run| files(&dir.join(run).join("checkpoints/step-00000120")));
    assert!(ends[0] == ends[1]);
}

/// A terminal sends Ctrl-C to the launcher and to its processes, to which the launcher forwards it as well.
#[test]
fn ctrl_c_in_a_terminal_saves_and_ends_all_processes() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let mut job = Job::start(dir, "a", 2, &[], &["--steps", "100000", "--set", "checkpoint.every=0"]);
    wait_for_step(&dir.join("a"), 5);
    let group = format!("-{}", job.0.id());
    assert!(Command::new("kill").args(["-INT", "--", &group]).status().unwrap().success());
    let code = job.wait(&dir.join("a.log"));
    let log = std::fs::read_to_string(dir.join("a.log")).unwrap();
    assert_eq!(code, 0, "{log}");
    assert!(log.contains("press Ctrl-C again") && log.contains("interrupted after step"), "{log}");
    assert!(!files(&dir.join("a/checkpoints")).is_empty(), "{log}");
}

/// The job's `--timeout` is a minute and a half; a rank that hangs in an ordinary step is not waited for so long.
#[test]
fn a_rank_that_hangs_is_noticed_within_the_learned_timeout() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("a");
    let hang = ["--timeout", "90", "--set", "fault.min_timeout=2", "--set", "fault.hard_timeout=5"];
    let inject = "fault.inject=[\"hang:rank=1,step=60\"]";
    let train = [&hang[..], &["--set", "fault.heartbeat_timeout=60", "--set", inject]].concat();
    let start = Instant::now();
    let code = Job::start(dir.path(), "a", 2, &[], &train).wait(&dir.path().join("a.log"));
    assert_eq!(code, 0, "{}", std::fs::read_to_string(dir.path().join("a.log")).unwrap());
    let restarts = events(&out).into_iter().filter(|e| e["kind"] == "restart").count();
    assert_eq!(restarts, 1);
    assert!(start.elapsed() < Duration::from_secs(45), "{:?}", start.elapsed());
}
