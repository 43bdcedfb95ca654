//! Merging of partial attention results (ring attention).

use super::rows::{PIECE, check_len};
use super::{CpuContext, multiversion};
use ferrotron_tensor::{Float, Result};

/// Merges `part [rows, width]` with `part_lse [rows]` into `out` and `lse` of the same shapes.
///
/// With `x = e^−|lse − part_lse|` the result with the larger lse has weight `1/(1+x)` and the other `x/(1+x)`: the exponent is
/// never positive, and the weights sum to 1 for any magnitude of the log-sum-exps.
pub fn merge<T: Float>(
    cpu: CpuContext,
    width: usize,
    out: &mut [f32],
    lse: &mut [f32],
    part: &[T],
    part_lse: &[f32],
) -> Result<()> {
    check_len("merge", "out", out.len(), lse.len() * width)?;
    check_len("merge", "part", part.len(), out.len())?;
    check_len("merge", "part_lse", part_lse.len(), lse.len())?;
    let grain = (PIECE / width.max(1)).max(1);
    let rows = out.chunks_mut((grain * width).max(1)).zip(lse.chunks_mut(grain));
    let mut pieces: Vec<_> = rows.collect();
    cpu.threads.parallel_chunks(&mut pieces, 1, &|i, pieces| {
        for (out, lse) in pieces {
            let first = i * grain;
            for (r, (out, lse)) in out.chunks_mut(width).zip(lse.iter_mut()).enumerate() {
                let (a, b) = (*lse, part_lse[first + r]);
                if b == f32::NEG_INFINITY {
                    continue;
                }
                let x = (-(a - b).abs()).exp();
                let (large, small) = (1.0 / (1.0 + x), x / (1.0 + x));
                let (old, new) = if a >= b { (large, small) } else { (small, large) };
                *lse = a.max(b) + x.ln_1p();
                mix(cpu.isa, out, old, &part[(first + r) * width..][..width], new);
            }
        }
    });
    Ok(())
}

multiversion! {
    fn mix<T: Float>(out: &mut [f32], old: f32, part: &[T], new: f32) {
        for (out, part) in out.iter_mut().zip(part) {
            *out = *out * old + part.to_f32() * new;
        }
    }
}
