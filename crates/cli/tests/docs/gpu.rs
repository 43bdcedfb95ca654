//! Commands of the documentation that need a GPU (`sh gpu`). On a host that has one, where scripts/gpu-check.sh runs this test, they
//! are run as they stand; elsewhere they are only looked at.

use super::{binary, device::test_on_gpu, pages, split};
use std::process::{Command, Stdio};
use std::time::Instant;

/// What a command needs besides one GPU.
fn needs_more(line: &str) -> Option<&'static str> {
    if line.contains("cargo ") {
        Some("a Rust toolchain")
    } else if line.contains("--nproc-per-node 8") || line.contains("parallel.ep=8") {
        Some("eight GPUs")
    } else {
        None
    }
}

#[test]
fn commands_that_need_a_gpu() {
    let has_gpu = test_on_gpu();
    let dir = tempfile::tempdir().unwrap();
    let bin = dir.path().join("bin");
    std::fs::create_dir(&bin).unwrap();
    std::fs::copy(binary(), bin.join("ferrotron")).unwrap();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap_or_default());
    let (mut run, mut skipped) = (0, 0);
    for page in pages() {
        for block in split(&page).0.iter().filter(|b| b.info == "sh gpu") {
            for line in block.text.lines().filter(|l| !l.trim().is_empty()) {
                let place = format!("{page}:{}: {line}", block.line);
                if let Some(what) = needs_more(line) {
                    eprintln!("SKIPPED: {place}: it needs {what}");
                    skipped += 1;
                    continue;
                }
                run += 1;
                if !has_gpu {
                    eprintln!("SKIPPED: {place}: not on a GPU");
                    continue;
                }
                let begin = Instant::now();
                let mut bash = Command::new("bash");
                bash.args(["-euo", "pipefail", "-c", line]).current_dir(dir.path()).env("PATH", &path);
                let out = bash.stdin(Stdio::null()).output().unwrap();
                let said =
                    [out.stdout, out.stderr].map(|b| String::from_utf8_lossy(&b).into_owned()).concat();
                assert!(out.status.success(), "{place}: failed\n{said}");
                eprintln!("{place}: {:.0} s", begin.elapsed().as_secs_f64());
            }
        }
    }
    assert!(run >= 7 && skipped >= 4, "{run} commands to run, {skipped} that need more");
}
