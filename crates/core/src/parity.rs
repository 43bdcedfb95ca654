//! One training step under two settings, compared tensor by tensor.

use crate::Result;
use crate::config::{Resolved, Scaling, Weights};
use crate::data::source;
use crate::train::{FirstWeights, LogicalValues, Trainer};
use ferrotron_engine::Rank;
use serde::Serialize;
use std::collections::{HashMap, HashSet};

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

/// The first training step of a recipe. `first_weights` fills the model where the recipe starts from given ones. Delayed
/// scaling has the scales that collecting magnitudes in this same step leads to: without any it would say nothing.
pub fn first_step(rank: Rank, resolved: &Resolved, first_weights: Option<&FirstWeights>) -> Result<Outcome> {
    let sources = source::open(resolved)?;
    let fresh = |resolved: &Resolved| -> Result<Trainer> {
        let trainer = Trainer::new(rank.clone(), resolved)?;
        first_weights.map_or(Ok(()), |fill| fill(&trainer))?;
        Ok(trainer)
    };
    let scales = match resolved.config.precision.scaling == Scaling::Delayed {
        true => {
            let mut collecting = resolved.clone();
            collecting.config.precision.calibrate = 1;
            collecting.config.precision.weights = Weights::Bf16;
            let mut trainer = fresh(&collecting)?;
            trainer.train_step(&*sources.train)?;
            trainer.scales()?
        }
        false => None,
    };
    let mut collected = resolved.clone();
    collected.config.precision.calibrate = 0;
    let mut trainer = fresh(&collected)?;
    if let Some(scales) = scales {
        trainer.set_scales(&scales)?;
    }
    let report = trainer.train_step(&*sources.train)?;
    let tensors = vec![(Kind::Gradient, trainer.gradients()?), (Kind::Weight, trainer.weights()?)];
    Ok(Outcome { loss: Some(report.loss), lr: report.lr, tensors })
}

/// Largest errors that count as agreement, relative to the norm of side a.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Bounds {
    /// Of the loss.
    pub loss: f64,
    /// Of the logits.
    pub logits: f64,
    /// Of each gradient.
    pub gradient: f64,
    /// Noise that a gradient may have however small it is, as a part of the root mean square of all gradients.
    /// Some are zero but for rounding: a bias of keys moves all scores of a query alike, which softmax ignores.
    pub noise: f64,
    /// Of each weight; none: what such gradients lead to in an update, see [`update_distance`].
    pub weight: Option<f64>,
    /// Standard deviations above the expected number of signs that may differ in an update.
    pub deviations: f64,
}

impl Bounds {
    /// The same bits.
    pub const EXACT: Bounds = Bounds::all(0.0);
    /// The same products summed in another order. Sums are f32 whatever the products are.
    pub const F32: Bounds =
        Bounds { loss: 1e-6, logits: 1e-5, gradient: 1e-5, noise: 1e-6, weight: None, deviations: 0.0 };
    /// bf16 against f32.
    pub const BF16: Bounds =
        Bounds { loss: 2e-2, logits: 2e-2, gradient: 1e-1, noise: 1e-2, weight: None, deviations: 0.0 };

    /// The same 8-bit products, where ranks or devices round before it.
    pub const SCALED: Bounds =
        Bounds { loss: 2e-3, logits: 5e-2, gradient: 5e-2, noise: 1e-2, weight: None, deviations: 3.0 };
    /// The same where a scale holds for other values on both sides: they round independently of each other. Gradients in
    /// E5M2 are off by 5 % each then.
    pub const RESCALED: Bounds = Bounds { gradient: 1e-1, ..Bounds::SCALED };
    /// 8-bit products against others. A gradient in E5M2 has two digits after the point: it is off by up to an eighth, and
    /// so is what is made of it; an eighth more for everything before.
    pub const EIGHT_BITS: Bounds =
        Bounds { loss: 2e-2, logits: 1e-1, gradient: 0.25, noise: 2e-2, weight: None, deviations: 3.0 };
    /// Four-bit products against others: one digit.
    pub const FOUR_BITS: Bounds =
        Bounds { loss: 2e-2, logits: 2e-1, gradient: 0.5, noise: 4e-2, weight: None, deviations: 3.0 };

