//! A run folder of somebody else: links are not followed where the run writes; leftovers of killed runs go.

use super::support::{recipe, run};
use super::train;
use std::os::unix::fs::symlink;

#[test]
fn targets_of_links_in_the_run_folder_stay() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), 3, "[checkpoint]\nevery = 1\n");
    let precious = dir.path().join("precious");
    for resumed in [false, true] {
        for name in [
            "events.jsonl",
            "config.toml",
            ".lock",
            ".events.jsonl.tmp",
            ".config.toml.tmp",
            "checkpoints/.lock",
        ] {
            let out = dir.path().join(format!("{resumed}-{}", name.replace('/', "-")));
            std::fs::create_dir_all(out.join("checkpoints")).unwrap();
            if resumed {
                assert_eq!(run(&train(&recipe, &out, &["--steps", "2"])).code, Some(0));
            }
            std::fs::write(&precious, "precious\n").unwrap();
            let link = out.join(name);
            drop(std::fs::remove_file(&link));
            symlink(&precious, &link).unwrap();
            let e = run(&train(&recipe, &out, &[]));
            assert_eq!(std::fs::read(&precious).unwrap(), b"precious\n", "{name}, resumed: {resumed}");
            match e.code {
                Some(0) => assert!(!link.is_symlink(), "{name}"),
                _ => super::support::assert_one_sentence_error(&e, name),
            }
        }
    }
}

#[test]
fn leftovers_of_killed_runs_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), 2, "");
    let out = dir.path().join("run");
    std::fs::create_dir_all(out.join("checkpoints/.tmp-step-00000001")).unwrap();
    std::fs::create_dir_all(out.join(".tmp-replaced/checkpoints")).unwrap();
    for name in [".events.jsonl.tmp", ".config.toml.tmp", "events.jsonl.new", "mine.tmp"] {
        std::fs::write(out.join(name), "half").unwrap();
    }
    assert_eq!(run(&train(&recipe, &out, &[])).code, Some(0));
    let mut left: Vec<_> =
        std::fs::read_dir(&out).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    left.sort();
    assert_eq!(left, [".lock", "checkpoints", "config.toml", "events.jsonl", "logs", "mine.tmp"]);
    assert!(!out.join("checkpoints/.tmp-step-00000001").exists());
}

#[test]
fn a_damaged_line_of_the_log_is_reported_by_its_number() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), 4, "");
    let out = dir.path().join("run");
    assert_eq!(run(&train(&recipe, &out, &[])).code, Some(0));
    let log = out.join("events.jsonl");
    let text = std::fs::read_to_string(&log).unwrap();
    let mut lines: Vec<&str> = text.lines().collect();
    lines[2] = "{\"kind\":\"step\",\"step\":2,\"lo";
    let last = lines.len();
    lines[last - 1] = "###";
    std::fs::write(&log, lines.join("\n") + "\n").unwrap();
    let e = ferrotron_core::events::read(&log).unwrap_err().to_string();
    assert!(e.contains("line 3 is not an event"), "{e}");
    let e = run(&train(&recipe, &out, &["--steps", "5"]));
    assert_eq!(e.code, Some(0), "{}", e.err);
    assert!(e.err.contains(&format!("dropped damaged lines: 3, {last}")), "{}", e.err);
    ferrotron_core::events::read(&log).unwrap();
}
