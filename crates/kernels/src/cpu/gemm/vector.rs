//! f32 block GEMMs with SIMD. 16-bit operands are converted to f32 while they are packed, so all types run at the same speed.

use super::driver::{self, Block, From, Job, PackedOperands, TILE};
use crate::cpu::{CpuContext, Isa, multiversion};
use ferrotron_tensor::Float;

/// f32 block GEMM at an instruction-set level.
struct Vector(Isa);

/// An operand that is being packed: source, rows and columns (k is the columns of A and the rows of B), destination, stride
/// between rows (A) or panels (B), and the next unit.
struct Packing<T> {
    from: From<T>,
    rows: usize,
    cols: usize,
    out: *mut f32,
    stride: usize,
    unit: usize,
}

impl<T: Float> Block<T> for Vector {
    type Packed = f32;
    type Guard = ();
    type Left = Packing<T>;
    type Right = Packing<T>;
    const K_UNIT: usize = 1;
    /// Both operands of a block GEMM then fit in L1.
    const K_BLOCK: usize = 128;

    fn isa(&self) -> Isa {
        self.0
    }

    fn guard(&self) {}

    fn left(&self, from: From<T>, m: usize, k: usize, out: *mut f32, ldo: usize) -> Packing<T> {
        Packing { from, rows: m, cols: k, out, stride: ldo, unit: 0 }
    }

    /// A unit is a row, or 32 columns of a transposed block.
    fn left_units(&self, left: &Packing<T>) -> usize {
        if left.from.trans || left.cols == 0 { left.cols.div_ceil(32) } else { TILE }
    }

    unsafe fn pack_left(&self, _: &mut (), left: &mut Packing<T>, units: usize) {
        let Packing { from: From { at: a, ld, trans }, rows: m, cols: k, out, stride, unit: first } = *left;
        left.unit = first.saturating_add(units).min(self.left_units(left));
        for unit in first..left.unit {
            // SAFETY: 32 columns, or one row, of the source and destination that the caller vouches for.
            unsafe {
                if trans {
                    let (at, len) = (32 * unit, (k - 32 * unit).min(32));
                    flip(self.0, a.add(at * ld), ld, [len, m], out.add(at), stride);
                    for row in m..TILE {
                        out.add(row * stride + at).write_bytes(0, len);
                    }
                } else if unit < m {
                    widen_row(self.0, a.add(unit * ld), k, out.add(unit * stride));
                } else {
                    out.add(unit * stride).write_bytes(0, k);
                }
            }
        }
    }

    fn right(&self, from: From<T>, k: usize, n: usize, out: *mut f32, stride: usize) -> Packing<T> {
        Packing { from, rows: k, cols: n, out, stride, unit: 0 }
    }

    /// A unit is a row, or a panel of a transposed B.
    fn right_units(&self, right: &Packing<T>) -> usize {
        if right.from.trans { right.cols.div_ceil(TILE) } else { right.rows }
    }

    unsafe fn pack_right(&self, right: &mut Packing<T>, units: usize) {
        let Packing { from: From { at: b, ld, trans }, rows: k, cols, out, stride, unit: first } = *right;
        right.unit = first.saturating_add(units).min(self.right_units(right));
        for unit in first..right.unit {
            let (panels, row) = if trans { (unit..unit + 1, 0) } else { (0..cols.div_ceil(TILE), unit) };
            for panel in panels {
                let col = panel * TILE;
                let n = (cols - col).min(TILE);
                // SAFETY: one row, or all rows, of one panel of the memory that the caller vouches for.
                unsafe {
                    let out = out.add(panel * stride + row * TILE);
                    if n < TILE {
                        out.write_bytes(0, TILE * if trans { k } else { 1 });
                    }
                    if trans {
                        flip(self.0, b.add(col * ld), ld, [n, k], out, TILE);
                    } else {
                        widen_row(self.0, b.add(row * ld + col), n, out);
                    }
                }
            }
        }
    }

    fn parts(_: usize) -> usize {
        1
    }

    unsafe fn multiply(
        &self,
        guard: &mut (),
        operands: PackedOperands<f32>,
        tile: *mut f32,
        accumulate: bool,
        mut meanwhile: impl FnMut(&mut ()),
    ) {
        meanwhile(guard);
        // SAFETY: the caller's promise; the level comes from `Isa::detect` or `Isa::all`, which ask the CPU.
        unsafe {
            match self.0 {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 | Isa::Amx => x86::multiply_avx512(operands, tile, accumulate),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => x86::multiply_avx2(operands, tile, accumulate),
                _ => multiply(operands, tile, accumulate),
            }
        }
    }
}

multiversion! {
    /// `out = from` in f32; both pointers must be valid for `len` elements.
    fn widen_row<T: Float>(from: *const T, len: usize, out: *mut f32) {
        // SAFETY: as the caller promised.
        let (from, out) =
            unsafe { (std::slice::from_raw_parts(from, len), std::slice::from_raw_parts_mut(out, len)) };
        for (o, f) in out.iter_mut().zip(from) {
            *o = f.to_f32();
        }
    }
}

/// `out[c][r] = from[r][c]` in f32.
///
/// # Safety
/// The pointers are valid for that, and the CPU has this level.
pub(super) unsafe fn flip<T: Float>(
    isa: Isa,
    from: *const T,
    ld: usize,
    [rows, cols]: [usize; 2],
    out: *mut f32,
    ldo: usize,
) {
    let _ = isa;
    let (mut r0, mut c0) = (0, 0);
    #[cfg(target_arch = "x86_64")]
    if isa >= Isa::Avx512 {
        (r0, c0) = (rows / 16 * 16, cols / 16 * 16);
        // SAFETY: full blocks inside the memory that the caller vouches for.
        unsafe { x86::flip(from, ld, [r0, c0], out, ldo) };
    }
    for r in 0..rows {
        for c in if r < r0 { c0 } else { 0 }..cols {
            // SAFETY: inside the memory that the caller vouches for.
            unsafe { *out.add(c * ldo + r) = (*from.add(r * ld + c)).to_f32() };
        }
    }
}

