//! Digests of tensors: 64 bits by which two runs of a step are compared.
//!
//! The bytes are read as little-endian words `w[i]` of 64 bits, the last one filled up with zeros. The digest is the sum modulo
//! 2⁶⁴ of `mix(w[i] + (i + 1)·γ)`, and of the mixed number of bytes. A sum of integers is the same in any order, so that a GPU
//! adds with atomics and still gives the bits of the CPU. `mix` is one-to-one: a change of a single word always changes the
//! digest, changes of several words escape it with probability 2⁻⁶⁴. It finds faults, not forgeries.

use crate::checks::{contiguous, dtypes};
use ferrotron_tensor::{DType, Result, Stream, Tensor, shape_error};

/// γ: 2⁶⁴ over the golden ratio, odd, so that every position shifts a word differently.
pub(crate) const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// Digests of tensors.
pub trait DigestKernels {
    /// `out[0]` = the digest of the bytes of contiguous `x`, of any dtype; `out` i64 `[1]`. See [`digest_of_bytes`].
    fn digest(&self, s: &Stream, x: &Tensor, out: &Tensor) -> Result<()>;
}

/// A permutation of 64-bit words (the finalizer of SplitMix64), in which every bit depends on every other.
#[inline(always)]
pub(crate) fn mix(word: u64) -> u64 {
    let x = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The digest of `bytes`.
pub fn digest_of_bytes(bytes: &[u8]) -> u64 {
    length_term(bytes.len()).wrapping_add(sum_of_words(bytes, 0))
}

/// What the number of bytes adds, so that trailing zeros count.
pub(crate) fn length_term(bytes: usize) -> u64 {
    mix(bytes as u64)
}

/// `Σ mix(w[i] + (first + i + 1)·γ)` over the words of `bytes`.
pub(crate) fn sum_of_words(bytes: &[u8], first: u64) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    let tail = (!rest.is_empty()).then_some(&last);
    let (mut sum, mut shift) = (0u64, GAMMA.wrapping_mul(first.wrapping_add(1)));
    for word in words.iter().chain(tail) {
        sum = sum.wrapping_add(mix(u64::from_le_bytes(*word).wrapping_add(shift)));
        shift = shift.wrapping_add(GAMMA);
    }
    sum
}

/// Checks the arguments of a digest.
pub(crate) fn check_digest(x: &Tensor, out: &Tensor) -> Result<()> {
    const OP: &str = "digest";
    contiguous(OP, &[x, out])?;
    dtypes(OP, DType::I64, &[out])?;
    match out.numel() {
        1 => Ok(()),
        _ => shape_error(OP, format!("the output must hold one element, not {:?}", out.shape())),
    }
}
