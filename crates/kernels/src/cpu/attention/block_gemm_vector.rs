//! GEMMs of small row-major f32 matrices in scratch memory.

use crate::cpu::Isa;

/// Operands of a GEMM, with their row strides.
pub(super) struct Operands<'a> {
    /// `[m, k]`.
    pub a: &'a [f32],
    /// Row stride of `a`.
    pub lda: usize,
    /// `[k, n]`.
    pub b: &'a [f32],
    /// Row stride of `b`.
    pub ldb: usize,
    /// `[m, n]`.
    pub c: &'a mut [f32],
    /// Row stride of `c`.
    pub ldc: usize,
}

/// `c = a·b`, or `c += a·b` with `add`; `m` and `n` are multiples of 32.
pub(super) fn gemm(isa: Isa, [m, k, n]: [usize; 3], o: Operands<'_>, add: bool) {
    if m == 0 || n == 0 || (k == 0 && add) {
        return;
    }
    assert!(m.is_multiple_of(32) && n.is_multiple_of(32));
    assert!(o.a.len() >= (m - 1) * o.lda + k && o.c.len() >= (m - 1) * o.ldc + n);
    assert!(k == 0 || o.b.len() >= (k - 1) * o.ldb + n);
    match isa {
        // SAFETY: the CPU has the instructions (`isa` says so), and the operands were measured above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Amx => unsafe { avx512([m, k, n], o, add) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { avx2([m, k, n], o, add) },
        // SAFETY: the operands were measured above.
        _ => unsafe { portable([m, k, n], o, add) },
    }
}

/// Defines a GEMM built of register tiles of `$rows` x (`$vectors` * `$lanes`).
macro_rules! tiled {
    ($name:ident, $feature:literal, $vector:ty, $lanes:literal, $rows:literal, $vectors:literal,
     $zero:path, $load:path, $store:path, $broadcast:path, $fma:path, $add:path) => {
        /// # Safety
        /// The CPU has the instructions; the operands hold `m` x `k`, `k` x `n` and `m` x `n` elements at their
        /// strides, `m` a multiple of the tile's rows and `n` of its columns.
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = $feature)]
        unsafe fn $name([m, k, n]: [usize; 3], o: Operands<'_>, add: bool) {
            let Operands { a, lda, b, ldb, c, ldc } = o;
            let (a, b, c) = (a.as_ptr(), b.as_ptr(), c.as_mut_ptr());
            for j in (0..n).step_by($vectors * $lanes) {
                for i in (0..m).step_by($rows) {
                    // SAFETY: every address below lies in an operand, by the caller's promise.
                    unsafe {
                        let (a, b, c) = (a.add(i * lda), b.add(j), c.add(i * ldc + j));
                        let mut sum: [[$vector; $vectors]; $rows] = [[$zero(); $vectors]; $rows];
                        for p in 0..k {
                            let mut right = [$zero(); $vectors];
                            for (v, x) in right.iter_mut().enumerate() {
                                *x = $load(b.add(p * ldb + v * $lanes));
                            }
                            for (r, sum) in sum.iter_mut().enumerate() {
                                let left = $broadcast(*a.add(r * lda + p));
                                for (s, x) in sum.iter_mut().zip(right) {
                                    *s = $fma(left, x, *s);
                                }
                            }
                        }
                        for (r, sum) in sum.iter().enumerate() {
                            for (v, s) in sum.iter().enumerate() {
                                let to = c.add(r * ldc + v * $lanes);
                                $store(to, if add { $add($load(to), *s) } else { *s });
                            }
                        }
                    }
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
tiled!(
    avx512,
    "avx512f",
    __m512,
    16,
    8,
    2,
    _mm512_setzero_ps,
    _mm512_loadu_ps,
    _mm512_storeu_ps,
    _mm512_set1_ps,
    _mm512_fmadd_ps,
    _mm512_add_ps
);
tiled!(
    avx2,
    "avx2,fma",
    __m256,
    8,
    4,
    2,
    _mm256_setzero_ps,
    _mm256_loadu_ps,
    _mm256_storeu_ps,
    _mm256_set1_ps,
    _mm256_fmadd_ps,
    _mm256_add_ps
);

/// # Safety
/// As for the others; tiles of 4 x 8.
unsafe fn portable([m, k, n]: [usize; 3], o: Operands<'_>, add: bool) {
    let Operands { a, lda, b, ldb, c, ldc } = o;
    let (a, b, c) = (a.as_ptr(), b.as_ptr(), c.as_mut_ptr());
    for j in (0..n).step_by(8) {
        for i in (0..m).step_by(4) {
            let mut sum = [[0.0f32; 8]; 4];
            for p in 0..k {
                // SAFETY: 8 elements of row p from column j on, a multiple of 8 below n.
                let right = unsafe { *b.add(p * ldb + j).cast::<[f32; 8]>() };
                for (r, sum) in sum.iter_mut().enumerate() {
                    // SAFETY: row i + r, column p of the left operand.
                    let left = unsafe { *a.add((i + r) * lda + p) };
                    for (s, x) in sum.iter_mut().zip(right) {
                        *s += left * x;
                    }
                }
            }
            for (r, sum) in sum.iter().enumerate() {
                // SAFETY: 8 elements of row i + r of the result, which nothing else refers to.
                let to = unsafe { &mut *c.add((i + r) * ldc + j).cast::<[f32; 8]>() };
                for (to, s) in to.iter_mut().zip(sum) {
                    *to = if add { *to + s } else { *s };
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_level_multiplies() {
        for isa in Isa::all() {
            for (m, k, n) in [(32, 1, 32), (64, 33, 96), (32, 0, 32), (96, 64, 64)] {
                let (lda, ldb, ldc) = (k + 2, n + 1, n + 3);
                let a: Vec<f32> = (0..m * lda).map(|i| ((i * 7 % 13) as f32) - 6.0).collect();
                let b: Vec<f32> = (0..(k + 1) * ldb).map(|i| ((i * 5 % 11) as f32) - 5.0).collect();
                for add in [false, true] {
                    let mut c: Vec<f32> = (0..m * ldc).map(|i| (i % 9) as f32).collect();
                    let before = c.clone();
                    gemm(isa, [m, k, n], Operands { a: &a, lda, b: &b, ldb, c: &mut c, ldc }, add);
                    for i in 0..m {
                        for j in 0..ldc {
                            // Small integers: the products and sums are exact.
                            let sum: f32 = (0..k).map(|p| a[i * lda + p] * b[p * ldb + j.min(n - 1)]).sum();
                            let old = before[i * ldc + j];
                            let want = if j >= n {
                                old
                            } else if add {
                                old + sum
                            } else {
                                sum
                            };
                            assert_eq!(c[i * ldc + j], want, "{isa:?} {m}x{k}x{n} at {i},{j} add {add}");
                        }
                    }
                }
            }
        }
    }
}
