//! Checkpoints hold the same tensors, bit for bit, under every layout and resume under any other.

use super::*;
use ferrotron_core::checkpoint::{self, Saver};
use ferrotron_core::data::source;
use ferrotron_core::events::Event;
use ferrotron_core::train::{CHECKPOINTS, Observer, Run};
use std::path::{Path, PathBuf};

struct StopAfter(u64, u64);

impl Observer for StopAfter {
    fn event(&mut self, event: &Event) {
        if let Event::Step(s) = event {
            self.1 = s.step;
        }
    }
    fn stop(&self) -> bool {
        self.1 >= self.0
    }
}

/// Trains in a folder until step `stop` and returns all weights.
fn train(layout: &RankLayout, dir: &Path, stop: u64) -> Vec<LogicalValues> {
    let resolved = recipe(layout, &["checkpoint.keep=0"]);
    run(layout, |rank| {
        let sources = source::open(&resolved)?;
        let mut run = Run::open(rank, resolved.clone(), dir, None)?;
        run.train(&*sources.train, sources.eval.as_deref(), &mut StopAfter(stop, 0))?;
        run.trainer.weights()
    })
    .unwrap()
}

/// Loads a run's checkpoint and saves it again elsewhere, unchanged.
fn save_again(layout: &RankLayout, dir: &Path, to: &Path) {
    let resolved = recipe(layout, &["checkpoint.keep=0"]);
    run(layout, |rank| {
        let mut saver = Saver::on(to, None, &rank.world.all())?;
        saver.save(Run::open(rank, resolved.clone(), dir, None)?.trainer.snapshot()?)?;
        saver.finish()
    })
    .unwrap();
}

/// Both folders have the same steps, and checkpoints of the same tensors, bit for bit, and the same state.
fn assert_same(a: &Path, b: &Path, what: &str) {
    let [found, wanted] = [a, b].map(|dir| checkpoint::list(dir).unwrap());
    let steps = |all: &[(u64, PathBuf)]| all.iter().map(|(step, _)| *step).collect::<Vec<_>>();
    assert_eq!(steps(&found), steps(&wanted), "{what}");
    assert!(!found.is_empty(), "{what}: no checkpoint");
    for ((_, a), (_, b)) in found.iter().zip(&wanted) {
        let different = checkpoint::compare(a, b).unwrap();
        assert!(different.same(), "{what}: {different:?}");
    }
}

#[test]
fn a_checkpoint_is_the_same_under_every_layout_and_resumes_under_any() {
    for (a, others) in [
        ("tp=2,dp=2", &["tp=4", "pp=2"][..]),
        ("tp=2,pp=2,dp=2", &["pp=4,cp=2", "tp=1", "pp=2,vp=2"]),
        ("pp=4,cp=2", &["tp=2,pp=2,dp=2"]),
    ] {
        let a = layout(a);
        let dir = tempfile::tempdir().unwrap();
        let saved = train(&a, dir.path(), 5);
        let written = dir.path().join(CHECKPOINTS);
        // Every other layout reads the saved tensors bit for bit and writes the same.
        for b in others.iter().map(|b| layout(b)).chain([a.clone()]) {
            let resolved = recipe(&b, &[]);
            let read = run(&b, |rank| Run::open(rank, resolved.clone(), dir.path(), None)?.trainer.weights());
            assert!(read.unwrap() == saved, "saved under {a}, read under {b}: other weights");
            let again = tempfile::tempdir().unwrap();
            save_again(&b, dir.path(), again.path());
            assert_same(again.path(), &written, &format!("saved under {a}, read and saved under {b}"));
        }
        // Resumed under another layout it ends where one rank ends; Adam amplifies rounding up to a fraction of lr = 1e-3.
        let whole = tempfile::tempdir().unwrap();
        let wanted = train(&one(), whole.path(), 100);
        let b = layout(others[0]);
        for (o, w) in train(&b, dir.path(), 100).iter().zip(&wanted) {
            let apart =
                o.values.iter().zip(&w.values).fold(0f64, |m, (a, b)| m.max(f64::from((a - b).abs())));
            assert!(apart < 2e-4, "{a} then {b}: {} is {apart} apart after ten steps", o.name);
        }
    }
}
