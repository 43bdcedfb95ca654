//! The MPI backend under `mpirun`. Each test starts `mpirun` on this executable, whose ignored test `worker` then
//! runs one rank of the scenario named by the environment.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod operations;

use ferrotron_comm::{ReduceOp, World};
use ferrotron_tensor::{Category, DType, Device, Stream, Threads};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const SCENARIO: &str = "FERROTRON_TEST_SCENARIO";
/// Timeout of the ranks in scenarios where one goes missing.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Extra time for error reports and for `mpirun` to end all processes.
const END: Duration = Duration::from_secs(20);

struct Outcome {
    success: bool,
    seconds: f64,
    /// Output of each rank.
    ranks: Vec<String>,
    /// Output of `mpirun`, including that of all ranks.
    text: String,
}

impl Outcome {
    /// True if this rank printed a line that contains all of `words`.
    fn says(&self, rank: usize, words: &[&str]) -> bool {
        self.ranks[rank].lines().any(|l| words.iter().all(|w| l.contains(w)))
    }
}

/// Runs a scenario with four ranks. `None` where there is no Open MPI, except in CI.
fn play(scenario: &str, options: &[&str], limit: Duration) -> Option<Outcome> {
    if let Err(error) = ferrotron_comm::mpi_version().map_err(|e| e.to_string()).and_then(|_| {
        let found = Command::new("mpirun").arg("--version").output();
        found.map_err(|e| format!("mpirun: {e}"))
    }) {
        assert!(std::env::var_os("CI").is_none(), "CI needs Open MPI: {error}");
        eprintln!("SKIPPED: {scenario}: {error}");
        return None;
    }
    // One output file per rank, because `mpirun` may interleave them.
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("all");
    let out = std::fs::File::create(&file).unwrap();
    let start = Instant::now();
    let mut child = Command::new("mpirun")
        .args(["--oversubscribe", "--allow-run-as-root", "-n", "4"])
        .arg("--output-filename")
        .arg(folder.path())
        .args(options)
        .arg(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "worker", "--nocapture", "--test-threads=1"])
        .env(SCENARIO, scenario)
        .env("RUST_BACKTRACE", "0")
        .stdin(Stdio::null())
        .stdout(out.try_clone().unwrap())
        .stderr(out)
        .spawn()
        .unwrap();
    let success = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status.success();
        }
        if start.elapsed() > limit {
            let _ = Command::new("kill").arg(child.id().to_string()).status();
            std::thread::sleep(Duration::from_secs(3));
            let _ = child.kill();
            let text = std::fs::read_to_string(&file).unwrap();
            panic!("'{scenario}' hangs; so far:\n{text}");
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let seconds = start.elapsed().as_secs_f64();
    let read = |path: std::path::PathBuf| String::from_utf8_lossy(&std::fs::read(path).unwrap()).into_owned();
    let words = |rank: usize| {
        let rank = folder.path().join(format!("1/rank.{rank}"));
        read(rank.join("stdout")) + &read(rank.join("stderr"))
    };
    let (ranks, text) = ((0..4).map(words).collect(), read(file));
    eprintln!("'{scenario}' took {seconds:.1} s");
    Some(Outcome { success, seconds, ranks, text })
}

