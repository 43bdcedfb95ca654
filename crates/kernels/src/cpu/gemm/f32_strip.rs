//! f32 GEMM of a strip: a few rows of C, as many as the registers hold sums for, times panels of B, for one block of k.
//!
//! A tile of sums (14 x 32 with AVX-512, 6 x 16 with AVX2) is one multiply-add for each pair of a broadcast element of A and a vector
//! of B. The strip of A is copied to one place first: it then stays in L1, has strides that the compiler knows, and may come from A
//! or Aᵀ. Panels of B stream from L2, fetched a few steps of k ahead.
//!
//! The next strip of A comes from L3 or memory. Its lines are fetched one by one in the course of this strip: a burst of them would
//! take the line fill buffers that the loads of B need.

use super::driver::TILE;
use crate::cpu::Isa;

/// Largest k of a block, for A and for Aᵀ. A panel of B and a strip of A of that length are to stay in L1.
pub(super) const K_BLOCK: usize = 256;
pub(super) const K_BLOCK_TRANS: usize = 128;
/// Elements of the copy of one index of k, from Aᵀ: one cache line.
const COPIED_K: usize = LINE;
/// Elements of the copy.
const COPIED: usize = COPIED_K * K_BLOCK;
/// Elements of the scratch memory of a strip: its copy, and a tile for columns that are no whole vector.
pub(super) const SCRATCH: usize = COPIED + 16 * TILE;
/// Floats of a cache line.
const LINE: usize = 16;
/// Steps of k between two prefetched lines of A, and for which B is fetched ahead.
const STEPS: usize = 8;

/// A strip of C and its operands. Pointers are to the first element that it takes.
pub(super) struct Strip {
    pub(super) k: usize,
    pub(super) a: *const f32,
    pub(super) lda: usize,
    /// Where the strip of A after this one begins; any address, as it is only prefetched.
    pub(super) next_a: *const f32,
    /// Packed panels, each of `32·k` elements.
    pub(super) b: *const f32,
    pub(super) c: *mut f32,
    pub(super) ldc: usize,
    /// Columns of C.
    pub(super) cols: usize,
    /// What is added to every row, or null.
    pub(super) bias: *const f32,
    /// The old C is added.
    pub(super) accumulate: bool,
    /// [`SCRATCH`] elements, 64-byte aligned.
    pub(super) scratch: *mut f32,
}

/// Computes a strip.
pub(super) type StripFn = unsafe fn(&Strip);

/// The kernels of a level for strips of `1..=len` rows, with A as `[m, k]` and as `[k, m]`.
///
/// # Safety
/// Of each: the CPU has this level, and the operands are those of a strip of that many rows.
pub(super) fn strips(isa: Isa) -> Option<[&'static [StripFn]; 2]> {
    match isa {
        Isa::Portable => None,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => Some([avx2::A, avx2::A_TRANS]),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Amx => Some([avx512::A, avx512::A_TRANS]),
        #[cfg(not(target_arch = "x86_64"))]
        _ => None,
    }
}

/// Lines of memory that are fetched one at a time: the first of `rows` rows, then the next of each, `left` of each row.
#[cfg(target_arch = "x86_64")]
struct Lines {
    at: *const f32,
    ld: usize,
    rows: usize,
    row: usize,
    left: usize,
}

#[cfg(target_arch = "x86_64")]
impl Lines {
    /// Fetches the next line into L2, if there is one.
    #[inline(always)]
    fn prefetch(&mut self) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        if self.left == 0 {
            return;
        }
        // SAFETY: prefetching any address is harmless.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(self.at.wrapping_add(self.row * self.ld).cast()) };
        self.row += 1;
        if self.row == self.rows {
            (self.row, self.left, self.at) = (0, self.left - 1, self.at.wrapping_add(LINE));
        }
    }
}

/// Copies `rows` rows of `cols` elements; operands are a pointer and the stride of its rows.
///
/// # Safety
/// Both are valid for that and do not overlap.
#[cfg(target_arch = "x86_64")]
unsafe fn copy(rows: usize, cols: usize, (from, ld): (*const f32, usize), (to, ldo): (*mut f32, usize)) {
    for i in 0..rows {
        // SAFETY: the caller's promise.
        unsafe { to.add(i * ldo).copy_from_nonoverlapping(from.add(i * ld), cols) };
    }
}

