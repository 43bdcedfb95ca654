//! Packing operands for the AMX unit with AVX-512, ragged edges padded with zeros.
//!
//! A tile of the right-hand side holds pairs of consecutive k ("VNNI"): a panel of up to 32 columns is
//! `[k/32][2 column halves][16 k pairs][16 columns][2]` bf16. A pair of bf16 is one 32-bit word, so going from
//! k-contiguous storage to this is a transpose of 16x16 words, and the left-hand side of a transposed product
//! is the same transpose the other way round.

use crate::cpu::gemm::transpose::{Words, transpose};
use ferrotron_tensor::bf16;
use std::arch::x86_64::*;

/// Elements of one packed step: 32 of k by 32 columns (or rows).
pub(crate) const STEP: usize = 32 * 32;

/// Packs row-major `b[k, n]` (rows `ldb` elements apart, n contiguous, `n <= 32`) into a VNNI panel of
/// `k.div_ceil(32)` steps at `out`; columns from `n` and rows from `k` become zero.
///
/// # Safety
/// `b` is valid for reads of those rows, `out` for writes of `k.div_ceil(32) * STEP` elements and 64-byte
/// aligned; the CPU has AVX-512 F/BW/DQ/VL.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) unsafe fn rows(b: *const bf16, ldb: usize, k: usize, n: usize, out: *mut bf16) {
    debug_assert!(n <= 32);
    for step in 0..k.div_ceil(32) {
        let at = step * 32;
        // SAFETY: rows at.. of b exist (`k - at` of them); a step of `out` is written.
        unsafe {
            let src = b.add(at * ldb);
            interleave(
                src,
                ldb,
                (k - at).min(32),
                n,
                out.add(step * STEP).cast(),
                out.add(step * STEP + 512).cast(),
            );
        }
    }
}

/// Packs k-contiguous `b[n, k]` (rows `ldb` elements apart, `n <= 32`), that is the transpose of the
/// right-hand side, into a VNNI panel of `k.div_ceil(32)` steps at `out`; what is outside becomes zero.
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

/// Packs up to 32 rows of a left-hand side `a[m, k]` (k contiguous, rows `lda` elements apart) into 32 rows of
/// `ldo` elements (a multiple of 32, at least `k`), zero outside.
///
/// # Safety
/// `a` is valid for those rows, `out` for 32 rows of `k.div_ceil(32) * 32` and 64-byte aligned; AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) unsafe fn left(a: *const bf16, lda: usize, m: usize, k: usize, out: *mut bf16, ldo: usize) {
    debug_assert!(m <= 32 && ldo.is_multiple_of(32) && ldo >= k);
    for r in 0..32 {
        for at in (0..k).step_by(32) {
            let keep = if r < m { mask((k - at).min(32)) } else { 0 };
            // SAFETY: masked to the elements that exist.
            unsafe {
                let row = _mm512_maskz_loadu_epi16(keep, a.wrapping_add(r * lda + at).cast());
                _mm512_store_si512(out.add(r * ldo + at).cast(), row);
            }
        }
    }
}

/// As [`left`], from the transpose: `a[k, m]` with m contiguous and `m <= 32`, rows `lda` elements apart.
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
    debug_assert!(m <= 32 && ldo.is_multiple_of(32) && ldo >= k);
    let mut pairs = [Words([0; 256]), Words([0; 256])];
    for at in (0..k).step_by(32) {
        let [low, high] = &mut pairs;
        // SAFETY: rows at.. of `a` exist (`k - at` of them); 32 rows of 32 are written at column `at` of `out`.
        unsafe {
            interleave(a.add(at * lda), lda, (k - at).min(32), m, low.0.as_mut_ptr(), high.0.as_mut_ptr());
            transpose(low.0.as_ptr().cast(), 64, out.add(at).cast(), 2 * ldo);
            transpose(high.0.as_ptr().cast(), 64, out.add(16 * ldo + at).cast(), 2 * ldo);
        }
    }
}

/// The first `n <= 32` lanes.
#[inline(always)]
fn mask(n: usize) -> u32 {
    if n >= 32 { u32::MAX } else { (1 << n) - 1 }
}

