//! GEMM epilogue: from f32 sums to C with bias, accumulation and rounding.

use super::driver::{Sums, TILE};
use crate::cpu::{Isa, multiversion};
use ferrotron_tensor::{DType, Float};

/// What a GEMM does with its f32 sums before it rounds and stores them.
#[derive(Debug)]
pub struct Epilogue<'a, T> {
    /// `bias[n]` is added to every row.
    pub bias: Option<&'a [T]>,
    /// The old C is added; otherwise C is overwritten without being read.
    pub accumulate: bool,
}

impl<T> Epilogue<'_, T> {
    /// C is overwritten by the sums.
    pub const OVERWRITE: Self = Epilogue { bias: None, accumulate: false };
    /// The sums are added to C.
    pub const ACCUMULATE: Self = Epilogue { bias: None, accumulate: true };
}

impl<T> Clone for Epilogue<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Epilogue<'_, T> {}

/// A block of finished sums that is being stored to C.
pub(super) struct Finished<'a, C> {
    /// f32 sums.
    pub(super) sums: *const Sums,
    /// Rows and columns of the block.
    pub(super) m: usize,
    pub(super) n: usize,
    /// Bias of each column.
    pub(super) bias: &'a [f32; TILE],
    /// Add to the old C.
    pub(super) accumulate: bool,
    /// First element, and leading dimension of C.
    pub(super) c: *mut C,
    pub(super) ldc: usize,
    /// Next row to prefetch, and to store.
    pub(super) fetched: usize,
    pub(super) row: usize,
}

impl<C: Float> Finished<'_, C> {
    /// Stores the next `rows` rows, at most to the end.
    ///
    /// # Safety
    /// `sums` is valid, `c` is valid for `m` rows of `n` elements that nothing else accesses meanwhile, and the CPU has this
    /// level.
    #[inline]
    pub(super) unsafe fn advance(&mut self, isa: Isa, rows: usize) {
        #[cfg(target_arch = "x86_64")]
        if isa == Isa::Amx && C::DTYPE == DType::BF16 {
            // SAFETY: the caller's promise; CPUs with AMX have AVX512-BF16 (`amx::available`).
            return unsafe { x86::advance_bf16(self, rows) };
        }
        advance(isa, self, rows);
    }

    /// Prefetches the next `rows` rows of C for writing.
    #[inline]
    pub(super) fn fetch(&mut self, rows: usize) {
        #[cfg(target_arch = "x86_64")]
        for _ in 0..rows {
            // SAFETY: prefetching any address is harmless.
            unsafe {
                use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
                _mm_prefetch::<_MM_HINT_ET0>(self.c.wrapping_add(self.fetched * self.ldc).cast());
            }
            self.fetched += 1;
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = rows;
    }

    /// The next row: its sums and its address in C.
    ///
    /// # Safety
    /// As for `advance`, and there is a next row.
    #[inline(always)]
    unsafe fn next(&mut self) -> (*const f32, *mut C) {
        let row = self.row;
        self.row += 1;
        // SAFETY: the row is inside the block.
        unsafe { (self.sums.cast::<f32>().add(row * TILE), self.c.add(row * self.ldc)) }
    }
}

multiversion! {
    /// See `Finished::advance`, whose safety contract it needs.
    fn advance<C: Float>(block: &mut Finished<'_, C>, rows: usize) {
        for _ in 0..rows.min(block.m - block.row) {
            // SAFETY: there is a next row; the caller of `Finished::advance` vouches for the memory.
            unsafe {
                let (sums, c) = block.next();
                let sums = &*sums.cast::<[f32; TILE]>();
                if block.n == TILE {
                    // A constant length for the compiler.
                    row(&mut *c.cast::<[C; TILE]>(), sums, block.bias, block.accumulate);
                } else {
                    row(std::slice::from_raw_parts_mut(c, block.n), sums, block.bias, block.accumulate);
                }
            }
        }
    }
}

#[inline(always)]
fn row<C: Float>(out: &mut [C], sums: &[f32; TILE], bias: &[f32; TILE], accumulate: bool) {
    if accumulate {
        for ((o, s), b) in out.iter_mut().zip(sums).zip(bias) {
            *o = C::from_f32(s + b + o.to_f32());
        }
    } else {
        for ((o, s), b) in out.iter_mut().zip(sums).zip(bias) {
            *o = C::from_f32(s + b);
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Finished, TILE};
    use ferrotron_tensor::Float;
    use std::arch::x86_64::*;

    /// `Finished::advance` to bf16 with the AVX512-BF16 conversion (which, like AMX, flushes subnormals to zero): it must be fast
    /// enough to hide behind AMX.
    ///
    /// # Safety
    /// As for `Finished::advance`, `C` is bf16, and the CPU has AVX512-BF16.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    pub(super) unsafe fn advance_bf16<C: Float>(block: &mut Finished<'_, C>, rows: usize) {
        let columns = if block.n >= TILE { u32::MAX } else { (1 << block.n) - 1 };
        for _ in 0..rows.min(block.m - block.row) {
            // SAFETY: 32 floats of sums and bias; C masked to the columns that exist.
            unsafe {
                let (sums, c) = block.next();
                let (bias, to) = (block.bias.as_ptr(), c.cast::<i16>());
                let mut low = _mm512_add_ps(_mm512_loadu_ps(sums), _mm512_loadu_ps(bias));
                let mut high = _mm512_add_ps(_mm512_loadu_ps(sums.add(16)), _mm512_loadu_ps(bias.add(16)));
                if block.accumulate {
                    let old = _mm512_maskz_loadu_epi16(columns, to);
                    let widen = |half: __m256i| {
                        _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))
                    };
                    low = _mm512_add_ps(low, widen(_mm512_castsi512_si256(old)));
                    high = _mm512_add_ps(high, widen(_mm512_extracti64x4_epi64(old, 1)));
                }
                let rounded: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(high, low));
                _mm512_mask_storeu_epi16(to, columns, rounded);
            }
        }
    }
}
