//! f16 training with a dynamic loss scale: it falls, grows and resumes; the model learns as in bf16.

use super::support::*;
use ferrotron_core::config::{Recipe, Resolved};
use ferrotron_core::events::{Event, RerunOutcome};
use ferrotron_core::grid::RankLayout;
use ferrotron_core::ranks::on_threads;
use ferrotron_core::train::{Run, StepReport, Trainer};
use ferrotron_engine::Rank;

fn half(more: &[&str]) -> Resolved {
    recipe(&[&["precision.dtype=f16", "train.steps=60"], more].concat())
}

fn steps(t: &mut Trainer, n: usize) -> Vec<StepReport> {
    (0..n).map(|_| t.train_step(&RULE).unwrap()).collect()
}

fn bits(reports: &[StepReport]) -> Vec<[u64; 3]> {
    let one = |r: &StepReport| [r.loss, r.grad_norm, r.loss_scale.unwrap()].map(f64::to_bits);
    reports.iter().map(one).collect()
}

/// From the initial scale on, steps are skipped until gradients are finite; weights stay unchanged and the run continues.
#[test]
fn the_scale_falls_until_gradients_are_finite() {
    let mut t = trainer(&half(&[]));
    let before = t.weights().unwrap();
    let first = steps(&mut t, 1);
    assert_eq!(first[0].loss_scale, Some(2f64.powi(32)));
    assert!(first[0].loss.is_finite() && !first[0].grad_norm.is_finite(), "{first:?}");
    assert!(t.weights().unwrap() == before);
    let rest = steps(&mut t, 40);
    let all: Vec<&StepReport> = first.iter().chain(&rest).collect();
    // Hysteresis: one overflow is tolerated, then every overflow halves the scale.
    let left_out = all.iter().take_while(|r| !r.grad_norm.is_finite()).count();
    assert!(left_out > 11, "{left_out}");
    for (i, r) in all[..=left_out].iter().enumerate() {
        assert_eq!(r.loss_scale, Some(2f64.powi(33 - i.max(1) as i32)), "{i}");
    }
    assert!(t.weights().unwrap() != before);
    // Loss and norm are reported unscaled.
    let good = all[left_out];
    assert!(good.loss < 4.0 && good.grad_norm < 10.0, "{good:?}");
    assert!(all[40].loss < good.loss - 0.5, "{} {}", good.loss, all[40].loss);
}

/// The warm-up waits for skipped steps, from the second step after each on: whether steps are launched ahead or not, and
/// wherever the run is resumed.
#[test]
fn skipped_steps_do_not_advance_the_schedules() {
    let r = half(&["schedule.warmup=30", "schedule.decay=constant"]);
    let all = steps(&mut trainer(&r), 40);
    let skipped = |i: usize| all[..i.saturating_sub(1)].iter().filter(|r| !r.grad_norm.is_finite()).count();
    for (i, report) in all.iter().enumerate() {
        let warm = (i + 1 - skipped(i)).min(30) as f64 / 30.0;
        assert!((report.lr - 1e-2 * warm).abs() < 1e-12, "step {}: {} for {warm}", i + 1, report.lr);
    }
    assert!(skipped(40) > 11 && all[39].lr < 1e-2, "{all:?}");
    let rates = |reports: &[StepReport]| reports.iter().map(|r| r.lr.to_bits()).collect::<Vec<_>>();
    // Ahead: the result of a step is read when the next has been launched.
    let mut t = trainer(&r);
    let mut in_flight = t.begin_step(&RULE).unwrap();
    let mut ahead = Vec::new();
    for _ in 0..39 {
        let mut next = Some(t.begin_step(&RULE).unwrap());
        ahead.push(t.end_step(in_flight, &mut next).unwrap());
        in_flight = next.unwrap();
    }
    ahead.push(t.end_step(in_flight, &mut None).unwrap());
    assert_eq!((rates(&ahead), bits(&ahead)), (rates(&all), bits(&all)));
    for n in [1, 2, 7, 20, 30] {
        let dir = tempfile::tempdir().unwrap();
        let mut first = trainer(&r);
        steps(&mut first, n);
        let mut resumed = trainer(&r);
        resumed.restore(&saved(dir.path(), first.snapshot().unwrap())).unwrap();
        let rest = steps(&mut resumed, 40 - n);
        assert_eq!((rates(&rest), bits(&rest)), (rates(&all[n..]), bits(&all[n..])), "resumed after {n}");
    }
}

