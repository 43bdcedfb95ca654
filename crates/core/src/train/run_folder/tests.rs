//! Every state in which a crash can leave a run folder that `--fresh` is replacing.

use super::*;
use crate::checkpoint::{Saver, Snapshot};
use std::collections::BTreeMap;

/// A run folder with a checkpoint, a log, a configuration and a file of the user.
fn old_run(dir: &Path) {
    std::fs::create_dir_all(dir).unwrap();
    save(dir, 7, "old");
    std::fs::write(dir.join("events.jsonl"), "old log").unwrap();
    std::fs::write(dir.join("config.toml"), "old configuration").unwrap();
    std::fs::write(dir.join("config-until-00000003.toml"), "older configuration").unwrap();
    std::fs::write(dir.join(CHAT_TEMPLATE), "old template").unwrap();
    std::fs::write(dir.join(GEMMS), "old algorithms").unwrap();
    std::fs::create_dir(dir.join(LOGS)).unwrap();
    std::fs::write(dir.join(LOGS).join("rank-0.log"), "old lines").unwrap();
    std::fs::write(dir.join("notes.txt"), "mine").unwrap();
}

fn save(dir: &Path, step: u64, of: &str) {
    let mut saver = Saver::new(&dir.join(CHECKPOINTS), None).unwrap();
    saver.save(Snapshot { step, state: serde_json::json!({ "of": of }), items: Vec::new() }).unwrap();
    saver.finish().unwrap();
}

/// Every file of a folder by its path, without locks.
fn files(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    fn walk(root: &Path, dir: &Path, out: &mut BTreeMap<PathBuf, Vec<u8>>) {
        for path in RunFolder::entries(dir).unwrap() {
            match path.is_dir() {
                true => walk(root, &path, out),
                false if path.file_name() == Some(OsStr::new(".lock")) => {}
                false => {
                    _ = out.insert(path.strip_prefix(root).unwrap().into(), std::fs::read(&path).unwrap())
                }
            }
        }
    }
    let mut out = BTreeMap::new();
    walk(dir, dir, &mut out);
    out
}

#[test]
fn a_replaced_run_comes_back_after_a_crash_at_any_point() {
    let root = tempfile::tempdir().unwrap();
    let want = {
        let dir = root.path().join("want");
        old_run(&dir);
        files(&dir)
    };
    // The renames of `set_aside`, in order, and what a new run does before its first checkpoint.
    let files_of_a_run = ["events.jsonl", "config.toml", "config-until-00000003.toml", CHAT_TEMPLATE, GEMMS];
    let names = [&files_of_a_run[..], &[LOGS, CHECKPOINTS]].concat();
    for point in 0..=names.len() + 2 {
        let dir = root.path().join(format!("crash-{point}"));
        old_run(&dir);
        std::fs::create_dir(dir.join(REPLACED)).unwrap();
        for name in names.iter().take(point) {
            std::fs::rename(dir.join(name), dir.join(REPLACED).join(name)).unwrap();
        }
        if point > names.len() {
            std::fs::write(dir.join("events.jsonl"), "new log").unwrap();
            std::fs::write(dir.join(".config.toml.tmp"), "half a new").unwrap();
        }
        if point > names.len() + 1 {
            std::fs::create_dir_all(dir.join(CHECKPOINTS).join(".tmp-step-00000001")).unwrap();
        }
        let folder = RunFolder::open(&dir, false).unwrap();
        assert!(folder.notes.len() == 1 && folder.notes[0].contains("is back"), "{:?}", folder.notes);
        assert_eq!(files(&dir), want, "point {point}");
        drop(folder);
        // A second start finds nothing to do.
        assert!(RunFolder::open(&dir, false).unwrap().notes.is_empty());
        assert_eq!(files(&dir), want, "point {point}");
    }
}

