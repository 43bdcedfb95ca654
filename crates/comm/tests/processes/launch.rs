//! Starts a scenario as four processes and collects what each says.

use crate::{END, SCENARIO, TIMEOUT};
use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// What starts the processes.
#[derive(Clone, Copy)]
pub enum By<'a> {
    /// `mpirun` with these options.
    Mpirun(&'a [&'a str]),
    /// `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`.
    Variables,
}

pub struct Outcome {
    pub success: bool,
    pub seconds: f64,
    /// Output of each rank.
    pub ranks: Vec<String>,
    /// All output.
    pub text: String,
}

impl Outcome {
    /// True if this rank printed a line that contains all of `words`.
    pub fn says(&self, rank: usize, words: &[&str]) -> bool {
        self.ranks[rank].lines().any(|l| words.iter().all(|w| l.contains(w)))
    }
}

/// Runs a scenario that must succeed.
pub fn good(by: By, scenario: &str) {
    if let Some(o) = play(by, scenario, None, Duration::from_secs(240)) {
        assert!(o.success, "{}", o.text);
        assert!((0..4).all(|rank| o.says(rank, &["1 passed"])), "{}", o.text);
    }
}

/// Runs a scenario that must fail in time. `stopped` is a rank that cannot end by itself.
pub fn bad(by: By, scenario: &str, stopped: Option<usize>) -> Option<Outcome> {
    let o = play(by, scenario, stopped, TIMEOUT + END + Duration::from_secs(20))?;
    assert!(!o.success, "{}", o.text);
    let limit = (TIMEOUT + END).as_secs_f64();
    assert!(o.seconds < limit, "it took {:.1} s:\n{}", o.seconds, o.text);
    Some(o)
}

/// Runs a scenario with four ranks. `None` where there is no Open MPI, except in CI.
fn play(by: By, scenario: &str, stopped: Option<usize>, limit: Duration) -> Option<Outcome> {
    let options = match by {
        By::Variables => return Some(by_variables(scenario, stopped, limit)),
        By::Mpirun(options) => options,
    };
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
    let start = Instant::now();
    let mut command = Command::new("mpirun");
    command
        .args(["--oversubscribe", "--allow-run-as-root", "-n", "4"])
        .arg("--output-filename")
        .arg(folder.path())
        .args(options)
        .arg(std::env::current_exe().unwrap());
    let mut children = vec![spawn(&mut command, scenario, File::create(&file).unwrap())];
    let success = wait(&mut children, None, start + limit).unwrap_or_else(|| {
        let _ = Command::new("kill").arg(children[0].id().to_string()).status();
        std::thread::sleep(Duration::from_secs(3));
        let _ = children[0].kill();
        panic!("'{scenario}' hangs; so far:\n{}", read(file.clone()));
    });
    let seconds = start.elapsed().as_secs_f64();
    let words = |rank: usize| {
        let rank = folder.path().join(format!("1/rank.{rank}"));
        read(rank.join("stdout")) + &read(rank.join("stderr"))
    };
    let (ranks, text) = ((0..4).map(words).collect(), read(file));
    eprintln!("'{scenario}' took {seconds:.1} s");
    Some(Outcome { success, seconds, ranks, text })
}

fn by_variables(scenario: &str, stopped: Option<usize>, limit: Duration) -> Outcome {
    let folder = tempfile::tempdir().unwrap();
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let file = |rank: usize| folder.path().join(rank.to_string());
    let start = Instant::now();
    let mut children: Vec<Child> = (0..4)
        .map(|rank| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", "4")
                .env("MASTER_ADDR", "127.0.0.1")
                .env("MASTER_PORT", free.to_string());
            spawn(&mut command, scenario, File::create(file(rank)).unwrap())
        })
        .collect();
    let ended = wait(&mut children, stopped, start + limit);
    let seconds = start.elapsed().as_secs_f64();
    children.iter_mut().for_each(|c| drop((c.kill(), c.wait())));
    let ranks: Vec<String> = (0..4).map(|rank| read(file(rank))).collect();
    let text = ranks.join("\n");
    let success = ended.unwrap_or_else(|| panic!("'{scenario}' hangs; so far:\n{text}"));
    eprintln!("'{scenario}' by variables took {seconds:.1} s");
    Outcome { success, seconds, ranks, text }
}

fn spawn(command: &mut Command, scenario: &str, out: File) -> Child {
    command
        .args(["--ignored", "--exact", "worker", "--nocapture", "--test-threads=1"])
        .env(SCENARIO, scenario)
        .env("RUST_BACKTRACE", "0")
        .stdin(Stdio::null())
        .stdout(out.try_clone().unwrap())
        .stderr(out)
        .spawn()
        .unwrap()
}

/// Waits until all but the stopped one have ended; whether all succeeded, `None` if it takes too long.
fn wait(children: &mut [Child], stopped: Option<usize>, deadline: Instant) -> Option<bool> {
    loop {
        let ended: Vec<Option<bool>> =
            children.iter_mut().map(|c| c.try_wait().unwrap().map(|status| status.success())).collect();
        if ended.iter().enumerate().all(|(i, e)| e.is_some() || stopped == Some(i)) {
            return Some(ended.iter().all(|e| *e == Some(true)));
        }
        if Instant::now() > deadline {
            return None;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn read(path: PathBuf) -> String {
    String::from_utf8_lossy(&std::fs::read(path).unwrap()).into_owned()
}
