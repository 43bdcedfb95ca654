//! Section times of ranks, and the rank that is slower than the others: named if it is, and nobody if none is. With
//! `FERROTRON_TEST_DEVICE=cuda` also the sections of one rank on the first GPU.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests are tests too

#[path = "../../../tests/support/device.rs"]
mod device;

use device::{skipped, test_on_gpu};
use ferrotron_core::config::{Recipe, Resolved};
use ferrotron_core::data::source;
use ferrotron_core::events::{self, Event, Sections, Straggler};
use ferrotron_core::fault::sections::Section;
use ferrotron_core::ranks::on_threads;
use ferrotron_core::train::{Observer, Run};
use ferrotron_engine::Rank;
use std::path::Path;

struct Quiet;

impl Observer for Quiet {
    fn event(&mut self, _: &Event) {}
    fn stop(&self) -> bool {
        false
    }
}

fn recipe(steps: u64, more: &[&str]) -> Resolved {
    let mut recipe = Recipe::named("tiny").unwrap();
    let set = [
        "data.seq_len=32",
        "train.global_batch=8",
        "train.micro_batch=1",
        "generate.tokens=0",
        "checkpoint.every=0",
        "eval.every=0",
        "checkpoint.at_end=false",
        "fault.straggler_every=10",
    ];
    set.iter().chain(more).for_each(|s| recipe.set(s).unwrap());
    recipe.set(&format!("train.steps={steps}")).unwrap();
    recipe.resolve(None).unwrap()
}

/// Trains, rank `slow.0` by `slow.1` percent slower than the machine allows; the events of sections and stragglers.
fn train(dir: &Path, r: &Resolved, slow: Option<(usize, f64)>) -> (Vec<Sections>, Vec<Straggler>) {
    on_threads(
        &r.config.parallel.layout(),
        || Ok(Rank::cpu(1, 1)?),
        |rank| {
            let mine = slow.filter(|(who, _)| *who == rank.world.rank());
            let data = source::open(r)?;
            let mut run = Run::open(rank, r.clone(), dir, None)?;
            mine.iter().for_each(|(_, percent)| run.trainer.slow_down(*percent));
            run.train(&*data.train, None, &mut Quiet)
        },
    )
    .unwrap();
    let (mut sections, mut stragglers) = (Vec::new(), Vec::new());
    for line in events::read(dir).unwrap() {
        match line.event {
            Event::Sections(s) => sections.push(s),
            Event::Straggler(s) => stragglers.push(s),
            _ => {}
        }
    }
    (sections, stragglers)
}

#[test]
fn sections_of_every_rank_are_told_once_a_window() {
    let dir = tempfile::tempdir().unwrap();
    let (sections, _) = train(dir.path(), &recipe(25, &["parallel.dp=2", "checkpoint.every=10"]), None);
    assert_eq!(sections.iter().map(|s| (s.step, s.steps)).collect::<Vec<_>>(), [(10, 10), (20, 10)]);
    for window in &sections {
        assert_eq!(window.ranks.iter().map(|r| r.rank).collect::<Vec<_>>(), [0, 1]);
        for rank in &window.ranks {
            for section in Section::ALL {
                // Step 10 is saved after its window has ended.
                let none_yet = section == Section::Checkpoint && window.step == 10;
                assert_eq!(rank.times.of(section) > 0.0, !none_yet, "{section:?} of {rank:?}");
            }
            assert!(rank.times.backward > rank.times.optimizer, "{rank:?}");
            assert!(rank.relative.is_some_and(|s| s > 0.0), "{rank:?}");
        }
    }
}

#[test]
fn measuring_changes_no_bit() {
    let end = |more: &[&str]| {
        let dir = tempfile::tempdir().unwrap();
        train(dir.path(), &recipe(4, &[more, &["parallel.dp=2", "checkpoint.at_end=true"]].concat()), None);
        let last = dir.path().join("checkpoints");
        let last = ferrotron_core::checkpoint::latest(&last).unwrap().unwrap();
        let mut files: Vec<_> = std::fs::read_dir(last).unwrap().map(|f| f.unwrap().path()).collect();
        files.retain(|f| f.extension().is_some_and(|e| e == "safetensors"));
        files.sort();
        assert!(!files.is_empty());
        files.iter().map(|f| std::fs::read(f).unwrap()).collect::<Vec<_>>()
    };
    assert!(end(&["fault.straggler_every=2"]) == end(&["fault.straggler_every=0"]));
}

#[test]
fn a_rank_slowed_by_a_fifth_is_named_within_20_steps() {
    let dir = tempfile::tempdir().unwrap();
    let (sections, found) = train(dir.path(), &recipe(20, &["parallel.dp=4"]), Some((1, 20.0)));
    let seen: Vec<_> = sections.iter().flat_map(|s| &s.ranks).map(|r| (r.rank, r.relative)).collect();
    assert!(found.iter().any(|s| s.rank == 1), "{found:?} {seen:?}");
    assert!(found.iter().all(|s| s.rank == 1), "{found:?} {seen:?}");
    assert!(found.iter().all(|s| !s.host.is_empty() && s.device == "CPU" && s.score < 0.87), "{found:?}");
}

#[test]
#[ignore = "a minute alone on a quiet machine: it measures time"]
fn no_false_stragglers_in_500_steps() {
    let dir = tempfile::tempdir().unwrap();
    let (sections, found) = train(dir.path(), &recipe(500, &["parallel.dp=4"]), None);
    assert_eq!(sections.len(), 50);
    let of_window = |s: &Sections| s.ranks.iter().filter_map(|r| r.relative).collect::<Vec<_>>();
    assert!(found.is_empty(), "{found:?} {:?}", sections.iter().map(of_window).collect::<Vec<_>>());
}

#[test]
fn a_gpu_s_sections_are_timed_by_events_and_slow_down() {
    if !test_on_gpu() {
        return skipped("not on a GPU");
    }
    let own = |percent: f64| {
        let (dir, r) = (tempfile::tempdir().unwrap(), recipe(30, &["train.cuda_graph=off"]));
        let rank = Rank::cuda(0, 1, 1, Default::default()).unwrap().0;
        let data = source::open(&r).unwrap();
        let mut run = Run::open(rank, r, dir.path(), None).unwrap();
        run.trainer.slow_down(percent);
        run.train(&*data.train, None, &mut Quiet).unwrap();
        let lines = events::read(dir.path()).unwrap();
        let of_sections = |e: Event| if let Event::Sections(s) = e { Some(s) } else { None };
        let window = lines.into_iter().rev().find_map(|line| of_sections(line.event)).unwrap();
        let times = window.ranks[0].times;
        assert!(times.forward > 0.0 && times.backward > 0.0 && times.optimizer > 0.0, "{window:?}");
        assert!(
            window.steps == 10 && window.ranks[0].gpu.as_ref().is_none_or(|g| g.sm_mhz.is_some()),
            "{window:?}"
        );
        times.forward + times.backward + times.optimizer
    };
    let ratio = own(100.0) / own(0.0);
    assert!((1.5..2.6).contains(&ratio), "{ratio}");
}