    /// One bound for everything.
    pub const fn all(x: f64) -> Bounds {
        Bounds { loss: x, logits: x, gradient: x, noise: 0.0, weight: Some(x), deviations: 0.0 }
    }
}

/// How far `n` weights may be apart after a step of `lr` with gradients that are off by a relative `epsilon`.
///
/// The first step of Adam is close to `lr·sign(g)`. Where a normally distributed gradient is off by a relative
/// ε, a share ε/π of the signs differ, and each by 2·lr: a distance of `2·√(ε/π)·lr·√n`.
pub fn update_distance(epsilon: f64, n: usize, lr: f64) -> f64 {
    2.0 * (epsilon / std::f64::consts::PI).sqrt().min(1.0) * lr * (n as f64).sqrt()
}

/// [`update_distance`] where few signs are expected to differ: their number is a Poisson one, and some standard deviations
/// above its mean are still likely. No more signs can differ than there are.
fn likely_distance(epsilon: f64, n: usize, lr: f64, deviations: f64) -> f64 {
    let expected = (update_distance(epsilon, n, 1.0) / 2.0).powi(2);
    2.0 * lr * (expected + deviations * expected.sqrt()).min(n as f64).sqrt()
}

/// The bounds as distances for the tensors of one outcome.
struct Allowed<'a> {
    bounds: &'a Bounds,
    lr: f64,
    /// Root mean square of all elements of all gradients.
    typical: f64,
    /// Relative error allowed to each gradient.
    epsilon: HashMap<&'a str, f64>,
}

impl<'a> Allowed<'a> {
    fn new(a: &'a Outcome, bounds: &'a Bounds) -> Allowed<'a> {
        let gradients = a.of(Kind::Gradient);
        let elements: usize = gradients.iter().map(|g| g.values.len()).sum();
        let squares: f64 = gradients.iter().map(|g| norm(&g.values).powi(2)).sum();
        let typical = (squares / elements.max(1) as f64).sqrt();
        let mut allowed = Allowed { bounds, lr: a.lr, typical, epsilon: HashMap::new() };
        let epsilon = |g: &'a LogicalValues| {
            let norm = norm(&g.values);
            (
                g.name.as_str(),
                allowed.distance(Kind::Gradient, &g.name, &g.values) / norm.max(f64::MIN_POSITIVE),
            )
        };
        allowed.epsilon = gradients.into_iter().map(epsilon).collect();
        allowed
    }

    /// How far the other side may be from `a`.
    fn distance(&self, kind: Kind, name: &str, a: &[f32]) -> f64 {
        let b = self.bounds;
        match (kind, b.weight) {
            (Kind::Loss, _) => b.loss * norm(a),
            (Kind::Logits, _) => b.logits * norm(a),
            (Kind::Gradient, _) => {
                (b.gradient * norm(a)).max(b.noise * self.typical * (a.len() as f64).sqrt())
            }
            (Kind::Weight, Some(weight)) => weight * norm(a),
            (Kind::Weight, None) => {
                let epsilon = self.epsilon.get(name).copied().unwrap_or(b.gradient);
                // Either side may have rounded once more.
                likely_distance(epsilon, a.len(), self.lr, b.deviations) + f64::from(f32::EPSILON) * norm(a)
            }
        }
    }
}

fn norm(x: &[f32]) -> f64 {
    x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt()
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
    /// The relative error that would still be agreement; 0: the same bits.
    pub allowed: f64,
    /// The verdict.
    pub agrees: bool,
}

