//! Transposing 16x16 blocks of 32-bit words with AVX-512.

use std::arch::x86_64::*;

/// 16x16 words, each row a cache line.
#[repr(C, align(64))]
pub(crate) struct Words(pub(crate) [u32; 256]);

/// `to[j][i] = from[i][j]` for 16x16 words; strides in bytes.
///
/// # Safety
/// Both are valid for 16 rows of 64 bytes; AVX-512.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) unsafe fn transpose(from: *const u8, from_stride: usize, to: *mut u32, to_stride: usize) {
    for part in 0..4 {
        // SAFETY: the caller's promise.
        unsafe { transpose_part(from, from_stride, to, to_stride, part) };
    }
}

/// Rows `4·part..4·part+4` of the result of [`transpose`].
///
/// # Safety
/// As for [`transpose`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) unsafe fn transpose_part(
    from: *const u8,
    from_stride: usize,
    to: *mut u32,
    to_stride: usize,
    part: usize,
) {
    // Lane l of `gather(t)` is the 4 words of row 4l+t at column 4·part: the loads do half of the transpose.
    let gather = |t: usize| {
        // SAFETY: row 4l+t < 16, bytes 16·part.. of its 64.
        unsafe {
            let lane = |l: usize| from.add((4 * l + t) * from_stride + 16 * part).cast::<__m128i>();
            let v = _mm512_castsi128_si512(_mm_loadu_si128(lane(0)));
            let v = _mm512_inserti32x4(v, _mm_loadu_si128(lane(1)), 1);
            let v = _mm512_inserti32x4(v, _mm_loadu_si128(lane(2)), 2);
            _mm512_inserti32x4(v, _mm_loadu_si128(lane(3)), 3)
        }
    };
    // Then a 4x4 transpose inside each lane.
    let (r0, r1, r2, r3) = (gather(0), gather(1), gather(2), gather(3));
    let (a, b) = (_mm512_unpacklo_epi32(r0, r1), _mm512_unpacklo_epi32(r2, r3));
    let (c, d) = (_mm512_unpackhi_epi32(r0, r1), _mm512_unpackhi_epi32(r2, r3));
    let out = [
        _mm512_unpacklo_epi64(a, b),
        _mm512_unpackhi_epi64(a, b),
        _mm512_unpacklo_epi64(c, d),
        _mm512_unpackhi_epi64(c, d),
    ];
    for (i, v) in out.into_iter().enumerate() {
        // SAFETY: row 4·part+i < 16 of the output.
        unsafe { _mm512_storeu_si512(to.cast::<u8>().add((4 * part + i) * to_stride).cast(), v) };
    }
}
