//! Checkpoints count when they are on disk; a run that cannot go on saves what it has.

use crate::support::{Broken, RULE, Stopper, newest, rank, recipe, run};
use ferrotron_core::checkpoint;
use ferrotron_core::events::Event;
use ferrotron_core::grid::RankLayout;
use ferrotron_core::ranks::on_threads;
use ferrotron_core::train::{Observer, Run};
use ferrotron_engine::Rank;
use std::path::PathBuf;

/// Checks at the event of a checkpoint that it can be loaded.
struct Checker {
    dir: PathBuf,
    seen: Vec<u64>,
}

impl Observer for Checker {
    fn event(&mut self, event: &Event) {
        if let Event::Checkpoint(c) = event {
            let loaded = checkpoint::load(&self.dir.join(&c.path)).unwrap();
            assert_eq!(loaded.step(), c.step);
            self.seen.push(c.step);
        }
    }
    fn stop(&self) -> bool {
        false
    }
}

#[test]
fn a_checkpoint_is_reported_when_it_is_on_disk() {
    let dir = tempfile::tempdir().unwrap();
    // Large enough that writing takes longer than what follows a save.
    let r = recipe(&[
        "model.hidden=256",
        "model.ffn=1024",
        "train.steps=4",
        "checkpoint.every=1",
        "checkpoint.keep=0",
    ]);
    let mut checker = Checker { dir: dir.path().to_path_buf(), seen: Vec::new() };
    Run::open(rank(1, &r), r.clone(), dir.path(), None).unwrap().train(&RULE, None, &mut checker).unwrap();
    assert_eq!(checker.seen, [1, 2, 3, 4]);
}

#[test]
fn a_run_without_data_saves_its_last_step() {
    let r = recipe(&["train.steps=6"]);
    let dir = tempfile::tempdir().unwrap();
    // Batches of 4: sample 14 is in the fourth step.
    let mut observer = Stopper::default();
    let e =
        Run::open(rank(1, &r), r.clone(), dir.path(), None).unwrap().train(&Broken(14), None, &mut observer);
    assert!(e.unwrap_err().to_string().contains("sample 14 cannot be read"));
    assert!(
        matches!(observer.events.last(), Some(Event::Checkpoint(c)) if c.step == 3),
        "{:?}",
        observer.events
    );
    let stopped = tempfile::tempdir().unwrap();
    run(stopped.path(), &r, 1, &RULE, None, Some(3));
    assert!(newest(dir.path()) == newest(stopped.path()), "not the state after step 3");
    // With its data back it ends as if nothing had happened.
    let whole = tempfile::tempdir().unwrap();
    run(whole.path(), &r, 1, &RULE, None, None);
    run(dir.path(), &r, 1, &RULE, None, None);
    assert!(newest(dir.path()) == newest(whole.path()));
}

#[test]
fn all_ranks_save_when_one_has_no_data() {
    let r = recipe(&[
        "train.steps=6",
        "schedule.warmup=0",
        "parallel.tp=2",
        "parallel.dp=2",
        "train.micro_batch=1",
    ]);
    let layout = RankLayout { tp: 2, dp: Some(2), ..RankLayout::default() };
    let dir = tempfile::tempdir().unwrap();
    let make = || Ok(Rank::cpu(1, r.config.train.seed)?);
    let failed = on_threads(&layout, make, |rank| {
        // Only the second data-parallel rank reads sample 13.
        Run::open(rank, r.clone(), dir.path(), None)?.train(&Broken(13), None, &mut Stopper::default())
    });
    assert!(failed.unwrap_err().to_string().contains("sample 13 cannot be read"));
    let path = checkpoint::latest(&dir.path().join("checkpoints")).unwrap().unwrap();
    assert_eq!(checkpoint::load(&path).unwrap().step(), 3);
}

#[test]
fn divergence_saves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut bad = recipe(&["train.steps=40"]);
    bad.config.optimizer.lr = 1e30;
    let mut r = Run::open(rank(1, &bad), bad.clone(), dir.path(), None).unwrap();
    r.train(&RULE, None, &mut Stopper::default()).unwrap_err();
    drop(r);
    assert_eq!(checkpoint::latest(&dir.path().join("checkpoints")).unwrap(), None);
}

#[test]
fn the_seconds_of_steps_add_up_to_the_time_they_took() {
    let r = recipe(&["train.steps=20"]);
    let dir = tempfile::tempdir().unwrap();
    let begin = std::time::Instant::now();
    let (outcome, events) = run(dir.path(), &r, 1, &RULE, None, None);
    let took = begin.elapsed().as_secs_f64();
    let seconds: Vec<f64> =
        events.iter().filter_map(|e| if let Event::Step(s) = e { Some(s.seconds) } else { None }).collect();
    assert_eq!(seconds.len(), 20);
    assert!((seconds.iter().sum::<f64>() - outcome.seconds).abs() < 1e-9 && outcome.seconds < took);
    assert!(seconds.iter().all(|s| *s > 0.0), "{seconds:?}");
}
