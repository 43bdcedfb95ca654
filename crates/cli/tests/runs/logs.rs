//! The log of each rank: its own file in the run folder, levels, rank and step in every line.

use super::support::{ferrotron, recipe, run, wait};
use super::train;
use std::path::Path;

fn lines(out: &Path, rank: usize) -> Vec<String> {
    let text = std::fs::read_to_string(out.join(format!("logs/rank-{rank}.log"))).unwrap_or_default();
    text.lines().map(String::from).collect()
}

#[test]
fn every_rank_has_its_file_with_rank_and_step() {
    let dir = tempfile::tempdir().unwrap();
    let (recipe, out) = (recipe(dir.path(), 3, ""), dir.path().join("run"));
    let e = run(&train(&recipe, &out, &["--ranks", "2", "--log-level", "debug"]));
    assert_eq!(e.code, Some(0), "{}", e.err);
    for rank in 0..2 {
        let lines = lines(&out, rank);
        assert!(lines.iter().all(|l| l.contains(&format!(" rank={rank} "))), "{lines:#?}");
        assert!(lines[0].contains(" INFO ") && lines[0].contains("the run begins ranks=2"), "{}", lines[0]);
        // The thread that saves logs as its rank.
        let written = "ferrotron_core::checkpoint::saver: parts of a checkpoint are written";
        assert!(lines.iter().any(|l| l.contains(written)), "{lines:#?}");
        for step in 1..=3 {
            let done =
                format!("DEBUG rank={rank} step={step} ferrotron_core::train::run_loop: step done loss=");
            assert!(lines.iter().any(|l| l.contains(&done)), "{done}: {lines:#?}");
            // The level holds on standard error too.
            assert!(e.err.contains(&format!("ferrotron: debug: rank {rank}: step done")), "{}", e.err);
        }
    }
    let saved = |l: &String| l.contains(" INFO ") && l.contains("\"kind\":\"checkpoint\"");
    assert!(lines(&out, 0).iter().any(saved) && !lines(&out, 1).iter().any(saved));
}

#[test]
fn files_have_info_and_standard_error_has_warnings_unless_a_level_is_given() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), 2, "");
    let logged = |name: &str, variable: &str, more: &[&str]| {
        let out = dir.path().join(name);
        let mut command = ferrotron(&train(&recipe, &out, more));
        let e = wait(command.env("FERROTRON_LOG", variable).spawn().unwrap());
        assert_eq!(e.code, Some(0), "{}", e.err);
        assert!(!e.err.contains("ferrotron: "), "{}", e.err);
        lines(&out, 0)
    };
    let plain = logged("plain", "", &[]);
    assert!(
        plain.iter().any(|l| l.contains("the run begins")) && !plain.iter().any(|l| l.contains(" DEBUG "))
    );
    assert_eq!(logged("variable", "error", &[]), Vec::<String>::new());
    // The command line stands above the variable.
    assert_eq!(logged("both", "trace", &["--log-level", "warn"]), Vec::<String>::new());
    // A resumed run appends.
    let more = logged("plain", "", &["--steps", "4"]);
    assert!(more.len() > plain.len() && more[..plain.len()] == plain);
}

#[test]
fn an_error_is_in_the_log_and_a_link_is_not_followed() {
    let dir = tempfile::tempdir().unwrap();
    let (recipe, out) = (recipe(dir.path(), 2, ""), dir.path().join("run"));
    std::fs::create_dir_all(&out).unwrap();
    let elsewhere = dir.path().join("elsewhere");
    std::fs::create_dir(&elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, out.join("logs")).unwrap();
    let e = run(&train(&recipe, &out, &[]));
    assert_eq!(e.code, Some(0), "{}", e.err);
    assert!(e.err.contains("ferrotron: warning: ") && e.err.contains("is a link"), "{}", e.err);
    assert_eq!(std::fs::read_dir(&elsewhere).unwrap().count(), 0);
    // A run that fails says so in its log.
    let out = dir.path().join("diverged");
    let e = run(&train(&recipe, &out, &["--set", "optimizer.lr=1000", "--steps", "20"]));
    assert_eq!(e.code, Some(1), "{}", e.err);
    let lines = lines(&out, 0);
    assert!(lines.iter().any(|l| l.contains(" ERROR rank=0") && l.contains("gradient norm")), "{lines:#?}");
}

#[test]
fn an_unknown_level_is_refused() {
    let e = run(&["recipes", "--log-level", "loud"]);
    assert_eq!(e.code, Some(2), "{}", e.err);
    let e = wait(ferrotron(&["recipes"]).env("FERROTRON_LOG", "loud").spawn().unwrap());
    assert_eq!(e.code, Some(2), "{}", e.err);
    assert!(e.err.contains("FERROTRON_LOG=loud") && e.err.contains("debug"), "{}", e.err);
}