#[cfg(target_arch = "x86_64")]
macro_rules! level {
    ($level:ident, $features:literal, lanes $lanes:literal, rows [$($rows:literal)*],
     $zero:ident, $load:ident, $store:ident, $set:ident, $add:ident, $fma:ident) => {
        mod $level {
            use super::{COPIED, COPIED_K, K_BLOCK, LINE, Lines, STEPS, Strip, StripFn, TILE, copy};
            use std::arch::x86_64::*;

            pub(super) const A: &[StripFn] = &[$(strip::<$rows, false>),*];
            pub(super) const A_TRANS: &[StripFn] = &[$(strip::<$rows, true>),*];

            /// See [`Strip`]; `R` rows.
            #[target_feature(enable = $features)]
            unsafe fn strip<const R: usize, const TRANS: bool>(s: &Strip) {
                // SAFETY: R rows and k columns of op(A), and the room for them.
                unsafe {
                    if TRANS {
                        for l in 0..s.k {
                            let from = s.a.add(l * s.lda).cast::<[f32; R]>();
                            s.scratch.add(l * COPIED_K).cast::<[f32; R]>().write(from.read());
                        }
                    } else {
                        for i in 0..R {
                            s.scratch.add(i * K_BLOCK).copy_from_nonoverlapping(s.a.add(i * s.lda), s.k);
                        }
                    }
                }
                // Of R transposed columns the last is often in another line than this strip, the first is not.
                let mut next = match TRANS {
                    true => Lines { at: s.next_a.wrapping_add(R - 1), ld: s.lda, rows: s.k, row: 0, left: 1 },
                    false => Lines { at: s.next_a, ld: s.lda, rows: R, row: 0, left: s.k.div_ceil(LINE) },
                };
                let mut col = 0;
                while col < s.cols {
                    // SAFETY: the caller's promise; one vector holds what is left.
                    unsafe {
                        if s.cols - col > $lanes {
                            tile::<R, TRANS, 2>(s, col, &mut next);
                            col += 2 * $lanes;
                        } else {
                            tile::<R, TRANS, 1>(s, col, &mut next);
                            col += $lanes;
                        }
                    }
                }
            }

            /// Columns `col..` of a strip whose A is copied, as many as `V` vectors hold.
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn tile<const R: usize, const TRANS: bool, const V: usize>(
                s: &Strip,
                col: usize,
                next: &mut Lines,
            ) {
                // Element (i, l) of the copy is at i·row + l·step.
                let (row, step) = const { if TRANS { (1, COPIED_K) } else { (K_BLOCK, 1) } };
                let mut sums = [[$zero(); V]; R];
                // SAFETY: k rows of a panel, and the copied strip; prefetching any address is harmless.
                unsafe {
                    let mut a = s.scratch.cast_const();
                    let mut b = s.b.add(col / TILE * TILE * s.k + col % TILE);
                    let mut left = s.k;
                    while left > 0 {
                        next.prefetch();
                        let steps = left.min(STEPS);
                        left -= steps;
                        for _ in 0..steps {
                            for line in (0..V * $lanes).step_by(LINE) {
                                _mm_prefetch::<_MM_HINT_T0>(b.wrapping_add(STEPS * TILE + line).cast());
                            }
                            let mut right = [$zero(); V];
                            for v in 0..V {
                                right[v] = $load(b.add(v * $lanes));
                            }
                            for i in 0..R {
                                let left = $set(*a.add(i * row));
                                for v in 0..V {
                                    sums[i][v] = $fma(left, right[v], sums[i][v]);
                                }
                            }
                            a = a.add(step);
                            b = b.add(TILE);
                        }
                    }
                }
                let cols = (s.cols - col).min(V * $lanes);
                // SAFETY: these columns of R rows of C and of the bias, and the room for a tile of whole vectors.
                unsafe {
                    let to = s.c.add(col);
                    let whole = cols == V * $lanes;
                    let (c, ldc) = if whole { (to, s.ldc) } else { (s.scratch.add(COPIED), V * $lanes) };
                    if s.accumulate {
                        if !whole {
                            copy(R, cols, (to.cast_const(), s.ldc), (c, ldc));
                        }
                        for i in 0..R {
                            for v in 0..V {
                                sums[i][v] = $add(sums[i][v], $load(c.add(i * ldc + v * $lanes)));
                            }
                        }
                    }
                    if !s.bias.is_null() {
                        let mut bias = [0f32; 2 * $lanes];
                        bias.as_mut_ptr().copy_from_nonoverlapping(s.bias.add(col), cols);
                        for i in 0..R {
                            for v in 0..V {
                                sums[i][v] = $add(sums[i][v], $load(bias.as_ptr().add(v * $lanes)));
                            }
                        }
                    }
                    for i in 0..R {
                        for v in 0..V {
                            $store(c.add(i * ldc + v * $lanes), sums[i][v]);
                        }
                    }
                    if !whole {
                        copy(R, cols, (c.cast_const(), ldc), (to, s.ldc));
                    }
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
level!(
    avx512, "avx512f,avx512bw,avx512dq,avx512vl", lanes 16, rows [1 2 3 4 5 6 7 8 9 10 11 12 13 14],
    _mm512_setzero_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_set1_ps, _mm512_add_ps, _mm512_fmadd_ps
);
#[cfg(target_arch = "x86_64")]
level!(
    avx2, "avx2,fma", lanes 8, rows [1 2 3 4 5 6],
    _mm256_setzero_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_set1_ps, _mm256_add_ps, _mm256_fmadd_ps
);