#[test]
fn a_replaced_run_goes_when_the_new_one_has_a_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for crash in [false, true] {
        old_run(dir);
        let mut folder = RunFolder::open(dir, false).unwrap();
        folder.set_aside().unwrap();
        assert!(folder.notes[0].contains(REPLACED), "{:?}", folder.notes);
        assert_eq!(std::fs::read(dir.join("notes.txt")).unwrap(), b"mine");
        assert!(dir.join(REPLACED).join("checkpoints/step-00000007").is_dir());
        assert!(!folder.has_run().unwrap());
        save(dir, 1, "new");
        if !crash {
            folder.new_run_is_saved().unwrap();
            folder.new_run_is_saved().unwrap();
        }
        drop(folder);
        let folder = RunFolder::open(dir, false).unwrap();
        assert!(folder.notes.is_empty(), "{:?}", folder.notes);
        let left: Vec<_> = files(dir).into_keys().collect();
        assert_eq!(left, [Path::new("checkpoints/step-00000001/manifest.json"), Path::new("notes.txt")]);
        drop(folder);
        std::fs::remove_dir_all(dir.join(CHECKPOINTS)).unwrap();
    }
}

#[test]
fn a_locked_folder_stays_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    old_run(dir.path());
    let before = files(dir.path());
    let held = RunFolder::open(dir.path(), false).unwrap();
    let e = RunFolder::open(dir.path(), false).err().unwrap().to_string();
    assert!(e.contains(&format!("process {}", std::process::id())), "{e}");
    assert_eq!(files(dir.path()), before);
    drop(held);
}

#[test]
fn leftovers_go_and_other_files_stay() {
    let dir = tempfile::tempdir().unwrap();
    for name in
        [".events.jsonl.tmp", ".config.toml.tmp", ".config-until-00000003.toml.tmp", "events.jsonl.new"]
    {
        std::fs::write(dir.path().join(name), "").unwrap();
    }
    for name in [".mine.tmp", "events.jsonl.bak", "x.tmp"] {
        std::fs::write(dir.path().join(name), "").unwrap();
    }
    drop(RunFolder::open(dir.path(), false).unwrap());
    let left: Vec<_> = files(dir.path()).into_keys().collect();
    assert_eq!(left, [".mine.tmp", "events.jsonl.bak", "x.tmp"].map(PathBuf::from));
}

#[cfg(unix)]
#[test]
fn linked_checkpoints_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("elsewhere")).unwrap();
    std::os::unix::fs::symlink("elsewhere", dir.path().join(CHECKPOINTS)).unwrap();
    let e = RunFolder::open(dir.path(), false).err().unwrap().to_string();
    assert!(e.contains("is a link"), "{e}");
}

#[test]
fn a_damaged_table_of_gemm_algorithms_is_noted_and_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let mut folder = RunFolder::open(dir.path(), false).unwrap();
    assert!(folder.gemm_table().is_none() && folder.notes.is_empty());
    std::fs::write(dir.path().join(GEMMS), "{").unwrap();
    assert!(folder.gemm_table().is_none());
    assert!(folder.notes.len() == 1 && folder.notes[0].contains(GEMMS), "{:?}", folder.notes);
}

/// A run is used with the template that it was trained with, also where the file is gone.
#[test]
fn the_text_of_the_chat_template_stays_with_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let (run, file) = (dir.path().join("run"), dir.path().join("mine.jinja"));
    let folder = RunFolder::open(&run, false).unwrap();
    let named = file.to_str();
    for none in [None, Some("none"), named] {
        folder.write_chat_template(none).unwrap();
        assert!(!run.join(CHAT_TEMPLATE).exists());
    }
    let kept = || std::fs::read_to_string(run.join(CHAT_TEMPLATE)).unwrap();
    for text in ["first", "second"] {
        std::fs::write(&file, text).unwrap();
        folder.write_chat_template(named).unwrap();
        assert_eq!(kept(), text);
    }
    std::fs::remove_file(&file).unwrap();
    folder.write_chat_template(named).unwrap();
    assert_eq!(kept(), "second");
}