/// Steps that are run again from a snapshot in memory have the rates of their first run.
#[test]
fn skipped_steps_are_verified() {
    let keys = ["train.steps=30", "fault.snapshot_every=4", "fault.verify_every=4", "schedule.warmup=20"];
    for ahead in [false, true] {
        let r = half(&keys);
        let dir = tempfile::tempdir().unwrap();
        let mut run = Run::open(rank(1, &r), r.clone(), dir.path(), None).unwrap();
        run.launches_ahead = ahead;
        let mut observer = Stopper::default();
        assert!(run.train(&RULE, None, &mut observer).unwrap().finished);
        let reruns = observer.events.iter().filter_map(|e| match e {
            Event::Rerun(r) => Some(r.outcome),
            _ => None,
        });
        let outcomes: Vec<RerunOutcome> = reruns.collect();
        assert!(outcomes.len() >= 7 && outcomes.iter().all(|o| *o == RerunOutcome::Same), "{outcomes:?}");
    }
}

#[test]
fn the_scale_grows_after_good_steps() {
    let mut t = trainer(&half(&["precision.loss_scale=[64, 5]"]));
    let scales: Vec<f64> = steps(&mut t, 16).iter().map(|r| r.loss_scale.unwrap()).collect();
    let wanted: Vec<f64> = (0..16).map(|i| 64.0 * 2f64.powi(i / 5)).collect();
    assert_eq!(scales, wanted);
}

/// The same losses as bf16 within rounding, and gradients closer to f32.
#[test]
fn f16_learns_what_bf16_learns() {
    let learn = |dtype: &str| {
        let scale = if dtype == "f16" { &["precision.loss_scale=1024"][..] } else { &[] };
        let dtype = format!("precision.dtype={dtype}");
        let mut t = trainer(&recipe(&[&[dtype.as_str(), "train.steps=60"], scale].concat()));
        let first = steps(&mut t, 1)[0].loss;
        let gradients: Vec<f64> =
            t.gradients().unwrap().iter().flat_map(|g| &g.values).map(|x| f64::from(*x)).collect();
        (first, gradients, steps(&mut t, 50).last().unwrap().loss)
    };
    let [single, half, brain] = ["f32", "f16", "bf16"].map(learn);
    let apart = |a: &[f64]| {
        let diff: f64 = a.iter().zip(&single.1).map(|(a, b)| (a - b).powi(2)).sum();
        (diff / single.1.iter().map(|x| x * x).sum::<f64>()).sqrt()
    };
    let (f16, bf16) = (apart(&half.1), apart(&brain.1));
    assert!(f16 < 0.3 * bf16 && f16 < 3e-3, "{f16} {bf16}");
    assert!((half.0 - single.0).abs() < 1e-3, "{} {}", half.0, single.0);
    assert!((half.2 - single.2).abs() < 0.05 && half.2 < half.0 - 1.0, "{} {}", half.2, single.2);
}

#[test]
fn a_resumed_run_has_the_bits_of_one_that_went_on() {
    // Before the scale has fallen far enough, and after it grew.
    for (set, n) in [
        (&[][..], 7),
        (&["precision.loss_scale=[64, 4]"], 6),
        (&["optimizer.state_dtype=fp8", "model.ffn=64", "train.micro_batch=4", "precision.loss_scale=64"], 3),
        (&["optimizer.kind=sgd", "precision.loss_scale=64"], 3),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let r = half(set);
        let mut whole = trainer(&r);
        steps(&mut whole, n);
        let loaded = saved(dir.path(), whole.snapshot().unwrap());
        let scale = loaded.state()["loss_scale"].clone();
        assert!(scale["scale"].as_f64().unwrap() >= 1.0, "{scale}");
        let mut resumed = trainer(&r);
        resumed.restore(&loaded).unwrap();
        let after = steps(&mut whole, 24);
        assert_eq!(bits(&after), bits(&steps(&mut resumed, 24)), "{set:?}");
        assert!(whole.snapshot().unwrap() == resumed.snapshot().unwrap(), "{set:?}: other state");
        assert!(after.last().unwrap().grad_norm.is_finite());
        // Other dtypes ignore the saved scale; returning to f16 starts with a fresh one.
        let rest = set.iter().copied().filter(|s| !s.contains("loss_scale"));
        let mut other = trainer(&recipe(
            &["train.steps=60", "precision.dtype=bf16"].into_iter().chain(rest).collect::<Vec<_>>(),
        ));
        other.restore(&loaded).unwrap();
        assert!(!other.snapshot().unwrap().state.to_string().contains("loss_scale"));
    }
}

