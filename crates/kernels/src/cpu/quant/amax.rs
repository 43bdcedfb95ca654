//! Amax: the largest absolute value of a tensor, row or column.

use crate::cpu::rows::RowsView;
use crate::cpu::{CpuContext, multiversion};
use ferrotron_tensor::{Float, Result};

/// Bits of `|x|`, which order like the value; 0 for NaN, so that amax ignores NaN.
#[inline(always)]
pub(super) fn magnitude(x: f32) -> u32 {
    let bits = x.to_bits() & 0x7fff_ffff;
    if bits > 0x7f80_0000 { 0 } else { bits }
}

/// `max |x|` over all rows; NaN is ignored, and the amax of an empty tensor is 0.
pub fn amax<T: Float>(cpu: CpuContext, x: RowsView<'_, T>) -> Result<f32> {
    x.check("amax", "x")?;
    let RowsView { data, rows } = x;
    if rows.elements() == 0 {
        return Ok(0.0);
    }
    let grain = rows.grain();
    let mut parts = vec![0u32; rows.outer.div_ceil(grain)];
    let mut pieces: Vec<_> = rows.cut(data, grain).zip(&mut parts).collect();
    cpu.threads.parallel_chunks(&mut pieces, 1, &|i, pieces| {
        for (x, amax) in pieces {
            let view = rows.piece(i * grain, grain);
            for row in 0..view.count() {
                **amax = (**amax).max(amax_row(cpu.isa, view.row(x, row)));
            }
        }
    });
    Ok(f32::from_bits(parts.into_iter().max().unwrap_or(0)))
}

multiversion! {
    /// Bits of the amax of a row.
    pub(crate) fn amax_row<T: Float>(x: &[T]) -> u32 {
        let mut amax = 0;
        for x in x {
            amax = amax.max(magnitude(x.to_f32()));
        }
        amax
    }
}

multiversion! {
    /// Updates the bits of each column's amax by one more row.
    pub(super) fn amax_columns<T: Float>(x: &[T], amax: &mut [u32]) {
        for (amax, x) in amax.iter_mut().zip(x) {
            *amax = (*amax).max(magnitude(x.to_f32()));
        }
    }
}
