//! Processes of one host without MPI: started with plain variables and by torchrun. The run is that of `--ranks` to the
//! last bit, and when a rank fails, every other names it and ends, and the run resumes to the same bits.

use super::support::{self, Finished, files, losses, run};
use super::{Scene, signal, text};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// `--timeout` of the ranks.
const TIMEOUT: u64 = 4;

impl Scene {
    /// Arguments of a run in `out`.
    fn args(&self, out: &Path) -> Vec<String> {
        let timeout = TIMEOUT.to_string();
        let args =
            ["train", text(&self.recipe), "--out", text(out), "--timeout", &timeout, "--device", "cpu"];
        args.iter().chain(&["--set", "parallel.tp=2"]).map(|s| s.to_string()).collect()
    }

    /// Starts the run as four processes.
    fn train(&self) -> Vec<Child> {
        let port = free_port();
        (0..4).map(|rank| by_variables(&self.args(&self.out()), rank, 4, port)).collect()
    }

    /// Going on from here ends as a run of threads does.
    fn resumes(&self) {
        assert!(!files(&self.out().join("checkpoints")).is_empty());
        let ended = all(self.train());
        assert!(ended.iter().all(|e| e.code == Some(0)), "{ended:?}");
        assert!(ended[0].err.contains("resuming"), "{}", ended[0].err);
        self.equals_threads();
    }

