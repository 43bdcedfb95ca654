//! Sinkhorn normalization.

use super::grain;
use ferrotron_tensor::{Float, Threads};

const EPS: f64 = 1e-8;
const TOLERANCE: f64 = 1e-4;
const ROUNDS: usize = 10_000;

/// `out [T, E] = d1·exp(logits)·d0`; see [`crate::RouterKernels::sinkhorn`]. Factors are f32, sums f64.
pub fn sinkhorn<T: Float>(threads: &Threads, logits: &[T], experts: usize, out: &mut [f32]) {
    let (tokens, rows) = (out.len() / experts, grain(experts));
    threads.parallel_chunks(out, rows * experts, &|piece, out| {
        let from = &logits[piece * rows * experts..];
        out.iter_mut().zip(from).for_each(|(c, x)| *c = x.to_f32().exp());
    });
    let (mut d0, mut d1) = (vec![0f32; tokens], vec![1f32; experts]);
    let cost: &[f32] = out;
    for _ in 0..ROUNDS {
        let mut parts = vec![0f64; tokens.div_ceil(rows) * experts];
        let mut pieces: Vec<_> = d0.chunks_mut(rows).zip(parts.chunks_mut(experts)).collect();
        threads.parallel_chunks(&mut pieces, 1, &|piece, pieces| {
            for (d0, part) in pieces {
                let rows = cost[piece * rows * experts..].chunks(experts);
                for (d0, row) in d0.iter_mut().zip(rows) {
                    let sum: f64 = row.iter().zip(&d1).map(|(c, d)| f64::from(c * d)).sum();
                    *d0 = (1.0 / (tokens as f64 * (sum + EPS))) as f32;
                    part.iter_mut().zip(row).for_each(|(p, c)| *p += f64::from(*d0 * c));
                }
            }
        });
        let mut change = 0f64;
        for (e, d1) in d1.iter_mut().enumerate() {
            let sum: f64 = parts.iter().skip(e).step_by(experts).sum();
            let new = (1.0 / (experts as f64 * (sum + EPS))) as f32;
            change += f64::from((new - *d1).abs());
            *d1 = new;
        }
        // The negated comparison also stops at NaN.
        let far = change / experts as f64 > TOLERANCE;
        if !far {
            break;
        }
    }
    threads.parallel_chunks(out, rows * experts, &|piece, out| {
        for (row, d0) in out.chunks_mut(experts).zip(&d0[piece * rows..]) {
            row.iter_mut().zip(&d1).for_each(|(c, d1)| *c = d1 * *c * d0);
        }
    });
}
