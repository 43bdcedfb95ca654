//! FP8 scales and amax histories in checkpoints: bit-equal under any layout and recipe; damage is refused.

use super::*;
use ferrotron_core::checkpoint::Item;

#[test]
fn a_resumed_run_has_the_bits_of_one_that_went_on() {
    for set in [
        &[][..],
        &["precision.calibrate=5"],
        &["precision.amax_history=1"],
        &["train.micro_batch=4"],
        &["precision.fp8_lm_head=true"],
        &["precision.fp8_lm_head=true", "model.tied=true", "precision.calibrate=5"],
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
        // Two linear layers in each of attention and MLP, two decoder layers; scales have left their initial value.
        let all = scales(&a);
        let names = ["attn.out", "attn.q+k+v", "mlp.down", "mlp.gate+up"];
        let mut maps: Vec<String> = (0..2).flat_map(|l| names.map(|n| format!("layers.{l}.{n}"))).collect();
        if set.contains(&"precision.fp8_lm_head=true") {
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

/// A tied embedding is on the first and last stage, its LM-head scales on the last.
#[test]
fn every_layout_saves_the_scales_of_the_lm_head() {
    const HEAD: [&str; 2] = ["precision.fp8_lm_head=true", "model.vocab=64"];
    same_in_layouts(&[&HEAD[..], &["model.tied=true"]].concat());
    same_in_layouts(&HEAD);
}

fn same_in_layouts(more: &[&str]) {
    let in_layout = |layout| in_layout(layout, more);
    let layouts = ["dp=1", "tp=2", "pp=2,dp=2", "cp=2", "tp=2,pp=2"];
    let one = under("dp=1", &in_layout("dp=1"), None, 1);
    for from in layouts {
        let dir = tempfile::tempdir().unwrap();
        // amax equals one rank's up to summation order, which later steps amplify.
        let first = under(from, &in_layout(from), None, 1);
        let snapshot = under(from, &in_layout(from), None, 3);
        assert_eq!(scales(&first).len(), scales(&one).len());
        for (a, b) in scales(&first).iter().zip(&scales(&one)) {
            assert_eq!((&a.0, &a.1), (&b.0, &b.1));
            let near = a.2.iter().zip(&b.2).all(|(x, y)| (x - y).abs() <= 0.1 * y.abs());
            assert!(near && a.2.len() == b.2.len(), "{from}: {a:?} and {b:?}");
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
    let all = ["none", "fp8-current", "fp8-delayed", "fp8-block", "mxfp8", "nvfp4"];
    for from in all {
        let dir = tempfile::tempdir().unwrap();
        let mut t = trainer(&narrow(from, &[]));
        steps(&mut t, 2);
        let before = t.snapshot().unwrap();
        assert_eq!(scales(&before).is_empty(), from != "fp8-delayed");
        let loaded = saved(dir.path(), before.clone());
        for to in all {
            let mut t = trainer(&narrow(to, &[]));
            t.restore(&loaded).unwrap();
            let now = t.snapshot().unwrap();
            match (from, to) {
                ("fp8-delayed", "fp8-delayed") => assert_eq!(scales(&now), scales(&before)),
                (_, "fp8-delayed") => {
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

/// A module that leaves or joins the FP8 recipe.
#[test]
fn skipped_modules_may_change() {
    let dir = tempfile::tempdir().unwrap();
    let mut t = trainer(&delayed(&["precision.skip=mlp.down"]));
    steps(&mut t, 2);
    let before = t.snapshot().unwrap();
    let loaded = saved(dir.path(), before.clone());
    let mut t = trainer(&delayed(&["precision.skip=attn.out"]));
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
        let mut t = trainer(&delayed(&[&format!("precision.amax_history={len}")]));
        t.restore(&loaded).unwrap();
        let after = scales(&t.snapshot().unwrap());
        assert_eq!(before.len(), after.len());
        for (a, b) in before.iter().zip(&after) {
            assert_eq!(a.0, b.0);
            if a.0.starts_with("fp8.scale/") {
                assert_eq!(a, b);
                continue;
            }
            assert_eq!(b.1, [len, 3]);
            // Oldest first, zeros for steps before the run; row 0 accumulates the current step.
            let kept = (len - 1).min(3);
            let wanted = [&vec![0.0; 3 * (len - kept)][..], &a.2[3 * (4 - kept)..]].concat();
            assert_eq!(b.2, wanted, "{} with {len} steps", a.0);
        }
        steps(&mut t, 1);
    }
}

/// A scale maps its amax to the largest value of a format: with another format or margin it is another scale.
#[test]
fn scales_follow_the_format_and_the_margin() {
    let dir = tempfile::tempdir().unwrap();
    let mut t = trainer(&delayed(&[]));
    steps(&mut t, 5);
    let before = scales(&t.snapshot().unwrap());
    let loaded = saved(dir.path(), t.snapshot().unwrap());
    // E5M2's largest value is 57344, E4M3's 448.
    for (set, factors) in [
        (&["precision.format=e4m3"][..], [1.0, 1.0, 1.0 / 128.0]),
        (&["precision.margin=2"], [0.25, 0.25, 0.25]),
        (&["precision.format=e4m3", "precision.margin=1"], [0.5, 0.5, 1.0 / 256.0]),
    ] {
        let mut t = trainer(&delayed(set));
        t.restore(&loaded).unwrap();
        for (a, b) in before.iter().zip(&scales(&t.snapshot().unwrap())) {
            assert_eq!(a.0, b.0);
            match a.0.starts_with("fp8.scale/") {
                true => assert_eq!(
                    b.2,
                    a.2.iter().zip(factors).map(|(s, f)| s * f).collect::<Vec<f32>>(),
                    "{set:?}"
                ),
                false => assert_eq!(a, b),
            }
        }
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
        // Whether the recipe uses them or not.
        ["fp8-delayed", "none"].map(|scaling| {
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
            items[i] = Item::whole(name, items[i].dtype, shape.to_vec(), bytes);
        }
    };
    assert_eq!(with(&|_| ()), ["", ""]);
    let value = |x: f32| {
        move |items: &mut Vec<Item>| {
            let i = at(items, SCALE);
            items[i].bytes[..4].copy_from_slice(&x.to_le_bytes());
        }
    };
    for x in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let [used, unused] = with(&value(x));
        assert!(used.contains("is no scale") && unused.is_empty(), "{x}: {used} {unused}");
    }
    let wrong: [(Change, &str); 7] = [
        (&resize(SCALE, &[2]), "fp8.scale/layers.1.mlp.down is f32 [2]"),
        (&resize(SCALE, &[3, 1]), "fp8.scale/layers.1.mlp.down is f32 [3, 1]"),
        (&resize(HISTORY, &[12]), "fp8.history/layers.1.mlp.down is f32 [12]"),
        (&resize(HISTORY, &[3, 4]), "fp8.history/layers.1.mlp.down is f32 [3, 4]"),
        (&|items| drop(items.remove(at(items, SCALE))), "without fp8.scale/layers.1.mlp.down"),
        (&|items| drop(items.remove(at(items, HISTORY))), "without fp8.history/layers.1.mlp.down"),
        (
            &|items| items.last_mut().unwrap().name = "fp8.scale/layers.9.mlp.down".into(),
            "layers.9.mlp.down is unknown",
        ),
    ];
    for (change, said) in wrong {
        for told in with(change) {
            assert!(told.contains(said), "{told:?} instead of {said:?}");
        }
    }
}
