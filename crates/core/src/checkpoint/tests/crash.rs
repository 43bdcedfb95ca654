//! Crashes at any time: what is on disk afterwards is complete, and a resumed run ends with the same bytes.

use super::*;
use std::fs;
use std::process::{Child, Command};
use std::time::Duration;

const DIR: &str = "FERROTRON_TEST_CRASH_DIR";
const FILL: &str = "FERROTRON_TEST_FILL_DIR";
const STEPS: u64 = 60;

/// A training run: each step's tensors follow from the previous ones, with a checkpoint every other step, keeping
/// two. Resumes from what is there.
fn run(dir: &Path) {
    let mut saver = Saver::new(dir, Some(2)).unwrap().shard_bytes(1 << 18);
    let (mut step, mut weights) = match latest(dir).unwrap() {
        None => (0, vec![0u8; 1 << 19]),
        Some(path) => {
            let loaded = load(&path).unwrap();
            let a = loaded.read("model/a").unwrap();
            let b = loaded.read("adam.m/b").unwrap();
            assert_eq!(loaded.state()["consumed"], loaded.step() * 8);
            (loaded.step(), [a, b].concat())
        }
    };
    while step < STEPS {
        step += 1;
        for (i, w) in weights.iter_mut().enumerate() {
            *w = w.wrapping_mul(5).wrapping_add((step as usize + i) as u8);
        }
        if step % 2 == 0 {
            let (a, b) = weights.split_at(1 << 18);
            let item = |name: &str, bytes: &[u8]| {
                Item::whole(name, DType::F32, vec![bytes.len() / 4], bytes.to_vec())
            };
            let items = vec![item("model/a", a), item("adam.m/b", b)];
            saver.save(Snapshot { step, state: json!({"consumed": step * 8}), items }).unwrap();
        }
    }
    saver.finish().unwrap();
}

/// Runs only as a child process of the test below.
#[test]
#[ignore = "the child process of the test below"]
fn crash_child() {
    if let Ok(dir) = std::env::var(DIR) {
        run(Path::new(&dir));
    }
}

fn child(dir: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "checkpoint::tests::crash::crash_child", "--ignored", "--nocapture"])
        .env(DIR, dir)
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap()
}

#[test]
fn a_run_killed_at_random_times_ends_with_the_same_bytes() {
    let root = tempfile::tempdir().unwrap();
    let (whole, killed) = (root.path().join("whole"), root.path().join("killed"));
    run(&whole);
    let last = format!("step-{STEPS:08}");
    let complete = |dir: &Path| {
        assert_eq!(latest(dir).unwrap(), Some(dir.join(&last)));
        assert_eq!(files(&dir.join(&last)), files(&whole.join(&last)));
        assert!(!names(dir).iter().any(|n| n.starts_with('.')), "{:?}", names(dir));
    };
    let mut rng = SeededRng(99);
    let (mut half_written, mut finished) = (0, 0);
    for _ in 0..60 {
        let mut running = child(&killed);
        std::thread::sleep(Duration::from_micros(rng.next() % 60_000));
        running.kill().unwrap(); // SIGKILL
        let status = running.wait().unwrap();
        if killed.exists() {
            half_written += usize::from(names(&killed).iter().any(|n| n.starts_with(".tmp-")));
            // Before any clean-up, everything that looks complete is complete.
            for (_, path) in list(&killed).unwrap() {
                load(&path).unwrap();
            }
        }
        if status.success() {
            complete(&killed);
            fs::remove_dir_all(&killed).unwrap();
            finished += 1;
        }
    }
    println!("60 kills, {half_written} left a temporary folder; {finished} runs ended before theirs");
    assert!(child(&killed).wait().unwrap().success());
    complete(&killed);
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for (name, bytes) in files(from) {
        fs::write(to.join(name), bytes).unwrap();
    }
}

