//! Round trips, determinism and pruning; damage and crashes have their own files.

mod crash;
mod damage;
mod parallel;
mod sharded;

use super::*;
use crate::error::Error;
use crate::tensorfile::tests::SeededRng;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A small model and optimizer with values from `seed`.
fn snapshot(step: u64, seed: u64) -> Snapshot {
    let mut rng = SeededRng(seed);
    let mut items = Vec::new();
    for (name, dtype, shape) in [
        ("model/embedding", DType::BF16, vec![7, 3]),
        ("model/layers.0.q", DType::F32, vec![4, 5]),
        ("model/scale", DType::F32, vec![]),
        ("model/none", DType::F16, vec![0, 9]),
        ("adam.m/embedding", DType::F32, vec![7, 3]),
        ("adam.v/embedding", DType::F32, vec![7, 3]),
        ("router/bias \"e\"\n", DType::F64, vec![3]),
        ("count", DType::I64, vec![2]),
        ("mask", DType::Bool, vec![5]),
    ] {
        let bytes = rng.bytes(shape.iter().product::<usize>() * dtype.size());
        items.push(Item::whole(name, dtype, shape, bytes));
    }
    let state = json!({
        "data": {"consumed": 3 * step, "epoch": 0},
        "rng": [u64::MAX, rng.next(), 0],
        "lr": 1.0 / 3.0 + seed as f64,
        "tiny": 5e-324,
        "loss_scale": 0.1 + 0.2,
        "text": "\u{7f}\"\\\n",
    });
    Snapshot { step, state, items }
}

/// All files of a folder with their bytes.
fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let name = |p: &Path| p.file_name().unwrap().to_str().unwrap().to_string();
    let paths = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path());
    paths.map(|p| (name(&p), std::fs::read(&p).unwrap())).collect()
}

fn names(dir: &Path) -> Vec<String> {
    let mut all: Vec<String> = std::fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .filter(|n| n != ".lock")
        .collect();
    all.sort();
    all
}

fn save(dir: &Path, snapshot: &Snapshot) -> PathBuf {
    let mut saver = Saver::new(dir, None).unwrap();
    saver.save(snapshot.clone()).unwrap();
    saver.finish().unwrap();
    dir.join(format!("step-{:08}", snapshot.step))
}

fn assert_holds(path: &Path, snapshot: &Snapshot) {
    let loaded = load(path).unwrap();
    assert_eq!((loaded.step(), loaded.state()), (snapshot.step, &snapshot.state));
    assert_eq!(loaded.tensors().count(), snapshot.items.len());
    for item in &snapshot.items {
        let info = loaded.get(&item.name).unwrap();
        assert_eq!((info.dtype.native(), &info.shape), (Some(item.dtype), &item.shape));
        assert_eq!(loaded.read(&item.name).unwrap(), item.bytes);
        let mut half = vec![0; item.bytes.len() / 2];
        let start = item.bytes.len() - half.len();
        loaded.read_range(&item.name, start as u64, &mut half).unwrap();
        assert_eq!(half, item.bytes[start..]);
    }
    assert!(matches!(loaded.read("nothing"), Err(Error::Missing { .. })));
}

#[test]
fn checkpoints_round_trip() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("run/checkpoints");
    assert_eq!(latest(&dir).unwrap(), None);
    let first = snapshot(120, 1);
    let path = save(&dir, &first);
    assert_eq!(names(&path), ["manifest.json", "model.safetensors", "optimizer.safetensors"]);
    assert_eq!(latest(&dir).unwrap(), Some(path.clone()));
    assert_holds(&path, &first);
    let bytes = files(&path).iter().filter(|(n, _)| n.ends_with("s")).map(|(_, b)| b.len() as u64).sum();
    assert_eq!(verify(&path).unwrap(), VerifyReport { step: 120, files: 2, tensors: 9, bytes });

    // Steps beyond eight digits are still ordered by number.
    let late = snapshot(123_456_789, 2);
    let late_path = save(&dir, &late);
    assert_holds(&late_path, &late);
    assert_eq!(latest(&dir).unwrap(), Some(late_path));

    // A checkpoint without tensors is valid.
    let empty = Snapshot { step: 0, state: json!(null), items: vec![] };
    assert_holds(&save(&dir, &empty), &empty);
}

#[test]
fn equal_snapshots_give_equal_bytes_in_any_order() {
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let one = snapshot(3, 5);
    let mut other = one.clone();
    other.items.reverse();
    for shard_bytes in [1 << 30, 100, 1] {
        let mut written = Vec::new();
        for (dir, snapshot) in [(&a, &one), (&b, &other)] {
            let mut saver = Saver::new(dir.path(), None).unwrap().shard_bytes(shard_bytes);
            saver.save(snapshot.clone()).unwrap();
            saver.finish().unwrap();
            let path = dir.path().join("step-00000003");
            assert_holds(&path, snapshot);
            written.push(files(&path));
        }
        assert_eq!(written[0], written[1]);
        // At least one file per tensor; the empty tensor needs none of its own.
        let many = if shard_bytes == 1 { 9 } else { 3 };
        assert!(written[0].len() >= many, "{:?}", written[0].keys());
    }
    assert!(a.path().join("step-00000003/model-00003-of-00003.safetensors").exists());
}