/// Compares two outcomes: one entry per tensor of either side, the worst (relative to what is allowed) first.
pub fn compare(a: &Outcome, b: &Outcome, bounds: &Bounds) -> Vec<Compared> {
    let allowed = Allowed::new(a, bounds);
    let mut out = Vec::new();
    if a.loss.is_some() || b.loss.is_some() {
        let [x, y] = [a, b].map(|o| o.loss.into_iter().collect::<Vec<_>>());
        let identical = a.loss.map(f64::to_bits) == b.loss.map(f64::to_bits);
        let distance = bounds.loss * a.loss.unwrap_or(0.0).abs();
        out.push(judge(Kind::Loss, "loss", &x, &y, identical, distance));
    }
    let mut kinds: Vec<Kind> = a.tensors.iter().chain(&b.tensors).map(|t| t.0).collect();
    kinds.sort();
    kinds.dedup();
    for kind in kinds {
        let (ours, theirs) = (a.of(kind), b.of(kind));
        let by_name: HashMap<&str, &LogicalValues> = theirs.iter().map(|t| (t.name.as_str(), *t)).collect();
        for t in &ours {
            let other = by_name.get(t.name.as_str()).map_or(&[][..], |o| &o.values);
            let distance = allowed.distance(kind, &t.name, &t.values);
            out.push(compare_values(kind, &t.name, &t.values, other, distance));
        }
        let known: HashSet<&str> = ours.iter().map(|t| t.name.as_str()).collect();
        for t in theirs.iter().filter(|t| !known.contains(t.name.as_str())) {
            out.push(compare_values(kind, &t.name, &[], &t.values, 0.0));
        }
    }
    let badness = |c: &Compared| match c.relative / c.allowed {
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

fn compare_values(kind: Kind, name: &str, a: &[f32], b: &[f32], distance: f64) -> Compared {
    let identical = a.len() == b.len() && a.iter().zip(b).all(|(x, y)| x.to_bits() == y.to_bits());
    let wide = |v: &[f32]| v.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
    judge(kind, name, &wide(a), &wide(b), identical, distance)
}

fn judge(kind: Kind, name: &str, a: &[f64], b: &[f64], identical: bool, allowed: f64) -> Compared {
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
    Compared { kind, name: name.into(), elements, max_abs, relative, identical, allowed, agrees }
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
                (Kind::Gradient, vec![tensor("w", &[1.0; 100]), tensor("b", &[noise; 4])]),
                (Kind::Weight, vec![tensor("b", &[bias; 4])]),
            ],
        };
        let agree =
            |a: Outcome, b: Outcome, bounds: Bounds| compare(&a, &b, &bounds).iter().all(|c| c.agrees);
        assert!(agree(outcome(1e-9, 1e-3), outcome(-1e-9, -1e-3), Bounds::F32));
        assert!(!agree(outcome(1e-3, 1e-3), outcome(-1e-3, 1e-3), Bounds::F32), "no noise of f32");
        assert!(agree(outcome(1e-3, 1e-3), outcome(-1e-3, -1e-3), Bounds::BF16));
        assert!(
            !agree(outcome(1.0, 1e-3), outcome(1.0, -1e-3), Bounds::BF16),
            "equal gradients, other signs"
        );
        assert!(
            !agree(outcome(1e-9, 1e-3), outcome(1e-9, -2e-3), Bounds::F32),
            "further than a step reaches"
        );
    }

    /// Signs of few values: one may differ where half a one is expected, and none where hardly any is.
    #[test]
    fn rare_signs_come_in_whole_numbers() {
        assert!(likely_distance(0.05, 32, 1.0, 3.0) > 2.0 * 2f64.sqrt());
        assert!(likely_distance(1e-5, 1024, 1.0, 3.0) < 2.0);
        assert_eq!(likely_distance(100.0, 4, 1.0, 3.0), 4.0);
    }

    /// The closed form against drawing: signs of normal numbers with a relative error.
    #[test]
    fn updates_differ_as_far_as_signs_do() {
        let draw = |stream: &str, n: usize| -> Vec<f64> {
            let stream = ferrotron_kernels::philox::RandomStream::named(3, stream);
            (0..n as u64)
                .map(|i| ferrotron_kernels::philox::normals(stream.block(i / 4))[(i % 4) as usize])
                .collect()
        };
        let n = 200_000;
        let (g, e) = (draw("g", n), draw("e", n));
        for epsilon in [1e-3, 1e-2, 1e-1] {
            let flips = g.iter().zip(&e).filter(|(g, e)| (*g + epsilon * *e) * *g < 0.0).count() as f64;
            let (distance, formula) = (2.0 * flips.sqrt(), update_distance(epsilon, n, 1.0));
            assert!((distance / formula - 1.0).abs() < 0.1, "{epsilon}: {distance} and {formula}");
        }
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
