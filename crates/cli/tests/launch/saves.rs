//! Saves of four processes: a rank that is killed at any moment costs nothing but the time since the last checkpoint, and
//! no rank needs more memory than its own share.

use super::support::soak::rounds;
use super::support::{SeededRng, files, losses};
use super::{mpi, recipe, text};
use ferrotron_core::checkpoint;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Layouts of four processes: everything is replicated, split, or sharded.
const LAYOUTS: [&[&str]; 4] = [
    &["parallel.zero=0"],
    &["parallel.zero=1"],
    &["parallel.tp=2", "parallel.zero=2"],
    &["parallel.tp=2", "parallel.pp=2"],
];

fn train(recipe: &Path, out: &Path, set: &[&str]) -> mpi::Job {
    let mut args = vec!["train", text(recipe), "--out", text(out), "--timeout", "5"];
    set.iter().for_each(|s| args.extend(["--set", s]));
    mpi::ferrotron(4, &[], &args)
}

/// Steps in the log of a run.
fn steps(out: &Path) -> usize {
    let text = std::fs::read_to_string(out.join("events.jsonl")).unwrap_or_default();
    text.lines().filter(|l| l.contains("\"kind\":\"step\"")).count()
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what}: not after a minute");
        std::thread::sleep(Duration::from_micros(500));
    }
}

/// Ten kills, FERROTRON_SOAK times as many with it: SIGKILL of a random rank at a random moment of a run that saves after
/// every step. Every folder that looks like a checkpoint is one, and the run resumes to the same bits.
#[test]
fn a_rank_killed_at_any_moment_leaves_a_checkpoint() {
    if !mpi::installed("a_rank_killed_at_any_moment_leaves_a_checkpoint") {
        return;
    }
    const STEPS: usize = 40;
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), STEPS);
    let every = ["checkpoint.every=1", "checkpoint.keep=2"];
    let mut dice = SeededRng(11);
    let (mut kills, mut half_written) = (0, 0);
    while kills < rounds(10) {
        let layout = LAYOUTS[dice.below(LAYOUTS.len())];
        let set = [layout, &every].concat();
        let whole = dir.path().join(layout.join("-"));
        if !whole.exists() {
            train(&recipe, &whole, &set).wait(Duration::from_secs(120)).succeeded();
        }
        let out = dir.path().join("killed");
        // Several kills of one run: each resumes where the last one left it.
        let mut after = 0;
        while after + 4 < STEPS && kills < rounds(10) {
            let job = train(&recipe, &out, &set);
            let rank = dice.below(4);
            let pid = job.process(rank);
            after += 1 + dice.below(STEPS / 4);
            let mut ended = false;
            wait_until("steps", || {
                ended = steps(&out) >= STEPS;
                steps(&out) >= after || ended
            });
            std::thread::sleep(Duration::from_micros(dice.next() % 4000));
            let killed = Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap().success();
            let outcome = job.wait(Duration::from_secs(60));
            if !killed || ended {
                break;
            }
            assert!(outcome.code != Some(0), "{}", outcome.text);
            kills += 1;
            let checkpoints = out.join("checkpoints");
            half_written += usize::from(left_over(&checkpoints));
            // Before any clean-up, what looks complete is complete, and there is something to go on from.
            let all = checkpoint::list(&checkpoints).unwrap();
            all.iter().for_each(|(_, path)| drop(checkpoint::load(path).unwrap()));
            // The second save waits for the first, so that the third step has a checkpoint behind it.
            assert!(!all.is_empty() || after < 3, "no checkpoint after {after} steps");
        }
        train(&recipe, &out, &set).wait(Duration::from_secs(120)).succeeded();
        assert_eq!(losses(&out), losses(&whole), "{layout:?}");
        let [ours, wanted] = [&out, &whole].map(|d| files(&d.join("checkpoints")));
        assert!(ours == wanted, "{layout:?}: other checkpoints");
        std::fs::remove_dir_all(&out).unwrap();
    }
    println!("{kills} kills, {half_written} in the middle of a save");
}

/// Whether a save was in progress.
fn left_over(checkpoints: &Path) -> bool {
    std::fs::read_dir(checkpoints)
        .unwrap()
        .any(|e| e.unwrap().file_name().to_string_lossy().starts_with(".tmp-step-"))
}

/// A model of 50 million parameters, so that its 150 MB a rank stand out from everything else in memory.
fn large(dir: &Path) -> PathBuf {
    let path = dir.join("large.toml");
    let text = "[model]\nlayers = 11\nhidden = 512\nheads = 8\nffn = 2048\nvocab = 4096\n\
        [data]\npath = \"embedded\"\nseq_len = 16\n\
        [train]\nsteps = 6\nglobal_batch = 4\nmicro_batch = 1\nlog_every = 1\n\
        [optimizer]\nlr = 1e-3\n[precision]\ndtype = \"f32\"\n[parallel]\nzero = 1\n[generate]\ntokens = 0\n\
        [checkpoint]\nevery = 0\n";
    std::fs::write(&path, text).unwrap();
    path
}

/// A number of kB from `/proc/PID/status`; none once the process has ended.
fn memory(pid: u32, key: &str) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(':'))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok().map(|kb| kb * 1024)
}

/// By how much the memory of rank 0 grows after its second step.
fn growth(recipe: &Path, out: &Path, set: &[&str]) -> u64 {
    let job = train(recipe, out, set);
    let pid = job.process(0);
    wait_until("two steps", || steps(out) >= 2);
    // From here on the peak is counted anew.
    std::fs::write(format!("/proc/{pid}/clear_refs"), "5").unwrap();
    let before = memory(pid, "VmRSS").unwrap();
    let mut peak = before;
    while let Some(now) = memory(pid, "VmHWM") {
        peak = peak.max(now);
        std::thread::sleep(Duration::from_millis(1));
    }
    job.wait(Duration::from_secs(120)).succeeded();
    peak - before
}

#[test]
fn a_save_takes_the_memory_of_a_rank_s_own_share() {
    if !mpi::installed("a_save_takes_the_memory_of_a_rank_s_own_share") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let recipe = large(dir.path());
    let (plain, saved) = (dir.path().join("plain"), dir.path().join("saved"));
    let without = growth(&recipe, &plain, &["checkpoint.at_end=false"]);
    // What else a process allocates varies by several megabytes with the load of the machine: the least of three runs counts.
    let grows = |i: usize| {
        let out = if i == 0 { saved.clone() } else { dir.path().join(format!("saved-{i}")) };
        growth(&recipe, &out, &["checkpoint.every=2", "checkpoint.keep=1"])
    };
    let with = (0..3).map(grows).min().unwrap();
    let newest = checkpoint::latest(&saved.join("checkpoints")).unwrap().unwrap();
    let own: u64 = files(&newest)
        .iter()
        .filter(|(name, _)| text(name).contains("-rank-00000"))
        .map(|(_, bytes)| bytes.len() as u64)
        .sum();
    let all: u64 = files(&newest).values().map(|bytes| bytes.len() as u64).sum();
    println!("rank 0 writes {own} of {all} bytes; memory grows by {with} with saves, by {without} without");
    assert!(own * 10 < all * 3, "the ranks do not share the writing: {own} of {all}");
    let grown = with.saturating_sub(without);
    assert!(grown * 2 > own, "the measurement misses the copy: {grown} bytes");
    assert!(grown * 10 <= own * 11, "{grown} bytes for a share of {own}");
}