/// One rank of a scenario, started by `mpirun`.
#[test]
#[ignore = "started by mpirun"]
fn worker() {
    let Ok(scenario) = std::env::var(SCENARIO) else { return };
    let timeout = if scenario.starts_with("good") { Duration::from_secs(60) } else { TIMEOUT };
    let world = World::mpi(timeout).unwrap();
    let s = Device::cpu(Threads::new(1).unwrap()).stream("compute").unwrap();
    let (rank, all) = (world.rank(), world.all());
    all.barrier("start").unwrap();
    let signal = |name: &str| {
        assert!(
            Command::new("kill").args([name, &std::process::id().to_string()]).status().unwrap().success()
        );
    };
    let ends = |result: ferrotron_comm::Result<()>| {
        let error = result.expect_err("a rank failed");
        eprintln!("rank {rank} ends: {error}");
        // Every further call fails at once.
        let again = Instant::now();
        assert!(all.barrier("after the end").is_err());
        assert!(again.elapsed() < Duration::from_secs(2));
        panic!("rank {rank}: {error}");
    };
    match scenario.as_str() {
        "good operations" => operations::all(&world, &s),
        "good long" => operations::long(&all, &s),
        "good beyond 32 bits" => {
            // Marks at the places where counts or message boundaries could go wrong.
            let len = (1usize << 31) + 101;
            let t = s.zeros(&[len], DType::U8, Category::Communication).unwrap();
            let places = [0, (1 << 30) - 2, (1 << 31) - 2, len - 4].map(|at| t.narrow(0, at, 4).unwrap());
            if rank == 1 {
                places.iter().for_each(|p| s.upload_into(p, &[1u8, 2, 3, 4]).unwrap());
            }
            all.broadcast(&s, &t, 1, "much").unwrap();
            assert!(places.iter().all(|p| s.download::<u8>(p).unwrap() == [1, 2, 3, 4]));
        }
        "good idle" => {
            if rank == 0 {
                std::thread::sleep(Duration::from_secs(3));
            }
            let before = cpu_seconds();
            all.barrier("a late one").unwrap();
            let used = cpu_seconds() - before;
            assert!(rank == 0 || used < 1.0, "rank {rank} used {used} s of a core while it waited");
        }
        "different shape" => {
            let len = if rank == 2 { 5 } else { 4 };
            let t = s.zeros(&[len], DType::F32, Category::Communication).unwrap();
            ends(all.all_reduce(&s, &t, ReduceOp::Sum, "gradients"));
        }
        "skipped" => {
            let t = s.zeros(&[4], DType::F32, Category::Communication).unwrap();
            if rank != 3 {
                ends(all.all_reduce(&s, &t, ReduceOp::Sum, "gradients"));
            }
            ends(all.barrier("step"));
        }
        "different message" => {
            let len = if rank == 1 { 5 } else { 4 };
            let t = s.zeros(&[len], DType::F32, Category::Communication).unwrap();
            match rank {
                0 => all.send(&s, &t, 1, "activations").unwrap(),
                1 => ends(all.receive(&s, &t, 0, "activations")),
                _ => {}
            }
            ends(all.barrier("step"));
        }
        "different groups" => {
            let list = if rank == 1 { [0, 1] } else { [0, 2] };
            // A rank that notices no difference gets the report in its next call.
            ends(world.group("tp", &list).and_then(|_| all.barrier("step")));
        }
        "killed" => {
            if rank == 2 {
                signal("-KILL");
            }
            ends(all.barrier("never"));
        }
        "stopped" => {
            all.barrier("before").unwrap();
            if rank == 1 {
                // The signal reaches another thread first, which stops this one a little later: wait here until then.
                signal("-STOP");
                std::thread::sleep(TIMEOUT + END);
            }
            ends(all.barrier("never"));
        }
        "stopped in a transfer" => {
            // Rank 1 agrees to the call and stops before it has sent everything.
            let t = s.zeros(&[64 << 20], DType::U8, Category::Communication).unwrap();
            if rank == 1 {
                std::thread::spawn(move || {
                    std::thread::sleep(Duration::from_millis(50));
                    let _ = Command::new("kill").args(["-STOP", &std::process::id().to_string()]).status();
                });
            }
            let start = Instant::now();
            loop {
                if let Err(error) = all.broadcast(&s, &t, 1, "weights") {
                    ends(Err(error));
                }
                assert!(start.elapsed() < Duration::from_secs(30));
            }
        }
        "late" => {
            if rank == 1 {
                std::thread::sleep(TIMEOUT + END);
            }
            ends(all.barrier("never"));
        }
        "exited early" => {
            if rank != 1 {
                ends(all.barrier("never"));
            }
        }
        other => panic!("no scenario '{other}'"),
    }
}

/// CPU time used by this process.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let after = stat.rsplit(')').next().unwrap();
    let ticks = |i: usize| after.split_whitespace().nth(i).unwrap().parse::<f64>().unwrap();
    (ticks(11) + ticks(12)) / 100.0
}

fn good(scenario: &str, options: &[&str]) {
    if let Some(o) = play(scenario, options, Duration::from_secs(240)) {
        assert!(o.success, "{}", o.text);
        assert!((0..4).all(|rank| o.says(rank, &["1 passed"])), "{}", o.text);
    }
}

#[test]
fn every_operation_equals_its_definition() {
    good("good operations", &[]);
}

#[test]
fn every_operation_over_tcp() {
    good("good operations", &["--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo"]);
}

#[test]
fn long_sums_are_split_into_segments() {
    good("good long", &[]);
}

