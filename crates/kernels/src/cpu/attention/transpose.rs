//! Transposing 32-bit elements.

use crate::cpu::Isa;

/// `dst[c, r] = src[r, c]` for `rows` x `cols`, both multiples of 16; `src_ld` and `dst_ld` are row strides.
pub(super) fn transpose(
    isa: Isa,
    [rows, cols]: [usize; 2],
    src: &[u32],
    src_ld: usize,
    dst: &mut [u32],
    dst_ld: usize,
) {
    if rows == 0 || cols == 0 {
        return;
    }
    assert!(rows.is_multiple_of(16) && cols.is_multiple_of(16));
    assert!(src.len() >= (rows - 1) * src_ld + cols && dst.len() >= (cols - 1) * dst_ld + rows);
    for r in (0..rows).step_by(16) {
        for c in (0..cols).step_by(16) {
            let (from, to) = (&src[r * src_ld + c..], &mut dst[c * dst_ld + r..]);
            #[cfg(target_arch = "x86_64")]
            if isa >= Isa::Avx512 {
                // SAFETY: the CPU has AVX-512 (`isa` says so), and both 16 x 16 squares are inside the slices, as
                // asserted above.
                unsafe { square(from.as_ptr(), src_ld, to.as_mut_ptr(), dst_ld) };
                continue;
            }
            let _ = isa;
            for i in 0..16 {
                for j in 0..16 {
                    to[j * dst_ld + i] = from[i * src_ld + j];
                }
            }
        }
    }
}

/// One 16 x 16 square in registers: pairs, quads, then quarters of vectors change places.
///
/// # Safety
/// 16 rows of 16 elements at `src` (stride `src_ld`) are readable, and as many at `dst` writable.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn square(src: *const u32, src_ld: usize, dst: *mut u32, dst_ld: usize) {
    use std::arch::x86_64::*;
    let mut a = [_mm512_setzero_si512(); 16];
    let mut b = a;
    for (i, x) in a.iter_mut().enumerate() {
        // SAFETY: row i, by the caller's promise.
        *x = unsafe { _mm512_loadu_si512(src.add(i * src_ld).cast()) };
    }
    for i in 0..8 {
        b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
    }
    // a[4q + c] holds, in each 128-bit quarter p, column 4p + c of rows 4q..4q + 4.
    for q in 0..4 {
        a[4 * q] = _mm512_unpacklo_epi64(b[4 * q], b[4 * q + 2]);
        a[4 * q + 1] = _mm512_unpackhi_epi64(b[4 * q], b[4 * q + 2]);
        a[4 * q + 2] = _mm512_unpacklo_epi64(b[4 * q + 1], b[4 * q + 3]);
        a[4 * q + 3] = _mm512_unpackhi_epi64(b[4 * q + 1], b[4 * q + 3]);
    }
    for c in 0..4 {
        let even_low = _mm512_shuffle_i32x4::<0x88>(a[c], a[4 + c]); // columns c, 8 + c of rows 0..8
        let odd_low = _mm512_shuffle_i32x4::<0xdd>(a[c], a[4 + c]); // columns 4 + c, 12 + c of rows 0..8
        let even_high = _mm512_shuffle_i32x4::<0x88>(a[8 + c], a[12 + c]);
        let odd_high = _mm512_shuffle_i32x4::<0xdd>(a[8 + c], a[12 + c]);
        b[c] = _mm512_shuffle_i32x4::<0x88>(even_low, even_high);
        b[8 + c] = _mm512_shuffle_i32x4::<0xdd>(even_low, even_high);
        b[4 + c] = _mm512_shuffle_i32x4::<0x88>(odd_low, odd_high);
        b[12 + c] = _mm512_shuffle_i32x4::<0xdd>(odd_low, odd_high);
    }
    for (i, x) in b.iter().enumerate() {
        // SAFETY: row i, by the caller's promise.
        unsafe { _mm512_storeu_si512(dst.add(i * dst_ld).cast(), *x) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_lands() {
        for isa in Isa::all() {
            for (rows, cols) in [(16, 16), (32, 48), (64, 16), (16, 64), (0, 16)] {
                let (src_ld, dst_ld) = (cols + 3, rows + 5);
                let src: Vec<u32> = (0..(rows * src_ld + 64) as u32).collect();
                let mut dst = vec![u32::MAX; cols * dst_ld + 64];
                transpose(isa, [rows, cols], &src, src_ld, &mut dst, dst_ld);
                for c in 0..cols {
                    for r in 0..dst_ld {
                        let want = if r < rows { src[r * src_ld + c] } else { u32::MAX };
                        assert_eq!(dst[c * dst_ld + r], want, "{isa:?} {rows}x{cols} at {r},{c}");
                    }
                }
            }
        }
    }
}
