//! The largest magnitude.

use crate::cpu::rows::Rows;
use crate::cpu::{Isa, multiversion};
use ferrotron_tensor::{Float, Result, Threads};

/// The pattern of `|x|`, which orders as the value does; zero for NaN, so that NaN is passed over.
#[inline(always)]
pub(super) fn magnitude(x: f32) -> u32 {
    let bits = x.to_bits() & 0x7fff_ffff;
    if bits > 0x7f80_0000 { 0 } else { bits }
}

/// `max |x|` over the rows; NaN is passed over, and of nothing it is zero.
pub fn amax<T: Float>(threads: &Threads, isa: Isa, x: &[T], rows: Rows) -> Result<f32> {
    rows.check("amax", "x", x.len())?;
    if rows.elements() == 0 {
        return Ok(0.0);
    }
    let grain = rows.grain();
    let mut parts = vec![0u32; rows.outer.div_ceil(grain)];
    let mut pieces: Vec<_> = rows.cut(x, grain).zip(&mut parts).collect();
    threads.parallel_chunks(&mut pieces, 1, &|i, pieces| {
        for (x, most) in pieces {
            let view = rows.piece(i * grain, grain);
            for row in 0..view.count() {
                **most = (**most).max(amax_row(isa, view.row(x, row)));
            }
        }
    });
    Ok(f32::from_bits(parts.into_iter().max().unwrap_or(0)))
}

multiversion! {
    /// The pattern of the largest magnitude.
    pub(crate) fn amax_row<T: Float>(x: &[T]) -> u32 {
        let mut most = 0;
        for x in x {
            most = most.max(magnitude(x.to_f32()));
        }
        most
    }
}

multiversion! {
    /// The patterns of the largest magnitudes of columns, row by row.
    pub(super) fn amax_columns<T: Float>(x: &[T], most: &mut [u32]) {
        for (most, x) in most.iter_mut().zip(x) {
            *most = (*most).max(magnitude(x.to_f32()));
        }
    }
}
