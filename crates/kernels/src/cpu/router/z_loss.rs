//! Router z-loss: the squared logsumexp of the logits.

use super::scores::{largest_and_sum, unless_excluded};
use super::{grain, take_row};
use ferrotron_tensor::{Float, Threads};

/// `(Σ_t logsumexp², tokens)` over tokens of `logits [T, E]` that are not padding.
pub fn z_loss<T: Float>(threads: &Threads, logits: &[T], segments: &[i32], experts: usize) -> [f64; 2] {
    let rows = grain(experts);
    let mut parts = vec![[0f64; 2]; segments.len().div_ceil(rows)];
    threads.parallel_chunks(&mut parts, 1, &|piece, part| {
        let mut x = vec![0f32; experts];
        for t in (piece * rows..segments.len().min((piece + 1) * rows)).filter(|t| segments[*t] >= 0) {
            take_row(logits, t, &mut x);
            let (most, sum) = largest_and_sum(&x);
            let lse = f64::from(most + sum.ln());
            part[0] = [part[0][0] + lse * lse, part[0][1] + 1.0];
        }
    });
    parts.iter().fold([0.0; 2], |sum, p| [sum[0] + p[0], sum[1] + p[1]])
}

/// `dlogits += scale·2·logsumexp·softmax` on these tokens.
pub fn z_loss_backward<T: Float>(
    threads: &Threads,
    scale: f32,
    logits: &[T],
    segments: &[i32],
    experts: usize,
    dlogits: &mut [T],
) {
    let rows = grain(experts);
    threads.parallel_chunks(dlogits, rows * experts, &|piece, dlogits| {
        let mut x = vec![0f32; experts];
        for (t, dlogits) in dlogits.chunks_mut(experts).enumerate() {
            let t = piece * rows + t;
            if segments[t] < 0 {
                continue;
            }
            take_row(logits, t, &mut x);
            let (most, sum) = largest_and_sum(&x);
            let each = scale * 2.0 * (most + sum.ln());
            for (to, x) in dlogits.iter_mut().zip(&x) {
                let d = each * ((x - most).exp() / sum);
                *to = T::from_f32(to.to_f32() + unless_excluded(*x, d));
            }
        }
    });
}
