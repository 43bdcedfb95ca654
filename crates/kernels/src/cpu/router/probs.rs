//! Probabilities of the selected experts, and their gradient.

use super::scores::{EPS, softmax, unless_excluded};
use super::{Router, check_below, grain, take_row};
use crate::{RouterParams, ScoreFunction};
use ferrotron_tensor::{Float, Result, Threads};

/// The selection of a row: slots and experts, without empty slots.
fn chosen(index: &[i32]) -> impl Iterator<Item = (usize, usize)> + Clone {
    index.iter().enumerate().filter(|(_, e)| **e >= 0).map(|(slot, e)| (slot, *e as usize))
}

/// `p [k]` = unscaled probabilities of the selection; `y [E]` is scratch.
fn row(how: RouterParams, x: &[f32], index: &[i32], y: &mut [f32], p: &mut [f32]) {
    let score = how.score;
    p.fill(0.0);
    match score {
        ScoreFunction::Softmax => {
            softmax(x, y);
            chosen(index).for_each(|(slot, e)| p[slot] = y[e]);
        }
        ScoreFunction::SoftmaxAfterTopK => {
            let most = chosen(index).fold(f32::NEG_INFINITY, |m, (_, e)| m.max(x[e]));
            chosen(index).for_each(|(slot, e)| p[slot] = (x[e] - most).exp());
            let sum: f32 = p.iter().sum();
            chosen(index).for_each(|(slot, _)| p[slot] /= sum);
        }
        ScoreFunction::Sigmoid | ScoreFunction::SqrtSoftplus => {
            chosen(index).for_each(|(slot, e)| p[slot] = score.alone(x[e]));
            if how.normalize {
                let sum = p.iter().sum::<f32>() + EPS;
                p.iter_mut().for_each(|p| *p /= sum);
            }
        }
    }
}

/// `probs [T, k]` of the selection `index [T, k]` for `logits [T, E]`.
pub fn probabilities<T: Float>(
    threads: &Threads,
    router: Router,
    logits: &[T],
    index: &[i32],
    probs: &mut [f32],
) -> Result<()> {
    let Router { params: how, experts, topk: k } = router;
    check_below("route", "expert", index, experts)?;
    let rows = grain(experts);
    threads.parallel_chunks(probs, rows * k, &|piece, probs| {
        let (mut x, mut y) = (vec![0f32; experts], vec![0f32; experts]);
        for (t, probs) in probs.chunks_mut(k).enumerate() {
            let t = piece * rows + t;
            take_row(logits, t, &mut x);
            row(how, &x, &index[t * k..][..k], &mut y, probs);
            probs.iter_mut().for_each(|p| *p *= how.scale);
        }
    });
    Ok(())
}

/// One row of the backward pass.
struct RowGrad {
    /// Logits `[E]`.
    x: Vec<f32>,
    /// Gradients of unscaled probabilities `[k]`.
    g: Vec<f32>,
    /// Written: gradients of logits `[E]`.
    dx: Vec<f32>,
    /// Scratch for scores `[E]`.
    y: Vec<f32>,
    /// Scratch for probabilities `[k]`.
    p: Vec<f32>,
}

fn row_backward(how: RouterParams, index: &[i32], row_grad: &mut RowGrad) {
    let RowGrad { x, g, dx, y, p } = row_grad;
    let score = how.score;
    dx.fill(0.0);
    match score {
        ScoreFunction::Softmax => {
            softmax(x, y);
            let mean: f32 = chosen(index).map(|(slot, e)| g[slot] * y[e]).sum();
            chosen(index).for_each(|(slot, e)| dx[e] += g[slot]);
            dx.iter_mut().zip(y).for_each(|(d, y)| *d = *y * (*d - mean));
        }
        ScoreFunction::SoftmaxAfterTopK => {
            row(how, x, index, y, p);
            let mean: f32 = chosen(index).map(|(slot, _)| g[slot] * p[slot]).sum();
            chosen(index).for_each(|(slot, e)| dx[e] += p[slot] * (g[slot] - mean));
        }
        ScoreFunction::Sigmoid | ScoreFunction::SqrtSoftplus if !how.normalize => {
            chosen(index).for_each(|(slot, e)| dx[e] += g[slot] * score.slope(x[e]));
        }
        ScoreFunction::Sigmoid | ScoreFunction::SqrtSoftplus => {
            let sum = chosen(index).map(|(_, e)| score.alone(x[e])).sum::<f32>() + EPS;
            let mean: f32 = chosen(index).map(|(slot, e)| g[slot] * (score.alone(x[e]) / sum)).sum();
            chosen(index).for_each(|(slot, e)| dx[e] += (g[slot] - mean) / sum * score.slope(x[e]));
        }
    }
    dx.iter_mut().zip(x).for_each(|(d, x)| *d = unless_excluded(*x, *d));
}

/// `dlogits [T, E]` from `dprobs [T, k]`; see [`crate::RouteBackward`].
pub fn probabilities_backward<T: Float>(
    threads: &Threads,
    router: Router,
    logits: &[T],
    index: &[i32],
    dprobs: &[f32],
    dlogits: &mut [T],
) -> Result<()> {
    let Router { params: how, experts, topk: k } = router;
    check_below("route_backward", "expert", index, experts)?;
    let rows = grain(experts);
    threads.parallel_chunks(dlogits, rows * experts, &|piece, dlogits| {
        let per_expert = || vec![0f32; experts];
        let (x, y, dx) = (per_expert(), per_expert(), per_expert());
        let mut row = RowGrad { x, g: vec![0f32; k], dx, y, p: vec![0f32; k] };
        for (t, dlogits) in dlogits.chunks_mut(experts).enumerate() {
            let t = piece * rows + t;
            take_row(logits, t, &mut row.x);
            row.g.iter_mut().zip(&dprobs[t * k..]).for_each(|(g, d)| *g = how.scale * d);
            row_backward(how, &index[t * k..][..k], &mut row);
            dlogits.iter_mut().zip(&row.dx).for_each(|(to, d)| *to = T::from_f32(*d));
        }
    });
    Ok(())
}
