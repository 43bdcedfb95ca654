//! Steps that are launched before the one before is read give the same run: losses, evaluations, checkpoints, requests.

use crate::support::{Broken, RULE, Rule, Stopper, newest, recipe, saved_at};
use ferrotron_core::Result;
use ferrotron_core::checkpoint;
use ferrotron_core::config::Resolved;
use ferrotron_core::data::{Batches, IGNORE, Row};
use ferrotron_core::events::Event;
use ferrotron_core::grid::RankLayout;
use ferrotron_core::ranks::on_threads;
use ferrotron_core::train::{Observer, OpenOptions, Outcome, Run, Snapshots};
use ferrotron_engine::Rank;
use ferrotron_engine::moe::SplitHeadroom;
use ferrotron_tensor::Instrumentation;
use std::cell::Cell;
use std::path::Path;

/// Runs on dp = 2 · tp = 2 threads, or alone; the outcome and events of the first rank.
fn train<O: Observer + Default>(
    dir: &Path,
    r: &Resolved,
    alone: bool,
    ahead: bool,
    data: &(dyn Batches + Sync),
    seen: impl Fn(O) -> Vec<Event> + Sync,
) -> Result<(Outcome, Vec<Event>)> {
    let four = RankLayout { tp: 2, dp: Some(2), ..RankLayout::default() };
    let layout = if alone { RankLayout::default() } else { four };
    let watch = Instrumentation { race_check: true, ..Instrumentation::default() };
    let make = || Ok(Rank::cpu_instrumented(1, r.config.train.seed, watch)?);
    let all = on_threads(&layout, make, |rank| {
        let mut run = Run::open(rank, r.clone(), dir, None)?;
        run.launches_ahead = ahead;
        let mut observer = O::default();
        let outcome = run.train(data, Some(&RULE), &mut observer)?;
        Ok((outcome, seen(observer)))
    })?;
    Ok(all.into_iter().next().unwrap())
}

fn setting(alone: bool) -> Resolved {
    let mut set = vec!["train.steps=9", "checkpoint.every=4", "eval.every=3", "train.micro_batch=1"];
    if !alone {
        set.extend(["parallel.tp=2", "parallel.dp=2", "parallel.zero=1"]);
    }
    recipe(&set)
}

/// Steps and the bits of their losses.
type Losses = Vec<(u64, u64)>;

/// Loss bits of steps and evaluations, and steps of checkpoints.
fn summary(events: &[Event]) -> (Losses, Losses, Vec<u64>) {
    let (mut steps, mut evals, mut saves) = (Vec::new(), Vec::new(), Vec::new());
    for e in events {
        match e {
            Event::Step(s) => steps.push((s.step, s.loss.to_bits())),
            Event::Eval(v) => evals.push((v.step, v.loss.to_bits())),
            Event::Checkpoint(c) => saves.push(c.step),
            _ => {}
        }
    }
    (steps, evals, saves)
}

#[test]
fn the_run_is_the_same() {
    for alone in [true, false] {
        let r = setting(alone);
        let [one, two] = [false, true].map(|ahead| {
            let dir = tempfile::tempdir().unwrap();
            let (outcome, events) =
                train::<Stopper>(dir.path(), &r, alone, ahead, &RULE, |o| o.events).unwrap();
            assert!(outcome.finished && outcome.steps == 9);
            (summary(&events), newest(dir.path()))
        });
        assert!(one.0 == two.0, "alone: {alone}: {:?} and {:?}", one.0, two.0);
        assert_eq!(one.0.2, [4, 8, 9]);
        assert!(one.1 == two.1, "alone: {alone}: another checkpoint");
    }
}

/// Asks to save before the fourth call, and to stop before the sixth.
#[derive(Default)]
struct Asks {
    calls: Cell<u64>,
    events: Vec<Event>,
}

impl Observer for Asks {
    fn event(&mut self, event: &Event) {
        self.events.push(event.clone());
    }
    fn stop(&self) -> bool {
        self.calls.set(self.calls.get() + 1);
        self.calls.get() == 6
    }
    fn save(&self) -> bool {
        self.calls.get() == 3
    }
}

/// A request is followed once the step in flight has ended, by all ranks after the same step, and nothing is lost.
#[test]
fn requests_are_followed_after_the_step_in_flight() {
    for (alone, ahead) in [(true, false), (true, true), (false, false), (false, true)] {
        let mut r = setting(alone);
        (r.config.checkpoint.every, r.config.eval.every) = (0, 0);
        let dir = tempfile::tempdir().unwrap();
        let (outcome, events) = train::<Asks>(dir.path(), &r, alone, ahead, &RULE, |o| o.events).unwrap();
        let (steps, _, saves) = summary(&events);
        assert!(!outcome.finished, "alone: {alone}, ahead: {ahead}");
        // Every call is before the launch of a step; a save lets one call pass without a step.
        assert_eq!((steps.len(), saves), (5, vec![3, 5]), "alone: {alone}, ahead: {ahead}");
        // It ends as if it had not been stopped.
        let (outcome, _) = train::<Stopper>(dir.path(), &r, alone, ahead, &RULE, |o| o.events).unwrap();
        assert!(outcome.finished && outcome.steps == 4);
        let whole = tempfile::tempdir().unwrap();
        train::<Stopper>(whole.path(), &r, alone, !ahead, &RULE, |o| o.events).unwrap();
        assert!(newest(dir.path()) == newest(whole.path()), "alone: {alone}, ahead: {ahead}");
    }
}

