//! The best checkpoint and early stopping: on one rank and on four, launched ahead or not, interrupted or not.

use crate::support::{RULE, Stopper, newest, recipe};
use ferrotron_core::Result;
use ferrotron_core::checkpoint;
use ferrotron_core::config::Resolved;
use ferrotron_core::data::{Batches, Row};
use ferrotron_core::events::Event;
use ferrotron_core::grid::RankLayout;
use ferrotron_core::ranks::on_threads;
use ferrotron_core::train::{OpenOptions, Outcome, Run};
use ferrotron_engine::Rank;
use std::path::Path;

/// Labels that the rule contradicts: the better the rule is learned, the higher their loss.
struct Contrary;

impl Batches for Contrary {
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
        RULE.row(n, row)?;
        row.labels.iter_mut().for_each(|l| *l = (*l + 1) % RULE.vocab);
        Ok(())
    }
}

fn setting(alone: bool, more: &[&str]) -> Resolved {
    let mut set = vec!["train.steps=20", "eval.every=2", "checkpoint.every=3", "checkpoint.keep=1"];
    set.extend(["train.micro_batch=1", "checkpoint.best=true"]);
    if !alone {
        set.extend(["parallel.tp=2", "parallel.dp=2", "parallel.zero=1"]);
    }
    set.extend(more);
    recipe(&set)
}

/// A run, or the rest of one; the outcome and events of the first rank.
fn train(
    dir: &Path,
    r: &Resolved,
    (alone, ahead): (bool, bool),
    eval: &dyn Batches,
    stop_after: Option<u64>,
) -> (Outcome, Vec<Event>) {
    let four = RankLayout { tp: 2, dp: Some(2), ..RankLayout::default() };
    let layout = if alone { RankLayout::default() } else { four };
    let make = || Ok(Rank::cpu(1, r.config.train.seed)?);
    let all = on_threads(&layout, make, |rank| {
        let mut run = Run::open(rank, r.clone(), dir, None)?;
        run.launches_ahead = ahead;
        let mut observer = Stopper { after: stop_after, ..Stopper::default() };
        let outcome = run.train(&RULE, Some(eval), &mut observer)?;
        Ok((outcome, observer.events))
    });
    all.unwrap().into_iter().next().unwrap()
}

/// Steps of the checkpoints on disk, and of the best.
fn kept(dir: &Path) -> (Vec<u64>, Option<u64>) {
    let dir = dir.join("checkpoints");
    (checkpoint::list(&dir).unwrap().into_iter().map(|c| c.0).collect(), checkpoint::best(&dir))
}

fn evaluated(events: &[Event]) -> Vec<u64> {
    let step = |e: &Event| match e {
        Event::Eval(v) => Some(v.step),
        _ => None,
    };
    events.iter().filter_map(step).collect()
}

#[test]
fn a_run_that_gets_worse_is_stopped_and_its_best_checkpoint_stays() {
    for how in [(true, false), (true, true), (false, false), (false, true)] {
        let r = setting(how.0, &["eval.patience=3"]);
        let dir = tempfile::tempdir().unwrap();
        let (outcome, events) = train(dir.path(), &r, how, &Contrary, None);
        assert!(outcome.finished && outcome.stopped_early, "{outcome:?}");
        assert_eq!((outcome.steps, evaluated(&events)), (8, vec![2, 4, 6, 8]), "{how:?}");
        assert_eq!(kept(dir.path()), (vec![2, 8], Some(2)), "{how:?}");
        let marks = events.iter().filter_map(|e| match e {
            Event::Checkpoint(c) => Some((c.step, c.best)),
            _ => None,
        });
        assert_eq!(marks.collect::<Vec<_>>(), [(2, true), (3, false), (6, false), (8, false)]);
        // The same command does nothing; with more patience the run goes on.
        let (again, _) = train(dir.path(), &r, how, &Contrary, None);
        assert!(again.finished && again.stopped_early && again.steps == 0, "{again:?}");
        let longer = setting(how.0, &["eval.patience=4"]);
        let (more, _) = train(dir.path(), &longer, how, &Contrary, None);
        assert!(more.stopped_early && more.steps == 2, "{more:?}");
        assert_eq!(kept(dir.path()), (vec![2, 10], Some(2)));
    }
}

/// An interrupted run remembers what it has seen: it ends where an undisturbed one does, with the same bytes.
#[test]
fn a_resumed_run_stops_where_it_would_have() {
    let r = setting(true, &["eval.patience=3"]);
    let [whole, parts] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    train(whole.path(), &r, (true, false), &Contrary, None);
    for stop in [1, 5] {
        let (outcome, _) = train(parts.path(), &r, (true, false), &Contrary, Some(stop));
        assert!(!outcome.finished && !outcome.stopped_early);
    }
    // As if the machine had stopped before the link was made.
    std::fs::remove_file(parts.path().join("checkpoints/best")).unwrap();
    let (outcome, _) = train(parts.path(), &r, (true, false), &Contrary, None);
    assert!(outcome.stopped_early && outcome.steps == 3, "{outcome:?}");
    assert_eq!(kept(parts.path()), (vec![2, 8], Some(2)));
    assert!(newest(whole.path()) == newest(parts.path()), "another checkpoint");
}

