//! Checkpoints are byte-equal under every layout and resume under any other.

use super::*;
use ferrotron_core::data::source;
use ferrotron_core::events::Event;
use ferrotron_core::train::{CHECKPOINTS, Observer, Run};
use std::path::Path;

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
    let snapshot = run(layout, |rank| {
        let first = rank.world.rank() == 0;
        let snapshot = Run::open(rank, resolved.clone(), dir, None)?.trainer.snapshot()?;
        Ok(first.then_some(snapshot))
    });
    let mut saver = ferrotron_core::checkpoint::Saver::new(to, None).unwrap();
    saver.save(snapshot.unwrap().unwrap()).unwrap();
    saver.finish().unwrap();
}

/// Every file below a folder with its bytes.
fn files(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let mut out = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => out.extend(files(&path)),
            false => {
                out.push((path.file_name().unwrap().display().to_string(), std::fs::read(&path).unwrap()))
            }
        }
    }
    out.sort();
    out
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
        let written = files(&dir.path().join(CHECKPOINTS));
        // Every other layout reads the saved tensors bit for bit and writes the same bytes.
        for b in others.iter().map(|b| layout(b)).chain([a.clone()]) {
            let resolved = recipe(&b, &[]);
            let read = run(&b, |rank| Run::open(rank, resolved.clone(), dir.path(), None)?.trainer.weights());
            assert!(read.unwrap() == saved, "saved under {a}, read under {b}: other weights");
            let again = tempfile::tempdir().unwrap();
            save_again(&b, dir.path(), again.path());
            assert!(files(again.path()) == written, "saved under {a}, read and saved under {b}: other bytes");
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
