//! Calibration of delayed scaling.

use super::*;
use ferrotron_core::events::Operand;

/// During calibration GEMMs run in bf16 while amax is recorded; afterwards scales fit.
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
    // The recorded amax maps exactly to the format's maximum.
    let state = scales(&calibrated);
    for (history, scale) in state[..8].iter().zip(&state[8..]) {
        for (role, most) in [448f32, 448.0, 57344.0].into_iter().enumerate() {
            let seen: Vec<f32> = history.2[3..].chunks(3).map(|row| row[role]).collect();
            let largest = seen.iter().fold(0f32, |m, x| m.max(*x));
            assert!(seen.len() == 3 && seen.iter().all(|x| *x > 0.0), "{}: {seen:?}", history.0);
            assert_eq!(scale.2[role], most / largest, "{}", scale.0);
        }
    }
    // In the next step: amax as a fraction of the format's range. Gradients change from step to step.
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
    // Recorded by several ranks: equal up to summation order.
    let once = |layout| scales(&under(layout, &in_layout(layout, &["precision.calibrate=3"]), None, 1));
    let (ranks, one) = (once("tp=2,dp=2"), once("dp=1"));
    assert_eq!(ranks.len(), one.len());
    for (a, b) in ranks.iter().zip(&one) {
        let near = a.2.iter().zip(&b.2).all(|(x, y)| (x - y).abs() <= 0.05 * y.abs());
        assert!(a.0 == b.0 && a.2.len() == b.2.len() && near, "{a:?} and {b:?}");
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
fn calibration_keys_without_delayed_scaling_are_refused() {
    use ferrotron_core::config::Recipe;
    for (scaling, key) in [
        ("none", "precision.stats_every=2"),
        ("none", "precision.calibrate=2"),
        ("fp8-current", "precision.calibrate=2"),
    ] {
        let mut r = Recipe::named("tiny").unwrap();
        r.set(&format!("precision.recipe={scaling}")).unwrap();
        r.set(key).unwrap();
        let said = refusal(r.resolve(None));
        assert!(said.contains(key.split('=').next().unwrap()), "{said}");
    }
}