/// `--resume best`: the run goes on from the best checkpoint to the same bits, and what came after it is gone.
#[test]
fn a_run_goes_on_from_its_best_checkpoint() {
    let r = setting(true, &["eval.patience=3", "checkpoint.keep=0"]);
    let dir = tempfile::tempdir().unwrap();
    let open = |from_best| {
        let options = OpenOptions { from_best, ..OpenOptions::default() };
        Run::open_with(Rank::cpu(1, r.config.train.seed)?, r.clone(), dir.path(), options)
    };
    let e = open(true).err().unwrap().to_string();
    assert!(e.contains("no best checkpoint") && e.contains("checkpoint.best=true"), "{e}");
    train(dir.path(), &r, (true, false), &Contrary, None);
    let (first, log) =
        (newest(dir.path()), std::fs::read_to_string(dir.path().join("events.jsonl")).unwrap());
    assert_eq!(kept(dir.path()), (vec![2, 3, 6, 8], Some(2)));
    let mut run = open(true).unwrap();
    assert_eq!((run.trainer.step(), kept(dir.path())), (2, (vec![2], Some(2))));
    let notes = &run.resumed.as_ref().unwrap().notes;
    assert!(notes.iter().any(|n| n.contains("step-00000003, step-00000006, step-00000008")), "{notes:?}");
    let outcome = run.train(&RULE, Some(&Contrary), &mut Stopper::default()).unwrap();
    drop(run);
    assert!(outcome.stopped_early && outcome.steps == 6, "{outcome:?}");
    assert!(newest(dir.path()) == first, "another checkpoint");
    let again = std::fs::read_to_string(dir.path().join("events.jsonl")).unwrap();
    let steps = |log: &str| log.lines().filter(|l| l.contains("\"kind\":\"step\"")).count();
    assert_eq!((steps(&log), steps(&again)), (8, 8));
}

/// The process was killed after the best checkpoint and before its link: that checkpoint is found, and not deleted.
#[test]
fn the_best_checkpoint_survives_a_crash_before_its_link() {
    let r = setting(true, &["train.steps=6", "checkpoint.keep=0"]);
    let dir = tempfile::tempdir().unwrap();
    train(dir.path(), &r, (true, false), &RULE, None);
    assert_eq!(kept(dir.path()), (vec![2, 3, 4, 6], Some(6)));
    let options = || OpenOptions { from_best: true, ..OpenOptions::default() };
    let checkpoints = dir.path().join("checkpoints");
    for stale in [Some(2), None] {
        match stale {
            Some(step) => checkpoint::mark_best(&checkpoints, step).unwrap(),
            None => std::fs::remove_file(checkpoints.join("best")).unwrap(),
        }
        let rank = Rank::cpu(1, r.config.train.seed).unwrap();
        let run = Run::open_with(rank, r.clone(), dir.path(), options()).unwrap();
        assert_eq!((run.trainer.step(), kept(dir.path())), (6, (vec![2, 3, 4, 6], Some(6))), "{stale:?}");
    }
}

#[test]
fn a_run_that_gets_better_keeps_the_last() {
    let r = setting(true, &["train.steps=6", "eval.patience=1", "eval.min_delta=0.001"]);
    let dir = tempfile::tempdir().unwrap();
    let (outcome, events) = train(dir.path(), &r, (true, false), &RULE, None);
    assert!(outcome.finished && !outcome.stopped_early && outcome.steps == 6);
    assert_eq!((evaluated(&events), kept(dir.path())), (vec![2, 4, 6], (vec![6], Some(6))));
    // An improvement that is too small is none, but still the best.
    let r = setting(true, &["eval.patience=2", "eval.min_delta=100"]);
    let dir = tempfile::tempdir().unwrap();
    let (outcome, _) = train(dir.path(), &r, (true, false), &RULE, None);
    assert!(outcome.stopped_early && outcome.steps == 6);
    assert_eq!(kept(dir.path()).1, Some(6));
}

#[test]
fn evaluations_are_needed() {
    for key in ["checkpoint.best=true", "eval.patience=2"] {
        let mut recipe = ferrotron_core::config::Recipe::named("tiny").unwrap();
        recipe.set("eval.every=0").unwrap();
        recipe.set(key).unwrap();
        let error = recipe.resolve(None).unwrap_err().to_string();
        assert!(error.contains("eval.every"), "{error}");
    }
}
