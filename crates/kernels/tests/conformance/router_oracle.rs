//! The router by its definition, in f64, one row at a time.

use super::devices::*;
use ferrotron_kernels::{GroupLimit, RouterParams, ScoreFunction};
use ferrotron_tensor::{DType, Tensor};

pub const SCORES: [ScoreFunction; 4] = [
    ScoreFunction::SoftmaxAfterTopK,
    ScoreFunction::Softmax,
    ScoreFunction::Sigmoid,
    ScoreFunction::SqrtSoftplus,
];

pub fn is_softmax(score: ScoreFunction) -> bool {
    matches!(score, ScoreFunction::SoftmaxAfterTopK | ScoreFunction::Softmax)
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

pub fn alone(score: ScoreFunction, x: f64) -> f64 {
    match score {
        ScoreFunction::SoftmaxAfterTopK | ScoreFunction::Softmax => x,
        ScoreFunction::Sigmoid => sigmoid(x),
        ScoreFunction::SqrtSoftplus if x > 20.0 => x.sqrt(),
        ScoreFunction::SqrtSoftplus => x.exp().ln_1p().sqrt(),
    }
}

pub fn softmax(x: &[f64]) -> Vec<f64> {
    let most = x.iter().fold(f64::NEG_INFINITY, |m, x| m.max(*x));
    let e: Vec<f64> = x.iter().map(|x| (x - most).exp()).collect();
    let sum: f64 = e.iter().sum();
    e.iter().map(|e| e / sum).collect()
}

pub fn logsumexp(x: &[f64]) -> f64 {
    let most = x.iter().fold(f64::NEG_INFINITY, |m, x| m.max(*x));
    most + x.iter().map(|x| (x - most).exp()).sum::<f64>().ln()
}

/// Normalized scores over all experts, as used by the auxiliary loss.
pub fn normalized(score: ScoreFunction, x: &[f64]) -> Vec<f64> {
    if is_softmax(score) {
        return softmax(x);
    }
    let y: Vec<f64> = x.iter().map(|x| alone(score, *x)).collect();
    let sum = y.iter().sum::<f64>() + 1e-20;
    y.iter().map(|y| y / sum).collect()
}

/// Indices in descending order of value, smaller index first among equals, NaN last.
pub fn ranked(values: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|a, b| match (values[*a], values[*b]) {
        (x, y) if x.is_nan() || y.is_nan() => x.is_nan().cmp(&y.is_nan()),
        (x, y) => y.partial_cmp(&x).unwrap(),
    });
    order
}

/// Whether rounding could change the top k: two neighbours in this order are within 1e-6 of each other.
fn rounding_decides(values: &[f64], order: &[usize], k: usize) -> bool {
    let near = |a: usize, b: usize| {
        let (a, b) = (values[a], values[b]);
        a != b && (a - b).abs() < 1e-6 * a.abs().max(b.abs())
    };
    order[..k].windows(2).any(|w| near(w[0], w[1])) || order[k..].iter().any(|e| near(order[k - 1], *e))
}

/// The selection of a row; none where it depends on rounding.
pub fn selection(how: RouterParams, bias: Option<&[f64]>, x: &[f64], k: usize) -> Option<Vec<usize>> {
    let scores = match how.score {
        ScoreFunction::Softmax => softmax(x),
        score => x.iter().map(|x| alone(score, *x)).collect(),
    };
    let plus = |(e, s): (usize, &f64)| s + bias.map_or(0.0, |b| b[e]);
    let selection: Vec<f64> = scores.iter().enumerate().map(plus).collect();
    // Every score function is monotonic in its logit.
    let by = if bias.is_some() { &selection } else { x };
    let mut order = ranked(by);
    if let Some(GroupLimit { count, keep, best: ranked_by }) = how.groups {
        let group = |e: usize| e / (x.len() / count);
        let of_group = |g: usize| order.iter().filter(move |e| group(**e) == g);
        let sum = |g: usize| of_group(g).take(ranked_by).map(|e| selection[*e]).sum();
        let sums: Vec<f64> = (0..count).map(sum).collect();
        let best = ranked(&sums);
        if rounding_decides(&sums, &best, keep) {
            return None;
        }
        order.retain(|e| best[..keep].contains(&group(*e)));
    }
    if bias.is_some() && rounding_decides(&selection, &order, k) {
        return None;
    }
    order.truncate(k);
    Some(order)
}