#[test]
fn data_that_cannot_be_read_saves_the_step_before() {
    for (alone, ahead) in [(true, true), (false, true)] {
        let mut r = setting(alone);
        (r.config.checkpoint.every, r.config.eval.every) = (0, 0);
        let dir = tempfile::tempdir().unwrap();
        let failed = train::<Stopper>(dir.path(), &r, alone, ahead, &Broken(13), |o| o.events);
        assert!(failed.unwrap_err().to_string().contains("sample 13 cannot be read"), "alone: {alone}");
        let path = checkpoint::latest(&dir.path().join("checkpoints")).unwrap().unwrap();
        assert_eq!(checkpoint::load(&path).unwrap().step(), 3, "alone: {alone}");
    }
}

/// The rule in rows that are padded: those of each step have two tokens more than those of the step before.
struct Growing;

impl Growing {
    const STEPS: u64 = 11;
    /// Samples of a step.
    const BATCH: u64 = 4;
    const SEQ: usize = 2 + 2 * Self::STEPS as usize;
}

impl Batches for Growing {
    fn seq(&self) -> usize {
        Self::SEQ
    }
    fn samples(&self) -> u64 {
        Self::STEPS * Self::BATCH
    }
    fn resets(&self) -> bool {
        true
    }
    fn row(&self, n: u64, row: &mut Row) -> Result<()> {
        let tokens = 4 + 2 * (n % self.samples() / Self::BATCH) as usize;
        Rule { seq: tokens, vocab: 16 }.row(n, row)?;
        row.padding = Self::SEQ - tokens;
        if row.padding > 0 {
            row.starts.push(tokens);
            row.tokens.resize(Self::SEQ, 0);
            row.labels.resize(Self::SEQ, IGNORE);
            row.positions.extend(0..row.padding as i32);
        }
        Ok(())
    }
}

/// Asks to save before the fifth call.
#[derive(Default)]
struct Saves {
    calls: Cell<u64>,
    events: Vec<Event>,
}

impl Observer for Saves {
    fn event(&mut self, event: &Event) {
        self.events.push(event.clone());
    }
    fn stop(&self) -> bool {
        false
    }
    fn save(&self) -> bool {
        self.calls.set(self.calls.get() + 1);
        self.calls.get() == 5
    }
}

/// A run of two expert-parallel ranks from the newest of its `snapshots`, with MoE messages of expected size or without. The steps
/// done before, the overflows, and the events of the first rank.
fn train_experts(dir: &Path, r: &Resolved, expects: bool, snapshots: &[Snapshots]) -> (u64, u64, Vec<Event>) {
    // Sizes are the largest counts so far, and they are used at once.
    let headroom = SplitHeadroom { share: 0.0, rows: 0, multiple: 1, calm: 0 };
    let watch = Instrumentation { race_check: true, ..Instrumentation::default() };
    let make = || Ok(Rank::cpu_instrumented(1, r.config.train.seed, watch)?);
    let all = on_threads(&r.config.parallel.layout(), make, |rank| {
        let snapshots = snapshots[rank.world.rank()].clone();
        let mut run =
            Run::open_with(rank, r.clone(), dir, OpenOptions { snapshots, ..OpenOptions::default() })?;
        run.launches_ahead = true;
        if expects {
            run.trainer.expect_split_sizes(headroom)?;
        }
        let (from, mut observer) = (run.trainer.step(), Saves::default());
        run.train(&Growing, Some(&Growing), &mut observer)?;
        Ok((from, run.trainer.split_overflows(), observer.events))
    });
    all.unwrap().into_iter().next().unwrap()
}

/// Every token goes to all experts, so that every step overflows but the first two, whose counts the host reads. Evaluations,
/// checkpoints and snapshots are of the steps as they ran again.
#[test]
fn a_run_whose_steps_overflow_is_the_same() {
    let (steps, batch, seq) = (Growing::STEPS, Growing::BATCH, Growing::SEQ);
    let sizes = [("train.steps", steps), ("train.global_batch", batch), ("data.seq_len", seq as u64)];
    let sizes = sizes.map(|(key, n)| format!("{key}={n}"));
    let mut set: Vec<&str> = sizes.iter().map(String::as_str).collect();
    set.extend(["parallel.ep=2", "parallel.dp=2", "moe.experts=4", "moe.topk=4", "moe.ffn=16"]);
    set.extend(["train.micro_batch=1", "data.reset_at_documents=true"]);
    // The last snapshot is of step 10, behind which nothing else holds back the launch of the next step.
    set.extend(["fault.snapshot_every=2", "eval.every=3", "checkpoint.every=4", "checkpoint.keep=0"]);
    let r = recipe(&set);
    let [exact, expected, restored] = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let kept = [(); 2].map(|()| Snapshots::default());
    let (_, none, one) = train_experts(exact.path(), &r, false, &[(); 2].map(|()| Snapshots::default()));
    let (from, overflows, two) = train_experts(expected.path(), &r, true, &kept);
    assert_eq!((none, from, overflows), (0, 0, steps - 2));
    assert_eq!(summary(&one), summary(&two));
    let (losses, evals, saves) = summary(&two);
    assert_eq!((losses.len() as u64, evals.len(), saves), (steps, 4, vec![4, 5, 8, 11]));
    for step in [4, 5, 8, 11] {
        let [one, two] = [&exact, &expected].map(|dir| saved_at(dir.path(), step));
        assert!(one == two, "another checkpoint of step {step}");
    }
    let (from, overflows, last) = train_experts(restored.path(), &r, true, &kept);
    assert_eq!((from, overflows, summary(&last).0.as_slice()), (10, 0, &losses[10..]));
    assert!(newest(exact.path()) == newest(restored.path()), "the snapshot is of another state");
}
