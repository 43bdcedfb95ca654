//! Rounding f32 to bf16, with the CPU's own instruction where it has one. That instruction takes denormals for
//! zero, as the matrix unit does.

use super::{GRAIN, KEYS, QUERIES};
use crate::cpu::{Isa, multiversion};
use ferrotron_tensor::{Float, bf16};

/// Columns of a tile of a right operand.
const HALF: usize = GRAIN / 2;

/// Does the CPU have the instruction, and may it be used at this level?
fn native(isa: Isa) -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        isa >= Isa::Avx512 && is_x86_feature_detected!("avx512bf16")
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = isa;
        false
    }
}

/// `to = from * factor`.
pub(super) fn round(isa: Isa, from: &[f32], factor: f32, to: &mut [bf16]) {
    #[cfg(target_arch = "x86_64")]
    if native(isa) {
        // SAFETY: the CPU has AVX512-BF16, and `isa` vouches for the rest of AVX-512.
        return unsafe { round_native(from, factor, to) };
    }
    round_emulated(isa, from, factor, to);
}

/// A block `[keys, QUERIES]` as bf16 panels of a right operand with room for `KEYS` rows: two rows to a word.
pub(super) fn round_pairs(isa: Isa, block: &[f32], panels: &mut [u32]) {
    #[cfg(target_arch = "x86_64")]
    if native(isa) {
        // SAFETY: as in `round`.
        return unsafe { round_pairs_native(block, panels) };
    }
    round_pairs_emulated(isa, block, panels);
}

/// Where in the panels 16 columns from `16 * half` on of a pair of rows go. Two halves make a panel of
/// `KEYS * GRAIN / 2` words, in which 16 pairs of rows by 16 columns make a tile.
#[inline(always)]
fn place(pair: usize, half: usize) -> usize {
    half / 2 * (KEYS * HALF) + pair / HALF * (2 * HALF * HALF) + half % 2 * (HALF * HALF) + pair % HALF * HALF
}

multiversion! {
    fn round_emulated(from: &[f32], factor: f32, to: &mut [bf16]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = Float::from_f32(from * factor);
        }
    }
}

multiversion! {
    fn round_pairs_emulated(block: &[f32], panels: &mut [u32]) {
        let bits = |x: f32| u32::from(<bf16 as Float>::from_f32(x).to_bits());
        for (pair, two) in block.chunks_exact(2 * QUERIES).enumerate() {
            let (even, odd) = two.split_at(QUERIES);
            for (half, (even, odd)) in even.chunks_exact(HALF).zip(odd.chunks_exact(HALF)).enumerate() {
                let to = &mut panels[place(pair, half)..][..HALF];
                for ((to, even), odd) in to.iter_mut().zip(even).zip(odd) {
                    *to = bits(*even) | bits(*odd) << 16;
                }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn round_native(from: &[f32], factor: f32, to: &mut [bf16]) {
    use std::arch::x86_64::*;
    let len = from.len().min(to.len());
    let factor = _mm512_set1_ps(factor);
    for at in (0..len).step_by(32) {
        let left = (len - at).min(32);
        let mask = u32::MAX >> (32 - left);
        // SAFETY: masked to the elements that both slices have; `bf16` is 16 bits.
        unsafe {
            let (from, to) = (from.as_ptr().add(at), to.as_mut_ptr().add(at).cast::<i16>());
            let low = _mm512_maskz_loadu_ps(mask as u16, from);
            let high = _mm512_maskz_loadu_ps((mask >> 16) as u16, from.wrapping_add(16));
            let both = _mm512_cvtne2ps_pbh(_mm512_mul_ps(high, factor), _mm512_mul_ps(low, factor));
            _mm512_mask_storeu_epi16(to, mask, std::mem::transmute::<__m512bh, __m512i>(both));
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn round_pairs_native(block: &[f32], panels: &mut [u32]) {
    use std::arch::x86_64::*;
    const INTERLEAVE: [i16; 32] = {
        let mut order = [0; 32];
        let mut i = 0;
        while i < 32 {
            order[i] = (i / 2 + i % 2 * 16) as i16;
            i += 1;
        }
        order
    };
    assert!(panels.len() >= KEYS * QUERIES / 2 && block.len() <= KEYS * QUERIES);
    // SAFETY: 64 bytes of a constant.
    let order = unsafe { _mm512_loadu_epi16(INTERLEAVE.as_ptr()) };
    for (pair, two) in block.chunks_exact(2 * QUERIES).enumerate() {
        for half in 0..QUERIES / HALF {
            // SAFETY: 16 columns of each row of the pair; 16 words within the panels, which were measured.
            unsafe {
                let even = _mm512_loadu_ps(two.as_ptr().add(half * HALF));
                let odd = _mm512_loadu_ps(two.as_ptr().add(QUERIES + half * HALF));
                let both = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(odd, even));
                let to = panels.as_mut_ptr().add(place(pair, half));
                _mm512_storeu_si512(to.cast(), _mm512_permutexvar_epi16(order, both));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of every kind but denormals, with ties.
    fn values(n: usize) -> Vec<f32> {
        let special = [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX, 1.0, -1.0];
        let bits = (0..n as u32).map(|i| f32::from_bits(i.wrapping_mul(0x9e37_79b9) & 0xffff_8000));
        bits.enumerate()
            .map(|(i, x)| if i % 7 == 0 || !x.is_normal() { special[i / 7 % 8] } else { x })
            .collect()
    }

    fn same(a: &[bf16], b: &[bf16]) -> bool {
        a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()))
    }

    #[test]
    fn every_level_rounds_alike() {
        for isa in Isa::all() {
            for n in [0, 1, 15, 16, 17, 31, 32, 33, 64, 255] {
                let from = values(n);
                let want: Vec<bf16> = from.iter().map(|x| <bf16 as Float>::from_f32(x * 0.5)).collect();
                let mut got = vec![bf16::ZERO; n + 1];
                round(isa, &from, 0.5, &mut got[..n]);
                assert!(same(&got, &want) && got[n] == bf16::ZERO, "{isa:?} {n}");
                round_emulated(isa, &from, 0.5, &mut got[..n]);
                assert!(same(&got, &want), "{isa:?} {n} emulated");
            }
            for keys in [32, 64] {
                let block = values(keys * QUERIES);
                for emulated in [false, true] {
                    let mut panels = vec![0u32; KEYS * QUERIES / 2];
                    if emulated {
                        round_pairs_emulated(isa, &block, &mut panels);
                    } else {
                        round_pairs(isa, &block, &mut panels);
                    }
                    for (i, x) in block.iter().enumerate() {
                        let (key, query) = (i / QUERIES, i % QUERIES);
                        // [QUERIES/32][KEYS/32][2][16 pairs][16 queries][2]
                        let word = query / 32 * (KEYS * 16)
                            + key / 32 * 512
                            + query / 16 % 2 * 256
                            + key % 32 / 2 * 16
                            + query % 16;
                        let got = bf16::from_bits((panels[word] >> (16 * (key % 2))) as u16);
                        assert!(same(&[got], &[Float::from_f32(*x)]), "{isa:?} {keys} at {key},{query}");
                    }
                }
            }
        }
    }
}
