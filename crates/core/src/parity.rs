//! One training step under two settings, compared tensor by tensor.

use crate::Result;
use crate::config::Resolved;
use crate::data::source;
use crate::train::{FirstWeights, LogicalValues, Trainer};
use ferrotron_engine::Rank;
use serde::Serialize;
use std::collections::HashMap;

/// What a compared tensor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// The loss of the step.
    Loss,
    /// Outputs of the model.
    Logits,
    /// The gradient of a parameter, before clipping.
    Gradient,
    /// A parameter after the step.
    Weight,
}

impl Kind {
    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Loss => "loss",
            Kind::Logits => "logits",
            Kind::Gradient => "gradient",
            Kind::Weight => "weight",
        }
    }
}

/// Everything one side has made.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// The loss, if there were labels.
    pub loss: Option<f64>,
    /// Learning rate of the step; 0 where there was no update.
    pub lr: f64,
    /// Tensors of each kind.
    pub tensors: Vec<(Kind, Vec<LogicalValues>)>,
}

impl Outcome {
    fn of(&self, kind: Kind) -> Vec<&LogicalValues> {
        self.tensors.iter().filter(|t| t.0 == kind).flat_map(|t| &t.1).collect()
    }
}

/// The first training step of a recipe. `first_weights` fills the model where the recipe starts from given ones.
pub fn first_step(rank: Rank, resolved: &Resolved, first_weights: Option<&FirstWeights>) -> Result<Outcome> {
    let sources = source::open(resolved)?;
    let mut trainer = Trainer::new(rank, resolved)?;
    if let Some(fill) = first_weights {
        fill(&trainer)?;
    }
    let report = trainer.train_step(&*sources.train)?;
    let tensors = vec![(Kind::Gradient, trainer.gradients()?), (Kind::Weight, trainer.weights()?)];
    Ok(Outcome { loss: Some(report.loss), lr: report.lr, tensors })
}

/// Largest relative errors that count as agreement.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Bounds {
    /// Of the loss.
    pub loss: f64,
    /// Of the logits.
    pub logits: f64,
    /// Of each gradient.
    pub gradient: f64,
    /// Of each weight; none: what the bound of gradients leads to in an update, see [`update_bound`].
    pub weight: Option<f64>,
}

impl Bounds {
    /// The same bits.
    pub const EXACT: Bounds = Bounds { loss: 0.0, logits: 0.0, gradient: 0.0, weight: Some(0.0) };
    /// The same f32 arithmetic in another order.
    pub const F32: Bounds = Bounds { loss: 1e-5, logits: 1e-5, gradient: 1e-4, weight: None };
    /// bf16 on one side or both.
    pub const BF16: Bounds = Bounds { loss: 2e-2, logits: 2e-2, gradient: 1e-1, weight: None };

    /// One bound for everything.
    pub const fn all(x: f64) -> Bounds {
        Bounds { loss: x, logits: x, gradient: x, weight: Some(x) }
    }

    fn of(&self, kind: Kind, a: &[f32], lr: f64) -> f64 {
        match kind {
            Kind::Loss => self.loss,
            Kind::Logits => self.logits,
            Kind::Gradient => self.gradient,
            Kind::Weight => self.weight.unwrap_or_else(|| update_bound(self.gradient, a, lr)),
        }
    }
}

/// How far weights `w` may be apart, relative to their norm, when gradients differ by `epsilon`.
///
/// The first step of Adam is close to `lr·sign(g)`. Where a normally distributed gradient is off by a relative
/// ε, a share ε/π of the signs differ, and each by 2·lr: a distance of `2·√(ε/π)·lr·√n`.
pub fn update_bound(epsilon: f64, w: &[f32], lr: f64) -> f64 {
    let norm = w.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    let step = lr * (w.len() as f64).sqrt();
    2.0 * (epsilon / std::f64::consts::PI).sqrt() * if norm > step { step / norm } else { 1.0 }
}

/// One tensor of both sides.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Compared {
    /// What it is.
    pub kind: Kind,
    /// Its name.
    pub name: String,
    /// Elements.
    pub elements: usize,
    /// Largest absolute difference; infinite where a value is missing or no number.
    pub max_abs: f64,
    /// `‖a − b‖ / ‖a‖`
    pub relative: f64,
    /// Are all bits equal?
    pub identical: bool,
    /// The relative error that would still be agreement.
    pub bound: f64,
    /// The verdict.
    pub agrees: bool,
}

