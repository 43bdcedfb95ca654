//! Reading the newest checkpoint of a run that saves and deletes checkpoints meanwhile.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // all of it is test

#[path = "../../../tests/support/golden.rs"]
mod golden;

use ferrotron_bridge::{HfCheckpoint, Weights};
use ferrotron_core::checkpoint::{Item, Saver, Snapshot};
use ferrotron_core::train::{CHECKPOINTS, weights_only};
use ferrotron_tensor::DType;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

#[test]
fn a_checkpoint_is_read_whole_though_it_is_deleted_meanwhile() {
    let golden = golden::fixture("qwen2");
    let model = HfCheckpoint::open(&golden).unwrap();
    let item = |t: &ferrotron_bridge::LogicalTensor| {
        let bytes = model.read(&t.name, DType::F32).unwrap();
        Item::whole(&format!("model/{}", t.name), DType::F32, t.shape.clone(), bytes)
    };
    let items: Vec<Item> = model.tensors().iter().map(item).collect();
    let state = weights_only(model.config().model()).unwrap();
    let run = tempfile::tempdir().unwrap();
    // A file per tensor: opening and checking all of them takes longer than a save.
    let mut saver = Saver::new(&run.path().join(CHECKPOINTS), Some(1)).unwrap().shard_bytes(1);
    let mut save = |step| {
        saver.save(Snapshot { step, state: state.clone(), items: items.clone() }).unwrap();
        saver.finish().unwrap();
    };
    save(1);
    let done = AtomicBool::new(false);
    std::thread::scope(|s| {
        let reader = s.spawn(|| {
            let mut seen = std::collections::BTreeSet::new();
            // A busy disk may take a second for a save.
            let begin = std::time::Instant::now();
            while seen.len() < 10 && begin.elapsed().as_secs() < 60 {
                let weights = Weights::open(run.path()).unwrap();
                // Read after the checkpoint may be gone.
                let first = &model.tensors()[0];
                assert!(weights.read(&first.name, DType::F32).unwrap() == items[0].bytes);
                let Weights::Checkpoint(native) = &weights else { panic!("not a checkpoint") };
                seen.insert(native.step());
            }
            done.store(true, Relaxed);
            seen.len()
        });
        let mut step = 1;
        while !done.load(Relaxed) && !reader.is_finished() {
            step += 1;
            save(step);
        }
        assert!(reader.join().unwrap() > 1, "the run stood still");
    });
}
