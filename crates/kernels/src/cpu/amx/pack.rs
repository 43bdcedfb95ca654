//! Packing operands for the AMX unit with AVX-512, ragged edges padded with zeros.
//!
//! A tile of the right-hand side holds pairs of consecutive k ("VNNI"): a panel of up to 32 columns is
//! `[k/32][2 column halves][16 k pairs][16 columns][2]` bf16. A pair of bf16 is one 32-bit word, so going from
//! k-contiguous storage to this is a transpose of 16x16 words, and the left-hand side of a transposed product
//! is the same transpose the other way round.

use crate::cpu::gemm::transpose::{Words, transpose, transpose_part};
use ferrotron_tensor::bf16;
use std::arch::x86_64::*;

/// Elements of one packed step: 32 of k by 32 columns (or rows).
pub(crate) const STEP: usize = 32 * 32;

/// Packs row-major `b[k, n]` (rows `ldb` elements apart, n contiguous, `n <= 32`) into a VNNI panel of
/// `k.div_ceil(32)` steps at `out`; columns from `n` and rows from `k` become zero.
///
/// # Safety
/// `b` is valid for reads of those rows, `out` for writes of `k.div_ceil(32) * STEP` elements and 64-byte
/// aligned; the CPU has AVX-512 F/BW/DQ/VL.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) unsafe fn rows(b: *const bf16, ldb: usize, k: usize, n: usize, out: *mut bf16) {
    debug_assert!(n <= 32);
    // SAFETY: the caller's promise.
    unsafe { Right { b, ldb, trans: false, k, n, out, stride: 0, at: 0, col: 0 }.advance(usize::MAX) };
}

/// Packs k-contiguous `b[n, k]` (rows `ldb` elements apart, `n <= 32`), that is the transpose of the
/// right-hand side, into a VNNI panel of `k.div_ceil(32)` steps at `out`; what is outside becomes zero.
///
/// # Safety
/// As for [`rows`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) unsafe fn cols(b: *const bf16, ldb: usize, k: usize, n: usize, out: *mut bf16) {
    debug_assert!(n <= 32);
    for step in 0..k.div_ceil(32) {
        let kn = (k - step * 32).min(32);
        for half in 0..2 {
            let count = n.saturating_sub(half * 16).min(16);
            // SAFETY: `count` rows of `b` from row 16·half with `kn` elements from `step * 32`; half a step of
            // `out` is written. No address past the storage is formed where `count` is zero.
            unsafe {
                let to: *mut u32 = out.add(step * STEP + half * 512).cast();
                let from = b.wrapping_add(half * 16 * ldb + step * 32);
                if count == 16 && kn == 32 {
                    transpose(from.cast(), 2 * ldb, to, 64);
                } else {
                    let mut edge = Words([0; 256]);
                    for r in 0..count {
                        let row = _mm512_maskz_loadu_epi16(mask(kn), from.wrapping_add(r * ldb).cast());
                        _mm512_store_si512(edge.0.as_mut_ptr().add(16 * r).cast(), row);
                    }
                    transpose(edge.0.as_ptr().cast(), 64, to, 64);
                }
            }
        }
    }
}

/// Packing a right-hand side, a little at a time: `b[k, n]` (rows `ldb` elements apart, n contiguous), or with
/// `trans` its transpose `b[n, k]`, into panels of 32 columns that start `stride` elements apart, zero outside.
pub(crate) struct Right {
    /// First element, and elements from one stored row to the next.
    pub(crate) b: *const bf16,
    pub(crate) ldb: usize,
    /// Is it stored transposed?
    pub(crate) trans: bool,
    /// Rows and columns.
    pub(crate) k: usize,
    pub(crate) n: usize,
    /// Where to, 64-byte aligned; each panel takes `k.div_ceil(32)` steps.
    pub(crate) out: *mut bf16,
    pub(crate) stride: usize,
    /// Where the next unit of work is: first of k, and first column.
    pub(crate) at: usize,
    pub(crate) col: usize,
}

impl Right {
    /// How many units of work there are in all: a pair of rows, or transposed a panel, of 32 columns.
    pub(crate) fn units(&self) -> usize {
        self.n.div_ceil(32) * if self.trans { 1 } else { self.k.div_ceil(32) * 16 }
    }

