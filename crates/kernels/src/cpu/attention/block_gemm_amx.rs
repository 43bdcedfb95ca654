//! Block GEMMs on the AMX unit: operands in bf16, sums in f32.
//!
//! A right operand of `[k, n]` is one panel for every 32 columns, each with room for all `k` rows; see
//! `amx::pack` for what a panel is.

use super::block_gemm::{Engine, Left, Output, Right};
use super::rounding::{round, round_pairs};
use super::{GRAIN, KEYS, QUERIES, padded};
use crate::cpu::Isa;
use crate::cpu::amx::{Tiles, mm_32x32, pack};
use crate::cpu::gemm::PackedOperands;
use ferrotron_tensor::{DType, Float, bf16};

/// AMX engine; created only where `isa` is [`Isa::Amx`].
pub(super) struct Matrix {
    isa: Isa,
    tiles: Tiles,
}

impl Engine for Matrix {
    type E = bf16;
    const COPIES: bool = true;

    fn start(isa: Isa) -> Matrix {
        assert!(isa == Isa::Amx);
        // SAFETY: `isa` comes from `Isa::detect` or `Isa::all`. A task creates one engine and calls no other kernel while it
        // lives.
        Matrix { isa, tiles: unsafe { Tiles::load() } }
    }

    fn stage<T: Float>(&self, src: &[T], stride: usize, rows: usize, cols: usize, tile: &mut [bf16]) {
        let ld = padded(cols);
        if T::DTYPE == DType::BF16 {
            let src: &[bf16] = bytemuck::cast_slice(src);
            assert!(rows == 0 || src.len() >= (rows - 1) * stride + cols);
            assert!(tile.len() >= padded(rows) * ld);
            for r in (0..rows).step_by(GRAIN) {
                // SAFETY: measured above; scratch is aligned; AMX brings AVX-512.
                unsafe {
                    let (from, to) = (src.as_ptr().add(r * stride), tile.as_mut_ptr().add(r * ld));
                    pack::left(from, stride, (rows - r).min(GRAIN), cols, to, ld);
                }
            }
        } else {
            tile[..padded(rows) * ld].fill(bf16::ZERO);
            for (r, to) in tile[..rows * ld].chunks_exact_mut(ld).enumerate() {
                let from = &src[r * stride..r * stride + cols];
                to.iter_mut().zip(from).for_each(|(to, x)| *to = Float::from_f32(x.to_f32()));
            }
        }
    }

    fn transpose_left(&self, rows: usize, cols: usize, tile: &[bf16], left: &mut [bf16]) {
        let rows = padded(rows);
        assert!(rows <= KEYS && tile.len() >= rows * cols && left.len() >= cols * KEYS);
        for c in (0..cols).step_by(GRAIN) {
            // SAFETY: measured above (`cols` is a multiple of the grain); scratch is aligned; AMX brings AVX-512.
            unsafe {
                let to = left.as_mut_ptr().add(c * KEYS);
                pack::left_transposed(tile.as_ptr().add(c), cols, GRAIN, rows, to, KEYS);
            }
        }
    }

    fn right<'a>(&self, rows: usize, cols: usize, tile: &'a [bf16], room: &'a mut [bf16]) -> Right<'a, bf16> {
        let rows = padded(rows);
        assert!(rows <= QUERIES && tile.len() >= rows * cols && room.len() >= QUERIES * cols);
        for c in (0..cols).step_by(GRAIN) {
            // SAFETY: as in `transpose_left`.
            unsafe {
                pack::rows(tile.as_ptr().add(c), cols, rows, GRAIN, room.as_mut_ptr().add(c * QUERIES));
            }
        }
        Right { data: room, rows: QUERIES, cols }
    }

    fn right_transposed(&self, rows: usize, cols: usize, tile: &[bf16], right: &mut [bf16]) {
        let rows = padded(rows);
        assert!(rows <= QUERIES && tile.len() >= rows * cols && right.len() >= cols * QUERIES);
        for r in (0..rows).step_by(GRAIN) {
            // SAFETY: as in `transpose_left`.
            unsafe {
                let at = r * cols;
                pack::cols(tile.as_ptr().add(at), cols, cols, GRAIN, right.as_mut_ptr().add(at));
            }
        }
    }

    fn block_left<'a>(&self, keys: usize, block: &'a [f32], room: &'a mut [bf16]) -> Left<'a, bf16> {
        round(self.isa, &block[..keys * QUERIES], 1.0, room);
        Left { data: room, ld: QUERIES }
    }

