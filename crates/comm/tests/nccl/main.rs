//! NCCL between real processes, all on the first GPU (NCCL ≥ 2.30 allows that). Each test starts this executable once
//! per rank with torchrun's variables; its ignored test `worker` then runs one rank of the scenario.
//!
//! Prints SKIPPED where there is no GPU or no NCCL; FERROTRON_NEEDS_NCCL makes that a failure.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../support/data_movement.rs"]
mod data_movement;
mod operations;

use ferrotron_comm::{ReduceKernels, ReduceOp, World};
use ferrotron_tensor::{Category, DType, Device, Instrumentation, Stream, Tensor, Threads};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

const SCENARIO: &str = "FERROTRON_TEST_SCENARIO";
const FOLDER: &str = "FERROTRON_TEST_FOLDER";
/// Timeout of the ranks in scenarios where something goes wrong.
const TIMEOUT: Duration = Duration::from_secs(5);
/// A stall is named, and every process has ended, so long after the timeout.
const STALL_LIMIT: Duration = Duration::from_secs(10);
/// A dead process is noticed and every process has ended within this time.
const DEAD_LIMIT: Duration = Duration::from_secs(10);

struct Outcome {
    /// Exit code and output of each rank; no code if it was ended by a signal.
    ranks: Vec<(Option<i32>, String)>,
    /// From the fault to the end of the last process that was not stopped.
    seconds: f64,
}

impl Outcome {
    /// Asserts that every rank but `faulty` printed a line with all of `words` and exited with an error.
    fn named_by_all_but(&self, faulty: usize, words: &[&str]) {
        for (rank, (code, text)) in self.ranks.iter().enumerate().filter(|(r, _)| *r != faulty) {
            let says = text.lines().any(|l| words.iter().all(|w| l.contains(w)));
            assert!(says && *code != Some(0), "rank {rank} ({code:?}) does not say {words:?}:\n{text}");
        }
    }
}

fn has_nccl() -> bool {
    let found = ferrotron_comm::nccl_version().map_err(|e| e.to_string()).and_then(|version| {
        let number = |s: &str| s.parse::<u32>().unwrap_or(0);
        let mut parts = version.split('.').map(number);
        let version_number = (parts.next().unwrap_or(0), parts.next().unwrap_or(0));
        let new = version_number >= (2, 30);
        let shared = || format!("NCCL {version} cannot run several ranks on one GPU; 2.30 can");
        if new { Ok(()) } else { Err(shared()) }
    });
    let found = found.and_then(|()| {
        Device::cuda(0, Threads::new(1).unwrap(), Instrumentation::default()).map_err(|e| e.to_string())
    });
    found.map_or_else(
        |error| {
            assert!(std::env::var_os("FERROTRON_NEEDS_NCCL").is_none(), "{error}");
            eprintln!("SKIPPED: {error}");
            false
        },
        |_| true,
    )
}