/// Compares two outcomes: one entry per tensor of either side, the worst (relative to its bound) first.
pub fn compare(a: &Outcome, b: &Outcome, bounds: &Bounds) -> Vec<Compared> {
    let mut out = Vec::new();
    let loss = |o: &Outcome| o.loss.map(|l| vec![l]);
    match (loss(a), loss(b)) {
        (None, None) => {}
        (x, y) => {
            let (x, y) = (x.unwrap_or_default(), y.unwrap_or_default());
            let identical = x.iter().map(|v| v.to_bits()).eq(y.iter().map(|v| v.to_bits()));
            out.push(judge(Kind::Loss, "loss", &x, &y, identical, bounds.loss));
        }
    }
    let kinds = a.tensors.iter().chain(&b.tensors).map(|t| t.0);
    let mut kinds: Vec<Kind> = kinds.collect();
    kinds.sort();
    kinds.dedup();
    for kind in kinds {
        let (ours, theirs) = (a.of(kind), b.of(kind));
        let by_name: HashMap<&str, &LogicalValues> = theirs.iter().map(|t| (t.name.as_str(), *t)).collect();
        for t in &ours {
            let other = by_name.get(t.name.as_str()).map_or(&[][..], |o| &o.values);
            out.push(compare_values(kind, &t.name, &t.values, other, bounds.of(kind, &t.values, a.lr)));
        }
        let known: HashMap<&str, ()> = ours.iter().map(|t| (t.name.as_str(), ())).collect();
        for t in theirs.iter().filter(|t| !known.contains_key(t.name.as_str())) {
            out.push(compare_values(kind, &t.name, &[], &t.values, 0.0));
        }
    }
    let badness = |c: &Compared| match c.relative {
        0.0 => 0.0,
        r if c.bound == 0.0 => f64::MAX.min(r * 1e300),
        r => r / c.bound,
    };
    out.sort_by(|x, y| badness(y).total_cmp(&badness(x)).then_with(|| x.name.cmp(&y.name)));
    out
}

fn compare_values(kind: Kind, name: &str, a: &[f32], b: &[f32], bound: f64) -> Compared {
    let identical = a.len() == b.len() && a.iter().zip(b).all(|(x, y)| x.to_bits() == y.to_bits());
    let wide = |v: &[f32]| v.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
    judge(kind, name, &wide(a), &wide(b), identical, bound)
}

fn judge(kind: Kind, name: &str, a: &[f64], b: &[f64], identical: bool, bound: f64) -> Compared {
    let (mut max_abs, mut distance, mut norm) = (0f64, 0f64, 0f64);
    for (x, y) in a.iter().zip(b) {
        let d = if x == y { 0.0 } else { (x - y).abs() };
        // A NaN compares false with everything and would pass for no difference.
        max_abs = if d.is_nan() { f64::INFINITY } else { max_abs.max(d) };
        distance += d * d;
        norm += x * x;
    }
    let comparable = a.len() == b.len() && max_abs.is_finite() && distance.is_finite() && norm.is_finite();
    let relative = match (comparable, distance > 0.0) {
        (false, _) => f64::INFINITY,
        (true, false) => 0.0,
        (true, true) => (distance / norm).sqrt(),
    };
    let agrees = if bound == 0.0 { identical } else { comparable && relative <= bound };
    let max_abs = if a.len() == b.len() { max_abs } else { f64::INFINITY };
    let elements = a.len().max(b.len());
    Compared { kind, name: name.into(), elements, max_abs, relative, identical, bound, agrees }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(loss: f64, gradient: &[f32]) -> Outcome {
        let t = LogicalValues { name: "w".into(), shape: vec![gradient.len()], values: gradient.to_vec() };
        Outcome { loss: Some(loss), lr: 0.0, tensors: vec![(Kind::Gradient, vec![t])] }
    }

    fn verdict(a: &[f32], b: &[f32], bound: f64) -> Compared {
        let rows = compare(&outcome(1.0, a), &outcome(1.0, b), &Bounds::all(bound));
        rows.into_iter().find(|r| r.kind == Kind::Gradient).unwrap()
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

    #[test]
    fn numbers_that_are_none_never_agree() {
        for (a, b) in [(f32::NAN, f32::NAN), (1.0, f32::NAN), (f32::NAN, 1.0), (1.0, f32::INFINITY)] {
            let c = verdict(&[a, 1.0], &[b, 1.0], 1e9);
            assert!(!c.agrees && c.relative == f64::INFINITY, "{a} {b}: {c:?}");
        }
        let nan = compare(&outcome(f64::NAN, &[]), &outcome(1.0, &[]), &Bounds::BF16);
        assert!(nan.iter().any(|c| c.kind == Kind::Loss && !c.agrees));
    }

    #[test]
    fn what_one_side_lacks_is_a_difference() {
        let none = Outcome { loss: Some(1.0), ..Outcome::default() };
        for (a, b) in [(outcome(1.0, &[1.0]), none.clone()), (none.clone(), outcome(1.0, &[1.0]))] {
            let rows = compare(&a, &b, &Bounds::BF16);
            assert_eq!((rows.len(), rows[0].name.as_str(), rows[0].agrees), (2, "w", false));
        }
        assert!(!verdict(&[1.0, 2.0], &[1.0], 0.5).agrees);
    }

    #[test]
    fn the_worst_comes_first() {
        let mut a = outcome(1.0, &[1.0, 1.0]);
        let mut b = outcome(1.0, &[1.0, 1.05]);
        let named = |name: &str, x: f32| LogicalValues { name: name.into(), shape: vec![1], values: vec![x] };
        a.tensors.push((Kind::Gradient, vec![named("z", 1.0), named("y", 2.0)]));
        b.tensors.push((Kind::Gradient, vec![named("y", 2.0), named("z", 1.5)]));
        let rows = compare(&a, &b, &Bounds::all(0.1));
        let names: Vec<_> = rows.iter().map(|r| r.name.as_str()).collect();
        assert_eq!(names, ["z", "w", "loss", "y"]);
        assert_eq!(rows.iter().map(|r| r.agrees).collect::<Vec<_>>(), [false, true, true, true]);
    }
}