    /// Does the next `units` units, to the end at most.
    ///
    /// # Safety
    /// The memory is as the fields say; the CPU has AVX-512 F/BW/DQ/VL.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(crate) unsafe fn advance(&mut self, units: usize) {
        for _ in 0..units {
            let (at, col) = (self.at, self.col);
            if col >= self.n || at >= self.k.next_multiple_of(32) {
                return;
            }
            let n = (self.n - col).min(32);
            // SAFETY: columns col.. of B, in their panel.
            unsafe {
                let out = self.out.add(col / 32 * self.stride);
                if self.trans {
                    cols(self.b.add(col * self.ldb), self.ldb, self.k, n, out);
                    self.col += 32;
                } else {
                    // Pairs of rows over the whole width, since the caches fetch ahead along rows.
                    let low: *mut u32 = out.add(at / 32 * STEP).cast();
                    let (b, k) = (self.b.wrapping_add(at * self.ldb + col), self.k.saturating_sub(at));
                    pair(b, self.ldb, k, n, low.add(at % 32 * 8), low.add(256 + at % 32 * 8));
                    self.col += 32;
                    if self.col >= self.n {
                        (self.at, self.col) = (at + 2, 0);
                    }
                }
            }
        }
    }
}

/// Packing a left-hand block, a little at a time: up to 32 rows of `a[m, k]` (k contiguous, rows `lda` elements
/// apart), or of its transpose `a[k, m]` (m contiguous), into 32 rows of `ldo` elements (a multiple of 32, at
/// least `k`), zero outside.
pub(crate) struct Left {
    /// First element, and elements from one stored row to the next.
    pub(crate) a: *const bf16,
    pub(crate) lda: usize,
    /// Is it stored transposed?
    pub(crate) trans: bool,
    /// Rows, at most 32, and columns.
    pub(crate) m: usize,
    pub(crate) k: usize,
    /// Where to, 64-byte aligned, for 32 rows of `k.div_ceil(32) * 32`.
    pub(crate) out: *mut bf16,
    pub(crate) ldo: usize,
    /// Where the next unit of work is: first of k, and row of the block or unit of the step.
    pub(crate) at: usize,
    pub(crate) unit: usize,
}

/// Packs a whole left-hand block `a[m, k]`; see [`Left`].
///
/// # Safety
/// The memory is as [`Left`] says; the CPU has AVX-512 F/BW/DQ/VL.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) unsafe fn left(a: *const bf16, lda: usize, m: usize, k: usize, out: *mut bf16, ldo: usize) {
    // SAFETY: the caller's promise.
    unsafe { whole_left(Left { a, lda, trans: false, m, k, out, ldo, at: 0, unit: 0 }) };
}

/// As [`left`], from the transpose `a[k, m]`.
///
/// # Safety
/// As for [`left`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) unsafe fn left_transposed(
    a: *const bf16,
    lda: usize,
    m: usize,
    k: usize,
    out: *mut bf16,
    ldo: usize,
) {
    // SAFETY: the caller's promise.
    unsafe { whole_left(Left { a, lda, trans: true, m, k, out, ldo, at: 0, unit: 0 }) };
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn whole_left(mut block: Left) {
    let mut pairs = [Words([0; 256]), Words([0; 256])];
    // SAFETY: the caller's promise.
    unsafe { block.advance(&mut pairs, usize::MAX) };
}

/// Units of one step of a transposed block: 16 pairs of rows to interleave, then 2 transposes in 4 parts each.
const TRANSPOSED_UNITS: usize = 24;

impl Left {
    /// How many units of work there are in all.
    pub(crate) fn units(&self) -> usize {
        self.k.div_ceil(32) * if self.trans { TRANSPOSED_UNITS } else { 32 }
    }

    /// Does the next `units` units, to the end at most. `pairs` is kept from call to call.
    ///
    /// # Safety
    /// The memory is as the fields say; the CPU has AVX-512 F/BW/DQ/VL.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(crate) unsafe fn advance(&mut self, pairs: &mut [Words; 2], units: usize) {
        // SAFETY: the caller's promise.
        unsafe { if self.trans { self.transposed(pairs, units) } else { self.plain(units) } }
    }

    /// Row after row, since the caches fetch ahead along rows.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn plain(&mut self, units: usize) {
        for _ in 0..units {
            if self.unit >= 32 || self.k == 0 {
                return;
            }
            let keep = if self.unit < self.m { mask((self.k - self.at).min(32)) } else { 0 };
            // SAFETY: masked to the elements that exist.
            unsafe {
                let row = _mm512_maskz_loadu_epi16(
                    keep,
                    self.a.wrapping_add(self.unit * self.lda + self.at).cast(),
                );
                _mm512_store_si512(self.out.add(self.unit * self.ldo + self.at).cast(), row);
            }
            self.at += 32;
            if self.at >= self.k {
                (self.unit, self.at) = (self.unit + 1, 0);
            }
        }
    }

    /// Step after step of k.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn transposed(&mut self, pairs: &mut [Words; 2], units: usize) {
        for _ in 0..units {
            if self.at >= self.k {
                return;
            }
            let (at, unit) = (self.at, self.unit);
            // SAFETY: rows at.. of `a` exist (`k - at` of them); 32 rows of 32 are written at column `at`.
            unsafe {
                if unit < 16 {
                    let a = self.a.add(at * self.lda);
                    // Rows lie far apart, where the caches do not fetch ahead by themselves.
                    for row in [32 + 2 * unit, 33 + 2 * unit] {
                        _mm_prefetch::<_MM_HINT_T0>(a.wrapping_add(row * self.lda).cast());
                    }
                    let [low, high] = pairs.each_mut().map(|w| w.0.as_mut_ptr());
                    let left = (self.k - at).saturating_sub(2 * unit);
                    pair(
                        a.wrapping_add(2 * unit * self.lda),
                        self.lda,
                        left,
                        self.m,
                        low.add(16 * unit),
                        high.add(16 * unit),
                    );
                } else {
                    let (half, part) = ((unit - 16) / 4, unit % 4);
                    let to = self.out.add(16 * half * self.ldo + at);
                    transpose_part(pairs[half].0.as_ptr().cast(), 64, to.cast(), 2 * self.ldo, part);
                }
            }
            self.unit += 1;
            if self.unit == TRANSPOSED_UNITS {
                (self.at, self.unit) = (at + 32, 0);
            }
        }
    }
}

