//! Tile configuration and the 32x32 microkernel.

use super::Operand;
use super::pack::STEP;
use crate::cpu::gemm::PackedOperands;
use ferrotron_tensor::bf16;
use std::arch::asm;
use std::marker::PhantomData;

/// The standard tile configuration (8 tiles of 16 rows x 64 bytes), loaded on the thread that created this guard and released
/// when it drops. Load it once per task, not once per block GEMM. One guard per thread at a time: dropping either of two would
/// release both.
pub(crate) struct Tiles {
    /// Tiles belong to a thread, so the guard is neither `Send` nor `Sync`.
    thread: PhantomData<*const ()>,
}

/// The memory image `ldtilecfg` reads.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Tiles {
    /// Configures the tiles of this thread.
    ///
    /// # Safety
    /// The machine has AMX and the process may use it: `Isa::detect()` or `Isa::all()` gave `Isa::Amx`.
    pub(crate) unsafe fn load() -> Tiles {
        const CONFIG: Config = Config {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
            rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
        };
        // SAFETY: reads the 64 bytes of a valid configuration; the caller vouches for the unit.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &CONFIG, options(nostack, readonly)) };
        Tiles { thread: PhantomData }
    }
}

/// A 32x32 block GEMM in steps, for callers that overlap other work with it: sums stay in tiles 0–3 from `start` to `finish`
/// (nothing else uses the tiles of this thread).
impl Tiles {
    /// Sums start at zero, or at `c[32][32]`, `ldc` elements from row to row.
    ///
    /// # Safety
    /// `c` is valid for those reads where it is read.
    #[inline(always)]
    pub(crate) unsafe fn start(&self, c: *const f32, ldc: usize, accumulate: bool) {
        // SAFETY: reads the block the caller vouches for; the tiles are configured.
        unsafe {
            if accumulate {
                asm!(
                    "tileloadd tmm0, [{c} + {s}]",
                    "tileloadd tmm1, [{c} + {s} + 64]",
                    "tileloadd tmm2, [{d} + {s}]",
                    "tileloadd tmm3, [{d} + {s} + 64]",
                    c = in(reg) c, d = in(reg) c.wrapping_add(16 * ldc), s = in(reg) 4 * ldc,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    options(nostack, readonly, preserves_flags),
                );
            } else {
                asm!(
                    "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    options(nostack, nomem, preserves_flags),
                );
            }
        }
    }

    /// Loads 32 rows of 32 elements of A, `lda` apart.
    ///
    /// # Safety
    /// `a` is valid for those reads.
    #[inline(always)]
    unsafe fn load_left(&self, a: *const bf16, lda: usize) {
        // SAFETY: as the caller vouches; the tiles are configured.
        unsafe {
            asm!(
                "tileloadd tmm4, [{a} + {s}]",
                "tileloadd tmm5, [{d} + {s}]",
                a = in(reg) a, d = in(reg) a.wrapping_add(16 * lda), s = in(reg) 2 * lda,
                out("tmm4") _, out("tmm5") _,
                options(nostack, readonly, preserves_flags),
            );
        }
    }

    /// Loads a step of a panel.
    ///
    /// # Safety
    /// `b` is valid for that read.
    #[inline(always)]
    unsafe fn load_right(&self, b: *const bf16) {
        // SAFETY: as the caller vouches; the tiles are configured.
        unsafe {
            asm!(
                "tileloadd tmm6, [{b} + {s}]",
                "tileloadd tmm7, [{b} + {s} + 1024]",
                b = in(reg) b, s = in(reg) 64usize,
                out("tmm6") _, out("tmm7") _,
                options(nostack, readonly, preserves_flags),
            );
        }
    }

    /// Adds the product of what is loaded.
    #[inline(always)]
    fn multiply(&self) {
        // SAFETY: the guard exists, so the tiles are configured.
        unsafe {
            asm!(
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                options(nostack, nomem, preserves_flags),
            );
        }
    }

    /// Adds product `number` of [`Operand::PRODUCTS`] of one step of k; all of them in turn make the step. Loads what the product
    /// before it has not: `a` and `b` are the first part of 32 rows of A, `lda` apart, and of a step of a panel.
    ///
    /// # Safety
    /// All parts are valid for reads.
    #[inline(always)]
    pub(crate) unsafe fn product<T: Operand>(
        &self,
        number: usize,
        a: *const bf16,
        lda: usize,
        b: *const bf16,
    ) {
        let (i, j) = T::PRODUCTS[number];
        let before = number.checked_sub(1).map(|number| T::PRODUCTS[number]);
        // SAFETY: as the caller vouches.
        unsafe {
            if before.is_none_or(|(before, _)| before != i) {
                self.load_left(a.add(i * 32 * lda), lda);
            }
            if before.is_none_or(|(_, before)| before != j) {
                self.load_right(b.add(j * STEP));
            }
        }
        self.multiply();
    }

    /// Writes the sums to `c[32][32]`, `ldc` elements from row to row.
    ///
    /// # Safety
    /// `c` is valid for those writes.
    #[inline(always)]
    pub(crate) unsafe fn finish(&self, c: *mut f32, ldc: usize) {
        // SAFETY: writes the block the caller vouches for; the tiles are configured.
        unsafe {
            asm!(
                "tilestored [{c} + {s}], tmm0",
                "tilestored [{c} + {s} + 64], tmm1",
                "tilestored [{d} + {s}], tmm2",
                "tilestored [{d} + {s} + 64], tmm3",
                c = in(reg) c, d = in(reg) c.wrapping_add(16 * ldc), s = in(reg) 4 * ldc,
                options(nostack, preserves_flags),
            );
        }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: the guard exists, so this thread has loaded a configuration.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// 32x32 block GEMM: `c[32][32] = A·B`, or `c += A·B` with `accumulate`, in f32.
///
/// * `operands.a`: fastest when every row starts on a 64-byte boundary; the next part is `32 * lda` elements on.
/// * `operands.b`: VNNI panel `[k/32][parts][2 column halves][16 k pairs][16 columns][2]`, as `pack::Right` writes
///   it; 64-byte aligned or it runs at a third of the speed.
/// * `operands.k`: a multiple of 32; 0 gives zeros (or leaves `c` as it is).
/// * `c`: f32, `ldc` elements from row to row.
///
/// Every element is summed along k in order, so it does not depend on the rest of the block.
///
/// # Safety
/// The operands must be valid for reads, and `c` for writes and, with `accumulate`, for reads.
pub(crate) unsafe fn mm_32x32<T: Operand>(
    tiles: &Tiles,
    operands: PackedOperands<T::Packed>,
    c: *mut f32,
    ldc: usize,
    accumulate: bool,
) {
    let PackedOperands { a, lda, b, k } = operands;
    let (a, b) = (a.cast::<bf16>(), b.cast::<bf16>());
    // SAFETY: the blocks are those the caller vouches for.
    unsafe {
        tiles.start(c, ldc, accumulate);
        for step in 0..k / 32 {
            for number in 0..T::PRODUCTS.len() {
                tiles.product::<T>(number, a.add(32 * step), lda, b.add(step * T::PARTS * STEP));
            }
        }
        tiles.finish(c, ldc);
    }
}
