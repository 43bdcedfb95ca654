//! Tile configuration and the 32x32 microkernel.

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

    /// Adds one step of k: 32 rows of 32 elements of A, `lda` apart, times one step of a panel.
    ///
    /// # Safety
    /// Both are valid for reads.
    #[inline(always)]
    pub(crate) unsafe fn step(&self, a: *const bf16, lda: usize, b: *const bf16) {
        // SAFETY: as the caller vouches; the tiles are configured.
        unsafe {
            asm!(
                "tileloadd tmm6, [{b} + {bs}]",
                "tileloadd tmm4, [{a} + {s}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{b} + {bs} + 1024]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{d} + {s}]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                a = in(reg) a, d = in(reg) a.wrapping_add(16 * lda), s = in(reg) 2 * lda,
                b = in(reg) b, bs = in(reg) 64usize,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, readonly, preserves_flags),
            );
        }
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
/// * `operands.a`: fastest when every row starts on a 64-byte boundary.
/// * `operands.b`: VNNI panel `[k/32][2 column halves][16 k pairs][16 columns][2]`, as `pack::rows` and `pack::cols` write
///   it; 64-byte aligned or it runs at a third of the speed.
/// * `operands.k`: a multiple of 32; 0 gives zeros (or leaves `c` as it is).
/// * `c`: f32, `ldc` elements from row to row.
///
/// Every element is summed along k in order, so it does not depend on the rest of the block.
///
/// # Safety
/// The operands must be valid for reads, and `c` for writes and, with `accumulate`, for reads.
pub(crate) unsafe fn mm_32x32(
    tiles: &Tiles,
    operands: PackedOperands<bf16>,
    c: *mut f32,
    ldc: usize,
    accumulate: bool,
) {
    // SAFETY: the blocks are those the caller vouches for.
    unsafe {
        tiles.start(c, ldc, accumulate);
        let PackedOperands { a, lda, b, k } = operands;
        for step in 0..k / 32 {
            tiles.step(a.add(32 * step), lda, b.add(1024 * step));
        }
        tiles.finish(c, ldc);
    }
}