/// The first `n <= 32` lanes.
#[inline(always)]
fn mask(n: usize) -> u32 {
    if n >= 32 { u32::MAX } else { (1 << n) - 1 }
}

/// The first two rows of `b[k, n <= 32]` interleaved to words: columns 0–15 go to `low[16]`, columns 16–31 to
/// `high[16]`; zero outside.
///
/// # Safety
/// `b` is valid for reads of up to two rows of `n`; `low` and `high` for 16 aligned words each; AVX-512.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn pair(b: *const bf16, ldb: usize, k: usize, n: usize, low: *mut u32, high: *mut u32) {
    // Unpacking works within 128-bit lanes: first bring quarter i of both halves of the row into lane i.
    let lanes = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
    let columns = mask(n);
    let keep = |r: usize| if r < k { columns } else { 0 };
    // SAFETY: masked to the elements that exist; an aligned row of words is written to each output.
    unsafe {
        let even = _mm512_maskz_loadu_epi16(keep(0), b.cast());
        let odd = _mm512_maskz_loadu_epi16(keep(1), b.wrapping_add(ldb).cast());
        let even = _mm512_permutexvar_epi64(lanes, even);
        let odd = _mm512_permutexvar_epi64(lanes, odd);
        _mm512_store_si512(low.cast(), _mm512_unpacklo_epi16(even, odd));
        _mm512_store_si512(high.cast(), _mm512_unpackhi_epi16(even, odd));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;
    use crate::cpu::amx::{Tiles, mm_32x32};

    #[repr(C, align(64))]
    #[derive(Clone)]
    struct Step([bf16; STEP]);

    fn values(count: usize) -> Vec<bf16> {
        // Small integers: products and sums are exact, and every position differs from its neighbours.
        (0..count).map(|i| bf16::from_f32(((i * 7919 + i / 31) % 201) as f32 - 100.0)).collect()
    }

    fn garbage(steps: usize) -> Vec<Step> {
        vec![Step([bf16::NAN; STEP]); steps]
    }

    fn panel(p: &[Step], row: usize, col: usize) -> f32 {
        let (step, half) = (row / 32, col / 16);
        p[step].0[half * 512 + (row % 32 / 2) * 32 + (col % 16) * 2 + row % 2].to_f32()
    }

    #[test]
    fn packers_place_every_element_and_pad_with_zeros() {
        if Isa::detect() < Isa::Avx512 {
            return;
        }
        for k in [0, 1, 2, 15, 16, 31, 32, 33, 64, 95] {
            for n in [1, 2, 15, 16, 17, 31, 32] {
                let (wide, tall) = (n + 3, k + 5);
                let (by_row, by_col) = (values(k * wide), values(n * tall));
                let steps = k.div_ceil(32);
                let (mut p, mut q) = (garbage(steps), garbage(steps));
                let (mut l, mut t) = (garbage(steps), garbage(steps));
                // SAFETY: buffers sized as the packers ask; AVX-512 checked above.
                unsafe {
                    rows(by_row.as_ptr(), wide, k, n, p.as_mut_ptr().cast());
                    cols(by_col.as_ptr(), tall, k, n, q.as_mut_ptr().cast());
                    // In portions, as the driver does.
                    let mut pairs = [Words([0; 256]), Words([0; 256])];
                    for (trans, from, lda, out) in
                        [(false, &by_col, tall, &mut l), (true, &by_row, wide, &mut t)]
                    {
                        let (a, out) = (from.as_ptr(), out.as_mut_ptr().cast());
                        let mut left = Left { a, lda, trans, m: n, k, out, ldo: steps * 32, at: 0, unit: 0 };
                        for _ in 0..left.units().div_ceil(7) {
                            left.advance(&mut pairs, 7);
                        }
                    }
                }
                let flat = |v: &[Step], r: usize, c: usize| {
                    let at = r * steps * 32 + c;
                    v[at / STEP].0[at % STEP].to_f32()
                };
                for row in 0..steps * 32 {
                    for col in 0..32 {
                        let inside = row < k && col < n;
                        let from_rows = if inside { by_row[row * wide + col].to_f32() } else { 0.0 };
                        let from_cols = if inside { by_col[col * tall + row].to_f32() } else { 0.0 };
                        assert_eq!(panel(&p, row, col), from_rows, "rows k={k} n={n} at {row},{col}");
                        assert_eq!(panel(&q, row, col), from_cols, "cols k={k} n={n} at {row},{col}");
                        assert_eq!(flat(&l, col, row), from_cols, "left k={k} m={n} at {row},{col}");
                        assert_eq!(
                            flat(&t, col, row),
                            from_rows,
                            "left_transposed k={k} m={n} at {row},{col}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn wide_right_hand_sides_become_panels() {
        if Isa::detect() < Isa::Avx512 {
            return;
        }
        for (k, n) in [(1, 33), (32, 64), (33, 65), (70, 100), (64, 32)] {
            for trans in [false, true] {
                let ldb = 3 + if trans { k } else { n };
                let b = values(if trans { n } else { k } * ldb);
                let (steps, panels) = (k.div_ceil(32), n.div_ceil(32));
                // One step between the panels stays as it is.
                let mut out = garbage(panels * (steps + 1));
                let (from, to, stride) = (b.as_ptr(), out.as_mut_ptr().cast(), (steps + 1) * STEP);
                let mut right = Right { b: from, ldb, trans, k, n, out: to, stride, at: 0, col: 0 };
                for _ in 0..right.units().div_ceil(5) {
                    // SAFETY: buffers sized as the packer asks; AVX-512 checked above.
                    unsafe { right.advance(5) };
                }
                for row in 0..steps * 32 {
                    for col in 0..panels * 32 {
                        let from = if trans { col * ldb + row } else { row * ldb + col };
                        let want = if row < k && col < n { b[from].to_f32() } else { 0.0 };
                        let got = panel(&out[col / 32 * (steps + 1)..], row, col % 32);
                        assert_eq!(got, want, "k={k} n={n} trans={trans} at {row},{col}");
                    }
                }
                assert!((1..=panels).all(|p| out[p * (steps + 1) - 1].0.iter().all(|x| x.is_nan())));
            }
        }
    }

    #[test]
    fn block_product_is_exact_on_integers() {
        if Isa::detect() < Isa::Amx {
            return;
        }
        for kb in [0usize, 1, 2, 5] {
            for accumulate in [false, true] {
                let k = 32 * kb;
                let (lda, ldc) = (k + 3, 37);
                let (a, b) = (values(32 * lda), values(k * 32));
                let mut p = garbage(kb);
                let mut c: Vec<f32> = (0..32 * ldc).map(|i| i as f32).collect();
                let before = c.clone();
                // SAFETY: buffers sized as asked; AMX checked above.
                unsafe {
                    rows(b.as_ptr(), 32, k, 32, p.as_mut_ptr().cast());
                    let tiles = Tiles::load();
                    mm_32x32(&tiles, a.as_ptr(), lda, p.as_ptr().cast(), kb, c.as_mut_ptr(), ldc, accumulate);
                }
                for i in 0..32 {
                    for j in 0..ldc {
                        let sum: f32 =
                            (0..k).map(|l| a[i * lda + l].to_f32() * b[l * 32 + (j % 32)].to_f32()).sum();
                        let old = before[i * ldc + j];
                        let want = match (j < 32, accumulate) {
                            (false, _) => old,
                            (true, true) => old + sum,
                            (true, false) => sum,
                        };
                        assert_eq!(c[i * ldc + j], want, "kb={kb} at {i},{j}");
                    }
                }
            }
        }
    }
}
