//! Tolerances of a comparison.

use super::{Outcome, TensorKind};
use crate::train::LogicalValues;
use serde::Serialize;
use std::collections::HashMap;

/// Largest errors that still agree, relative to the norm of side a.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Tolerance {
    /// Of the loss.
    pub loss: f64,
    /// Of the logits.
    pub logits: f64,
    /// Of each gradient.
    pub gradient: f64,
    /// Noise floor of a gradient, as a fraction of the root mean square of all gradients. Some gradients are zero but
    /// for rounding: a key bias shifts all scores of a query alike, which softmax ignores.
    pub noise: f64,
    /// Of each weight; none derives it from the gradients' tolerance, see [`update_distance`].
    pub weight: Option<f64>,
    /// Standard deviations above the expected number of sign flips that an update may have.
    pub deviations: f64,
}

impl Tolerance {
    /// Equal bits.
    pub const EXACT: Tolerance = Tolerance::all(0.0);
    /// The same GEMMs summed in another order. Sums are f32 whatever the operands are.
    pub const F32: Tolerance =
        Tolerance { loss: 1e-6, logits: 1e-5, gradient: 1e-5, noise: 1e-6, weight: None, deviations: 0.0 };
    /// bf16 against f32.
    pub const BF16: Tolerance =
        Tolerance { loss: 2e-2, logits: 2e-2, gradient: 1e-1, noise: 1e-2, weight: None, deviations: 0.0 };

    /// The same FP8 GEMMs, where ranks or devices round differently before them.
    pub const FP8_SAME_SCALES: Tolerance =
        Tolerance { loss: 2e-3, logits: 5e-2, gradient: 5e-2, noise: 1e-2, weight: None, deviations: 3.0 };
    /// The same where a scale covers other values on both sides, which then round independently. Gradients in E5M2 are
    /// off by 5 % each.
    pub const FP8_OTHER_SCALES: Tolerance = Tolerance { gradient: 1e-1, ..Tolerance::FP8_SAME_SCALES };
    /// FP8 against higher precision. E5M2 has two mantissa bits: a gradient is off by up to an eighth, and so is what
    /// follows from it; another eighth covers everything before.
    pub const FP8: Tolerance =
        Tolerance { loss: 2e-2, logits: 1e-1, gradient: 0.25, noise: 2e-2, weight: None, deviations: 3.0 };
    /// FP4 against higher precision: one mantissa bit.
    pub const FP4: Tolerance =
        Tolerance { loss: 2e-2, logits: 2e-1, gradient: 0.5, noise: 4e-2, weight: None, deviations: 3.0 };

    /// One tolerance for everything.
    pub const fn all(x: f64) -> Tolerance {
        Tolerance { loss: x, logits: x, gradient: x, noise: 0.0, weight: Some(x), deviations: 0.0 }
    }
}

/// How far apart `n` weights may be after a step of `lr` with gradients that are off by a relative `epsilon`.
///
/// The first step of Adam is close to `lr·sign(g)`. Where a normally distributed gradient is off by a relative
/// ε, a fraction ε/π of the signs flip, and each moves a weight by 2·lr: a distance of `2·√(ε/π)·lr·√n`.
pub fn update_distance(epsilon: f64, n: usize, lr: f64) -> f64 {
    2.0 * (epsilon / std::f64::consts::PI).sqrt().min(1.0) * lr * (n as f64).sqrt()
}

/// [`update_distance`] for few expected sign flips: their number is Poisson distributed, and a few standard deviations
/// above its mean are still likely. No more signs can flip than there are.
fn likely_distance(epsilon: f64, n: usize, lr: f64, deviations: f64) -> f64 {
    let expected = (update_distance(epsilon, n, 1.0) / 2.0).powi(2);
    2.0 * lr * (expected + deviations * expected.sqrt()).min(n as f64).sqrt()
}

/// The tolerance as absolute distances for the tensors of one outcome.
pub(super) struct AllowedDistances<'a> {
    tolerance: &'a Tolerance,
    lr: f64,
    /// Root mean square of all elements of all gradients.
    typical: f64,
    /// Relative error allowed for each gradient.
    epsilon: HashMap<&'a str, f64>,
}

impl<'a> AllowedDistances<'a> {
    pub(super) fn new(a: &'a Outcome, tolerance: &'a Tolerance) -> AllowedDistances<'a> {
        let gradients = a.tensors_of(TensorKind::Gradient);
        let elements: usize = gradients.iter().map(|g| g.values.len()).sum();
        let squares: f64 = gradients.iter().map(|g| norm(&g.values).powi(2)).sum();
        let typical = (squares / elements.max(1) as f64).sqrt();
        let mut allowed = AllowedDistances { tolerance, lr: a.lr, typical, epsilon: HashMap::new() };
        let epsilon = |g: &'a LogicalValues| {
            let norm = norm(&g.values);
            (
                g.name.as_str(),
                allowed.distance(TensorKind::Gradient, &g.name, &g.values) / norm.max(f64::MIN_POSITIVE),
            )
        };
        allowed.epsilon = gradients.into_iter().map(epsilon).collect();
        allowed
    }

    /// Largest distance from `a` that still agrees.
    pub(super) fn distance(&self, kind: TensorKind, name: &str, a: &[f32]) -> f64 {
        let b = self.tolerance;
        match (kind, b.weight) {
            (TensorKind::Loss, _) => b.loss * norm(a),
            (TensorKind::Logits, _) => b.logits * norm(a),
            (TensorKind::Gradient, _) => {
                (b.gradient * norm(a)).max(b.noise * self.typical * (a.len() as f64).sqrt())
            }
            (TensorKind::Weight, Some(weight)) => weight * norm(a),
            (TensorKind::Weight, None) => {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Few values: one sign may flip where half a flip is expected, and none where hardly any is.
    #[test]
    fn rare_signs_come_in_whole_numbers() {
        assert!(likely_distance(0.05, 32, 1.0, 3.0) > 2.0 * 2f64.sqrt());
        assert!(likely_distance(1e-5, 1024, 1.0, 3.0) < 2.0);
        assert_eq!(likely_distance(100.0, 4, 1.0, 3.0), 4.0);
    }

    /// The closed form against sampling: signs of normal values with a relative error.
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
}
