//! Moving tokens into and out of scratch memory.

use super::padded;
use super::rounding::round;
use crate::cpu::{Isa, multiversion};
use ferrotron_tensor::{DType, Float};

multiversion! {
    /// `rows` tokens of `cols` channels, `stride` apart in `src`, to an f32 tile `[padded(rows), padded(cols)]`
    /// with zeros in the padding.
    pub(super) fn widen<T: Float>(src: &[T], stride: usize, rows: usize, cols: usize, tile: &mut [f32]) {
        let ld = padded(cols);
        for r in 0..rows {
            let (data, rest) = tile[r * ld..(r + 1) * ld].split_at_mut(cols);
            for (to, from) in data.iter_mut().zip(&src[r * stride..r * stride + cols]) {
                *to = from.to_f32();
            }
            rest.fill(0.0);
        }
        tile[rows * ld..padded(rows) * ld].fill(0.0);
    }
}

/// `to = from * factor`, rounded.
pub(super) fn store_scaled<T: Float>(isa: Isa, from: &[f32], factor: f32, to: &mut [T]) {
    if T::DTYPE == DType::BF16 {
        return round(isa, from, factor, bytemuck::cast_slice_mut(to));
    }
    store_scaled_any(isa, from, factor, to);
}

multiversion! {
    fn store_scaled_any<T: Float>(from: &[f32], factor: f32, to: &mut [T]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = T::from_f32(from * factor);
        }
    }
}

multiversion! {
    /// `to += from`.
    pub(super) fn accumulate(from: &[f32], to: &mut [f32]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to += from;
        }
    }
}

multiversion! {
    /// Σ a_c b_c, in 32 partial sums that are then added in order.
    pub(super) fn dot<T: Float>(a: &[T], b: &[T]) -> f32 {
        let mut sums = [0.0f32; 32];
        let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<32>(), b.as_chunks::<32>());
        for (a, b) in a.iter().zip(b) {
            for i in 0..32 {
                sums[i] += a[i].to_f32() * b[i].to_f32();
            }
        }
        for ((sum, a), b) in sums.iter_mut().zip(a_rest).zip(b_rest) {
            *sum += a.to_f32() * b.to_f32();
        }
        let mut half = 16;
        while half > 0 {
            for i in 0..half {
                sums[i] += sums[i + half];
            }
            half /= 2;
        }
        sums[0]
    }
}
