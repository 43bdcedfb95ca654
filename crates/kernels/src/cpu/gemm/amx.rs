//! bf16 and f32 block GEMMs on AMX; f32 operands are split into three bf16 parts while they are packed (see `amx::operand`).

use super::driver::{self, Block, From, Job, PackedOperands, Sums, TILE};
use super::{GemmShape, vector};
use crate::cpu::amx::{Operand, Tiles, pack};
use crate::cpu::{Isa, multiversion};
use ferrotron_tensor::{Float, Threads, bf16};

struct Amx;

impl<T: Operand> Block<T> for Amx {
    type Packed = T::Packed;
    /// AMX tiles, and the scratch of `pack::Left`.
    type Guard = (Tiles, pack::Pairs);
    type Left = pack::Left<T>;
    type Right = pack::Right<T>;
    const K_UNIT: usize = 32;
    /// Both operands of a bf16 block GEMM then fit in L1. Those of f32 are three times as large, but used six times.
    const K_BLOCK: usize = 256;
    /// Every product of parts is a rounding of the sums.
    const SEPARATE: bool = T::PARTS > 1;

    fn isa(&self) -> Isa {
        Isa::Amx
    }

    fn guard(&self) -> Self::Guard {
        // SAFETY: `run` is reached only with `Isa::Amx`, which `Isa::detect` gives where the unit may be used.
        (unsafe { Tiles::load() }, pack::Pairs::default())
    }

    fn left(&self, from: From<T>, m: usize, k: usize, out: *mut T::Packed, ldo: usize) -> pack::Left<T> {
        let From { at: a, ld: lda, trans } = from;
        pack::Left { a, lda, trans, m, k, out: out.cast(), ldo, at: 0, unit: 0 }
    }

    fn left_units(&self, left: &pack::Left<T>) -> usize {
        left.units()
    }

    #[inline]
    unsafe fn pack_left(&self, guard: &mut Self::Guard, left: &mut pack::Left<T>, units: usize) {
        // SAFETY: the caller's promise is the packer's; `Isa::Amx` includes AVX-512.
        unsafe { left.advance(&mut guard.1, units) }
    }

    fn right(&self, from: From<T>, k: usize, n: usize, out: *mut T::Packed, stride: usize) -> pack::Right<T> {
        let From { at: b, ld: ldb, trans } = from;
        pack::Right { b, ldb, trans, k, n, out: out.cast(), stride: T::PARTS * stride, at: 0, col: 0 }
    }

    fn right_units(&self, right: &pack::Right<T>) -> usize {
        right.units()
    }

    #[inline]
    unsafe fn pack_right(&self, right: &mut pack::Right<T>, units: usize) {
        // SAFETY: the caller's promise is the packer's; `Isa::Amx` includes AVX-512.
        unsafe { right.advance(units) }
    }

    fn parts(k: usize) -> usize {
        (k / 32 * T::PRODUCTS.len()).max(1)
    }

    #[inline]
    unsafe fn multiply(
        &self,
        guard: &mut Self::Guard,
        operands: PackedOperands<T::Packed>,
        sums: *mut f32,
        accumulate: bool,
        mut meanwhile: impl FnMut(&mut Self::Guard),
    ) {
        let PackedOperands { a, lda, b, k } = operands;
        let (a, b) = (a.cast::<bf16>(), b.cast::<bf16>());
        // SAFETY: the caller vouches for the operands and sums, and `guard` for the configured tiles.
        unsafe {
            guard.0.start(sums, TILE, accumulate);
            for step in 0..k / 32 {
                for number in 0..T::PRODUCTS.len() {
                    let b = b.add(step * T::PARTS * pack::STEP);
                    guard.0.product::<T>(number, a.add(32 * step), lda, b);
                    meanwhile(guard);
                }
            }
            guard.0.finish(sums, TILE);
        }
    }

    /// The parts of a value say nothing where it is not finite, or so large that bf16 rounds it to infinity; then the sums are not
    /// finite either, and are computed again without parts.
    unsafe fn mend(&self, sums: &mut Sums, a: From<T>, b: From<T>, size: [usize; 3]) {
        if T::PARTS > 1 && !finite(Isa::Amx, sums.as_flattened()) {
            // SAFETY: the caller's promise.
            let plain = unsafe { vector::block(Isa::Amx, a, b, size) };
            for (sum, plain) in sums.as_flattened_mut().iter_mut().zip(plain.as_flattened()) {
                if !sum.is_finite() {
                    *sum = *plain;
                }
            }
        }
    }
}

multiversion! {
    fn finite(sums: &[f32]) -> bool {
        sums.iter().fold(0, |largest, x| x.abs().to_bits().max(largest)) < f32::INFINITY.to_bits()
    }
}

/// Whether an f32 GEMM is computed in parts: it is as exact from k = 32 on (see `amx::operand`), but packing must be worth it.
/// Depends on the shape alone.
pub(super) fn splits(shape: &GemmShape) -> bool {
    shape.m.min(shape.n).min(shape.k) >= 128
}

/// bf16 or f32 GEMM on a machine with AMX.
pub(super) fn run<T: Operand, C: Float>(threads: &Threads, job: Job<'_, T, C>) {
    driver::run(threads, &Amx, job);
}
