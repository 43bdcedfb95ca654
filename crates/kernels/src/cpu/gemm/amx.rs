//! bf16 blocks on the AMX unit.

use super::driver::{self, Block, Job};
use super::store::Epilogue;
use crate::cpu::Isa;
use crate::cpu::amx::{Tiles, mm_32x32, pack};
use ferrotron_tensor::{Float, Threads, bf16};

struct Amx;

impl Block<bf16> for Amx {
    type Packed = bf16;
    type Guard = Tiles;
    const K_UNIT: usize = 32;
    const K_BLOCK: usize = 512;

    fn guard(&self) -> Tiles {
        // SAFETY: `run` is reached only with `Isa::Amx`, which `Isa::detect` gives where the unit may be used.
        unsafe { Tiles::load() }
    }

    #[inline]
    unsafe fn left(
        &self,
        a: *const bf16,
        lda: usize,
        trans: bool,
        m: usize,
        k: usize,
        out: *mut bf16,
        ldo: usize,
    ) {
        // SAFETY: the caller's promise is the packers'; `Isa::Amx` includes AVX-512.
        unsafe {
            if trans {
                pack::left_transposed(a, lda, m, k, out, ldo)
            } else {
                pack::left(a, lda, m, k, out, ldo)
            }
        }
    }

    #[inline]
    unsafe fn right(&self, b: *const bf16, ldb: usize, trans: bool, k: usize, n: usize, out: *mut bf16) {
        // SAFETY: as above.
        unsafe { if trans { pack::cols(b, ldb, k, n, out) } else { pack::rows(b, ldb, k, n, out) } }
    }

    #[inline]
    unsafe fn multiply(
        &self,
        tiles: &Tiles,
        a: *const bf16,
        lda: usize,
        b: *const bf16,
        k: usize,
        tile: *mut f32,
        accumulate: bool,
    ) {
        // SAFETY: the caller's promise is the microkernel's.
        unsafe { mm_32x32(tiles, a, lda, b, k / 32, tile, 32, accumulate) }
    }
}

/// The product of a machine with AMX.
pub(super) fn run<C: Float>(threads: &Threads, job: Job<'_, bf16, C>) {
    driver::run(threads, &Amx, Epilogue(Isa::Amx), job);
}
