//! Helpers for tests of whole runs: a small recipe, the binary under a time limit, a seeded generator and file
//! corruption.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The binary under test: `FERROTRON_BIN` if set (on a GPU host), otherwise the one just built.
pub fn binary() -> std::ffi::OsString {
    std::env::var_os("FERROTRON_BIN").unwrap_or_else(|| env!("CARGO_BIN_EXE_ferrotron").into())
}

/// Time limit of a command; none of these tests needs a hundredth of it.
const LIMIT: Duration = Duration::from_secs(120);

#[path = "../../../../tests/support/soak.rs"]
pub mod soak;

#[path = "../../../../tests/support/rng.rs"]
mod rng;

pub use rng::SeededRng;

/// A recipe on the built-in corpus; `more` is appended.
pub fn recipe(dir: &Path, steps: usize, more: &str) -> PathBuf {
    let text = format!(
        "[model]\nlayers = 2\nhidden = 16\nheads = 2\nffn = 32\nvocab = 256\n\
         [data]\npath = \"embedded\"\nseq_len = 8\n\
         [train]\nsteps = {steps}\nglobal_batch = 4\nmicro_batch = 2\n\
         [optimizer]\nlr = 3e-3\n[schedule]\nwarmup = 1\n[dropout]\nhidden = 0.1\n{more}"
    );
    let path = dir.join("small.toml");
    std::fs::write(&path, text).unwrap();
    path
}

/// The binary with arguments, its output to be collected.
pub fn ferrotron<A: AsRef<std::ffi::OsStr>>(args: &[A]) -> Command {
    let mut command = Command::new(binary());
    command.args(args).args(["--threads", "1"]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Exit code and output of a finished command.
#[derive(Debug)]
pub struct Finished {
    /// The exit code; none after a signal.
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

/// Waits for a command, up to the time limit.
pub fn wait(mut child: Child) -> Finished {
    let start = Instant::now();
    let pipes = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let read = |mut pipe: Box<dyn std::io::Read + Send>| {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            pipe.read_to_end(&mut bytes).unwrap();
            String::from_utf8_lossy(&bytes).into_owned()
        })
    };
    let (out, err) = (read(Box::new(pipes.0)), read(Box::new(pipes.1)));
    let mut pause = Duration::from_micros(200);
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if start.elapsed() > LIMIT {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("no end after {LIMIT:?}; it said: {}", err.join().unwrap());
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(5));
    };
    Finished { code: status.code(), out: out.join().unwrap(), err: err.join().unwrap() }
}

/// Runs a command to its end.
pub fn run<A: AsRef<std::ffi::OsStr>>(args: &[A]) -> Finished {
    wait(ferrotron(args).spawn().unwrap())
}

/// Asserts a user-facing error: exit code 1 or 2, one sentence, perhaps a hint, and no internals.
pub fn assert_one_sentence_error(e: &Finished, what: &str) {
    assert!(matches!(e.code, Some(1 | 2)), "{what}: {e:?}");
    assert_no_internals(e, what);
    // Progress may come first; what is said last is the error.
    let lines: Vec<&str> = e.err.lines().collect();
    let at = lines.iter().position(|l| l.starts_with("error: ")).unwrap_or_else(|| panic!("{what}: {e:?}"));
    // A list that belongs to the sentence is indented.
    let rest: Vec<&str> = lines[at + 1..].iter().copied().filter(|l| !l.starts_with("  ")).collect();
    assert!(rest.is_empty() || (rest.len() == 1 && rest[0].starts_with("hint: ")), "{what}: {}", e.err);
    assert!(lines[at].len() > 20, "{what}: {}", e.err);
}

/// Asserts that the output shows no panic, backtrace or source path.
pub fn assert_no_internals(e: &Finished, what: &str) {
    for word in ["panicked", "RUST_BACKTRACE", "overflow", "called `", "src/"] {
        assert!(!e.err.contains(word), "{what}: {}", e.err);
    }
    assert!(e.code.is_some(), "{what}: ended by a signal: {}", e.err);
}

/// Every file under a folder with its bytes, by its path within.
pub fn files(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    fn walk(root: &Path, dir: &Path, out: &mut BTreeMap<PathBuf, Vec<u8>>) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(root, &path, out);
            } else {
                let inside = path.strip_prefix(root).unwrap().to_path_buf();
                out.insert(inside, std::fs::read(&path).unwrap());
            }
        }
    }
    let mut out = BTreeMap::new();
    walk(dir, dir, &mut out);
    out
}

/// Copies a folder and everything in it.
pub fn copy(from: &Path, to: &Path) {
    for (inside, bytes) in files(from) {
        let path = to.join(inside);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
}

/// `(step, loss as written)` of every step in the log of a run folder.
pub fn losses(run: &Path) -> Vec<(u64, String)> {
    let text = std::fs::read_to_string(run.join("events.jsonl")).unwrap();
    let lines = text.lines().map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap());
    lines
        .filter(|v| v["kind"] == "step")
        .map(|v| (v["step"].as_u64().unwrap(), v["loss"].to_string()))
        .collect()
}

impl SeededRng {
    /// Corrupts bytes: flips a bit, truncates, inserts, removes or overwrites; also returns what it did.
    pub fn corrupt(&mut self, good: &[u8]) -> (&'static str, Vec<u8>) {
        let mut bad = good.to_vec();
        let at = self.below(good.len());
        let n = 1 + self.below(16);
        let piece = self.bytes(n);
        let what = match self.below(7) {
            0 | 1 => {
                bad[at] ^= 1 << self.below(8);
                "a bit flipped"
            }
            2 => {
                bad.truncate(at);
                "cut short"
            }
            3 => {
                bad.extend(piece);
                "extended"
            }
            4 => {
                bad.splice(at..at, piece);
                "bytes put in"
            }
            5 => {
                let end = (at + piece.len()).min(bad.len());
                bad.drain(at..end);
                "bytes taken out"
            }
            _ => {
                let end = (at + piece.len()).min(bad.len());
                let n = end - at;
                bad[at..end].copy_from_slice(&piece[..n]);
                "bytes overwritten"
            }
        };
        (what, bad)
    }
}
