//! Comparison of two sides, with a verdict for each tensor.

use super::tolerance::AllowedDistances;
use super::{Outcome, TensorKind, Tolerance};
use crate::train::LogicalValues;
use serde::Serialize;
use std::collections::{HashMap, HashSet};

/// One tensor of both sides.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Its kind.
    pub kind: TensorKind,
    /// Its name.
    pub name: String,
    /// Elements.
    pub elements: usize,
    /// Largest absolute difference; infinite where a value is missing or not finite.
    pub max_abs: f64,
    /// `‖a − b‖ / ‖a‖`
    pub relative: f64,
    /// All bits are equal.
    pub identical: bool,
    /// Largest relative error that still agrees; 0 requires equal bits.
    pub allowed: f64,
    /// The verdict.
    pub agrees: bool,
    /// Of a tensor that misses its bound in f32: the relative distance that one unit in the last place of the weights
    /// moves it. See [`recheck`](super::recheck).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ulp_movement: Option<f64>,
}

impl Comparison {
    /// Whether it agrees although it misses its bound, because rounding moves it that far.
    pub fn is_ill_conditioned(&self) -> bool {
        self.agrees && self.ulp_movement.is_some()
    }
}

/// Compares two outcomes: one entry per tensor of either side, the worst (relative to its tolerance) first.
pub fn compare(a: &Outcome, b: &Outcome, tolerance: &Tolerance) -> Vec<Comparison> {
    let allowed = AllowedDistances::new(a, tolerance);
    let mut out = Vec::new();
    if a.loss.is_some() || b.loss.is_some() {
        let [x, y] = [a, b].map(|o| o.loss.into_iter().collect::<Vec<_>>());
        let identical = a.loss.map(f64::to_bits) == b.loss.map(f64::to_bits);
        let distance = tolerance.loss * a.loss.unwrap_or(0.0).abs();
        out.push(judge(TensorKind::Loss, "loss", &x, &y, identical, distance));
    }
    let mut kinds: Vec<TensorKind> = a.tensors.iter().chain(&b.tensors).map(|t| t.0).collect();
    kinds.sort();
    kinds.dedup();
    for kind in kinds {
        let (a_tensors, b_tensors) = (a.tensors_of(kind), b.tensors_of(kind));
        let by_name: HashMap<&str, &LogicalValues> =
            b_tensors.iter().map(|t| (t.name.as_str(), *t)).collect();
        for t in &a_tensors {
            let other = by_name.get(t.name.as_str()).map_or(&[][..], |o| &o.values);
            let distance = allowed.distance(kind, &t.name, &t.values);
            out.push(compare_values(kind, &t.name, &t.values, other, distance));
        }
        let known: HashSet<&str> = a_tensors.iter().map(|t| t.name.as_str()).collect();
        for t in b_tensors.iter().filter(|t| !known.contains(t.name.as_str())) {
            out.push(compare_values(kind, &t.name, &[], &t.values, 0.0));
        }
    }
    let badness = |c: &Comparison| match c.relative / c.allowed {
        _ if c.relative == 0.0 => 0.0,
        ratio if ratio.is_nan() => f64::INFINITY,
        ratio => ratio,
    };
    out.sort_by(|x, y| {
        let verdict = x.agrees.cmp(&y.agrees);
        verdict.then(badness(y).total_cmp(&badness(x))).then_with(|| x.name.cmp(&y.name))
    });
    out
}

fn compare_values(kind: TensorKind, name: &str, a: &[f32], b: &[f32], distance: f64) -> Comparison {
    let identical = a.len() == b.len() && a.iter().zip(b).all(|(x, y)| x.to_bits() == y.to_bits());
    let to_f64 = |v: &[f32]| v.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
    judge(kind, name, &to_f64(a), &to_f64(b), identical, distance)
}