#[test]
fn old_checkpoints_are_pruned() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    assert!(Saver::new(dir, Some(0)).is_err());
    let mut saver = Saver::new(dir, Some(2)).unwrap();
    for step in 1..=5 {
        saver.save(snapshot(step, step)).unwrap();
        saver.finish().unwrap();
        let want: Vec<String> = (step.max(2) - 1..=step).map(|s| format!("step-{s:08}")).collect();
        assert_eq!(names(dir), want);
    }
    // Going back to an earlier step does not delete what was just written.
    saver.save(snapshot(1, 9)).unwrap();
    saver.finish().unwrap();
    assert_holds(&dir.join("step-00000001"), &snapshot(1, 9));
    assert_eq!(latest(dir).unwrap(), Some(dir.join("step-00000005")));
    drop(saver);
    let mut all = Saver::new(dir, None).unwrap();
    (6..9).for_each(|s| all.save(snapshot(s, s)).unwrap());
    drop(all); // waits for the last one
    assert_holds(&dir.join("step-00000008"), &snapshot(8, 8));
    assert!(names(dir).len() >= 5);
}

#[test]
fn a_step_saved_again_replaces_the_old_one() {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), &snapshot(4, 1));
    let path = save(dir.path(), &snapshot(4, 2));
    assert_holds(&path, &snapshot(4, 2));
    assert_eq!(names(dir.path()), ["step-00000004"]);
}

#[test]
fn one_writer_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let first = Saver::new(dir.path(), None).unwrap();
    let e = Saver::new(dir.path(), None).err().unwrap().to_string();
    assert!(e.contains(&format!("process {}", std::process::id())) && e.contains("is writing here"), "{e}");
    drop(first);
    Saver::new(dir.path(), None).unwrap();
}

#[test]
fn tensors_of_another_model_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let held = snapshot(1, 1);
    let loaded = load(&save(dir.path(), &held)).unwrap();
    let mut want: Vec<(&str, DType, &[usize])> =
        held.items.iter().map(|i| (i.name.as_str(), i.dtype, i.shape.as_slice())).collect();
    loaded.check(want.clone()).unwrap();
    let last = want.pop().unwrap();
    assert!(loaded.check(want.clone()).unwrap_err().to_string().contains("mask is unknown"));
    want.push((last.0, last.1, &[6]));
    let e = loaded.check(want.clone()).unwrap_err().to_string();
    assert!(e.contains("mask is bool [5] where this run has bool [6]"), "{e}");
    want.extend(["a", "b", "c"].map(|n| (n, DType::F32, &[1usize][..])));
    let e = loaded.check(want).unwrap_err().to_string();
    assert!(e.contains("a is missing") && e.contains("and 1 more"), "{e}");
}

#[test]
fn comparison_names_what_differs() {
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let one = snapshot(3, 5);
    let first = save(a.path(), &one);
    assert!(compare(&first, &save(b.path(), &one)).unwrap().same());

    let mut two = one.clone();
    two.step = 4;
    two.state["data"]["epoch"] = json!(1);
    two.state["rng"][1] = json!(2);
    let f32s = |v: &[f32]| v.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let mut three = one.clone();
    let q: Vec<f32> = (0..20).map(|i| i as f32).collect();
    three.items[1].bytes = f32s(&q);
    let mut q2 = q.clone();
    (q2[0], q2[7], q2[9]) = (-0.0, 7.25, 8.0);
    two.items[1].bytes = f32s(&q2);
    three.items[4].bytes = f32s(&[0.0; 21]);
    two.items[4].bytes = f32s(&[f32::NAN; 21]);
    three.items[7].bytes = [i64::MAX, 0].iter().flat_map(|x| x.to_le_bytes()).collect();
    two.items[7].bytes = [i64::MAX - 1, 0].iter().flat_map(|x| x.to_le_bytes()).collect();
    two.items[3] = Item::whole(&two.items[3].name, DType::F16, vec![0, 8], Vec::new());
    two.items[8].name = "mask2".into();
    let found = compare(&save(a.path(), &three), &save(b.path(), &two)).unwrap();
    let values = |count, max_abs, at| DifferenceKind::Values { count, max_abs, at };
    let want = [
        ("adam.m/embedding", values(21, f64::INFINITY, 0)),
        ("count", values(1, 1.0, 0)),
        ("mask", DifferenceKind::OnlyFirst),
        ("mask2", DifferenceKind::OnlySecond),
        ("model/layers.0.q", values(3, 1.0, 9)),
        ("model/none", DifferenceKind::Form("F16 [0, 9]".into(), "F16 [0, 8]".into())),
    ];
    let want: Vec<_> = want.into_iter().map(|(name, kind)| Difference { name: name.into(), kind }).collect();
    assert_eq!(found.tensors, want);
    assert_eq!(found.state, ["step", "/data/epoch", "/rng/1"]);
}

#[test]
fn bad_snapshots_are_refused_and_leave_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut saver = Saver::new(dir.path(), None).unwrap();
    let mut fails = |change: &dyn Fn(&mut Snapshot), want: &str| {
        let mut bad = snapshot(1, 1);
        change(&mut bad);
        let e = saver.save(bad).and_then(|()| saver.finish()).unwrap_err().to_string();
        assert!(e.contains(want), "{e}");
        assert!(names(dir.path()).is_empty());
    };
    fails(&|s| s.items[0].name = s.items[1].name.clone(), "twice");
    fails(&|s| s.items[0].bytes.push(0), "\"model/embedding\" was given");
    fails(&|s| s.items[0].bytes.truncate(3), "\"model/embedding\" was given");
    fails(&|s| s.state = (0..200).fold(json!(1), |v, _| json!([v])), "does not read back");
    saver.save(snapshot(1, 1)).unwrap();
    saver.finish().unwrap();
    assert_eq!(names(dir.path()), ["step-00000001"]);
}
