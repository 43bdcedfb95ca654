//! Steps that are launched before the one before is read give the same run: losses, evaluations, checkpoints, requests.

use crate::support::{Broken, RULE, Stopper, newest, recipe};
use ferrotron_core::Result;
use ferrotron_core::checkpoint;
use ferrotron_core::config::Resolved;
use ferrotron_core::data::Batches;
use ferrotron_core::events::Event;
use ferrotron_core::grid::RankLayout;
use ferrotron_core::ranks::on_threads;
use ferrotron_core::train::{Observer, Outcome, Run};
use ferrotron_engine::Rank;
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
