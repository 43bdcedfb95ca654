//! Packing of A: blocks of 32 rows.

use super::{mask, pair};
use crate::cpu::gemm::transpose::{Words, transpose_part};
use ferrotron_tensor::bf16;
use std::arch::x86_64::*;

/// Incremental packing of a block of A: up to 32 rows of `a[m, k]` (k contiguous, rows `lda` elements apart), or of its transpose
/// `a[k, m]` (m contiguous), into 32 zero-padded rows of `ldo` elements (a multiple of 32, at least `k`).
pub(crate) struct Left {
    /// First element and leading dimension.
    pub(crate) a: *const bf16,
    pub(crate) lda: usize,
    /// Whether it is stored transposed.
    pub(crate) trans: bool,
    /// Rows, at most 32, and columns.
    pub(crate) m: usize,
    pub(crate) k: usize,
    /// Destination, 64-byte aligned, of 32 rows of `k.div_ceil(32) * 32`.
    pub(crate) out: *mut bf16,
    pub(crate) ldo: usize,
    /// Position of the next unit: index of k, and row of the block or unit of the step.
    pub(crate) at: usize,
    pub(crate) unit: usize,
}

/// Packs a block of A, `a[m, k]`, at once; see [`Left`].
///
/// # Safety
/// The memory is as [`Left`] says; the CPU has AVX-512 F/BW/DQ/VL.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) unsafe fn left(a: *const bf16, lda: usize, m: usize, k: usize, out: *mut bf16, ldo: usize) {
    // SAFETY: the caller's promise.
    unsafe { whole_left(Left { a, lda, trans: false, m, k, out, ldo, at: 0, unit: 0 }) };
}

/// As [`left`], from the transpose `a[k, m]`.
///
/// # Safety
/// As for [`left`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) unsafe fn left_transposed(
    a: *const bf16,
    lda: usize,
    m: usize,
    k: usize,
    out: *mut bf16,
    ldo: usize,
) {
    // SAFETY: the caller's promise.
    unsafe { whole_left(Left { a, lda, trans: true, m, k, out, ldo, at: 0, unit: 0 }) };
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn whole_left(mut block: Left) {
    let mut pairs = [Words([0; 256]), Words([0; 256])];
    // SAFETY: the caller's promise.
    unsafe { block.advance(&mut pairs, usize::MAX) };
}

/// Units of one step of a transposed block: 16 pairs of rows to interleave, then 2 transposes in 4 parts each.
const TRANSPOSED_UNITS: usize = 24;

impl Left {
    /// Total number of units.
    pub(crate) fn units(&self) -> usize {
        self.k.div_ceil(32) * if self.trans { TRANSPOSED_UNITS } else { 32 }
    }

    /// Packs the next `units` units, at most to the end. `pairs` must be the same from call to call.
    ///
    /// # Safety
    /// The memory is as the fields say; the CPU has AVX-512 F/BW/DQ/VL.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(crate) unsafe fn advance(&mut self, pairs: &mut [Words; 2], units: usize) {
        // SAFETY: the caller's promise.
        unsafe { if self.trans { self.transposed(pairs, units) } else { self.plain(units) } }
    }

    /// Row after row, which hardware prefetchers follow.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn plain(&mut self, units: usize) {
        for _ in 0..units {
            if self.unit >= 32 || self.k == 0 {
                return;
            }
            let keep = if self.unit < self.m { mask((self.k - self.at).min(32)) } else { 0 };
            // SAFETY: masked to the elements that exist.
            unsafe {
                let row = _mm512_maskz_loadu_epi16(
                    keep,
                    self.a.wrapping_add(self.unit * self.lda + self.at).cast(),
                );
                _mm512_store_si512(self.out.add(self.unit * self.ldo + self.at).cast(), row);
            }
            self.at += 32;
            if self.at >= self.k {
                (self.unit, self.at) = (self.unit + 1, 0);
            }
        }
    }

    /// Step after step of k.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn transposed(&mut self, pairs: &mut [Words; 2], units: usize) {
        for _ in 0..units {
            if self.at >= self.k {
                return;
            }
            let (at, unit) = (self.at, self.unit);
            // SAFETY: rows at.. of `a` exist (`k - at` of them); 32 rows of 32 are written at column `at`.
            unsafe {
                if unit < 16 {
                    let a = self.a.add(at * self.lda);
                    // Rows are far apart, beyond hardware prefetching.
                    for row in [32 + 2 * unit, 33 + 2 * unit] {
                        _mm_prefetch::<_MM_HINT_T0>(a.wrapping_add(row * self.lda).cast());
                    }
                    let [low, high] = pairs.each_mut().map(|w| w.0.as_mut_ptr());
                    let left = (self.k - at).saturating_sub(2 * unit);
                    pair(
                        a.wrapping_add(2 * unit * self.lda),
                        self.lda,
                        left,
                        self.m,
                        low.add(16 * unit),
                        high.add(16 * unit),
                    );
                } else {
                    let (half, part) = ((unit - 16) / 4, unit % 4);
                    let to = self.out.add(16 * half * self.ldo + at);
                    transpose_part(pairs[half].0.as_ptr().cast(), 64, to.cast(), 2 * self.ldo, part);
                }
            }
            self.unit += 1;
            if self.unit == TRANSPOSED_UNITS {
                (self.at, self.unit) = (at + 32, 0);
            }
        }
    }
}