/// Runs a scenario with `n` ranks and waits for all but the `stopped` one, at most `limit` after the fault.
fn play(scenario: &str, n: usize, stopped: Option<usize>, limit: Duration) -> Outcome {
    let folder = tempfile::tempdir().unwrap();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut ranks: Vec<Child> = (0..n).map(|r| start(scenario, r, n, port, folder.path())).collect();
    let (begin, mut fault) = (Instant::now(), None);
    let waited = |fault: Option<SystemTime>| fault.map_or(0.0, |at| at.elapsed().unwrap().as_secs_f64());
    loop {
        fault = fault.or_else(|| fs::metadata(folder.path().join("fault")).ok()?.modified().ok());
        let ended = |(r, c): (usize, &mut Child)| Some(r) == stopped || c.try_wait().unwrap().is_some();
        if ranks.iter_mut().enumerate().all(ended) {
            break;
        }
        let late = waited(fault) > limit.as_secs_f64() || begin.elapsed() > Duration::from_secs(180);
        if late {
            ranks.iter_mut().for_each(|c| drop(c.kill()));
            let text: Vec<String> = (0..n).map(|r| output(folder.path(), r)).collect();
            panic!(
                "'{scenario}' of {n}: not ended {:.1} s after the fault:\n{}",
                waited(fault),
                text.join("\n")
            );
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let seconds = waited(fault);
    stopped.into_iter().for_each(|r| drop(ranks[r].kill()));
    let result = |(r, c): (usize, &mut Child)| (c.wait().unwrap().code(), output(folder.path(), r));
    let ranks: Vec<_> = ranks.iter_mut().enumerate().map(result).collect();
    eprintln!("'{scenario}' of {n}: {seconds:.1} s after the fault");
    for (rank, (_, text)) in ranks.iter().enumerate() {
        text.lines().filter(|l| l.contains("ferrotron: ")).for_each(|l| eprintln!("    [{rank}] {l}"));
    }
    Outcome { ranks, seconds }
}

fn output(folder: &Path, rank: usize) -> String {
    String::from_utf8_lossy(&fs::read(folder.join(format!("rank-{rank}"))).unwrap()).into_owned()
}

fn start(scenario: &str, rank: usize, n: usize, port: u16, folder: &Path) -> Child {
    let out = fs::File::create(folder.join(format!("rank-{rank}"))).unwrap();
    Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "worker", "--nocapture", "--test-threads=1"])
        .env(SCENARIO, scenario)
        .env(FOLDER, folder)
        .envs([("RANK", rank.to_string()), ("WORLD_SIZE", n.to_string()), ("LOCAL_RANK", "0".into())])
        .envs([("MASTER_ADDR", "127.0.0.1".to_string()), ("MASTER_PORT", port.to_string())])
        .envs([("NCCL_MULTI_RANK_GPU_ENABLE", "1"), ("NCCL_NVLS_ENABLE", "0"), ("NCCL_MAX_CTAS", "4")])
        .env("RUST_BACKTRACE", "0")
        .stdin(Stdio::null())
        .stdout(out.try_clone().unwrap())
        .stderr(out)
        .spawn()
        .unwrap()
}

/// One rank of a scenario.
#[test]
#[ignore = "started by the other tests"]
fn worker() {
    let Ok(scenario) = std::env::var(SCENARIO) else { return };
    let folder = PathBuf::from(std::env::var_os(FOLDER).unwrap());
    let good = scenario.starts_with("good");
    let check = Instrumentation { race_check: scenario == "good checked", ..Instrumentation::default() };
    let device = Device::cuda(0, Threads::new(1).unwrap(), check).unwrap();
    let timeout = if good { Duration::from_secs(60) } else { TIMEOUT };
    let world = World::nccl(&device, timeout, ReduceKernels::default()).unwrap();
    let s = device.stream("compute").unwrap();
    let (rank, all) = (world.rank(), world.all());
    let t = s.zeros(&[1 << 20], DType::F32, Category::Communication).unwrap();
    let reduce = |t: &Tensor, label| all.all_reduce(&s, t, ReduceOp::Sum, label);
    reduce(&t, "before").unwrap();
    s.synchronize().unwrap();
    all.barrier("start").unwrap();
    let fault = || fs::write(folder.join("fault"), "").unwrap();
    // The last rank is the faulty one, or rank 0.
    let last = world.size() - 1;
    match scenario.as_str() {
        "good operations" | "good checked" => operations::all(&world, &s),
        "good host cost" => host_cost(&world, &s),
        "killed" | "killed rank 0" => {
            let victim = if scenario == "killed" { last } else { 0 };
            if rank == victim {
                fault();
                signal("-KILL");
            }
            goes_on(&world, &s, |_| reduce(&t, "gradients"));
        }
        "stopped" | "stopped rank 0" => {
            let victim = if scenario == "stopped" { last } else { 0 };
            if rank == victim {
                fault();
                signal("-STOP");
                std::thread::sleep(Duration::from_secs(60));
            }
            goes_on(&world, &s, |_| reduce(&t, "gradients"));
        }
        "skipped" => {
            if rank == 0 {
                fault();
            }
            goes_on(&world, &s, |i| if i == 5 && rank == last { Ok(()) } else { reduce(&t, LABELS[i % 10]) });
        }
        "late" => {
            if rank == last {
                fault();
                std::thread::sleep(Duration::from_secs(60));
            }
            goes_on(&world, &s, |_| reduce(&t, "gradients"));
        }
        "different shape" => {
            if rank == 0 {
                fault();
            }
            let small = t.narrow(0, 0, 1000).unwrap();
            goes_on(&world, &s, |i| reduce(if i == 5 && rank == last { &small } else { &t }, "gradients"));
        }
        // NCCL moves the same bytes, so nothing hangs.
        "different label" => {
            if rank == 0 {
                fault();
            }
            goes_on(&world, &s, |i| {
                std::thread::sleep(Duration::from_millis(20));
                reduce(&t, if i == 5 && rank == last { "other" } else { "gradients" })
            });
        }
        // The GPU works for longer than everybody waits.
        "busy device" => {
            if rank == last {
                let big = || Tensor::empty(&s, &[40 << 30], DType::U8, Category::Communication).unwrap();
                let (a, b) = (big(), big());
                fault();
                (0..400).for_each(|_| s.copy(&a, &b).unwrap());
                drop(reduce(&t, "gradients"));
                s.synchronize().unwrap();
            }
            goes_on(&world, &s, |_| reduce(&t, "gradients"));
        }
        other => panic!("no scenario '{other}'"),
    }
}

