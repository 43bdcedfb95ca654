//! Delayed scaling between steps: it resumes to the same bits, under any layout and recipe, and begins calibrated.
//! Statistics of operands change nothing.

use super::support::*;
use ferrotron_core::checkpoint::{self, Item, Saver, Snapshot};
use ferrotron_core::config::Resolved;
use ferrotron_core::data::Batches;
use ferrotron_core::events::{Event, Operand, Precision};
use ferrotron_core::grid::Layout;
use ferrotron_core::ranks::on_threads;
use ferrotron_core::train::{Trainer, to_f32};
use ferrotron_engine::Rank;
use std::path::Path;

/// The base recipe, in sizes that narrow products have, with some scaling.
fn narrow(scaling: &str, more: &[&str]) -> Resolved {
    let scaling = format!("precision.scaling={scaling}");
    let set = ["precision.dtype=bf16", "model.ffn=64", "model.head_dim=16", "train.steps=8", &scaling];
    recipe(&[&set, more].concat())
}

const DELAYED: [&str; 2] = ["delayed", "precision.history=4"];

fn delayed(more: &[&str]) -> Resolved {
    narrow(DELAYED[0], &[&DELAYED[1..], more].concat())
}

fn saved(dir: &Path, snapshot: Snapshot) -> checkpoint::Loaded {
    let step = snapshot.step;
    let mut saver = Saver::new(dir, None).unwrap();
    saver.save(snapshot).unwrap();
    saver.finish().unwrap();
    checkpoint::load(&dir.join(checkpoint::folder_name(step))).unwrap()
}