/// Sixteen pairs of rows of `b[k <= 32, n <= 32]`, interleaved to words: columns 0–15 go to `low[16][16]`,
/// columns 16–31 to `high[16][16]`.
///
/// # Safety
/// `b` is valid for reads of `k` rows of `n`; `low` and `high` for 256 aligned words each; AVX-512.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn interleave(b: *const bf16, ldb: usize, k: usize, n: usize, low: *mut u32, high: *mut u32) {
    // Unpacking works within 128-bit lanes: first bring quarter i of both halves of the row into lane i.
    let lanes = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
    let columns = mask(n);
    for pair in 0..16 {
        let keep = |r: usize| if r < k { columns } else { 0 };
        // SAFETY: masked to the elements that exist; one aligned row of each output is written.
        unsafe {
            let even = _mm512_maskz_loadu_epi16(keep(2 * pair), b.wrapping_add(2 * pair * ldb).cast());
            let odd =
                _mm512_maskz_loadu_epi16(keep(2 * pair + 1), b.wrapping_add((2 * pair + 1) * ldb).cast());
            let even = _mm512_permutexvar_epi64(lanes, even);
            let odd = _mm512_permutexvar_epi64(lanes, odd);
            _mm512_store_si512(low.add(16 * pair).cast(), _mm512_unpacklo_epi16(even, odd));
            _mm512_store_si512(high.add(16 * pair).cast(), _mm512_unpackhi_epi16(even, odd));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;
    use crate::cpu::amx::{Tiles, mm_32x32};

    #[repr(C, align(64))]
    #[derive(Clone)]
    struct Step([bf16; STEP]);

    fn values(count: usize) -> Vec<bf16> {
        // Small integers: products and sums are exact, and every position differs from its neighbours.
        (0..count).map(|i| bf16::from_f32(((i * 7919 + i / 31) % 201) as f32 - 100.0)).collect()
    }

    fn garbage(steps: usize) -> Vec<Step> {
        vec![Step([bf16::NAN; STEP]); steps]
    }

    fn panel(p: &[Step], row: usize, col: usize) -> f32 {
        let (step, half) = (row / 32, col / 16);
        p[step].0[half * 512 + (row % 32 / 2) * 32 + (col % 16) * 2 + row % 2].to_f32()
    }

    #[test]
    fn packers_place_every_element_and_pad_with_zeros() {
        if Isa::detect() < Isa::Avx512 {
            return;
        }
        for k in [0, 1, 2, 15, 16, 31, 32, 33, 64, 95] {
            for n in [1, 2, 15, 16, 17, 31, 32] {
                let (wide, tall) = (n + 3, k + 5);
                let (by_row, by_col) = (values(k * wide), values(n * tall));
                let steps = k.div_ceil(32);
                let (mut p, mut q) = (garbage(steps), garbage(steps));
                let (mut l, mut t) = (garbage(steps), garbage(steps));
                // SAFETY: buffers sized as the packers ask; AVX-512 checked above.
                unsafe {
                    rows(by_row.as_ptr(), wide, k, n, p.as_mut_ptr().cast());
                    cols(by_col.as_ptr(), tall, k, n, q.as_mut_ptr().cast());
                    left(by_col.as_ptr(), tall, n, k, l.as_mut_ptr().cast(), steps * 32);
                    left_transposed(by_row.as_ptr(), wide, n, k, t.as_mut_ptr().cast(), steps * 32);
                }
                let flat = |v: &[Step], r: usize, c: usize| {
                    let at = r * steps * 32 + c;
                    v[at / STEP].0[at % STEP].to_f32()
                };
                for row in 0..steps * 32 {
                    for col in 0..32 {
                        let inside = row < k && col < n;
                        let from_rows = if inside { by_row[row * wide + col].to_f32() } else { 0.0 };
                        let from_cols = if inside { by_col[col * tall + row].to_f32() } else { 0.0 };
                        assert_eq!(panel(&p, row, col), from_rows, "rows k={k} n={n} at {row},{col}");
                        assert_eq!(panel(&q, row, col), from_cols, "cols k={k} n={n} at {row},{col}");
                        assert_eq!(flat(&l, col, row), from_cols, "left k={k} m={n} at {row},{col}");
                        assert_eq!(
                            flat(&t, col, row),
                            from_rows,
                            "left_transposed k={k} m={n} at {row},{col}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn block_product_is_exact_on_integers() {
        if Isa::detect() < Isa::Amx {
            return;
        }
        for kb in [0usize, 1, 2, 5] {
            for accumulate in [false, true] {
                let k = 32 * kb;
                let (lda, ldc) = (k + 3, 37);
                let (a, b) = (values(32 * lda), values(k * 32));
                let mut p = garbage(kb);
                let mut c: Vec<f32> = (0..32 * ldc).map(|i| i as f32).collect();
                let before = c.clone();
                // SAFETY: buffers sized as asked; AMX checked above.
                unsafe {
                    rows(b.as_ptr(), 32, k, 32, p.as_mut_ptr().cast());
                    let tiles = Tiles::load();
                    mm_32x32(&tiles, a.as_ptr(), lda, p.as_ptr().cast(), kb, c.as_mut_ptr(), ldc, accumulate);
                }
                for i in 0..32 {
                    for j in 0..ldc {
                        let sum: f32 =
                            (0..k).map(|l| a[i * lda + l].to_f32() * b[l * 32 + (j % 32)].to_f32()).sum();
                        let old = before[i * ldc + j];
                        let want = match (j < 32, accumulate) {
                            (false, _) => old,
                            (true, true) => old + sum,
                            (true, false) => sum,
                        };
                        assert_eq!(c[i * ldc + j], want, "kb={kb} at {i},{j}");
                    }
                }
            }
        }
    }
}