const LABELS: [&str; 10] = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"];

/// Calls `step` and waits for the GPU, until something fails.
fn goes_on(world: &World, s: &Stream, step: impl Fn(usize) -> ferrotron_comm::Result<()>) {
    for i in 0..1_000_000 {
        let done = step(i).and_then(|()| Ok(s.synchronize()?)).and_then(|()| world.check());
        if let Err(error) = done {
            eprintln!("rank {} ends: {error}", world.rank());
            // Every further call fails at once.
            let again = Instant::now();
            assert!(world.all().barrier("after the end").is_err());
            assert!(again.elapsed() < Duration::from_secs(2));
            panic!("rank {}: {error}", world.rank());
        }
    }
}

fn signal(name: &str) {
    let id = std::process::id().to_string();
    assert!(Command::new("kill").args([name, &id]).status().unwrap().success());
}

/// Prints the host's time per enqueued all-reduce, without waiting for the GPU more often than every 50 calls.
fn host_cost(world: &World, s: &Stream) {
    let all = world.all();
    let t = s.zeros(&[1024], DType::F32, Category::Communication).unwrap();
    // Processes that share a GPU take turns on it: the more there are, the longer a call takes.
    let count = 200 / world.size();
    let cost = |calls: &dyn Fn()| {
        let (mut best, mut own) = (f64::MAX, f64::MAX);
        for _ in 0..5 {
            let (before, start) = (world.host_cost(), Instant::now());
            (0..count).for_each(|_| calls());
            let each = |seconds: f64| seconds / count as f64 * 1e6;
            let host = each(start.elapsed().as_secs_f64());
            let library = each(world.host_cost().since(&before).library.as_secs_f64());
            (best, own) = (best.min(host), own.min(host - library));
            s.synchronize().unwrap();
        }
        (best, own)
    };
    let n = all.size();
    let (best, own) = cost(&|| all.all_reduce(s, &t, ReduceOp::Sum, "host cost").unwrap());
    eprintln!(
        "ferrotron: {best:.1} us per enqueued all-reduce of {n} ranks, {own:.1} us of them outside NCCL"
    );
    assert!(own <= 10.0, "{own} us");
    let small: Vec<Tensor> =
        (0..4).map(|_| s.zeros(&[64], DType::F32, Category::Communication).unwrap()).collect();
    let labelled: Vec<_> = small.iter().map(|t| (t, "host cost")).collect();
    let (apart, _) = cost(&|| {
        small.iter().for_each(|t| all.all_reduce(s, t, ReduceOp::Sum, "host cost").unwrap());
    });
    let (together, _) = cost(&|| all.all_reduce_coalesced(s, &labelled, ReduceOp::Sum).unwrap());
    eprintln!(
        "ferrotron: four small all-reduces of {n} ranks: {apart:.1} us apart, {together:.1} us coalesced"
    );
    // Frames are sent with time, not with calls.
    let (before, start) = (world.host_cost(), Instant::now());
    let calls = 4 * count;
    for i in 0..calls {
        all.all_reduce(s, &t, ReduceOp::Sum, "host cost").unwrap();
        if i % count == 0 {
            s.synchronize().unwrap();
        }
    }
    let (frames, seconds) = (world.host_cost().since(&before).frames, start.elapsed().as_secs_f64());
    let receivers = if world.rank() == 0 { n as u64 - 1 } else { 1 };
    eprintln!("ferrotron: {frames} control frames in {seconds:.2} s and {calls} calls of {n} ranks");
    assert!(frames <= ((seconds / 0.5) as u64 + 2) * receivers, "{frames} frames in {seconds} s");
}

