//! Packing of B: VNNI panels of 32 columns.

use super::{STEP, mask, pair};
use crate::cpu::gemm::transpose::{Words, transpose};
use ferrotron_tensor::bf16;
use std::arch::x86_64::*;

/// Packs row-major `b[k, n]` (rows `ldb` elements apart, n contiguous, `n <= 32`) into a VNNI panel of
/// `k.div_ceil(32)` steps at `out`; columns from `n` and rows from `k` become zero.
///
/// # Safety
/// `b` is valid for reads of those rows, `out` for writes of `k.div_ceil(32) * STEP` elements and 64-byte
/// aligned; the CPU has AVX-512 F/BW/DQ/VL.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) unsafe fn rows(b: *const bf16, ldb: usize, k: usize, n: usize, out: *mut bf16) {
    debug_assert!(n <= 32);
    // SAFETY: the caller's promise.
    unsafe { Right { b, ldb, trans: false, k, n, out, stride: 0, at: 0, col: 0 }.advance(usize::MAX) };
}

/// Packs k-contiguous `b[n, k]` (rows `ldb` elements apart, `n <= 32`), the transpose of B, into a zero-padded VNNI panel of
/// `k.div_ceil(32)` steps at `out`.
///
/// # Safety
/// As for [`rows`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) unsafe fn cols(b: *const bf16, ldb: usize, k: usize, n: usize, out: *mut bf16) {
    debug_assert!(n <= 32);
    for step in 0..k.div_ceil(32) {
        let kn = (k - step * 32).min(32);
        for half in 0..2 {
            let count = n.saturating_sub(half * 16).min(16);
            // SAFETY: `count` rows of `b` from row 16·half with `kn` elements from `step * 32`; half a step of
            // `out` is written. No address past the storage is formed where `count` is zero.
            unsafe {
                let to: *mut u32 = out.add(step * STEP + half * 512).cast();
                let from = b.wrapping_add(half * 16 * ldb + step * 32);
                if count == 16 && kn == 32 {
                    transpose(from.cast(), 2 * ldb, to, 64);
                } else {
                    let mut edge = Words([0; 256]);
                    for r in 0..count {
                        let row = _mm512_maskz_loadu_epi16(mask(kn), from.wrapping_add(r * ldb).cast());
                        _mm512_store_si512(edge.0.as_mut_ptr().add(16 * r).cast(), row);
                    }
                    transpose(edge.0.as_ptr().cast(), 64, to, 64);
                }
            }
        }
    }
}

/// Incremental packing of B: `b[k, n]` (rows `ldb` elements apart, n contiguous), or with `trans` its transpose `b[n, k]`, into
/// zero-padded panels of 32 columns that start `stride` elements apart.
pub(crate) struct Right {
    /// First element and leading dimension.
    pub(crate) b: *const bf16,
    pub(crate) ldb: usize,
    /// Whether it is stored transposed.
    pub(crate) trans: bool,
    /// Rows and columns.
    pub(crate) k: usize,
    pub(crate) n: usize,
    /// Destination, 64-byte aligned; each panel has `k.div_ceil(32)` steps.
    pub(crate) out: *mut bf16,
    pub(crate) stride: usize,
    /// Position of the next unit: index of k, and first column.
    pub(crate) at: usize,
    pub(crate) col: usize,
}

impl Right {
    /// Total number of units: a unit is a pair of rows of 32 columns or, if transposed, a panel.
    pub(crate) fn units(&self) -> usize {
        self.n.div_ceil(32) * if self.trans { 1 } else { self.k.div_ceil(32) * 16 }
    }

    /// Packs the next `units` units, at most to the end.
    ///
    /// # Safety
    /// The memory is as the fields say; the CPU has AVX-512 F/BW/DQ/VL.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(crate) unsafe fn advance(&mut self, units: usize) {
        for _ in 0..units {
            let (at, col) = (self.at, self.col);
            if col >= self.n || at >= self.k.next_multiple_of(32) {
                return;
            }
            let n = (self.n - col).min(32);
            // SAFETY: columns col.. of B, in their panel.
            unsafe {
                let out = self.out.add(col / 32 * self.stride);
                if self.trans {
                    cols(self.b.add(col * self.ldb), self.ldb, self.k, n, out);
                    self.col += 32;
                } else {
                    // Pairs of rows over all columns, which hardware prefetchers follow.
                    let low: *mut u32 = out.add(at / 32 * STEP).cast();
                    let (b, k) = (self.b.wrapping_add(at * self.ldb + col), self.k.saturating_sub(at));
                    pair(b, self.ldb, k, n, low.add(at % 32 * 8), low.add(256 + at % 32 * 8));
                    self.col += 32;
                    if self.col >= self.n {
                        (self.at, self.col) = (at + 2, 0);
                    }
                }
            }
        }
    }
}
