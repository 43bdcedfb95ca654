//! Reductions over rows in two stages, within chunks of rows and then over chunks, in an order fixed by the shape.

use super::math::{LANES, fold};
use super::rows::{PIECE, Rows};
use super::{CpuContext, multiversion};
use ferrotron_tensor::{Float, Result};

/// Upper bound of partial rows, which keeps them small compared with the input.
const MAX_PARTS: usize = 64;

/// Groups of `rows` per chunk where every chunk has a partial row.
pub(super) fn part_grain(rows: &Rows) -> usize {
    rows.grain().max(rows.outer.div_ceil(MAX_PARTS))
}

/// `out (+)= Σ parts` over `[chunks, width]`, in order of the chunks.
pub(super) fn sum_parts(cpu: CpuContext, parts: &[f32], out: &mut [f32], accumulate: bool) {
    let width = out.len();
    cpu.threads.parallel_chunks(out, PIECE, &|i, out| {
        let mut total = vec![0f32; out.len()];
        for part in parts.chunks(width.max(1)) {
            add_row(cpu.isa, &part[i * PIECE..][..total.len()], &mut total);
        }
        if accumulate {
            add_row(cpu.isa, &total, out);
        } else {
            out.copy_from_slice(&total);
        }
    });
}

/// Column sums (bias gradient): `out[j] (+)= Σᵢ x[i, j]`, x is `rows`, out is f32 `[width]`.
pub fn column_sum<T: Float>(
    cpu: CpuContext,
    x: &[T],
    rows: Rows,
    out: &mut [f32],
    accumulate: bool,
) -> Result<()> {
    rows.check("column_sum", "x", x.len())?;
    super::rows::check_len("column_sum", "out", out.len(), rows.width)?;
    let grain = part_grain(&rows);
    let mut parts = vec![0f32; rows.outer.div_ceil(grain) * rows.width];
    if !parts.is_empty() {
        let mut pieces: Vec<_> = rows.cut(x, grain).zip(parts.chunks_mut(rows.width)).collect();
        cpu.threads.parallel_chunks(&mut pieces, 1, &|i, pieces| {
            for (x, part) in pieces {
                let view = rows.piece(i * grain, grain);
                for row in 0..view.count() {
                    add_row(cpu.isa, view.row(x, row), part);
                }
            }
        });
    }
    sum_parts(cpu, &parts, out, accumulate);
    Ok(())
}

/// `Σ a·b` of f32 vectors: in f32 within fixed chunks, in f64 over the chunks, in order.
pub fn dot(cpu: CpuContext, a: &[f32], b: &[f32]) -> Result<f32> {
    super::rows::check_len("dot", "b", b.len(), a.len())?;
    let mut parts = vec![0f32; a.len().div_ceil(PIECE)];
    cpu.threads.parallel_chunks(&mut parts, 1, &|i, part| {
        let (from, to) = (i * PIECE, ((i + 1) * PIECE).min(a.len()));
        part[0] = dot_piece(cpu.isa, &a[from..to], &b[from..to]);
    });
    Ok(parts.iter().map(|p| f64::from(*p)).sum::<f64>() as f32)
}

/// `Σ a·b` in f32: parallel lanes, then over the lanes.
#[inline(always)]
pub(super) fn lane_dot<A: Float, B: Float>(a: &[A], b: &[B]) -> f32 {
    let mut lanes = [0.0; LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        for l in 0..LANES {
            lanes[l] += a[l].to_f32() * b[l].to_f32();
        }
    }
    for (lane, (a, b)) in lanes.iter_mut().zip(a_rest.iter().zip(b_rest)) {
        *lane += a.to_f32() * b.to_f32();
    }
    fold(lanes)
}

multiversion! {
    fn dot_piece(a: &[f32], b: &[f32]) -> f32 {
        lane_dot(a, b)
    }
}

multiversion! {
    fn add_row<T: Float>(x: &[T], sum: &mut [f32]) {
        for (sum, x) in sum.iter_mut().zip(x) {
            *sum += x.to_f32();
        }
    }
}