/// Portable block GEMM: 4x8 sums at a time, which fit in the registers of any CPU.
///
/// # Safety
/// As for `Block::multiply`.
unsafe fn multiply(operands: PackedOperands<f32>, tile: *mut f32, accumulate: bool) {
    let PackedOperands { a, lda, b, k } = operands;
    for row in (0..TILE).step_by(4) {
        for col in (0..TILE).step_by(8) {
            let mut sums = [[0f32; 8]; 4];
            for l in 0..k {
                // SAFETY: row l of the panel, and element l of four rows of A.
                unsafe {
                    let right = &*b.add(l * TILE + col).cast::<[f32; 8]>();
                    for (i, sums) in sums.iter_mut().enumerate() {
                        let left = *a.add((row + i) * lda + l);
                        for (s, r) in sums.iter_mut().zip(right) {
                            *s += left * r;
                        }
                    }
                }
            }
            for (i, sums) in sums.iter().enumerate() {
                // SAFETY: 8 elements of row row+i < 32 of the tile, initialized if accumulated.
                let out = unsafe { &mut *tile.add((row + i) * TILE + col).cast::<[f32; 8]>() };
                for (o, s) in out.iter_mut().zip(sums) {
                    *o = if accumulate { *o + s } else { *s };
                }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{PackedOperands, TILE};
    use crate::cpu::gemm::transpose::{Words, transpose};
    use ferrotron_tensor::{DType, Float};
    use std::arch::x86_64::*;

    /// `super::flip` for multiples of 16.
    ///
    /// # Safety
    /// As for `super::flip`, and the CPU has AVX-512.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) unsafe fn flip<T: Float>(
        from: *const T,
        ld: usize,
        [rows, cols]: [usize; 2],
        out: *mut f32,
        ldo: usize,
    ) {
        let mut wide = Words([0; 256]);
        for r in (0..rows).step_by(16) {
            for c in (0..cols).step_by(16) {
                // SAFETY: a block of 16x16 inside both matrices.
                unsafe {
                    let (from, to) = (from.add(r * ld + c), out.add(c * ldo + r).cast());
                    if T::DTYPE == DType::F32 {
                        transpose(from.cast(), 4 * ld, to, 4 * ldo);
                    } else {
                        for (i, row) in wide.0.as_chunks_mut::<16>().0.iter_mut().enumerate() {
                            let from = &*from.add(i * ld).cast::<[T; 16]>();
                            for (w, f) in row.iter_mut().zip(from) {
                                *w = f.to_f32().to_bits();
                            }
                        }
                        transpose(wide.0.as_ptr().cast(), 64, to, 4 * ldo);
                    }
                }
            }
        }
    }

    macro_rules! multiply {
        ($name:ident, $features:literal, $rows:literal, $vectors:literal, $lanes:literal,
         $zero:ident, $load:ident, $store:ident, $set:ident, $fma:ident) => {
            /// Block GEMM, `$rows` rows by `$vectors` vectors of sums at a time.
            ///
            /// # Safety
            /// As for `Block::multiply`, and the CPU has the features.
            #[target_feature(enable = $features)]
            pub(super) unsafe fn $name(operands: PackedOperands<f32>, tile: *mut f32, accumulate: bool) {
                let PackedOperands { a, lda, b, k } = operands;
                for row in (0..TILE).step_by($rows) {
                    for col in (0..TILE).step_by($vectors * $lanes) {
                        // SAFETY: rows row.. and columns col.. of the block, the panel and the tile.
                        unsafe {
                            let (a, mut b) = (a.add(row * lda), b.add(col));
                            let tile = tile.add(row * TILE + col);
                            let mut sums = [[$zero(); $vectors]; $rows];
                            if accumulate {
                                for i in 0..$rows {
                                    for v in 0..$vectors {
                                        sums[i][v] = $load(tile.add(i * TILE + v * $lanes));
                                    }
                                }
                            }
                            for l in 0..k {
                                let mut right = [$zero(); $vectors];
                                for v in 0..$vectors {
                                    right[v] = $load(b.add(v * $lanes));
                                }
                                b = b.add(TILE);
                                for i in 0..$rows {
                                    let left = $set(*a.add(i * lda + l));
                                    for v in 0..$vectors {
                                        sums[i][v] = $fma(left, right[v], sums[i][v]);
                                    }
                                }
                            }
                            for i in 0..$rows {
                                for v in 0..$vectors {
                                    $store(tile.add(i * TILE + v * $lanes), sums[i][v]);
                                }
                            }
                        }
                    }
                }
            }
        };
    }

    multiply!(
        multiply_avx512,
        "avx512f,avx512bw,avx512dq,avx512vl",
        8,
        2,
        16,
        _mm512_setzero_ps,
        _mm512_loadu_ps,
        _mm512_storeu_ps,
        _mm512_set1_ps,
        _mm512_fmadd_ps
    );
    multiply!(
        multiply_avx2,
        "avx2,fma",
        4,
        2,
        8,
        _mm256_setzero_ps,
        _mm256_loadu_ps,
        _mm256_storeu_ps,
        _mm256_set1_ps,
        _mm256_fmadd_ps
    );
}

/// GEMM with f32 SIMD.
pub(super) fn run<T: Float, C: Float>(cpu: CpuContext, job: Job<'_, T, C>) {
    driver::run(cpu.threads, &Vector(cpu.isa), job);
}
