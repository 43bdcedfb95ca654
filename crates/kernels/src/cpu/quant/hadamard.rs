//! Random Hadamard transform: spreads outliers over sixteen values before quantization.

use crate::cpu::rows::RowsView;
use crate::cpu::{CpuContext, multiversion};
use crate::quant::microscaling::BlockAxis;
use ferrotron_tensor::Float;

/// Points of the transform.
pub const POINTS: usize = 16;
/// Fixed random signs.
pub const SIGNS: [f32; POINTS] =
    [1.0, 1.0, 1.0, -1.0, 1.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0, 1.0, -1.0, 1.0, -1.0, -1.0];

/// Transforms every 16 neighbours of `x [r, c]` along the axis: `H·(signs∘v)` with H Sylvester's matrix over √16. The axis is
/// zero-padded to a multiple of 16; returns the values and the padded shape.
pub fn transform<T: Float>(cpu: CpuContext, along: BlockAxis, x: RowsView<'_, T>) -> (Vec<f32>, [usize; 2]) {
    let (r, c) = (x.rows.outer, x.rows.width);
    let shape = match along {
        BlockAxis::Rows => [r, c.next_multiple_of(POINTS)],
        BlockAxis::Cols => [r.next_multiple_of(POINTS), c],
    };
    let mut out = vec![0f32; shape[0] * shape[1]];
    cpu.threads.parallel_chunks(&mut out, POINTS * shape[1], &|i, band| {
        for (at, to) in band.chunks_mut(shape[1]).enumerate().filter(|(at, _)| i * POINTS + at < r) {
            to.iter_mut().zip(x.row(i * POINTS + at)).for_each(|(to, x)| *to = x.to_f32());
        }
        match along {
            BlockAxis::Rows => along_rows(cpu.isa, band, false),
            BlockAxis::Cols => along_columns(cpu.isa, band, shape[1], false),
        }
    });
    (out, shape)
}

/// Inverse transform in place: `signs∘(H·v)`, since H is its own inverse.
pub fn inverse_transform(cpu: CpuContext, along: BlockAxis, [_, c]: [usize; 2], x: &mut [f32]) {
    cpu.threads.parallel_chunks(x, POINTS * c, &|_, band| match along {
        BlockAxis::Rows => along_rows(cpu.isa, band, true),
        BlockAxis::Cols => along_columns(cpu.isa, band, c, true),
    });
}

multiversion! {
    /// Transforms every 16 consecutive values.
    fn along_rows(x: &mut [f32], back: bool) {
        for v in x.as_chunks_mut::<POINTS>().0 {
            if !back {
                v.iter_mut().zip(SIGNS).for_each(|(v, s)| *v *= s);
            }
            for half in [1, 2, 4, 8] {
                for i in (0..POINTS).filter(|i| i & half == 0) {
                    (v[i], v[i + half]) = (v[i] + v[i + half], v[i] - v[i + half]);
                }
            }
            for (v, s) in v.iter_mut().zip(SIGNS) {
                *v *= if back { 0.25 * s } else { 0.25 };
            }
        }
    }
}

multiversion! {
    /// Transforms the columns of sixteen rows of `c` values.
    fn along_columns(x: &mut [f32], c: usize, back: bool) {
        if !back {
            for (row, s) in x.chunks_mut(c).zip(SIGNS) {
                row.iter_mut().for_each(|v| *v *= s);
            }
        }
        for half in [1, 2, 4, 8] {
            for i in (0..POINTS).filter(|i| i & half == 0) {
                let (low, high) = x.split_at_mut((i + half) * c);
                for (a, b) in low[i * c..][..c].iter_mut().zip(&mut high[..c]) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
        }
        for (row, s) in x.chunks_mut(c).zip(SIGNS) {
            let factor = if back { 0.25 * s } else { 0.25 };
            row.iter_mut().for_each(|v| *v *= factor);
        }
    }
}