    fn block_right<'a>(&self, keys: usize, block: &'a [f32], room: &'a mut [bf16]) -> Right<'a, bf16> {
        round_pairs(self.isa, &block[..keys * QUERIES], bytemuck::cast_slice_mut(room));
        Right { data: room, rows: KEYS, cols: QUERIES }
    }

    fn multiply(
        &self,
        (m, k, n): (usize, usize, usize),
        left: Left<'_, bf16>,
        right: Right<'_, bf16>,
        c: Output<'_>,
        add: bool,
    ) {
        let Output { data: c, ld: ldc } = c;
        assert!([m, k, n].iter().all(|x| x.is_multiple_of(GRAIN)) && m > 0 && n > 0);
        assert!(left.data.len() >= (m - 1) * left.ld + k && c.len() >= (m - 1) * ldc + n);
        assert!(right.data.len() >= right.rows * n && right.rows >= k);
        for j in (0..n).step_by(GRAIN) {
            for i in (0..m).step_by(GRAIN) {
                // SAFETY: measured above.
                unsafe {
                    let (a, b) =
                        (left.data.as_ptr().add(i * left.ld), right.data.as_ptr().add(j * right.rows));
                    let c = c.as_mut_ptr().add(i * ldc + j);
                    mm_32x32(&self.tiles, PackedOperands { a, lda: left.ld, b, k }, c, ldc, add);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::block_gemm::Plain;
    use super::super::scratch::Buffer;
    use super::*;

    fn buffer<E: ferrotron_tensor::Element>(from: impl ExactSizeIterator<Item = E>) -> Buffer<E> {
        let mut to = Buffer::new(from.len());
        to.iter_mut().zip(from).for_each(|(to, x)| *to = x);
        to
    }

    /// Both engines on the same small integers, where every product and sum is exact.
    #[test]
    fn agrees_with_the_plain_engine() {
        fn gemms<E: Engine>(isa: Isa, tokens: usize, channels: usize, keys: usize) -> [Vec<f32>; 4] {
            let e = E::start(isa);
            let cols = padded(channels);
            let src: Vec<f32> = (0..tokens * (channels + 3)).map(|i| (i * 7 % 19) as f32 - 9.0).collect();
            let block = buffer((0..KEYS * QUERIES).map(|i| (i * 5 % 17) as f32 - 8.0));
            let mut tile = Buffer::new(QUERIES * cols);
            e.stage(&src, channels + 3, tokens, channels, &mut tile);
            let room = || Buffer::<E::E>::new(QUERIES * cols.max(QUERIES));
            let (mut one, mut two, mut three, mut four) = (room(), room(), room(), room());
            let rows = padded(tokens);
            let result = || vec![1.0f32; KEYS.max(cols) * QUERIES.max(cols)];
            let mut c = [result(), result(), result(), result()];
            // tile · tileᵀ, block · tile, tileᵀ · block, with and without adding.
            e.right_transposed(tokens, cols, &tile, &mut one);
            let right = Right { data: &one, rows: cols, cols: QUERIES };
            let [c0, c1, c2, c3] = c.each_mut().map(Vec::as_mut_slice);
            let out = |data, ld| Output { data, ld };
            e.multiply((rows, cols, rows), Left { data: &tile, ld: cols }, right, out(c0, QUERIES), false);
            let right = e.right(tokens, cols, &tile, &mut two);
            let left = e.block_left(keys, &block, &mut three);
            e.multiply((keys, rows, cols), left, right, out(c1, cols), true);
            e.transpose_left(tokens, cols, &tile, &mut one);
            let right = e.block_right(keys, &block, &mut four);
            let (left, depth) = (Left { data: &one, ld: KEYS }, keys.min(rows));
            e.multiply((cols, depth, QUERIES), left, right, out(c2, QUERIES), true);
            e.multiply((cols, depth, 32), left, right, out(c3, QUERIES), false);
            c
        }
        if Isa::detect() < Isa::Amx {
            return eprintln!("SKIPPED: agrees_with_the_plain_engine: no AMX");
        }
        for (tokens, channels, keys) in [(64, 64, 64), (33, 40, 64), (1, 1, 32), (32, 128, 32), (50, 96, 64)]
        {
            let amx = gemms::<Matrix>(Isa::Amx, tokens, channels, keys);
            let plain = gemms::<Plain>(Isa::Portable, tokens, channels, keys);
            assert!(amx == plain, "{tokens} tokens, {channels} channels, {keys} keys");
        }
    }
}
