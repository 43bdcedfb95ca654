//! bf16 block GEMMs on AMX.

use super::driver::{self, Block, From, Job, PackedOperands};
use super::transpose::Words;
use crate::cpu::Isa;
use crate::cpu::amx::{Tiles, pack};
use ferrotron_tensor::{Float, Threads, bf16};

struct Amx;

impl Block<bf16> for Amx {
    type Packed = bf16;
    /// AMX tiles, and the scratch of `pack::Left`.
    type Guard = (Tiles, [Words; 2]);
    type Left = pack::Left;
    type Right = pack::Right;
    const K_UNIT: usize = 32;
    /// Both operands of a block GEMM then fit in L1.
    const K_BLOCK: usize = 256;

    fn isa(&self) -> Isa {
        Isa::Amx
    }

    fn guard(&self) -> Self::Guard {
        // SAFETY: `run` is reached only with `Isa::Amx`, which `Isa::detect` gives where the unit may be used.
        (unsafe { Tiles::load() }, [Words([0; 256]), Words([0; 256])])
    }

    fn left(&self, from: From<bf16>, m: usize, k: usize, out: *mut bf16, ldo: usize) -> pack::Left {
        let From { at: a, ld: lda, trans } = from;
        pack::Left { a, lda, trans, m, k, out, ldo, at: 0, unit: 0 }
    }

    fn left_units(&self, left: &pack::Left) -> usize {
        left.units()
    }

    #[inline]
    unsafe fn pack_left(&self, guard: &mut Self::Guard, left: &mut pack::Left, units: usize) {
        // SAFETY: the caller's promise is the packer's; `Isa::Amx` includes AVX-512.
        unsafe { left.advance(&mut guard.1, units) }
    }

    fn right(&self, from: From<bf16>, k: usize, n: usize, out: *mut bf16, stride: usize) -> pack::Right {
        let From { at: b, ld: ldb, trans } = from;
        pack::Right { b, ldb, trans, k, n, out, stride, at: 0, col: 0 }
    }

    fn right_units(&self, right: &pack::Right) -> usize {
        right.units()
    }

    #[inline]
    unsafe fn pack_right(&self, right: &mut pack::Right, units: usize) {
        // SAFETY: the caller's promise is the packer's; `Isa::Amx` includes AVX-512.
        unsafe { right.advance(units) }
    }

    fn parts(k: usize) -> usize {
        (k / 32).max(1)
    }

    #[inline]
    unsafe fn multiply(
        &self,
        guard: &mut Self::Guard,
        operands: PackedOperands<bf16>,
        sums: *mut f32,
        accumulate: bool,
        mut meanwhile: impl FnMut(&mut Self::Guard),
    ) {
        // SAFETY: the caller vouches for the operands and sums, and `guard` for the configured tiles.
        unsafe {
            guard.0.start(sums, 32, accumulate);
            let PackedOperands { a, lda, b, k } = operands;
            for step in 0..k / 32 {
                guard.0.step(a.add(32 * step), lda, b.add(1024 * step));
                meanwhile(guard);
            }
            guard.0.finish(sums, 32);
        }
    }
}

/// bf16 GEMM on a machine with AMX.
pub(super) fn run<C: Float>(threads: &Threads, job: Job<'_, bf16, C>) {
    driver::run(threads, &Amx, job);
}