    fn equals_threads(&self) {
        let whole = self.dir.path().join("whole");
        let mut args = self.args(&whole);
        args.extend(["--ranks".into(), "4".into()]);
        let e = run(&args);
        assert_eq!(e.code, Some(0), "{}", e.err);
        self.equals(&whole);
    }
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn by_variables(args: &[String], rank: usize, size: usize, port: u16) -> Child {
    support::ferrotron(args)
        .envs([("RANK", rank.to_string()), ("WORLD_SIZE", size.to_string())])
        .envs([("MASTER_ADDR", "127.0.0.1".to_string()), ("MASTER_PORT", port.to_string())])
        .env("RUST_BACKTRACE", "0")
        .spawn()
        .unwrap()
}

/// Waits for all.
fn all(children: Vec<Child>) -> Vec<Finished> {
    let waiting: Vec<_> =
        children.into_iter().map(|child| std::thread::spawn(move || support::wait(child))).collect();
    waiting.into_iter().map(|w| w.join().unwrap()).collect()
}

#[test]
fn a_run_by_plain_variables_is_that_of_threads_to_the_last_bit() {
    let scene = Scene::new();
    let ended = all(scene.train());
    assert!(ended.iter().all(|e| e.code == Some(0)), "{ended:?}");
    assert!(ended[0].err.contains("4 ranks (tp=2, dp=2)"), "{}", ended[0].err);
    assert!(ended[1..].iter().all(|e| e.out.is_empty() && e.err.is_empty()), "{ended:?}");
    scene.equals_threads();
}

/// Sends a signal to a rank in the middle of a run: every other names it within the limit and ends.
fn struck(name: &str, rank: usize, limit: f64) -> Scene {
    let scene = Scene::new();
    let mut children = scene.train();
    scene.wait_for_steps(7);
    let start = Instant::now();
    let mut bad = children.remove(rank);
    signal(name, bad.id());
    let ended = all(children);
    let took = start.elapsed().as_secs_f64();
    bad.kill().unwrap();
    bad.wait().unwrap();
    assert!(took < limit, "it took {took:.1} s: {ended:?}");
    for e in &ended {
        assert!(e.code.is_some_and(|code| code != 0), "{e:?}");
        assert!(e.err.contains(&format!("rank {rank} ")), "{e:?}");
        support::assert_no_internals(e, name);
    }
    scene
}

#[test]
fn a_killed_rank_is_named_at_once_and_the_run_resumes() {
    struck("-KILL", 2, 10.0).resumes();
}

#[test]
fn rank_0_killed_is_named_at_once_and_the_run_resumes() {
    struck("-KILL", 0, 10.0).resumes();
}

#[test]
fn a_stopped_rank_is_named_within_the_timeout_and_the_run_resumes() {
    struck("-STOP", 1, TIMEOUT as f64 + 8.0).resumes();
}

/// Hosts with folders of their own: the run ends before its first step, not at its first checkpoint.
#[test]
fn folders_that_ranks_do_not_share_are_refused() {
    let scene = Scene::new();
    let port = free_port();
    let folders = [scene.out(), scene.dir.path().join("elsewhere")];
    let start = |(rank, out): (usize, &std::path::PathBuf)| by_variables(&scene.args(out), rank, 2, port);
    let ended = all(folders.iter().enumerate().map(start).collect());
    assert!(ended.iter().all(|e| e.code.is_some_and(|code| code != 0)), "{ended:?}");
    let said = &ended[0].err;
    assert!(
        said.contains("rank 1 does not see the run folder") && said.contains("all hosts share"),
        "{said}"
    );
    assert!(!said.contains("step 1"), "{said}");
    assert!(folders.iter().all(|dir| !dir.join("checkpoints").exists()));
}

#[test]
fn a_port_that_is_taken_is_named() {
    let scene = Scene::new();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let start = Instant::now();
    let ended = all((0..2).map(|r| by_variables(&scene.args(&scene.out()), r, 2, port)).collect());
    assert!(start.elapsed() < Duration::from_secs(TIMEOUT + 5));
    ended.iter().for_each(|e| support::assert_one_sentence_error(e, "port taken"));
    let said = format!("cannot listen on port {port}");
    assert!(ended[0].err.contains(&said) && ended[0].err.contains("MASTER_PORT"), "{ended:?}");
    assert!(ended[1].err.contains("cannot reach rank 0"), "{ended:?}");
}

#[test]
fn a_rank_that_waits_for_the_others_ends_at_once_when_it_is_told_to() {
    let scene = Scene::new();
    for rank in [0, 1] {
        let mut args = scene.args(&scene.out());
        args.extend(["--timeout".into(), "100".into()]);
        args.drain(4..6);
        let child = by_variables(&args, rank, 2, free_port());
        std::thread::sleep(Duration::from_secs(2));
        let start = Instant::now();
        signal("-TERM", child.id());
        let e = support::wait(child);
        assert!(start.elapsed() < Duration::from_secs(3), "{e:?}");
        assert_eq!(e.code, Some(128 + 15), "{e:?}");
    }
}

#[test]
fn doctor_names_the_launcher_and_mpich_is_refused() {
    let doctor = |env: &[(&str, &str)]| {
        let child = support::ferrotron(&["doctor"]).envs(env.iter().copied()).spawn().unwrap();
        let e = support::wait(child);
        assert_eq!(e.code, Some(0), "{e:?}");
        e.out.lines().find(|l| l.starts_with("launcher")).unwrap().to_string()
    };
    assert!(doctor(&[]).contains("none"));
    let by_hand =
        [("RANK", "1"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")];
    let line = doctor(&by_hand);
    assert!(
        ["RANK and WORLD_SIZE", "rank 1 of 4", "127.0.0.1:29500"].iter().all(|w| line.contains(w)),
        "{line}"
    );
    assert!(doctor(&[("RANK", "1")]).contains("WORLD_SIZE is not"));
    let mpich = [("PMI_RANK", "0"), ("PMI_SIZE", "2")];
    assert!(doctor(&mpich).contains("not supported"));
    let scene = Scene::new();
    let e = support::wait(support::ferrotron(&scene.args(&scene.out())).envs(mpich).spawn().unwrap());
    support::assert_one_sentence_error(&e, "MPICH");
    assert!(e.err.contains("MPICH") && e.err.contains("torchrun"), "{e:?}");
}

/// `torchrun` with its own arguments and those of a run; `None` where it is not installed.
fn torchrun(test: &str, options: &[&str], args: &[String]) -> Option<Child> {
    if let Err(e) = Command::new("torchrun").arg("--help").output() {
        eprintln!("SKIPPED: {test}: torchrun: {e}");
        return None;
    }
    let mut command = Command::new("torchrun");
    command.args(options).args(["--no-python", "--nproc-per-node", "2"]).arg(support::binary()).args(args);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    Some(command.spawn().unwrap())
}

#[test]
fn torchrun_with_one_agent_and_with_two() {
    let scene = Scene::new();
    let whole = scene.dir.path().join("whole");
    let mut args = scene.args(&whole);
    args.extend(["--ranks".into(), "2".into()]);
    assert_eq!(run(&args).code, Some(0));
    let args = scene.args(&scene.out());
    let Some(child) = torchrun("torchrun_with_one_agent_and_with_two", &[], &args) else { return };
    let e = support::wait(child);
    assert_eq!(e.code, Some(0), "{e:?}");
    assert_eq!(losses(&scene.out()), losses(&whole));
    let e = run(&[&scene.args(&whole)[..], &["--fresh".into(), "--ranks".into(), "4".into()]].concat());
    assert_eq!(e.code, Some(0), "{e:?}");
    for backend in ["c10d", "static"] {
        let (out, port) = (scene.dir.path().join(backend), free_port().to_string());
        let agent = |node: &str| {
            let at = format!("127.0.0.1:{port}");
            let options = match backend {
                "c10d" => vec!["--rdzv-backend", "c10d", "--rdzv-endpoint", &at, "--rdzv-id", "7"],
                _ => vec!["--master-addr", "127.0.0.1", "--master-port", &port],
            };
            let options = [&["--nnodes", "2", "--node-rank", node][..], &options].concat();
            torchrun(backend, &options, &scene.args(&out)).unwrap()
        };
        let ended = all(vec![agent("0"), agent("1")]);
        assert!(ended.iter().all(|e| e.code == Some(0)), "{backend}: {ended:?}");
        assert_eq!(losses(&out), losses(&whole), "{backend}");
    }
}

#[test]
fn sigterm_to_torchrun_saves_and_ends() {
    let scene = Scene::new();
    let mut args = scene.args(&scene.out());
    args.extend(["--steps".into(), "100000".into()]);
    let Some(child) = torchrun("sigterm_to_torchrun_saves_and_ends", &[], &args) else { return };
    scene.wait_for_steps(7);
    let start = Instant::now();
    signal("-TERM", child.id());
    support::wait(child);
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    let log = std::fs::read_to_string(scene.out().join("events.jsonl")).unwrap();
    let end = log.lines().last().unwrap();
    assert!(end.contains("run_end") && end.contains("interrupted"), "{end}");
    let step = losses(&scene.out()).last().unwrap().0;
    assert!(scene.out().join(format!("checkpoints/step-{step:08}")).is_dir(), "step {step} is not saved");
}

/// The child of `parent` that has this rank.
fn child_of(parent: u32, rank: usize) -> u32 {
    let (parent, rank) = (format!("PPid:\t{parent}"), format!("RANK={rank}"));
    let read =
        |pid: u32, file: &str| std::fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
    let is_it = |pid: &u32| {
        read(*pid, "status").lines().any(|l| l == parent)
            && read(*pid, "environ").split('\0').any(|v| v == rank)
    };
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    all.filter_map(|e| e.file_name().to_str()?.parse().ok()).find(is_it).expect("the process of the rank")
}

#[test]
fn torchrun_restarts_a_job_whose_rank_was_killed() {
    let scene = Scene::new();
    let args = scene.args(&scene.out());
    let test = "torchrun_restarts_a_job_whose_rank_was_killed";
    let Some(child) = torchrun(test, &["--max-restarts", "1"], &args) else { return };
    scene.wait_for_steps(7);
    signal("-KILL", child_of(child.id(), 1));
    let e = support::wait(child);
    assert_eq!(e.code, Some(0), "{e:?}");
    assert!(e.err.contains("resuming"), "{e:?}");
    let whole = scene.dir.path().join("whole");
    assert_eq!(run(&[&scene.args(&whole)[..], &["--ranks".into(), "2".into()]].concat()).code, Some(0));
    assert_eq!(losses(&scene.out()), losses(&whole));
}
