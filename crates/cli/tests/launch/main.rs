//! Several ranks as threads and as processes, under `mpirun` and without: equal results, and errors when a rank fails.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod faults;
mod hosts;
mod layouts;
mod mpi;
mod one_host;
mod saves;
#[path = "../support/mod.rs"]
mod support;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use support::{files, losses};

/// A recipe that every layout of four ranks can split: grouped-query attention, a vocabulary that none divides.
fn recipe(dir: &Path, steps: usize) -> PathBuf {
    let text = format!(
        "[model]\nlayers = 2\nhidden = 32\nheads = 4\nkv_heads = 2\nffn = 48\nvocab = 259\nmax_positions = 64\n\
         qkv_bias = true\nproj_bias = true\n\
         [data]\npath = \"embedded\"\nseq_len = 16\n\
         [train]\nsteps = {steps}\nglobal_batch = 8\nmicro_batch = 1\nlog_every = 1\n\
         [optimizer]\nlr = 1e-3\n[precision]\ndtype = \"f32\"\n[checkpoint]\nevery = 3\n[generate]\ntokens = 0\n"
    );
    let path = dir.join("four.toml");
    std::fs::write(&path, text).unwrap();
    path
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Steps of the run of a [`Scene`].
const STEPS: usize = 60;

/// A run folder and its recipe.
struct Scene {
    dir: tempfile::TempDir,
    recipe: PathBuf,
}

impl Scene {
    fn new() -> Scene {
        let dir = tempfile::tempdir().unwrap();
        let recipe = recipe(dir.path(), STEPS);
        Scene { dir, recipe }
    }

    fn out(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    /// Waits until the run has made `n` steps.
    fn wait_for_steps(&self, n: usize) {
        let (log, start) = (self.out().join("events.jsonl"), Instant::now());
        let steps = || {
            let text = std::fs::read_to_string(&log).unwrap_or_default();
            text.lines().filter(|l| l.contains("\"kind\":\"step\"")).count()
        };
        while steps() < n {
            assert!(start.elapsed() < Duration::from_secs(60), "it does not begin");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Asserts the losses and the last checkpoints of the whole run in another folder.
    fn equals(&self, whole: &Path) {
        assert_eq!(losses(&self.out()), losses(whole));
        assert_eq!(losses(whole).len(), STEPS);
        let [a, b] = [self.out().as_path(), whole].map(|d| files(&d.join("checkpoints")));
        assert!(a == b, "the last checkpoints differ");
    }
}

fn signal(name: &str, pid: u32) {
    assert!(Command::new("kill").args([name, &pid.to_string()]).status().unwrap().success());
}
