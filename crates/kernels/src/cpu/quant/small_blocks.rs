//! Block scaling with small blocks, for microscaling formats.

use super::amax::{amax_columns, amax_row};
use super::encode::{Format, decode_each, encode_each};
use crate::cpu::rows::{PIECE, RowsView, check_len};
use crate::cpu::{CpuContext, Isa};
use crate::quant::microscaling::BlockAxis;
use ferrotron_tensor::{Float, Result};

/// Encodes a row, given the index of its first value in the matrix, the row, and the factor on each value.
type Encode<'a, F, T> = dyn Fn(usize, &[T], &[f32], &mut [F]) + Sync + 'a;

/// How the values of a block are encoded.
pub(super) struct BlockEncoder<'a, F, T, S> {
    /// Scale of a block and the factor on its values, from its amax.
    pub(super) scale: &'a (dyn Fn(f32) -> (S, f32) + Sync),
    /// Rounding of a row.
    pub(super) encode: &'a Encode<'a, F, T>,
}

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

    /// Quantizes to `codes [r, c]` and a scale per block.
    pub(super) fn quantize<F: Format, T: Float, S: Send>(
        &self,
        cpu: CpuContext,
        x: RowsView<'_, T>,
        encoder: BlockEncoder<'_, F, T, S>,
        codes: &mut [F],
        scales: &mut [S],
    ) -> Result<()> {
        const OP: &str = "quantize";
        let BlockEncoder { scale, encode } = encoder;
        let [_, across] = self.blocks();
        x.check(OP, "x")?;
        check_len(OP, "codes", codes.len(), self.r * self.c)?;
        check_len(OP, "scales", scales.len(), self.blocks().iter().product())?;
        if codes.is_empty() {
            return Ok(());
        }
        let grain = self.grain();
        let mut pieces: Vec<_> =
            codes.chunks_mut(grain * self.h * self.c).zip(scales.chunks_mut(grain * across)).collect();
        cpu.threads.parallel_chunks(&mut pieces, 1, &|i, pieces| {
            let (mut amax, mut factors) = (vec![0u32; across], vec![0f32; self.c]);
            for (codes, scales) in pieces {
                let bands = codes.chunks_mut(self.h * self.c).zip(scales.chunks_mut(across));
                for (band, (codes, scales)) in bands.enumerate() {
                    let first = (i * grain + band) * self.h;
                    amax.fill(0);
                    for row in first..first + codes.len() / self.c {
                        let x = x.row(row);
                        if self.w == 1 {
                            amax_columns(cpu.isa, x, &mut amax);
                        } else {
                            let blocks = amax.iter_mut().zip(x.chunks(self.w));
                            blocks.for_each(|(amax, x)| *amax = (*amax).max(amax_row(cpu.isa, x)));
                        }
                    }
                    for (k, (amax, out)) in amax.iter().zip(scales.iter_mut()).enumerate() {
                        let (found, factor) = scale(f32::from_bits(*amax));
                        *out = found;
                        factors[k * self.w..((k + 1) * self.w).min(self.c)].fill(factor);
                    }
                    for (row, codes) in codes.chunks_mut(self.c).enumerate() {
                        let row = first + row;
                        encode(row * self.c, x.row(row), &factors, codes);
                    }
                }
            }
        });
        Ok(())
    }

    /// `out [r, c] = value·scale`.
    pub(super) fn dequantize<F: Format, T: Float, S: Sync>(
        &self,
        cpu: CpuContext,
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
        cpu.threads.parallel_chunks(out, piece * self.c, &|i, out| {
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
                decode_each(cpu.isa, &codes[row * self.c..][..self.c], &factors, out);
            }
        });
        Ok(())
    }
}

/// Encodes to the nearest value.
pub(super) fn nearest<F: Format, T: Float>(isa: Isa) -> impl Fn(usize, &[T], &[f32], &mut [F]) + Sync {
    move |_, x, factors, codes| encode_each(isa, x, factors, codes)
}
