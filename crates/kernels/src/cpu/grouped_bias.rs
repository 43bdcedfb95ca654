//! Weighted bias per segment of rows.

use super::reduce::lane_dot;
use super::rows::PIECE;
use super::{CpuContext, multiversion};
use ferrotron_tensor::Float;
use std::ops::Range;

/// Rows per partial sum of a bias gradient, and columns per chunk.
const PART: usize = 64;
const COLUMNS: usize = 256;

/// Segment e is `counts[e]` rows from `offsets[e]`; offsets ascend.
#[derive(Clone, Copy, Debug)]
pub struct Segments<'a> {
    /// `[E + 1]`
    pub offsets: &'a [i32],
    /// `[E]`
    pub counts: &'a [i32],
}

impl Segments<'_> {
    /// Segment of a row, if any.
    pub(super) fn of(&self, row: usize) -> Option<usize> {
        let starts = &self.offsets[..self.counts.len()];
        let e = starts.partition_point(|o| i64::from(*o) <= row as i64).checked_sub(1)?;
        ((row as i64) < i64::from(starts[e]) + i64::from(self.counts[e])).then_some(e)
    }

    /// Rows of a segment, clamped to `n`.
    fn rows(&self, e: usize, n: usize) -> Range<usize> {
        let place = |i: i64| usize::try_from(i).unwrap_or(0).min(n);
        let start = i64::from(self.offsets[e]);
        place(start)..place(start + i64::from(self.counts[e])).max(place(start))
    }
}

/// `y[r] += weights[r]·bias[e]`: y is `[N, n]`, bias is `[E, n]`. Without weights, all are 1.
pub fn add_bias<T: Float>(
    cpu: CpuContext,
    segments: Segments,
    n: usize,
    bias: &[T],
    weights: Option<&[f32]>,
    y: &mut [T],
) {
    let grain = (PIECE / n.max(1)).max(1);
    cpu.threads.parallel_chunks(y, grain * n, &|i, y| {
        for (r, y) in (i * grain..).zip(y.chunks_exact_mut(n)) {
            if let Some(e) = segments.of(r) {
                add_weighted(cpu.isa, &bias[e * n..][..n], weights.map_or(1.0, |w| w[r]), y);
            }
        }
    });
}

/// `dbias[e] (+)= Σ_r weights[r]·dy[r]`: dbias is `[E, n]`. Partial sums of `PART` rows, then over them in order.
pub fn bias_gradient<T: Float>(
    cpu: CpuContext,
    segments: Segments,
    n: usize,
    weights: Option<&[f32]>,
    dy: &[T],
    (dbias, accumulate): (&mut [f32], bool),
) {
    let rows = dbias.chunks_mut(n.max(1)).enumerate();
    let mut pieces: Vec<_> = rows
        .flat_map(|(e, row)| row.chunks_mut(COLUMNS).enumerate().map(move |(c, out)| (e, c * COLUMNS, out)))
        .collect();
    cpu.threads.parallel_chunks(&mut pieces, 1, &|_, pieces| {
        for (e, column, out) in pieces {
            let mut total = [0f32; COLUMNS];
            let rows = segments.rows(*e, dy.len() / n.max(1));
            for first in rows.clone().step_by(PART) {
                let mut part = [0f32; COLUMNS];
                for r in first..rows.end.min(first + PART) {
                    add_weighted(
                        cpu.isa,
                        &dy[r * n + *column..][..out.len()],
                        weights.map_or(1.0, |w| w[r]),
                        &mut part[..out.len()],
                    );
                }
                add_weighted(cpu.isa, &part, 1.0, &mut total);
            }
            if !accumulate {
                out.fill(0.0);
            }
            add_weighted(cpu.isa, &total[..out.len()], 1.0, out);
        }
    });
}

/// `dweights[r] += <dy[r], bias[e]>`.
pub fn weight_gradient<T: Float>(
    cpu: CpuContext,
    segments: Segments,
    n: usize,
    bias: &[T],
    dy: &[T],
    dweights: &mut [f32],
) {
    let grain = (PIECE / n.max(1)).max(1);
    cpu.threads.parallel_chunks(dweights, grain, &|i, dweights| {
        for (r, out) in (i * grain..).zip(dweights) {
            if let Some(e) = segments.of(r) {
                *out += dot(cpu.isa, &dy[r * n..][..n], &bias[e * n..][..n]);
            }
        }
    });
}

multiversion! {
    fn add_weighted<X: Float, Y: Float>(x: &[X], weight: f32, y: &mut [Y]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = Y::from_f32(y.to_f32() + weight * x.to_f32());
        }
    }
}

multiversion! {
    fn dot<A: Float, B: Float>(a: &[A], b: &[B]) -> f32 {
        lane_dot(a, b)
    }
}
