//! Quantile balancing.

use super::top_k::{best, key, number, order};
use super::{grain, take_row};
use ferrotron_tensor::{Float, Threads};

/// `estimate [E] +=` the `place`-th largest value (from 0) of each column of `logits − alpha`, where alpha is the (k+1)-th
/// largest of a row of `logits − beta`.
pub fn quantiles<T: Float>(
    threads: &Threads,
    k: usize,
    place: usize,
    logits: &[T],
    beta: &[f32],
    estimate: &mut [f32],
) {
    let experts = beta.len();
    let rows = grain(experts);
    let mut alpha = vec![0f32; logits.len() / experts];
    if alpha.is_empty() {
        return;
    }
    threads.parallel_chunks(&mut alpha, rows, &|piece, alpha| {
        let (mut x, mut keys) = (vec![0f32; experts], Vec::with_capacity(experts));
        for (t, alpha) in alpha.iter_mut().enumerate() {
            take_row(logits, piece * rows + t, &mut x);
            x.iter_mut().zip(beta).for_each(|(x, b)| *x -= b);
            keys.clear();
            keys.extend(x.iter().enumerate().map(|(e, x)| key(*x, e)));
            *alpha = best(&mut keys, k + 1).last().map_or(0.0, |key| x[number(*key)]);
        }
    });
    threads.parallel_chunks(estimate, 1, &|e, estimate| {
        let column = logits.iter().skip(e).step_by(experts).zip(&alpha);
        let mut values: Vec<f32> = column.map(|(x, a)| x.to_f32() - a).collect();
        let (_, value, _) = values.select_nth_unstable_by(place, |a, b| order(*b).cmp(&order(*a)));
        estimate[0] += *value;
    });
}
