//! Block scaling with small blocks, for microscaling formats.

use super::amax::{amax_columns, amax_row};
use super::encode::{Format, decode_each, encode_each};
use crate::cpu::Isa;
use crate::cpu::rows::{PIECE, Rows, check_len};
use crate::quant::microscaling::BlockAxis;
use ferrotron_tensor::{Float, Result, Threads};

/// Encodes a row, given the index of its first value in the matrix, the row, and the factor on each value.
type Encode<'a, F, T> = dyn Fn(usize, &[T], &[f32], &mut [F]) + Sync + 'a;

/// A matrix `[r, c]` in row-major blocks of `h x w`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SmallBlocks {
    /// Rows of the matrix.
    pub r: usize,
    /// Columns of the matrix.
    pub c: usize,
    /// Rows of a block.
    pub h: usize,
    /// Columns of a block.
    pub w: usize,
}

impl SmallBlocks {
    /// Blocks of `n` values along an axis, or of `n x n`.
    pub fn new([r, c]: [usize; 2], n: usize, along: BlockAxis, square: bool) -> SmallBlocks {
        let h = if square || along == BlockAxis::Cols { n } else { 1 };
        let w = if square || along == BlockAxis::Rows { n } else { 1 };
        SmallBlocks { r, c, h, w }
    }

    /// Numbers of blocks in both directions: the shape of the scales.
    pub fn blocks(&self) -> [usize; 2] {
        [self.r.div_ceil(self.h), self.c.div_ceil(self.w)]
    }

    /// Rows of blocks per chunk of work.
    fn grain(&self) -> usize {
        (PIECE / (self.h * self.c).max(1)).max(1)
    }

    /// Quantizes to `codes [r, c]` and a scale per block; `scale` returns a block's scale and the factor on its values from its
    /// amax.
    pub(super) fn quantize<F: Format, T: Float, S: Send>(
        &self,
        threads: &Threads,
        isa: Isa,
        x: &[T],
        x_rows: Rows,
        codes: &mut [F],
        scales: &mut [S],
        scale: &(dyn Fn(f32) -> (S, f32) + Sync),
        encode: &Encode<'_, F, T>,
    ) -> Result<()> {
        const OP: &str = "quantize";
        let [_, across] = self.blocks();
        x_rows.check(OP, "x", x.len())?;
        check_len(OP, "codes", codes.len(), self.r * self.c)?;
        check_len(OP, "scales", scales.len(), self.blocks().iter().product())?;
        if codes.is_empty() {
            return Ok(());
        }
        let grain = self.grain();
        let mut pieces: Vec<_> =
            codes.chunks_mut(grain * self.h * self.c).zip(scales.chunks_mut(grain * across)).collect();
        threads.parallel_chunks(&mut pieces, 1, &|i, pieces| {
            let (mut most, mut factors) = (vec![0u32; across], vec![0f32; self.c]);
            for (codes, scales) in pieces {
                let bands = codes.chunks_mut(self.h * self.c).zip(scales.chunks_mut(across));
                for (band, (codes, scales)) in bands.enumerate() {
                    let first = (i * grain + band) * self.h;
                    most.fill(0);
                    for row in first..first + codes.len() / self.c {
                        let x = x_rows.row(x, row);
                        if self.w == 1 {
                            amax_columns(isa, x, &mut most);
                        } else {
                            let blocks = most.iter_mut().zip(x.chunks(self.w));
                            blocks.for_each(|(most, x)| *most = (*most).max(amax_row(isa, x)));
                        }
                    }
                    for (k, (most, out)) in most.iter().zip(scales.iter_mut()).enumerate() {
                        let (found, factor) = scale(f32::from_bits(*most));
                        *out = found;
                        factors[k * self.w..((k + 1) * self.w).min(self.c)].fill(factor);
                    }
                    for (row, codes) in codes.chunks_mut(self.c).enumerate() {
                        let row = first + row;
                        encode(row * self.c, x_rows.row(x, row), &factors, codes);
                    }
                }
            }
        });
        Ok(())
    }

    /// `out [r, c] = value·scale`.
    pub(super) fn dequantize<F: Format, T: Float, S: Sync>(
        &self,
        threads: &Threads,
        isa: Isa,
        codes: &[F],
        scales: &[S],
        scale: &(dyn Fn(&S) -> f32 + Sync),
        out: &mut [T],
    ) -> Result<()> {
        const OP: &str = "dequantize";
        let [_, across] = self.blocks();
        check_len(OP, "codes", codes.len(), self.r * self.c)?;
        check_len(OP, "scales", scales.len(), self.blocks().iter().product())?;
        check_len(OP, "out", out.len(), codes.len())?;
        let piece = self.grain() * self.h;
        threads.parallel_chunks(out, piece * self.c, &|i, out| {
            let mut factors = vec![0f32; self.c];
            for (row, out) in out.chunks_mut(self.c).enumerate() {
                let row = i * piece + row;
                // Chunks start at a row of blocks.
                if row.is_multiple_of(self.h) {
                    let scales = &scales[row / self.h * across..][..across];
                    for (factors, s) in factors.chunks_mut(self.w).zip(scales) {
                        factors.fill(scale(s));
                    }
                }
                decode_each(isa, &codes[row * self.c..][..self.c], &factors, out);
            }
        });
        Ok(())
    }
}

/// Encodes to the nearest value.
pub(super) fn nearest<F: Format, T: Float>(isa: Isa) -> impl Fn(usize, &[T], &[f32], &mut [F]) + Sync {
    move |_, x, factors, codes| encode_each(isa, x, factors, codes)
}
