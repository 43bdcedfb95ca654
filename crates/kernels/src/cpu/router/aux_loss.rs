//! Auxiliary load-balancing losses: statistics, weights and gradient; and the expert bias of loss-free balancing.

use super::scores::{normalized, unless_excluded};
use super::top_k::{best, key, number};
use super::{check_below, grain, take_row};
use crate::ScoreFunction;
use ferrotron_tensor::{Float, Result, Threads};

/// Tokens of an auxiliary loss: `logits [T, E]` and the segment of each token, negative for padding.
#[derive(Clone, Copy, Debug)]
pub struct Statistics<'a, T> {
    /// `[T, E]`
    pub logits: &'a [T],
    /// `[T]`
    pub segments: &'a [i32],
    /// E
    pub experts: usize,
    /// Top-k of a token.
    pub k: usize,
    /// Score function.
    pub score: ScoreFunction,
}

/// `sums [S, E]` of normalized scores, and `counts [S, E]` of appearances in a token's top-k.
pub fn balance<T: Float>(
    threads: &Threads,
    of: Statistics<T>,
    sums: &mut [f32],
    counts: &mut [i64],
) -> Result<()> {
    let (experts, segments) = (of.experts, sums.len() / of.experts);
    check_below("balance", "segment", of.segments, segments)?;
    let mut rows: Vec<Vec<usize>> = vec![Vec::new(); segments];
    for (t, segment) in of.segments.iter().enumerate().filter(|(_, s)| **s >= 0) {
        rows[*segment as usize].push(t);
    }
    let pieces: Vec<(usize, &[usize])> = rows
        .iter()
        .enumerate()
        .flat_map(|(s, rows)| rows.chunks(grain(experts)).map(move |r| (s, r)))
        .collect();
    let mut parts = vec![(0f64, 0i64); pieces.len() * experts];
    threads.parallel_chunks(&mut parts, experts, &|i, part| {
        let (mut x, mut y, mut keys) = (vec![0f32; experts], vec![0f32; experts], Vec::new());
        for t in pieces[i].1 {
            take_row(of.logits, *t, &mut x);
            normalized(of.score, &x, &mut y);
            part.iter_mut().zip(&y).for_each(|(p, y)| p.0 += f64::from(*y));
            keys.clear();
            keys.extend(x.iter().enumerate().map(|(e, x)| key(*x, e)));
            best(&mut keys, of.k).iter().for_each(|key| part[number(*key)].1 += 1);
        }
    });
    let mut totals = vec![0f64; sums.len()];
    counts.fill(0);
    for ((segment, _), part) in pieces.iter().zip(parts.chunks(experts)) {
        for (e, (sum, count)) in part.iter().enumerate() {
            totals[segment * experts + e] += sum;
            counts[segment * experts + e] += count;
        }
    }
    sums.iter_mut().zip(totals).for_each(|(to, total)| *to = total as f32);
    Ok(())
}

/// `dlogits +=` the gradient of `Σ weights[segment, e]·score`; `weights [S, E]`.
pub fn aux_loss_backward<T: Float>(
    threads: &Threads,
    of: Statistics<T>,
    weights: &[f32],
    dlogits: &mut [T],
) -> Result<()> {
    let experts = of.experts;
    check_below("aux_loss_backward", "segment", of.segments, weights.len() / experts)?;
    let rows = grain(experts);
    threads.parallel_chunks(dlogits, rows * experts, &|piece, dlogits| {
        let (mut x, mut y) = (vec![0f32; experts], vec![0f32; experts]);
        for (t, dlogits) in dlogits.chunks_mut(experts).enumerate() {
            let t = piece * rows + t;
            let Ok(segment) = usize::try_from(of.segments[t]) else { continue };
            let w = &weights[segment * experts..][..experts];
            take_row(of.logits, t, &mut x);
            let sum = normalized(of.score, &x, &mut y);
            let mean = w.iter().zip(&y).map(|(w, y)| f64::from(*w) * f64::from(*y)).sum::<f64>() as f32;
            for (e, to) in dlogits.iter_mut().enumerate() {
                let from_mean = w[e] - mean;
                let d = match of.score.is_softmax() {
                    true => y[e] * from_mean,
                    false => from_mean / sum * of.score.slope(x[e]),
                };
                *to = T::from_f32(to.to_f32() + unless_excluded(x[e], d));
            }
        }
    });
    Ok(())
}

/// Statistics of [`balance`], summed over the micro-batches and ranks that share a loss.
#[derive(Clone, Copy, Debug)]
pub struct ExpertStats<'a> {
    /// Sums of normalized scores `[S, E]`.
    pub sums: &'a [f32],
    /// Tokens per expert `[S, E]`.
    pub counts: &'a [i64],
    /// E
    pub experts: usize,
    /// Steps that `counts` is summed over; none means 1.
    pub steps: Option<f32>,
    /// Segments weigh by their own tokens, instead of each like the mean.
    pub by_tokens: bool,
}

/// See [`crate::AuxLossWeights`]; `weights [S, E]`. Returns the loss.
pub fn aux_loss_weights(factor: f32, k: usize, stats: ExpertStats<'_>, weights: &mut [f32]) -> f32 {
    let ExpertStats { sums, counts, experts, steps, by_tokens } = stats;
    let (steps, k) = (f64::from(steps.unwrap_or(1.0)), k as f64);
    let tokens = |counts: &[i64]| counts.iter().sum::<i64>() as f64 / steps / k;
    let all = tokens(counts);
    let mean = all / (counts.len() / experts) as f64;
    let mut loss = 0f64;
    let segments = weights.chunks_mut(experts).zip(counts.chunks(experts)).zip(sums.chunks(experts));
    for ((weights, counts), sums) in segments {
        let squared = if by_tokens { all * tokens(counts) } else { mean * mean };
        let each = if squared == 0.0 { 0.0 } else { f64::from(factor) * experts as f64 / (k * squared) };
        for ((w, count), sum) in weights.iter_mut().zip(counts).zip(sums) {
            let weight = each * (*count as f64 / steps);
            *w = weight as f32;
            loss += weight * f64::from(*sum);
        }
    }
    loss as f32
}

/// `bias[e] += rate·sign(mean(counts) − counts[e])`; then the counts are zeroed.
pub fn update_expert_bias(rate: f32, counts: &mut [i64], bias: &mut [f32]) {
    let (total, n) = (counts.iter().sum::<i64>(), counts.len() as i64);
    for (bias, count) in bias.iter_mut().zip(counts.iter()) {
        // Compared in integers, since a mean would be rounded.
        *bias += match total.cmp(&(count * n)) {
            std::cmp::Ordering::Greater => rate,
            std::cmp::Ordering::Equal => 0.0,
            std::cmp::Ordering::Less => -rate,
        };
    }
    counts.fill(0);
}
