//! Score functions and their derivatives.

use crate::ScoreFunction;

/// Added to sums of scores to avoid division by 0.
pub(super) const EPS: f32 = 1e-20;

/// `σ(x)` and `1 - σ(x)`, neither losing digits to cancellation.
pub(super) fn sigmoid(x: f32) -> (f32, f32) {
    let e = (-x.abs()).exp();
    let (large, small) = (1.0 / (1.0 + e), e / (1.0 + e));
    if x >= 0.0 { (large, small) } else { (small, large) }
}

impl ScoreFunction {
    /// Whether it is a softmax, over all experts or over the selection.
    pub(super) fn is_softmax(self) -> bool {
        matches!(self, ScoreFunction::SoftmaxAfterTopK | ScoreFunction::Softmax)
    }

    /// Score of a single logit; for a softmax, the logit itself.
    pub(super) fn alone(self, x: f32) -> f32 {
        match self {
            ScoreFunction::SoftmaxAfterTopK | ScoreFunction::Softmax => x,
            ScoreFunction::Sigmoid => sigmoid(x).0,
            ScoreFunction::SqrtSoftplus if x > 20.0 => x.sqrt(),
            ScoreFunction::SqrtSoftplus => x.exp().ln_1p().sqrt(),
        }
    }

    /// Derivative of [`ScoreFunction::alone`].
    pub(super) fn slope(self, x: f32) -> f32 {
        match self {
            ScoreFunction::SoftmaxAfterTopK | ScoreFunction::Softmax => 1.0,
            ScoreFunction::Sigmoid => {
                let (y, rest) = sigmoid(x);
                y * rest
            }
            ScoreFunction::SqrtSoftplus => {
                let up = if x > 20.0 { 1.0 } else { sigmoid(x).0 };
                up / (2.0 * self.alone(x) + EPS)
            }
        }
    }
}

/// The largest of a row and `Σ exp(x - largest)`.
pub(super) fn largest_and_sum(x: &[f32]) -> (f32, f32) {
    let most = x.iter().fold(f32::NEG_INFINITY, |m, x| m.max(*x));
    let sum: f64 = x.iter().map(|x| f64::from((x - most).exp())).sum();
    (most, sum as f32)
}

/// `y = softmax(x)`
pub(super) fn softmax(x: &[f32], y: &mut [f32]) {
    let (most, sum) = largest_and_sum(x);
    y.iter_mut().zip(x).for_each(|(y, x)| *y = (x - most).exp() / sum);
}

/// Scores over all experts for an auxiliary loss: a softmax, or scores divided by their sum. Returns that sum (1 for a softmax).
pub(super) fn normalized(score: ScoreFunction, x: &[f32], y: &mut [f32]) -> f32 {
    if score.is_softmax() {
        softmax(x, y);
        return 1.0;
    }
    y.iter_mut().zip(x).for_each(|(y, x)| *y = score.alone(*x));
    let sum = y.iter().map(|y| f64::from(*y)).sum::<f64>() as f32 + EPS;
    y.iter_mut().for_each(|y| *y /= sum);
    sum
}

/// 0 where a logit is -inf.
pub(super) fn unless_excluded(x: f32, gradient: f32) -> f32 {
    if x == f32::NEG_INFINITY { 0.0 } else { gradient }
}