fn judge(kind: TensorKind, name: &str, a: &[f64], b: &[f64], identical: bool, allowed: f64) -> Comparison {
    let (mut max_abs, mut distance, mut norm) = (0f64, 0f64, 0f64);
    for (x, y) in a.iter().zip(b) {
        let d = if x == y { 0.0 } else { (x - y).abs() };
        // A NaN compares false with everything and would pass for no difference.
        max_abs = if d.is_nan() { f64::INFINITY } else { max_abs.max(d) };
        distance += d * d;
        norm += x * x;
    }
    let comparable = a.len() == b.len() && max_abs.is_finite() && distance.is_finite() && norm.is_finite();
    let (distance, norm) = (distance.sqrt(), norm.sqrt());
    let relative = match (comparable, distance > 0.0) {
        (false, _) => f64::INFINITY,
        (true, false) => 0.0,
        (true, true) => distance / norm,
    };
    let agrees = if allowed == 0.0 { identical } else { comparable && distance <= allowed };
    let max_abs = if a.len() == b.len() { max_abs } else { f64::INFINITY };
    let elements = a.len().max(b.len());
    let allowed = if allowed == 0.0 { 0.0 } else { allowed / norm };
    let name = name.into();
    Comparison { kind, name, elements, max_abs, relative, identical, allowed, agrees, ulp_movement: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(loss: f64, gradient: &[f32]) -> Outcome {
        let t = LogicalValues { name: "w".into(), shape: vec![gradient.len()], values: gradient.to_vec() };
        Outcome { loss: Some(loss), lr: 0.0, tensors: vec![(TensorKind::Gradient, vec![t])] }
    }

    fn verdict(a: &[f32], b: &[f32], bound: f64) -> Comparison {
        let rows = compare(&outcome(1.0, a), &outcome(1.0, b), &Tolerance::all(bound));
        rows.into_iter().find(|r| r.kind == TensorKind::Gradient).unwrap()
    }

    #[test]
    fn errors_are_what_the_definitions_say() {
        let c = verdict(&[3.0, 4.0], &[3.0, 4.5], 0.11);
        assert_eq!((c.max_abs, c.relative, c.agrees, c.identical), (0.5, 0.1, true, false));
        assert!(!verdict(&[3.0, 4.0], &[3.0, 4.5], 0.09).agrees);
        assert!(verdict(&[0.0; 3], &[0.0; 3], 0.1).agrees);
        assert_eq!(verdict(&[0.0], &[1e-30], 0.1).relative, f64::INFINITY);
    }

    #[test]
    fn a_bound_of_zero_means_the_same_bits() {
        assert!(verdict(&[1.0, -2.0], &[1.0, -2.0], 0.0).agrees);
        let c = verdict(&[0.0], &[-0.0], 0.0);
        assert!(!c.agrees && c.max_abs == 0.0);
        assert!(!verdict(&[1.0], &[1.0 + f32::EPSILON], 0.0).agrees);
    }

    /// A gradient that is zero but for rounding, and what Adam makes of it.
    #[test]
    fn noise_is_measured_against_the_other_gradients() {
        let tensor = |name: &str, values: &[f32]| LogicalValues {
            name: name.into(),
            shape: vec![values.len()],
            values: values.to_vec(),
        };
        let outcome = |noise: f32, bias: f32| Outcome {
            loss: None,
            lr: 1e-3,
            tensors: vec![
                (TensorKind::Gradient, vec![tensor("w", &[1.0; 100]), tensor("b", &[noise; 4])]),
                (TensorKind::Weight, vec![tensor("b", &[bias; 4])]),
            ],
        };
        let agree = |a: Outcome, b: Outcome, tolerance: Tolerance| {
            compare(&a, &b, &tolerance).iter().all(|c| c.agrees)
        };
        assert!(agree(outcome(1e-9, 1e-3), outcome(-1e-9, -1e-3), Tolerance::F32));
        assert!(!agree(outcome(1e-3, 1e-3), outcome(-1e-3, 1e-3), Tolerance::F32), "no noise of f32");
        assert!(agree(outcome(1e-3, 1e-3), outcome(-1e-3, -1e-3), Tolerance::BF16));
        assert!(
            !agree(outcome(1.0, 1e-3), outcome(1.0, -1e-3), Tolerance::BF16),
            "equal gradients, other signs"
        );
        assert!(
            !agree(outcome(1e-9, 1e-3), outcome(1e-9, -2e-3), Tolerance::F32),
            "further than a step reaches"
        );
    }

    #[test]
    fn numbers_that_are_none_never_agree() {
        for (a, b) in [(f32::NAN, f32::NAN), (1.0, f32::NAN), (f32::NAN, 1.0), (1.0, f32::INFINITY)] {
            let c = verdict(&[a, 1.0], &[b, 1.0], 1e9);
            assert!(!c.agrees && c.relative == f64::INFINITY, "{a} {b}: {c:?}");
        }
        let nan = compare(&outcome(f64::NAN, &[]), &outcome(1.0, &[]), &Tolerance::BF16);
        assert!(nan.iter().any(|c| c.kind == TensorKind::Loss && !c.agrees));
    }

    #[test]
    fn what_one_side_lacks_is_a_difference() {
        let none = Outcome { loss: Some(1.0), ..Outcome::default() };
        for (a, b) in [(outcome(1.0, &[1.0]), none.clone()), (none.clone(), outcome(1.0, &[1.0]))] {
            let rows = compare(&a, &b, &Tolerance::BF16);
            assert_eq!((rows.len(), rows[0].name.as_str(), rows[0].agrees), (2, "w", false));
        }
        assert!(!verdict(&[1.0, 2.0], &[1.0], 0.5).agrees);
    }

    #[test]
    fn the_worst_comes_first() {
        let mut a = outcome(1.0, &[1.0, 1.0]);
        let mut b = outcome(1.0, &[1.0, 1.05]);
        let named = |name: &str, x: f32| LogicalValues { name: name.into(), shape: vec![1], values: vec![x] };
        a.tensors.push((TensorKind::Gradient, vec![named("z", 1.0), named("y", 2.0)]));
        b.tensors.push((TensorKind::Gradient, vec![named("y", 2.0), named("z", 1.5)]));
        let rows = compare(&a, &b, &Tolerance::all(0.1));
        let names: Vec<_> = rows.iter().map(|r| r.name.as_str()).collect();
        assert_eq!(names, ["z", "w", "loss", "y"]);
        assert_eq!(rows.iter().map(|r| r.agrees).collect::<Vec<_>>(), [false, true, true, true]);
    }
}
