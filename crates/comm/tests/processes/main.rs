//! Ranks as processes: over MPI under `mpirun`, and over shared memory with plain variables. Each test starts this
//! executable as four processes, whose ignored test `worker` then runs one rank of the scenario named by the
//! environment.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../support/data_movement.rs"]
mod data_movement;
mod launch;
mod mpi;
mod operations;
mod shm;

use ferrotron_comm::{LaunchEnv, Launcher, ReduceOp, World};
use ferrotron_tensor::{Category, DType, Device, Stream, Threads};
use std::process::Command;
use std::time::{Duration, Instant};

const SCENARIO: &str = "FERROTRON_TEST_SCENARIO";
/// Timeout of the ranks in scenarios where one goes missing.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Extra time for error reports and for all processes to end.
const END: Duration = Duration::from_secs(20);

/// One rank of a scenario, started by a launcher.
#[test]
#[ignore = "started by a launcher"]
fn worker() {
    let Ok(scenario) = std::env::var(SCENARIO) else { return };
    let timeout = if scenario.starts_with("good") { Duration::from_secs(60) } else { TIMEOUT };
    let job = LaunchEnv::detect().unwrap().expect("started by a launcher");
    let world = match job.launcher {
        Launcher::OpenMpi => World::mpi(timeout).unwrap(),
        _ => World::one_host(&job, timeout).unwrap(),
    };
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
        "good frames" => {
            let t = s.zeros(&[16], DType::F32, Category::Communication).unwrap();
            let some = s.zeros(&[4], DType::F32, Category::Communication).unwrap();
            let before = world.host_cost();
            assert!(before.frames > 0, "groups are created over the control transport");
            for _ in 0..500 {
                all.all_reduce(&s, &t, ReduceOp::Sum, "gradients").unwrap();
                all.all_gather(&s, &some, &t, "weights").unwrap();
                all.broadcast(&s, &t, 1, "weights").unwrap();
                all.barrier("step").unwrap();
            }
            let sent = world.host_cost().since(&before);
            // Nobody says goodbye, through rank 0, before all have counted.
            all.barrier("counted").unwrap();
            assert_eq!(sent.frames, 0, "collectives send no control frames");
            assert!(sent.inside > Duration::ZERO, "time inside calls is counted");
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
        "rank 0 killed" => {
            // Rank 1 waits for rank 2, not for rank 0.
            let pair = world.group("pair", &[1, 2]).unwrap();
            all.barrier("all have their groups").unwrap();
            if rank == 0 {
                signal("-KILL");
            }
            match pair.filter(|_| rank == 1) {
                Some(pair) => ends(pair.barrier("a rank that waits elsewhere")),
                None => ends(all.barrier("never")),
            }
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
        "rank 0 stopped" => {
            all.barrier("before").unwrap();
            if rank == 0 {
                signal("-STOP");
                std::thread::sleep(TIMEOUT + END);
            }
            if rank == 1 {
                ends(all.barrier("never"));
            }
            // Messages between two other ranks are announced through rank 0.
            let [mine, theirs] = [0, 1].map(|_| s.zeros(&[4], DType::F32, Category::Communication).unwrap());
            let start = Instant::now();
            while start.elapsed() < TIMEOUT + END {
                let peer = 5 - rank;
                if let Err(error) = all.send_recv(&s, &[(peer, &mine)], &[(peer, &theirs)], "ring") {
                    ends(Err(error));
                }
            }
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
