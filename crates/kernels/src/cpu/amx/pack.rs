//! Packing of AMX operands with AVX-512; partial tiles are zero-padded.
//!
//! Tiles of B have the VNNI layout, pairs of consecutive k: a panel of up to 32 columns is
//! `[k/32][2 column halves][16 k pairs][16 columns][2]` bf16. A pair of bf16 is one 32-bit word, so packing k-contiguous storage
//! is a transpose of 16x16 words, and packing a transposed A is the inverse transpose.
//!
//! Elements of several parts (see `Operand`) have one such block of A after the other, and one such step of a panel after the other.

mod left;
mod right;
#[cfg(test)]
mod tests;

pub(crate) use left::{Left, Pairs, left, left_transposed};
pub(crate) use right::{Right, cols, rows};

use super::Operand;
use std::arch::x86_64::__m512i;

/// Elements of one part of a packed step: 32 of k by 32 columns (or rows).
pub(crate) const STEP: usize = 32 * 32;

/// Mask of the first `n <= 32` lanes.
#[inline(always)]
fn mask(n: usize) -> u32 {
    if n >= 32 { u32::MAX } else { (1 << n) - 1 }
}

/// [`Operand::pair`] of the first two rows of `b[k, n <= 32]`; rows from `k` are zero.
///
/// # Safety
/// `b` is valid for reads of up to two rows of `n`; AVX-512.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn pair<T: Operand>(b: *const T, ldb: usize, k: usize, n: usize) -> [[__m512i; 2]; 3] {
    let keep = |r: usize| if r < k { mask(n) } else { 0 };
    // SAFETY: masked to the elements that exist.
    unsafe { T::pair([keep(0), keep(1)], b, b.wrapping_add(ldb)) }
}
