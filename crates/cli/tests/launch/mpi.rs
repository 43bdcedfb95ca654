//! Processes under `mpirun`.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// True if Open MPI is installed. CI requires it; elsewhere tests print that they are skipped.
pub fn installed(test: &str) -> bool {
    match Command::new("mpirun").arg("--version").output() {
        Ok(_) => true,
        Err(e) => {
            assert!(std::env::var_os("CI").is_none(), "CI needs Open MPI: mpirun: {e}");
            eprintln!("SKIPPED: {test}: mpirun: {e}");
            false
        }
    }
}

/// A job and the folder with each rank's output, which `mpirun` itself may interleave.
pub struct Job {
    child: Child,
    words: tempfile::TempDir,
    start: Instant,
}

/// Exit code and output of a finished job.
pub struct Outcome {
    pub code: Option<i32>,
    pub seconds: f64,
    /// Standard output of each rank.
    pub out: Vec<String>,
    /// Standard error of each rank.
    pub err: Vec<String>,
    /// What `mpirun` wrote, including all of that.
    pub text: String,
}

impl Outcome {
    /// Did this rank write a line to standard error that contains all of `words`?
    pub fn says(&self, rank: usize, words: &[&str]) -> bool {
        self.err[rank].lines().any(|l| words.iter().all(|w| l.contains(w)))
    }

    pub fn succeeded(self) -> Outcome {
        assert_eq!(self.code, Some(0), "{}", self.text);
        self
    }
}

/// Starts `program` on `n` ranks.
pub fn start(n: usize, options: &[&str], program: &OsString, args: &[&str], env: &[(&str, &str)]) -> Job {
    let words = tempfile::tempdir().unwrap();
    let all = std::fs::File::create(words.path().join("all")).unwrap();
    let child = Command::new("mpirun")
        .args(["--oversubscribe", "--allow-run-as-root", "-n", &n.to_string()])
        .arg("--output-filename")
        .arg(words.path())
        .args(options)
        .arg(program)
        .args(args)
        .envs(env.iter().copied())
        .env("RUST_BACKTRACE", "0")
        .stdin(Stdio::null())
        .stdout(all.try_clone().unwrap())
        .stderr(all)
        .spawn()
        .unwrap();
    Job { child, words, start: Instant::now() }
}

/// The same with the program under test, each rank with one compute thread.
pub fn ferrotron(n: usize, options: &[&str], args: &[&str]) -> Job {
    start(
        n,
        options,
        &super::support::binary(),
        &[args, &["--threads", "1", "--device", "cpu"]].concat(),
        &[],
    )
}

impl Job {
    /// The process of a rank. It may take a moment until it is there.
    pub fn process(&self, rank: usize) -> u32 {
        let wanted = format!("OMPI_COMM_WORLD_RANK={rank}");
        let parent = format!("PPid:\t{}", self.child.id());
        let ours = |pid: u32| {
            let read =
                |file: &str| std::fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
            read("status").lines().any(|l| l == parent) && read("environ").split('\0').any(|v| v == wanted)
        };
        while self.start.elapsed() < Duration::from_secs(30) {
            let all = std::fs::read_dir("/proc").unwrap().flatten();
            let mut pids = all.filter_map(|e| e.file_name().to_str()?.parse().ok());
            if let Some(pid) = pids.find(|pid| ours(*pid)) {
                return pid;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("rank {rank} does not start; so far:\n{}", self.so_far());
    }

    fn so_far(&self) -> String {
        lossy(&self.words.path().join("all"))
    }

    /// Waits for the end; a job that takes longer than `limit` hangs.
    pub fn wait(mut self, limit: Duration) -> Outcome {
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            if self.start.elapsed() > limit {
                // mpirun ends its processes when it is asked to end.
                let _ = Command::new("kill").arg(self.child.id().to_string()).status();
                std::thread::sleep(Duration::from_secs(3));
                let _ = self.child.kill();
                panic!("it hangs; so far:\n{}", self.so_far());
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let seconds = self.start.elapsed().as_secs_f64();
        let words = |file: &str| -> Vec<String> {
            let of = |rank: usize| self.words.path().join(format!("1/rank.{rank}")).join(file);
            (0..).map(of).take_while(|p| p.exists()).map(|p| lossy(&p)).collect()
        };
        Outcome {
            code: status.code(),
            seconds,
            out: words("stdout"),
            err: words("stderr"),
            text: self.so_far(),
        }
    }
}

fn lossy(path: &Path) -> String {
    String::from_utf8_lossy(&std::fs::read(path).unwrap_or_default()).into_owned()
}