fn good(scenario: &str, n: usize) {
    if has_nccl() {
        let o = play(scenario, n, None, Duration::from_secs(150));
        for (rank, (code, text)) in o.ranks.iter().enumerate() {
            assert_eq!(*code, Some(0), "rank {rank}:\n{text}");
            assert!(text.contains("1 passed"), "rank {rank}:\n{text}");
        }
    }
}

#[test]
fn every_operation_with_2_4_and_8_ranks() {
    [2, 4, 8].into_iter().for_each(|n| good("good operations", n));
}

#[test]
fn every_operation_with_calls_compared_first() {
    good("good checked", 4);
}

#[test]
fn host_cost_of_a_collective() {
    [2, 4, 8].into_iter().for_each(|n| good("good host cost", n));
}

/// A fault with 2 and 4 ranks: everybody else names it in time.
fn bad(scenario: &str, limit: Duration, stopped: bool, words: impl Fn(usize, usize) -> Vec<String>) {
    if !has_nccl() {
        return;
    }
    for n in [2, 4] {
        let faulty = if scenario.ends_with("rank 0") { 0 } else { n - 1 };
        let o = play(scenario, n, stopped.then_some(faulty), limit);
        let words = words(n, faulty);
        o.named_by_all_but(faulty, &words.iter().map(String::as_str).collect::<Vec<_>>());
        assert!(o.seconds <= limit.as_secs_f64(), "{:.1} s", o.seconds);
    }
}

#[test]
fn a_killed_rank_is_named() {
    for scenario in ["killed", "killed rank 0"] {
        bad(scenario, DEAD_LIMIT, false, |_, r| vec!["ferrotron: ".into(), format!("rank {r} has exited")]);
    }
}

#[test]
fn a_stopped_rank_is_named() {
    for scenario in ["stopped", "stopped rank 0"] {
        bad(scenario, TIMEOUT + STALL_LIMIT, true, |_, r| {
            vec!["ferrotron: ".into(), format!("rank {r} ("), "not respond".into(), "gradients".into()]
        });
    }
}

#[test]
fn a_skipped_collective_is_named() {
    bad("skipped", TIMEOUT + STALL_LIMIT, false, |_, r| {
        vec!["ranks differ".into(), format!("rank {r} calls"), "'6'".into()]
    });
}

#[test]
fn a_late_rank_is_named() {
    bad("late", TIMEOUT + STALL_LIMIT, false, |_, r| {
        vec!["ferrotron: ".into(), format!("rank {r} has not called"), "gradients".into()]
    });
}

#[test]
fn a_different_shape_is_named() {
    bad("different shape", TIMEOUT + STALL_LIMIT, false, |_, r| {
        vec!["ranks differ".into(), format!("rank {r} calls"), "[1000]".into(), "[1048576]".into()]
    });
}

#[test]
fn calls_that_differ_without_a_stall_are_named() {
    bad("different label", TIMEOUT, false, |_, r| {
        vec!["ranks differ".into(), format!("rank {r} calls"), "'other'".into()]
    });
}

#[test]
fn a_busy_device_is_named() {
    bad("busy device", TIMEOUT + STALL_LIMIT, false, |_, r| {
        vec!["ferrotron: ".into(), format!("the GPU of rank {r} has not reached"), "gradients".into()]
    });
}
