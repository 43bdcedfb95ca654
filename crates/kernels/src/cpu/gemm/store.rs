//! From finished f32 blocks to C: bias, old value, rounding.

use super::driver::TILE;
use crate::cpu::{Isa, multiversion};
use ferrotron_tensor::{DType, Float};

/// A finished block.
pub(super) type Sums = [f32; TILE * TILE];

/// Writes finished blocks with the instructions of this level.
#[derive(Clone, Copy)]
pub(super) struct Epilogue(pub(super) Isa);

impl Epilogue {
    /// `c[i][j] = sums[i][j] + bias[j] (+ c[i][j])` for `m x n` elements, rounded once.
    ///
    /// # Safety
    /// `c` is valid for `m` rows of `n` elements, `ldc` apart, and nothing else touches them meanwhile.
    pub(super) unsafe fn store<T: Float, C: Float>(
        self,
        sums: &Sums,
        m: usize,
        n: usize,
        bias: Option<&[T]>,
        accumulate: bool,
        c: *mut C,
        ldc: usize,
    ) {
        let mut wide = [0f32; TILE];
        if let Some(bias) = bias {
            for (w, b) in wide.iter_mut().zip(bias) {
                *w = b.to_f32();
            }
        }
        #[cfg(target_arch = "x86_64")]
        if self.0 == Isa::Amx && C::DTYPE == DType::BF16 {
            // SAFETY: C is bf16, the block is the caller's, and CPUs with AMX have AVX512-BF16 (`available`).
            return unsafe { x86::store_bf16(sums, m, n, &wide, accumulate, c.cast(), ldc) };
        }
        if n == TILE {
            full(self.0, sums, m, &wide, accumulate, c, ldc);
        } else {
            part(self.0, sums, m, n, &wide, accumulate, c, ldc);
        }
    }
}

/// One row; `out.len()` elements.
#[inline(always)]
fn row<C: Float>(out: &mut [C], sums: &[f32], bias: &[f32; TILE], accumulate: bool) {
    if accumulate {
        for ((o, s), b) in out.iter_mut().zip(sums).zip(bias) {
            *o = C::from_f32(s + b + o.to_f32());
        }
    } else {
        for ((o, s), b) in out.iter_mut().zip(sums).zip(bias) {
            *o = C::from_f32(s + b);
        }
    }
}

multiversion! {
    /// Whole rows, of a length the compiler knows. The pointer is as `store` asks.
    fn full<C: Float>(sums: &Sums, m: usize, bias: &[f32; TILE], accumulate: bool, c: *mut C, ldc: usize) {
        for (i, sums) in sums.as_chunks::<TILE>().0.iter().enumerate().take(m) {
            // SAFETY: row i < m of the block.
            let out = unsafe { &mut *c.add(i * ldc).cast::<[C; TILE]>() };
            row(out, sums, bias, accumulate);
        }
    }
}

multiversion! {
    /// Rows of `n`. The pointer is as `store` asks.
    fn part<C: Float>(sums: &Sums, m: usize, n: usize, bias: &[f32; TILE], accumulate: bool, c: *mut C, ldc: usize) {
        for (i, sums) in sums.as_chunks::<TILE>().0.iter().enumerate().take(m) {
            // SAFETY: row i < m of the block.
            let out = unsafe { std::slice::from_raw_parts_mut(c.add(i * ldc), n) };
            row(out, sums, bias, accumulate);
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Sums, TILE};
    use ferrotron_tensor::bf16;
    use std::arch::x86_64::*;

    /// `Epilogue::store` to bf16 with the CPU's own rounding (which, like AMX, flushes denormals to zero): this
    /// runs once for every block and must hide behind the matrix unit.
    ///
    /// # Safety
    /// As for `store`, and the CPU has AVX512-BF16.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    pub(super) unsafe fn store_bf16(
        sums: &Sums,
        m: usize,
        n: usize,
        bias: &[f32; TILE],
        accumulate: bool,
        c: *mut bf16,
        ldc: usize,
    ) {
        let columns = if n >= TILE { u32::MAX } else { (1 << n) - 1 };
        // SAFETY: 32 floats of bias and of each row of sums; C masked to the columns that exist.
        unsafe {
            let (bias_low, bias_high) =
                (_mm512_loadu_ps(bias.as_ptr()), _mm512_loadu_ps(bias.as_ptr().add(16)));
            for i in 0..m {
                let (from, to) = (sums.as_ptr().add(i * TILE), c.add(i * ldc).cast::<i16>());
                let mut low = _mm512_add_ps(_mm512_loadu_ps(from), bias_low);
                let mut high = _mm512_add_ps(_mm512_loadu_ps(from.add(16)), bias_high);
                if accumulate {
                    let old = _mm512_maskz_loadu_epi16(columns, to);
                    let widen = |half: __m256i| {
                        _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))
                    };
                    low = _mm512_add_ps(low, widen(_mm512_castsi512_si256(old)));
                    high = _mm512_add_ps(high, widen(_mm512_extracti64x4_epi64(old, 1)));
                }
                let rounded: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(high, low));
                if n >= TILE {
                    _mm512_storeu_si512(to.cast(), rounded);
                } else {
                    _mm512_mask_storeu_epi16(to, columns, rounded);
                }
            }
        }
    }
}
