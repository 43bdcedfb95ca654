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
