//! What AMX multiplies: bf16 as it is, and f32 as the sum of three bf16 parts.
//!
//! An f32 value `a` is `a₀ + a₁ + a₂`, exactly: each part is the nearest bf16 (8 bits) to what the parts before it leave of the 24
//! bits, so `|a₁| ≤ 2⁻⁸|a|` and `|a₂| ≤ 2⁻¹⁶|a|`. A product is the sum of the six products `aᵢ·bⱼ` with `i + j ≤ 2`; the three that
//! are left out are below `2·2⁻²⁴|a·b|`. AMX rounds a sum of 32 products like two chains of 16 and then adds it to the
//! accumulator, so for k of 32 and more the error of such a GEMM is below the bound of a plain f32 one, `k·2⁻²⁴·Σ|a·b|`
//! (`tests/gemm_f32.rs` compares the two).
//!
//! Parts below 2⁻¹²⁶ count as zero, so values below 2⁻¹⁰³ may be off by as much, and subnormal values are zero. A part of an
//! infinity times a zero part is NaN: see `gemm::amx`, which computes non-finite sums again without parts.

use ferrotron_tensor::{Float, bf16};
use std::arch::x86_64::*;

/// Element types that AMX can multiply.
pub(crate) trait Operand: Float {
    /// All parts of an element.
    type Packed: Copy + Send + Sync;
    /// Number of bf16 parts of an element.
    const PARTS: usize;
    /// The products of parts (left, right) that make a product. Neighbours share a part, which is then loaded once.
    const PRODUCTS: &'static [(usize, usize)];

    /// Up to 32 elements of a row as 32 bf16 of each part, zero where `keep` has no bit. Only the first `PARTS` vectors count.
    ///
    /// # Safety
    /// `from` is valid for reads of the elements kept; AVX-512 F/BW/DQ/VL.
    unsafe fn row(keep: u32, from: *const Self) -> [__m512i; 3];

    /// Up to 32 columns of two rows as words (even row in the low half) of each part: columns 0–15, then columns 16–31. Columns
    /// without a bit in `keep` (one for each row) become zero.
    ///
    /// # Safety
    /// As for [`Operand::row`], for both rows.
    unsafe fn pair(keep: [u32; 2], even: *const Self, odd: *const Self) -> [[__m512i; 2]; 3];
}

impl Operand for bf16 {
    type Packed = bf16;
    const PARTS: usize = 1;
    const PRODUCTS: &'static [(usize, usize)] = &[(0, 0)];

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn row(keep: u32, from: *const bf16) -> [__m512i; 3] {
        // SAFETY: masked to the elements that exist.
        [unsafe { _mm512_maskz_loadu_epi16(keep, from.cast()) }; 3]
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn pair(keep: [u32; 2], even: *const bf16, odd: *const bf16) -> [[__m512i; 2]; 3] {
        // Unpack instructions work within 128-bit lanes: first move quarter i of both halves of the row into lane i.
        let lanes = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
        // SAFETY: masked to the elements that exist.
        let (even, odd) = unsafe {
            (_mm512_maskz_loadu_epi16(keep[0], even.cast()), _mm512_maskz_loadu_epi16(keep[1], odd.cast()))
        };
        let even = _mm512_permutexvar_epi64(lanes, even);
        let odd = _mm512_permutexvar_epi64(lanes, odd);
        [[_mm512_unpacklo_epi16(even, odd), _mm512_unpackhi_epi16(even, odd)]; 3]
    }
}

impl Operand for f32 {
    type Packed = [bf16; 3];
    const PARTS: usize = 3;
    const PRODUCTS: &'static [(usize, usize)] = &[(1, 1), (0, 1), (0, 2), (0, 0), (1, 0), (2, 0)];

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn row(keep: u32, from: *const f32) -> [__m512i; 3] {
        const UPPER: [u16; 32] = {
            let mut at = [0; 32];
            let mut i = 0;
            while i < 32 {
                at[i] = 2 * i as u16 + 1;
                i += 1;
            }
            at
        };
        // SAFETY: masked to the elements that exist; 64 bytes of a constant.
        let (low, high, upper) = unsafe {
            let [low, high] = halves(keep, from);
            (low, high, _mm512_loadu_si512(UPPER.as_ptr().cast()))
        };
        let both = |p: usize| _mm512_permutex2var_epi16(low[p], upper, high[p]);
        [both(0), both(1), both(2)]
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn pair(keep: [u32; 2], even: *const f32, odd: *const f32) -> [[__m512i; 2]; 3] {
        // SAFETY: masked to the elements that exist.
        let (even, odd) = unsafe { (halves(keep[0], even), halves(keep[1], odd)) };
        // The upper half of an odd word above the upper half of the even word.
        let word = |half: usize, p: usize| {
            _mm512_mask_blend_epi16(0xaaaa_aaaa, _mm512_srli_epi32(even[half][p], 16), odd[half][p])
        };
        [[word(0, 0), word(1, 0)], [word(0, 1), word(1, 1)], [word(0, 2), word(1, 2)]]
    }
}

/// The parts of 32 elements, in two halves: each part is the upper half of its word.
///
/// # Safety
/// `from` is valid for reads of the elements kept; AVX-512 F/BW/DQ/VL.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn halves(keep: u32, from: *const f32) -> [[__m512i; 3]; 2] {
    // SAFETY: masked to the elements that exist.
    unsafe {
        [
            split(_mm512_maskz_loadu_ps(keep as u16, from)),
            split(_mm512_maskz_loadu_ps((keep >> 16) as u16, from.wrapping_add(16))),
        ]
    }
}

/// The three parts of each element, each as the upper half of a word. Some part of a value that is not finite, or that bf16 rounds
/// to infinity, is not finite.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn split(x: __m512) -> [__m512i; 3] {
    // To the nearest, ties away from zero: as near as ties to even, in fewer instructions.
    let round = |x: __m512| {
        let up = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
        _mm512_and_si512(up, _mm512_set1_epi32(0xffff_0000_u32 as i32))
    };
    let first = round(x);
    let rest = _mm512_sub_ps(x, _mm512_castsi512_ps(first));
    let second = round(rest);
    // At most 8 bits are left.
    let third = _mm512_sub_ps(rest, _mm512_castsi512_ps(second));
    [first, second, _mm512_castps_si512(third)]
}