/// Probabilities of a selection; a slot of `None` is empty.
pub fn probs_of(how: RouterParams, x: &[f64], index: &[Option<usize>]) -> Vec<f64> {
    let of = |y: &dyn Fn(usize) -> f64| -> Vec<f64> { index.iter().map(|e| e.map_or(0.0, y)).collect() };
    let p = match how.score {
        ScoreFunction::Softmax => {
            let y = softmax(x);
            of(&|e| y[e])
        }
        ScoreFunction::SoftmaxAfterTopK => {
            let chosen: Vec<f64> = index.iter().flatten().map(|e| x[*e]).collect();
            let mut y = softmax(&chosen).into_iter();
            index.iter().map(|e| e.map_or(0.0, |_| y.next().unwrap())).collect()
        }
        score if !how.normalize => of(&|e| alone(score, x[e])),
        score => {
            let sum = index.iter().flatten().map(|e| alone(score, x[*e])).sum::<f64>() + 1e-20;
            of(&|e| alone(score, x[e]) / sum)
        }
    };
    p.iter().map(|p| p * f64::from(how.scale)).collect()
}

/// Gradient of `f` by finite differences.
pub fn differences(x: &[f64], f: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    let step = 1e-5;
    let at = |e: usize, by: f64| {
        let mut x = x.to_vec();
        x[e] += by;
        f(&x)
    };
    let slope = |e: usize| (at(e, step) - at(e, -step)) / (2.0 * step);
    (0..x.len()).map(|e| if x[e] == f64::NEG_INFINITY { 0.0 } else { slope(e) }).collect()
}

/// NaN must match NaN and infinities must be equal; other values as in [`close`].
pub fn same(what: &str, dtype: DType, ours: &[f64], wanted: &[f64], slack: f64) {
    assert_eq!(ours.len(), wanted.len(), "{what}");
    for (i, (o, w)) in ours.iter().zip(wanted).enumerate() {
        if w.is_finite() {
            close(&format!("{what} at {i}"), dtype, &[*o], &[*w], slack);
        } else {
            assert!(o == w || (o.is_nan() && w.is_nan()), "{what} [{i}]: {o} instead of {w}");
        }
    }
}

/// Contiguous, but `shift` elements beyond 16-byte alignment.
pub fn shifted(h: &TestDevice, shift: usize, dtype: DType, shape: &[usize], values: &[f64]) -> Tensor {
    let whole: Vec<f64> = vec![0.0; shift].into_iter().chain(values.iter().copied()).collect();
    h.tensor(dtype, &[whole.len()], &whole).narrow(0, shift, values.len()).unwrap().view(shape).unwrap()
}

/// Logits `[T, E]` in (-4, 4), with rows of equal values, of coarse values (many ties), with -inf, with one NaN, and of NaN
/// only; `tame` leaves out the last two.
pub fn logits(dtype: DType, seed: u64, tokens: usize, experts: usize, tame: bool) -> Vec<f64> {
    let raw = numbers(DType::F32, seed, tokens * experts);
    let value = |(i, x): (usize, &f64)| {
        let (t, e) = (i / experts, i % experts);
        match t % 16 {
            3 => 0.5,
            5 => (x * 4.0).round(),
            7 if e % 3 != 0 => f64::NEG_INFINITY,
            9 if e == experts / 2 && !tame => f64::NAN,
            11 if !tame => f64::NAN,
            13 => x * 40.0,
            _ => x * 4.0,
        }
    };
    raw.iter().enumerate().map(value).map(|x| rounded(dtype, x)).collect()
}

/// The gradient formula in the kernels' documentation must match finite differences.
pub fn gradient(how: RouterParams, x: &[f64], index: &[Option<usize>], dprobs: &[f64]) -> Vec<f64> {
    let g: Vec<f64> = dprobs.iter().map(|d| d * f64::from(how.scale)).collect();
    let plain = RouterParams { scale: 1.0, ..how };
    let p = probs_of(plain, x, index);
    let mean: f64 = p.iter().zip(&g).map(|(p, g)| p * g).sum();
    let mut dx = vec![0.0; x.len()];
    let chosen = || index.iter().enumerate().filter_map(|(slot, e)| e.map(|e| (slot, e)));
    let slope = |e: usize| match how.score {
        ScoreFunction::Sigmoid => sigmoid(x[e]) * sigmoid(-x[e]),
        _ if x[e] > 20.0 => 0.5 / x[e].sqrt(),
        _ => sigmoid(x[e]) / (2.0 * alone(how.score, x[e]) + 1e-20),
    };
    match how.score {
        ScoreFunction::Softmax => {
            chosen().for_each(|(slot, e)| dx[e] += g[slot]);
            dx.iter_mut().zip(softmax(x)).for_each(|(d, y)| *d = y * (*d - mean));
        }
        ScoreFunction::SoftmaxAfterTopK => chosen().for_each(|(slot, e)| dx[e] = p[slot] * (g[slot] - mean)),
        _ if !how.normalize => chosen().for_each(|(slot, e)| dx[e] = g[slot] * slope(e)),
        score => {
            let sum = chosen().map(|(_, e)| alone(score, x[e])).sum::<f64>() + 1e-20;
            chosen().for_each(|(slot, e)| dx[e] = (g[slot] - mean) / sum * slope(e));
        }
    }
    dx.iter().zip(x).map(|(d, x)| if *x == f64::NEG_INFINITY { 0.0 } else { *d }).collect()
}