/// All ranks share one loss scale, whichever of them overflowed.
#[test]
fn layouts_agree_on_the_scale() {
    let go = |layout: &str, zero: &str| {
        let keys = layout_keys(layout);
        let set: Vec<&str> = keys.iter().map(String::as_str).chain([zero]).collect();
        let r = half(&set);
        let layout: RankLayout = layout.parse().unwrap();
        let work = |rank: Rank| {
            let mut t = Trainer::new(rank, &r)?;
            (0..30).map(|_| t.train_step(&RULE)).collect::<ferrotron_core::Result<Vec<StepReport>>>()
        };
        let all = on_threads(&layout, || Ok(Rank::cpu(1, r.config.train.seed)?), work).unwrap();
        assert!(all.iter().all(|r| bits(r) == bits(&all[0])), "{layout}: ranks differ");
        all[0].clone()
    };
    let one = go("dp=1", "parallel.zero=0");
    for (layout, zero) in [("tp=2", 0), ("dp=2", 1), ("pp=2", 0), ("cp=2", 0), ("tp=2,dp=2", 2), ("dp=2", 3)]
    {
        let all = go(layout, &format!("parallel.zero={zero}"));
        for (i, (a, b)) in all.iter().zip(&one).enumerate() {
            assert_eq!(a.loss_scale, b.loss_scale, "{layout} step {i}");
            assert!((a.loss - b.loss).abs() < 0.02 * b.loss, "{layout} step {i}: {} {}", a.loss, b.loss);
        }
    }
}

#[test]
fn a_run_that_overflows_at_the_least_scale_ends() {
    let mut t = trainer(&half(&["precision.loss_scale=2"]));
    // Weights that are beyond f16: no scale helps.
    let weights = t.weights().unwrap();
    t.import(&|name| {
        let values = &weights.iter().find(|w| w.name == name).unwrap().values;
        Ok(values.iter().map(|x| if name.contains("norm") { 1e6 } else { *x }).collect())
    })
    .unwrap();
    let ends = (0..40).find_map(|i| t.train_step(&RULE).err().map(|e| (i, e.to_string())));
    let (after, said) = ends.unwrap();
    assert!((10..20).contains(&after) && said.contains("gradient norm"), "{after}: {said}");
}

#[test]
fn events_tell_the_scale() {
    let dir = tempfile::tempdir().unwrap();
    let r = half(&["train.steps=3", "precision.loss_scale=256"]);
    let events = run(dir.path(), &r, 2, &RULE, None, None).1;
    let scales: Vec<Option<f64>> = events
        .iter()
        .filter_map(|e| if let Event::Step(s) = e { Some(s.loss_scale) } else { None })
        .collect();
    assert_eq!(scales, [Some(256.0); 3]);
    let text = std::fs::read_to_string(dir.path().join("events.jsonl")).unwrap();
    assert!(text.contains("\"loss_scale\":256.0"), "{text}");
    let dir = tempfile::tempdir().unwrap();
    run(dir.path(), &recipe(&["train.steps=2"]), 2, &RULE, None, None);
    assert!(!std::fs::read_to_string(dir.path().join("events.jsonl")).unwrap().contains("loss_scale"));
}

#[test]
fn what_cannot_work_is_refused_in_one_sentence() {
    for (changes, words) in [
        (&["precision.loss_scale=8"][..], "precision.dtype"),
        (&["precision.loss_scale=[4294967296, 8]"], "precision.dtype"),
        (&["precision.dtype=f16", "precision.loss_scale=0.5"], "at least 1"),
        (&["precision.dtype=f16", "precision.loss_scale=1e39"], "finite"),
        (&["precision.dtype=f16", "precision.loss_scale=[64, 0]"], "at least 1"),
        (&["precision.dtype=f16", "precision.loss_scale=[64]"], "a number, or a list"),
        (&["precision.dtype=f16", "precision.recipe=fp8-current"], "bf16"),
        (&["precision.dtype=f16", "optimizer.master_dtype=remainder"], "remainder"),
        (&["precision.dtype=f16", "moe.experts=4"], "f16 does not support MoE models"),
    ] {
        let mut r = Recipe::named("tiny").unwrap();
        let said = changes.iter().try_for_each(|c| r.set(c)).and_then(|()| r.resolve(None).map(|_| ()));
        let said = said.unwrap_err().to_string();
        assert!(said.contains(words) && !said.trim().contains('\n'), "{changes:?}: {said}");
    }
}
