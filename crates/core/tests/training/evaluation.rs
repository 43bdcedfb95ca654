//! Evaluation: what it reads, and when.

use crate::support::{RULE, recipe, trainer};
use ferrotron_core::data::{Batches, Row};
use ferrotron_core::events::Event;
use ferrotron_core::grid::RankLayout;
use ferrotron_core::ranks::on_threads;
use ferrotron_core::train::{Observer, Run};
use ferrotron_core::{Result, checkpoint};
use ferrotron_engine::Rank;
use ferrotron_tensor::{Category, Device};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The rule; notes the peak of activations whenever a micro-batch of one sample is read.
struct Watched {
    device: Device,
    peaks: Mutex<Vec<usize>>,
}

impl Batches for Watched {
    fn seq(&self) -> usize {
        RULE.seq
    }
    fn samples(&self) -> u64 {
        RULE.samples()
    }
    fn resets(&self) -> bool {
        false
    }
    fn row(&self, n: u64, row: &mut Row) -> Result<()> {
        let index = Category::ALL.iter().position(|c| *c == Category::Activations).unwrap();
        self.peaks.lock().unwrap().push(self.device.memory().peak[index]);
        RULE.row(n, row)
    }
}

/// The host holds one micro-batch at a time: the second is read when the first has been through the model.
#[test]
fn micro_batches_are_read_one_by_one() {
    let trainer = trainer(&recipe(&["train.micro_batch=1"]));
    let data = Watched { device: trainer.rank.device().clone(), peaks: Mutex::default() };
    let loss = trainer.evaluate(&data, 3).unwrap();
    assert_eq!(loss, trainer.evaluate(&RULE, 3).unwrap());
    let peaks = data.peaks.into_inner().unwrap();
    assert!(peaks.len() == 3 && peaks[0] < peaks[1], "{peaks:?}");
}

/// The rule; counts the samples that are read.
struct Counted<'a>(&'a AtomicU64);

impl Batches for Counted<'_> {
    fn seq(&self) -> usize {
        RULE.seq
    }
    fn samples(&self) -> u64 {
        RULE.samples()
    }
    fn resets(&self) -> bool {
        false
    }
    fn row(&self, n: u64, row: &mut Row) -> Result<()> {
        self.0.fetch_add(1, Relaxed);
        RULE.row(n, row)
    }
}

/// Asks to stop once validation data has been read, if `rank` is to ask.
struct Asking<'a> {
    asks: bool,
    read: &'a AtomicU64,
    events: Vec<Event>,
}

impl Observer for Asking<'_> {
    fn event(&mut self, event: &Event) {
        self.events.push(event.clone());
    }
    fn stop(&self) -> bool {
        self.asks && self.read.load(Relaxed) > 0
    }
}

/// A run that is asked to end during an evaluation saves the step before it at once, whichever rank is asked.
#[test]
fn a_request_to_stop_is_heard_during_an_evaluation() {
    for ranks in [1, 2] {
        let dir = tempfile::tempdir().unwrap();
        let set = ["train.micro_batch=1", "train.steps=6", "eval.every=3", "eval.batches=500"];
        let dp = format!("parallel.dp={ranks}");
        let r = recipe(&[&set[..], &[dp.as_str()]].concat());
        let read = AtomicU64::new(0);
        let layout = RankLayout { dp: Some(ranks), ..RankLayout::default() };
        let make = || Ok(Rank::cpu(1, r.config.train.seed)?);
        let all = on_threads(&layout, make, |rank| {
            let asks = rank.world.rank() == ranks - 1;
            let mut observer = Asking { asks, read: &read, events: Vec::new() };
            let mut run = Run::open(rank, r.clone(), dir.path(), None)?;
            let outcome = run.train(&RULE, Some(&Counted(&read)), &mut observer)?;
            Ok((outcome, observer.events))
        })
        .unwrap();
        let whole = 500 * 4;
        assert!(read.load(Relaxed) < whole / 4, "{} of {whole} samples were read", read.load(Relaxed));
        for (outcome, events) in all {
            assert_eq!((outcome.finished, outcome.steps, outcome.eval), (false, 3, None));
            assert!(!events.iter().any(|e| matches!(e, Event::Eval(_))));
        }
        let newest = checkpoint::latest(&dir.path().join("checkpoints")).unwrap().unwrap();
        assert!(newest.ends_with(checkpoint::folder_name(3)), "{}", newest.display());
    }
}

/// A long evaluation is the mean over all of its parts: the rule repeats itself after 16 samples.
#[test]
fn the_loss_of_a_long_evaluation_is_that_of_all_its_parts() {
    let trainer = trainer(&recipe(&["train.micro_batch=1"]));
    let [short, long] = [16, 7 * 16].map(|count| trainer.evaluate(&RULE, count).unwrap());
    assert!((long / short - 1.0).abs() < 1e-12, "{short} {long}");
    // The last part is shorter: samples 0 to 3 count once more.
    let few = trainer.evaluate(&RULE, 4).unwrap();
    let more = trainer.evaluate(&RULE, 36).unwrap();
    assert!((more / ((32.0 * short + 4.0 * few) / 36.0) - 1.0).abs() < 1e-12, "{more}");
}
