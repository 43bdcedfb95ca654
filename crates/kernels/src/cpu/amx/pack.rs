//! Packing of AMX operands with AVX-512; partial tiles are zero-padded.
//!
//! Tiles of B have the VNNI layout, pairs of consecutive k: a panel of up to 32 columns is
//! `[k/32][2 column halves][16 k pairs][16 columns][2]` bf16. A pair of bf16 is one 32-bit word, so packing k-contiguous storage
//! is a transpose of 16x16 words, and packing a transposed A is the inverse transpose.

mod left;
mod right;
#[cfg(test)]
mod tests;

pub(crate) use left::{Left, left, left_transposed};
pub(crate) use right::{Right, cols, rows};

use ferrotron_tensor::bf16;
use std::arch::x86_64::*;

/// Elements of one packed step: 32 of k by 32 columns (or rows).
pub(crate) const STEP: usize = 32 * 32;

/// Mask of the first `n <= 32` lanes.
#[inline(always)]
fn mask(n: usize) -> u32 {
    if n >= 32 { u32::MAX } else { (1 << n) - 1 }
}

/// Interleaves the first two rows of `b[k, n <= 32]` into words, zero-padded: columns 0–15 go to `low[16]`, columns 16–31 to
/// `high[16]`.
///
/// # Safety
/// `b` is valid for reads of up to two rows of `n`; `low` and `high` for 16 aligned words each; AVX-512.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn pair(b: *const bf16, ldb: usize, k: usize, n: usize, low: *mut u32, high: *mut u32) {
    // Unpack instructions work within 128-bit lanes: first move quarter i of both halves of the row into lane i.
    let lanes = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
    let columns = mask(n);
    let keep = |r: usize| if r < k { columns } else { 0 };
    // SAFETY: masked to the elements that exist; an aligned row of words is written to each output.
    unsafe {
        let even = _mm512_maskz_loadu_epi16(keep(0), b.cast());
        let odd = _mm512_maskz_loadu_epi16(keep(1), b.wrapping_add(ldb).cast());
        let even = _mm512_permutexvar_epi64(lanes, even);
        let odd = _mm512_permutexvar_epi64(lanes, odd);
        _mm512_store_si512(low.cast(), _mm512_unpacklo_epi16(even, odd));
        _mm512_store_si512(high.cast(), _mm512_unpackhi_epi16(even, odd));
    }
}