/// Every state of the folder that a crash can leave, created by hand.
#[test]
fn a_crash_at_any_stage_of_a_save_is_recovered() {
    let root = tempfile::tempdir().unwrap();
    let done = save(&root.path().join("done"), &snapshot(2, 2));
    type Stage<'a> = (&'a str, &'a dyn Fn(&Path));
    let stages: [Stage; 7] = [
        ("empty temporary", &|d| fs::create_dir(d.join(".tmp-step-00000002")).unwrap()),
        ("half-written", &|d| {
            fs::create_dir(d.join(".tmp-step-00000002")).unwrap();
            fs::write(d.join(".tmp-step-00000002/model.safetensors"), [1, 2, 3]).unwrap();
        }),
        ("complete, not renamed", &|d| copy(&done, &d.join(".tmp-step-00000002"))),
        ("half-deleted", &|d| {
            fs::create_dir(d.join(".tmp-delete-step-00000000")).unwrap();
            fs::write(d.join(".tmp-delete-step-00000000/manifest.json"), "{}").unwrap();
        }),
        ("temporary file", &|d| fs::write(d.join(".tmp-x"), "").unwrap()),
        ("moved aside, successor not there", &|d| {
            fs::rename(d.join("step-00000001"), d.join(".replaced-step-00000001")).unwrap();
            copy(&done, &d.join(".tmp-step-00000001"));
        }),
        ("moved aside, successor there", &|d| {
            copy(&d.join("step-00000001"), &d.join(".replaced-step-00000001"));
        }),
    ];
    for (name, stop) in stages {
        let dir = root.path().join(name);
        save(&dir, &snapshot(1, 1));
        stop(&dir);
        let saver = Saver::new(&dir, Some(2)).unwrap();
        assert_eq!(names(&dir), ["step-00000001"], "{name}");
        assert_holds(&latest(&dir).unwrap().unwrap(), &snapshot(1, 1));
        drop(saver);
        assert_holds(&save(&dir, &snapshot(2, 2)), &snapshot(2, 2));
    }
}

/// Runs only as a child process of the test below, under a limit on file sizes.
#[test]
#[ignore = "the child of a_full_disk_loses_nothing"]
fn full_disk_child() {
    let Ok(dir) = std::env::var(FILL) else { return };
    let dir = Path::new(&dir);
    let mut big = snapshot(2, 2);
    let bytes = vec![1; 4 << 20];
    big.items.push(Item::whole("model/z", DType::U8, vec![bytes.len()], bytes));
    let mut saver = Saver::new(dir, Some(1)).unwrap();
    saver.save(big).unwrap();
    let e = saver.save(snapshot(3, 3)).unwrap_err().to_string();
    assert!(e.contains("model.safetensors") && e.contains("cannot write"), "{e}");
    saver.finish().unwrap();
    assert_eq!(names(dir), ["step-00000001"]);
}

/// A write that fails half-way, by the file-size limit of Unix.
#[cfg(unix)]
#[test]
fn a_full_disk_loses_nothing() {
    let root = tempfile::tempdir().unwrap();
    let path = save(root.path(), &snapshot(1, 1));
    let status = Command::new("sh")
        .args(["-c", "trap '' XFSZ; ulimit -f 1024; exec \"$@\"", "sh"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "checkpoint::tests::crash::full_disk_child", "--ignored", "--nocapture"])
        .env(FILL, root.path())
        .stdout(std::process::Stdio::null())
        .status()
        .unwrap();
    assert!(status.success());
    assert_eq!(names(root.path()), ["step-00000001"]);
    assert_holds(&path, &snapshot(1, 1));
}

#[test]
fn a_folder_that_cannot_be_made_is_one_sentence() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("file");
    fs::write(&file, "").unwrap();
    for dir in [file.clone(), file.join("checkpoints")] {
        let e = Saver::new(&dir, None).err().unwrap().to_string();
        assert!(e.contains("file") && e.contains("cannot create the folder") && !e.contains('\n'), "{e}");
    }
    // The folder disappears under a running saver.
    let dir = root.path().join("run");
    let mut saver = Saver::new(&dir, None).unwrap();
    fs::remove_dir_all(&dir).unwrap();
    let e = saver.save(snapshot(1, 1)).unwrap_err().to_string();
    assert!(e.contains("cannot save: the folder was removed"), "{e}");
}
