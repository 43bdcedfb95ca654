//! Gradient norms, clipping, unscaling and zero counting over lists of tensors. Partial results are f64 per fixed chunk,
//! summed in order.

use super::rows::PIECE;
use super::{CpuContext, multiversion};
use ferrotron_tensor::Float;

/// Norm type.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum NormType {
    /// `Σ |x|`
    L1,
    /// `√ Σ x²`
    L2,
    /// `(Σ |x|ᵖ)^(1/p)`
    Power(f64),
    /// `max |x|`; NaN if there is one.
    Max,
}

impl NormType {
    /// The norm from the total over all ranks: `Σ|x|`, `Σx²`, `Σ|x|ᵖ` or `max|x|`, combined over ranks by sum or maximum.
    pub fn finish(self, total: f64) -> f64 {
        match self {
            NormType::L2 => total.sqrt(),
            NormType::Power(p) => libm::pow(total, 1.0 / p),
            NormType::L1 | NormType::Max => total,
        }
    }
}

/// `Σ|x|`, `Σx²`, `Σ|x|ᵖ` or `max|x|` over all tensors: the quantity that ranks all-reduce before [`NormType::finish`].
pub fn norm_total<T: Float>(cpu: CpuContext, kind: NormType, list: &[&[T]]) -> f64 {
    let pieces: Vec<&[T]> = list.iter().flat_map(|x| x.chunks(PIECE)).collect();
    let mut parts = vec![0f64; pieces.len()];
    cpu.threads.parallel_chunks(&mut parts, 1, &|i, part| {
        part[0] = match kind {
            NormType::L1 => absolute_sum(cpu.isa, pieces[i]),
            NormType::L2 => grad_square_sum(cpu.isa, pieces[i]),
            NormType::Power(p) => pieces[i].iter().map(|x| libm::pow(f64::from(x.to_f32().abs()), p)).sum(),
            NormType::Max => f64::from(absolute_max(cpu.isa, pieces[i])),
        };
    });
    match kind {
        NormType::Max => parts.into_iter().fold(0.0, |a, b| if a >= b || a.is_nan() { a } else { b }),
        _ => parts.into_iter().sum(),
    }
}

/// `max_norm / (norm + 1e-6)` where that is below 1, else 1; NaN for a NaN norm.
pub fn clip_factor(norm: f64, max_norm: f64) -> f32 {
    let factor = max_norm / (norm + 1e-6);
    if factor >= 1.0 { 1.0 } else { factor as f32 }
}

/// `x *= factor` in every tensor; returns whether any element was infinite or NaN before.
pub fn scale_and_check<T: Float>(cpu: CpuContext, list: Vec<&mut [T]>, factor: f32) -> bool {
    let mut pieces: Vec<(&mut [T], bool)> =
        list.into_iter().flat_map(|x| x.chunks_mut(PIECE)).map(|x| (x, false)).collect();
    cpu.threads.parallel_chunks(&mut pieces, 1, &|_, pieces| {
        for (x, bad) in pieces {
            *bad = scale_piece(cpu.isa, x, factor);
        }
    });
    pieces.iter().any(|(_, bad)| *bad)
}

/// Number of zero elements.
pub fn count_zeros<T: Float>(cpu: CpuContext, list: &[&[T]]) -> usize {
    let pieces: Vec<&[T]> = list.iter().flat_map(|x| x.chunks(PIECE)).collect();
    let mut parts = vec![0usize; pieces.len()];
    cpu.threads.parallel_chunks(&mut parts, 1, &|i, part| part[0] = zeros(cpu.isa, pieces[i]) as usize);
    parts.iter().sum()
}

const LANES: usize = 16;

#[inline(always)]
fn fold(lanes: [f64; LANES]) -> f64 {
    let mut total = 0.0;
    for lane in lanes {
        total += lane;
    }
    total
}

multiversion! {
    /// `Σ x²` in f64.
    pub(super) fn grad_square_sum<T: Float>(x: &[T]) -> f64 {
        let mut lanes = [0f64; LANES];
        let (blocks, rest) = x.as_chunks::<LANES>();
        for block in blocks {
            for (lane, x) in lanes.iter_mut().zip(block) {
                let x = f64::from(x.to_f32());
                *lane += x * x;
            }
        }
        for (lane, x) in lanes.iter_mut().zip(rest) {
            let x = f64::from(x.to_f32());
            *lane += x * x;
        }
        fold(lanes)
    }
}

multiversion! {
    fn absolute_sum<T: Float>(x: &[T]) -> f64 {
        let mut lanes = [0f64; LANES];
        let (blocks, rest) = x.as_chunks::<LANES>();
        for block in blocks {
            for (lane, x) in lanes.iter_mut().zip(block) {
                *lane += f64::from(x.to_f32().abs());
            }
        }
        for (lane, x) in lanes.iter_mut().zip(rest) {
            *lane += f64::from(x.to_f32().abs());
        }
        fold(lanes)
    }
}

multiversion! {
    // Magnitudes order like their bits, with NaN above infinity, so the integer maximum keeps NaN.
    fn absolute_max<T: Float>(x: &[T]) -> f32 {
        let mut largest = 0u32;
        for x in x {
            largest = largest.max(x.to_f32().to_bits() & 0x7fff_ffff);
        }
        f32::from_bits(largest)
    }
}

multiversion! {
    fn scale_piece<T: Float>(x: &mut [T], factor: f32) -> bool {
        let mut largest = 0u32;
        for x in x {
            let before = x.to_f32();
            largest = largest.max(before.to_bits() & 0x7fff_ffff);
            *x = T::from_f32(before * factor);
        }
        largest >= f32::INFINITY.to_bits()
    }
}

multiversion! {
    fn zeros<T: Float>(x: &[T]) -> u32 {
        let mut count = 0u32;
        for x in x {
            count += u32::from(x.to_f32() == 0.0);
        }
        count
    }
}