/// Scales and histories, by name.
fn scales(s: &Snapshot) -> Vec<(String, Vec<usize>, Vec<f32>)> {
    let ours = s.items.iter().filter(|i| i.name.starts_with("fp8."));
    let mut all: Vec<_> =
        ours.map(|i| (i.name.clone(), i.shape.clone(), to_f32(i.dtype, &i.bytes).unwrap())).collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

fn steps(t: &mut Trainer, n: usize) -> Vec<u64> {
    (0..n).map(|_| t.train_step(&RULE).unwrap().loss.to_bits()).collect()
}

/// The snapshot of the first rank after some steps under a layout, from a checkpoint or from the start.
fn under(layout: &str, r: &Resolved, from: Option<&checkpoint::Loaded>, n: usize) -> Snapshot {
    let layout: Layout = layout.parse().unwrap();
    let work = |rank: Rank| {
        let first = rank.world.rank() == 0;
        let mut t = Trainer::new(rank, r)?;
        from.map_or(Ok(()), |from| t.restore(from))?;
        for _ in 0..n {
            t.train_step(&RULE)?;
        }
        let snapshot = t.snapshot()?;
        Ok(first.then_some(snapshot))
    };
    let make = || Ok(Rank::cpu(1, r.config.train.seed)?);
    on_threads(&layout, make, work).unwrap().swap_remove(0).unwrap()
}

fn in_layout(layout: &str, more: &[&str]) -> Resolved {
    let keys: Vec<String> = layout.split(',').map(|k| format!("parallel.{k}")).collect();
    delayed(&keys.iter().map(String::as_str).chain(more.iter().copied()).collect::<Vec<_>>())
}

#[test]
fn a_resumed_run_has_the_bits_of_one_that_went_on() {
    for set in [
        &[][..],
        &["precision.calibrate=5"],
        &["precision.history=1"],
        &["train.micro_batch=4"],
        &["precision.also=head"],
        &["precision.also=head", "model.tied=true", "precision.calibrate=5"],
    ] {
        let dir = tempfile::tempdir().unwrap();
        let r = delayed(set);
        let mut whole = trainer(&r);
        steps(&mut whole, 3);
        let loaded = saved(dir.path(), whole.snapshot().unwrap());
        let mut resumed = trainer(&r);
        resumed.restore(&loaded).unwrap();
        assert_eq!(steps(&mut whole, 4), steps(&mut resumed, 4), "{set:?}");
        let (a, b) = (whole.snapshot().unwrap(), resumed.snapshot().unwrap());
        assert!(a == b, "{set:?}: other state");
        // Two maps in each of attention and MLP, two layers; scales have left their first value.
        let all = scales(&a);
        let names = ["attn.out", "attn.q+k+v", "mlp.down", "mlp.gate+up"];
        let mut maps: Vec<String> = (0..2).flat_map(|l| names.map(|n| format!("layers.{l}.{n}"))).collect();
        if set.contains(&"precision.also=head") {
            let tied = set.contains(&"model.tied=true");
            maps.insert(0, if tied { "embed.tokens" } else { "head" }.into());
        }
        let wanted =
            ["history", "scale"].iter().flat_map(|kind| maps.iter().map(move |m| format!("fp8.{kind}/{m}")));
        assert_eq!(all.iter().map(|a| a.0.clone()).collect::<Vec<_>>(), wanted.collect::<Vec<_>>());
        for (name, shape, values) in &all {
            let history = name.starts_with("fp8.history/");
            assert_eq!(shape.last(), Some(&3));
            assert!(history || values.iter().all(|s| *s > 0.0 && *s != 1.0), "{name}: {values:?}");
            assert!(
                !history || shape[0] == 1 || values[shape[0] * 3 - 3..].iter().all(|x| *x > 0.0),
                "{name}"
            );
        }
    }
}

#[test]
fn every_layout_saves_and_loads_the_same_scales() {
    same_in_layouts(&[]);
}

/// A tied table is on the first and the last stage, and its scales on the last.
#[test]
fn every_layout_knows_the_scales_of_the_head() {
    const HEAD: [&str; 2] = ["precision.also=head", "model.vocab=64"];
    same_in_layouts(&[&HEAD[..], &["model.tied=true"]].concat());
    same_in_layouts(&HEAD);
}

fn same_in_layouts(more: &[&str]) {
    let in_layout = |layout| in_layout(layout, more);
    let layouts = ["dp=1", "tp=2", "pp=2,dp=2", "cp=2", "tp=2,pp=2"];
    let one = under("dp=1", &in_layout("dp=1"), None, 1);
    for from in layouts {
        let dir = tempfile::tempdir().unwrap();
        // Magnitudes are those of one rank but for the order of sums, which later steps make more of.
        let first = under(from, &in_layout(from), None, 1);
        let snapshot = under(from, &in_layout(from), None, 3);
        for (a, b) in scales(&first).iter().zip(&scales(&one)) {
            assert_eq!((&a.0, &a.1), (&b.0, &b.1));
            let near = a.2.iter().zip(&b.2).all(|(x, y)| (x - y).abs() <= 0.1 * y.abs());
            assert!(near, "{from}: {a:?} and {b:?}");
        }
        let loaded = saved(dir.path(), snapshot.clone());
        for to in layouts {
            let again = under(to, &in_layout(to), Some(&loaded), 0);
            assert_eq!(scales(&again), scales(&snapshot), "{from} to {to}");
        }
        let (whole, resumed) =
            (under(from, &in_layout(from), None, 5), under(from, &in_layout(from), Some(&loaded), 2));
        assert_eq!(scales(&whole), scales(&resumed), "{from}");
    }
}

#[test]
fn recipes_switch_in_all_directions() {
    let all = ["none", "current", "delayed", "block", "mxfp8", "nvfp4"];
    for from in all {
        let dir = tempfile::tempdir().unwrap();
        let mut t = trainer(&narrow(from, &[]));
        steps(&mut t, 2);
        let before = t.snapshot().unwrap();
        assert_eq!(scales(&before).is_empty(), from != "delayed");
        let loaded = saved(dir.path(), before.clone());
        for to in all {
            let mut t = trainer(&narrow(to, &[]));
            t.restore(&loaded).unwrap();
            let now = t.snapshot().unwrap();
            match (from, to) {
                ("delayed", "delayed") => assert_eq!(scales(&now), scales(&before)),
                (_, "delayed") => {
                    let fresh = |s: &(String, Vec<usize>, Vec<f32>)| {
                        let value = if s.0.starts_with("fp8.scale/") { 1.0 } else { 0.0 };
                        s.2.iter().all(|x| *x == value)
                    };
                    assert!(scales(&now).len() == 16 && scales(&now).iter().all(fresh));
                }
                _ => assert!(scales(&now).is_empty()),
            }
            assert_eq!(steps(&mut t, 1).len(), 1, "{from} to {to}");
        }
    }
}

/// A module that was narrow and no longer is, and the other way round.
#[test]
fn exceptions_may_change() {
    let dir = tempfile::tempdir().unwrap();
    let mut t = trainer(&delayed(&["precision.except=mlp.down"]));
    steps(&mut t, 2);
    let before = t.snapshot().unwrap();
    let loaded = saved(dir.path(), before.clone());
    let mut t = trainer(&delayed(&["precision.except=attn.out"]));
    t.restore(&loaded).unwrap();
    let (then, now) = (scales(&before), scales(&t.snapshot().unwrap()));
    assert_eq!(then.len(), now.len());
    for item in &now {
        match item.0.contains("mlp.down") {
            true => assert!(item.2.iter().all(|x| *x == 0.0 || *x == 1.0), "{item:?}"),
            false => assert!(then.contains(item), "{item:?}"),
        }
    }
}

#[test]
fn the_history_may_change_its_length() {
    let dir = tempfile::tempdir().unwrap();
    let mut t = trainer(&delayed(&[]));
    steps(&mut t, 5);
    let before = scales(&t.snapshot().unwrap());
    let loaded = saved(dir.path(), t.snapshot().unwrap());
    for len in [1, 2, 3, 4, 7] {
        let mut t = trainer(&delayed(&[&format!("precision.history={len}")]));
        t.restore(&loaded).unwrap();
        for (a, b) in before.iter().zip(&scales(&t.snapshot().unwrap())) {
            assert_eq!(a.0, b.0);
            if a.0.starts_with("fp8.scale/") {
                assert_eq!(a, b);
                continue;
            }
            assert_eq!(b.1, [len, 3]);
            // Oldest first, in front of them what was never seen; the first row is where a step gathers.
            let kept = (len - 1).min(3);
            let wanted = [&vec![0.0; 3 * (len - kept)][..], &a.2[3 * (4 - kept)..]].concat();
            assert_eq!(b.2, wanted, "{} with {len} steps", a.0);
        }
        steps(&mut t, 1);
    }
}

type Change<'a> = &'a dyn Fn(&mut Vec<Item>);

#[test]
fn damaged_scales_are_refused() {
    let mut t = trainer(&delayed(&[]));
    steps(&mut t, 1);
    let good = t.snapshot().unwrap();
    let with = |change: Change| {
        let dir = tempfile::tempdir().unwrap();
        let mut s = good.clone();
        change(&mut s.items);
        let loaded = saved(dir.path(), s);
        // Whether they are asked for or not.
        ["delayed", "none"].map(|scaling| {
            let r = if scaling == "none" { narrow("none", &[]) } else { delayed(&[]) };
            let mut t = trainer(&r);
            t.restore(&loaded).map_or_else(|e| e.to_string(), |()| String::new())
        })
    };
    let at = |items: &[Item], name: &str| items.iter().position(|i| i.name == name).unwrap();
    const SCALE: &str = "fp8.scale/layers.1.mlp.down";
    const HISTORY: &str = "fp8.history/layers.1.mlp.down";
    let resize = |name: &'static str, shape: &'static [usize]| {
        move |items: &mut Vec<Item>| {
            let i = at(items, name);
            let bytes = vec![0; 4 * shape.iter().product::<usize>()];
            items[i] = Item { shape: shape.to_vec(), bytes, ..items[i].clone() };
        }
    };
    assert_eq!(with(&|_| ()), ["", ""]);
    let wrong: [(Change, &str); 7] = [
        (&resize(SCALE, &[2]), "fp8.scale/layers.1.mlp.down is f32 [2]"),
        (&resize(SCALE, &[3, 1]), "fp8.scale/layers.1.mlp.down is f32 [3, 1]"),
        (&resize(HISTORY, &[12]), "fp8.history/layers.1.mlp.down is f32 [12]"),
        (&resize(HISTORY, &[3, 4]), "fp8.history/layers.1.mlp.down is f32 [3, 4]"),
        (&|items| drop(items.remove(at(items, SCALE))), "without fp8.scale/layers.1.mlp.down"),
        (&|items| drop(items.remove(at(items, HISTORY))), "without fp8.history/layers.1.mlp.down"),
        (&|items| items[0].name = "fp8.scale/layers.9.mlp.down".into(), "layers.9.mlp.down is unknown"),
    ];
    for (change, said) in wrong {
        for told in with(change) {
            assert!(told.contains(said), "{told:?} instead of {said:?}");
        }
    }
}

/// Calibration: products as in bf16 while magnitudes are collected, and scales that fit when it ends.
#[test]
fn calibration_ends_with_good_scales() {
    let mut plain = trainer(&narrow("none", &[]));
    let mut ours = trainer(&delayed(&["precision.calibrate=3", "precision.stats_every=1"]));
    let mut cold = trainer(&delayed(&["precision.stats_every=1"]));
    assert_eq!(steps(&mut plain, 3), steps(&mut ours, 3), "not the products of bf16");
    assert!(ours.take_statistics().is_none(), "nothing was narrow");
    let calibrated = ours.snapshot().unwrap();
    let evaluated = |t: &Trainer| t.evaluate(&RULE, 2).unwrap();
    assert_ne!(evaluated(&plain), evaluated(&ours), "calibration is over, but not for evaluation");
    for t in [&mut ours, &mut cold] {
        assert_eq!(steps(t, 1).len(), 1);
    }
    // What was collected fills the formats, exactly.
    let state = scales(&calibrated);
    for (history, scale) in state[..8].iter().zip(&state[8..]) {
        for (role, most) in [448f32, 448.0, 57344.0].into_iter().enumerate() {
            let seen: Vec<f32> = history.2[3..].chunks(3).map(|row| row[role]).collect();
            let largest = seen.iter().fold(0f32, |m, x| m.max(*x));
            assert!(seen.len() == 3 && seen.iter().all(|x| *x > 0.0), "{}: {seen:?}", history.0);
            assert_eq!(scale.2[role], most / largest, "{}", scale.0);
        }
    }
    // In the next step: the largest magnitude as a part of what the format holds. Gradients change from step to step.
    let filled = |t: &mut Trainer| -> Vec<f64> {
        let part = |o: &Operand| {
            let most = if o.role == "gradient" { 57344.0 } else { 448.0 };
            o.amax * o.scale.unwrap()[0] / most
        };
        t.take_statistics().unwrap().operands.iter().map(part).collect()
    };
    let (good, bad) = (filled(&mut ours), filled(&mut cold));
    assert!(good.len() == 24 && good.iter().all(|x| (0.1..2.0).contains(x)), "calibrated: {good:?}");
    assert!(bad.iter().any(|x| *x < 1e-3), "without: {bad:?}");
    assert_ne!(plain.train_step(&RULE).unwrap().loss, ours.train_step(&RULE).unwrap().loss);
    // Collected by several ranks, the same but for the order of sums.
    let once = |layout: &str| {
        let keys: Vec<String> = layout.split(',').map(|k| format!("parallel.{k}")).collect();
        let set: Vec<&str> = keys.iter().map(String::as_str).chain(["precision.calibrate=3"]).collect();
        scales(&under(layout, &delayed(&set), None, 1))
    };
    for (a, b) in once("tp=2,dp=2").iter().zip(&once("dp=1")) {
        let near = a.2.iter().zip(&b.2).all(|(x, y)| (x - y).abs() <= 0.05 * y.abs());
        assert!(a.0 == b.0 && near, "{a:?} and {b:?}");
    }
}

/// A bf16 run that goes on under delayed scaling is calibrated from there.
#[test]
fn calibration_begins_where_delayed_scaling_does() {
    let dir = tempfile::tempdir().unwrap();
    let mut plain = trainer(&narrow("none", &[]));
    steps(&mut plain, 4);
    let loaded = saved(dir.path(), plain.snapshot().unwrap());
    let mut ours = trainer(&delayed(&["precision.calibrate=2"]));
    ours.restore(&loaded).unwrap();
    assert_eq!(steps(&mut plain, 2), steps(&mut ours, 2));
    assert_ne!(steps(&mut plain, 1), steps(&mut ours, 1));
}

#[test]
fn watched_steps_change_no_bit_and_tell_of_every_operand() {
    for scaling in ["current", "delayed", "block", "mxfp8", "nvfp4"] {
        let go = |more: &[&str]| {
            let dir = tempfile::tempdir().unwrap();
            let (_, events) = run(dir.path(), &narrow(scaling, more), 2, &RULE, Some(&RULE), None);
            let log = ferrotron_core::events::read(dir.path()).unwrap();
            (losses(&events), newest(dir.path()), events, log)
        };
        let (plain, watched) = (go(&[]), go(&["precision.stats_every=3"]));
        assert_eq!(plain.0, watched.0, "{scaling}");
        assert!(plain.1 == watched.1, "{scaling}: other checkpoints");
        let of = |events: &[Event]| -> Vec<Precision> {
            let ours = events.iter().filter_map(|e| match e {
                Event::Precision(p) => Some(p.clone()),
                _ => None,
            });
            ours.collect()
        };
        assert!(of(&plain.2).is_empty());
        let seen = of(&watched.2);
        assert_eq!(seen.iter().map(|p| p.step).collect::<Vec<_>>(), [3, 6], "{scaling}");
        let logged: Vec<Event> = watched.3.into_iter().map(|l| l.event).collect();
        assert_eq!(of(&logged), seen, "{scaling}: the log says something else");
        for o in seen.iter().flat_map(|p| &p.operands) {
            // Scales of earlier steps are behind while gradients grow.
            let bound = if scaling == "nvfp4" || scaling == "delayed" { 0.5 } else { 0.1 };
            assert!(o.error > 0.0 && o.error < bound && o.amax > 0.0, "{scaling}: {o:?}");
            assert_eq!(o.scale.is_some(), !["mxfp8", "nvfp4"].contains(&scaling), "{scaling}: {o:?}");
        }
        let names: Vec<(&str, &str)> =
            seen[0].operands.iter().map(|o| (o.module.as_str(), o.role.as_str())).collect();
        let maps = ["attn.q+k+v", "attn.out", "mlp.gate+up", "mlp.down"];
        let modules: Vec<String> = (0..2).flat_map(|l| maps.map(|m| format!("layers.{l}.{m}"))).collect();
        let wanted: Vec<(&str, &str)> =
            modules.iter().flat_map(|m| ["input", "weight", "gradient"].map(|r| (m.as_str(), r))).collect();
        assert_eq!(names, wanted, "{scaling}");
    }
}

/// What several ranks see together is what one sees: percentages, magnitudes and errors of all tokens and channels.
#[test]
fn statistics_of_all_ranks_are_those_of_one() {
    let look = |layout: &str| {
        let keys: Vec<String> = layout.split(',').map(|k| format!("parallel.{k}")).collect();
        let set: Vec<&str> = keys.iter().map(String::as_str).chain(["precision.stats_every=1"]).collect();
        let r = narrow("current", &set);
        let work = |rank: Rank| {
            let mut t = Trainer::new(rank, &r)?;
            t.train_step(&RULE)?;
            Ok(t.take_statistics().unwrap())
        };
        on_threads(&layout.parse::<Layout>().unwrap(), || Ok(Rank::cpu(1, r.config.train.seed)?), work)
            .unwrap()
    };
    let one = look("dp=1").swap_remove(0);
    for layout in ["tp=2", "dp=2", "cp=2", "pp=2", "tp=2,pp=2"] {
        let all = look(layout);
        assert!(all.windows(2).all(|w| w[0] == w[1]), "{layout}: ranks differ");
        assert_eq!(all[0].operands.len(), one.operands.len(), "{layout}");
        for (a, b) in all[0].operands.iter().zip(&one.operands) {
            assert_eq!((&a.module, &a.role), (&b.module, &b.role), "{layout}");
            let near = (a.amax / b.amax - 1.0).abs() < 0.02
                && (a.error / b.error - 1.0).abs() < 0.1
                && (a.underflow - b.underflow).abs() < 1.0;
            assert!(near && a.saturation == 0.0, "{layout}: {a:?} and {b:?}");
        }
    }
}

/// A generated text or an evaluation between steps is no part of them.
#[test]
fn passes_between_steps_leave_no_trace() {
    use ferrotron_core::model::generate::{Sampling, generate};
    use ferrotron_engine::Pass;
    for scaling in ["current", "delayed", "block"] {
        let r = narrow(scaling, &[]);
        let (mut a, mut b) = (trainer(&r), trainer(&r));
        for _ in 0..3 {
            let first = b.evaluate(&RULE, 4).unwrap();
            assert_eq!(first, b.evaluate(&RULE, 4).unwrap());
            let cold = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 3 };
            generate(&b.decoder, &Pass::new(&b.rank, &b.params), &[3], 5, cold, &[], &mut |_| true).unwrap();
            assert_eq!(a.evaluate(&RULE, 4).unwrap(), first);
            assert_eq!(steps(&mut a, 1), steps(&mut b, 1), "{scaling}");
        }
        assert!(a.snapshot().unwrap() == b.snapshot().unwrap(), "{scaling}");
    }
    assert_eq!(RULE.seq(), 16);
}

#[test]
fn keys_that_have_nothing_to_do_are_refused() {
    use ferrotron_core::config::Recipe;
    for (scaling, key) in [
        ("none", "precision.stats_every=2"),
        ("none", "precision.calibrate=2"),
        ("current", "precision.calibrate=2"),
    ] {
        let mut r = Recipe::named("tiny").unwrap();
        r.set(&format!("precision.scaling={scaling}")).unwrap();
        r.set(key).unwrap();
        let said = refusal(r.resolve(None));
        assert!(said.contains(key.split('=').next().unwrap()), "{said}");
    }
}