#[test]
#[ignore = "takes 9 GiB of memory; run it after changes to transfers"]
fn messages_may_exceed_32_bit_counts() {
    good("good beyond 32 bits", &[]);
}

#[test]
fn a_waiting_rank_does_not_use_cpu_time() {
    good("good idle", &[]);
}

#[test]
fn the_thread_backend_gives_the_same_results() {
    let device = Device::cpu(Threads::new(1).unwrap());
    std::thread::scope(|scope| {
        for world in World::threads(4, Duration::from_secs(60)) {
            let s: Stream = device.stream("compute").unwrap();
            scope.spawn(move || {
                operations::all(&world, &s);
                operations::long(&world.all(), &s);
            });
        }
    });
}

/// Runs a scenario that must fail in time.
fn bad(scenario: &str) -> Option<Outcome> {
    let o = play(scenario, &[], TIMEOUT + END + Duration::from_secs(20))?;
    assert!(!o.success, "{}", o.text);
    let limit = (TIMEOUT + END).as_secs_f64();
    assert!(o.seconds < limit, "it took {:.1} s:\n{}", o.seconds, o.text);
    Some(o)
}

#[test]
fn a_different_shape_is_named_on_every_rank() {
    let Some(o) = bad("different shape") else { return };
    for rank in 0..4 {
        assert!(o.says(rank, &["ends: ", "rank 2", "gradients", "[4]", "[5]"]), "{}", o.text);
    }
}

#[test]
fn a_skipped_collective_is_named_on_every_rank() {
    let Some(o) = bad("skipped") else { return };
    for rank in 0..4 {
        assert!(o.says(rank, &["ends: ", "rank 3", "gradients", "'step'"]), "{}", o.text);
    }
}

#[test]
fn a_different_message_is_named() {
    let Some(o) = bad("different message") else { return };
    assert!(o.says(1, &["ends: ", "rank 0", "activations", "[4]", "[5]"]), "{}", o.text);
    for rank in [0, 2, 3] {
        // They get the report while they wait.
        assert!(o.says(rank, &["ends: ", "rank 1 failed", "activations"]), "{}", o.text);
    }
}

#[test]
fn different_groups_are_named() {
    let Some(o) = bad("different groups") else { return };
    // The rank after the one that differs notices it and reports it to the others.
    for rank in 0..4 {
        assert!(o.says(rank, &["ends: ", "[0, 1]", "[0, 2]", "rank 1"]), "{}", o.text);
    }
}

#[test]
fn a_killed_rank_ends_the_job() {
    let Some(o) = bad("killed") else { return };
    // Open MPI detects the death of a process itself and ends the others.
    assert!(o.text.lines().any(|l| l.contains("rank 2") && l.contains("signal 9")), "{}", o.text);
}

#[test]
fn a_stopped_rank_is_named_on_every_other() {
    let Some(o) = bad("stopped") else { return };
    assert!(o.seconds > TIMEOUT.as_secs_f64());
    for rank in [0, 2, 3] {
        let waited = format!("rank {rank} waited");
        let words = ["ferrotron: stalled", &waited, "'never'", "rank 1 (it completed barrier 'before'"];
        assert!(o.says(rank, &words), "{}", o.text);
    }
}

#[test]
fn a_rank_stopped_in_a_transfer_is_named_on_every_other() {
    let Some(o) = bad("stopped in a transfer") else { return };
    for rank in [0, 2, 3] {
        let waited = format!("rank {rank} waited");
        assert!(o.says(rank, &["ferrotron: stalled", &waited, "'weights'", "rank 1 ("]), "{}", o.text);
    }
}

#[test]
fn a_late_rank_reports_its_last_operation() {
    let Some(o) = bad("late") else { return };
    for rank in [0, 2, 3] {
        let waited = format!("rank {rank} waited");
        let words = ["ends: ", &waited, "'never'", "rank 1 (it completed barrier 'start'"];
        assert!(o.says(rank, &words), "{}", o.text);
        assert!(!o.says(rank, &["stopped responding"]), "{}", o.text);
    }
}

#[test]
fn a_rank_that_exited_early_is_named() {
    let Some(o) = bad("exited early") else { return };
    for rank in [0, 2, 3] {
        assert!(o.says(rank, &["ends: ", "'never'", "rank 1 (it completed barrier 'start'"]), "{}", o.text);
    }
}
