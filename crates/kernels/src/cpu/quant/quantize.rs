//! Quantization of matrices to FP8 in both orientations.

use super::amax::{amax_columns, amax_row};
use super::encode::{Format, Tile, encode_each, encode_row, transpose};
use crate::cpu::rows::{Rows, RowsView, check_len};
use crate::cpu::{CpuContext, Isa};
use crate::quant::scale::ScaleRule;
use crate::{ALIGN, BLOCK, ScalingMode};
use ferrotron_tensor::{Float, Result, shape_error};

/// Orientation of a matrix `x [r, c]` as a GEMM operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Orientation {
    /// Row-wise: as stored, contracted along c.
    Rows,
    /// Column-wise: transposed, contracted along r.
    Cols,
}

/// Block scaling.
#[derive(Clone, Copy, Debug)]
pub struct Blocks {
    /// [`ScalingMode::Block1x128`] or [`ScalingMode::Block128x128`].
    pub scaling: ScalingMode,
    /// Scale of a block from its amax.
    pub rule: ScaleRule,
}

/// Output of one unit of work: up to 128 rows.
struct Band<'a, F> {
    data: &'a mut [F],
    /// Inverse scales of the 128-column blocks: per row, or one for all rows.
    scales: &'a mut [f32],
}

/// Output shape `[r, c]` of an orientation of x, and its padded width.
fn output(how: Orientation, x: &Rows) -> ([usize; 2], usize) {
    let [r, c] = if how == Orientation::Rows { [x.outer, x.width] } else { [x.width, x.outer] };
    ([r, c], c.next_multiple_of(ALIGN))
}

/// `data = round(x·scale)`; see [`crate::Fp8Tensor`] for the layout.
pub fn quantize_tensor<F: Format, T: Float>(
    cpu: CpuContext,
    how: Orientation,
    x: RowsView<'_, T>,
    scale: f32,
    data: &mut [F],
) -> Result<()> {
    x.check("quantize", "x")?;
    let ([r, _], width) = output(how, &x.rows);
    check_len("quantize", "data", data.len(), r * width)?;
    cpu.threads.parallel_chunks(data, BLOCK * width, &|i, data| {
        let band = Band { data, scales: &mut [] };
        fill(cpu.isa, how, x, i * BLOCK, band, |_, _| [scale; BLOCK]);
    });
    Ok(())
}

/// [`quantize_tensor`] with a scale per block; `scale_inv` has the shape of [`ScalingMode::scales`].
pub fn quantize_blocks<F: Format, T: Float>(
    cpu: CpuContext,
    how: Orientation,
    x: RowsView<'_, T>,
    blocks: Blocks,
    data: &mut [F],
    scale_inv: &mut [f32],
) -> Result<()> {
    const OP: &str = "quantize";
    x.check(OP, "x")?;
    let ([r, c], width) = output(how, &x.rows);
    check_len(OP, "data", data.len(), r * width)?;
    check_len(OP, "scale_inv", scale_inv.len(), blocks.scaling.scales(r, c).iter().product())?;
    let each = match blocks.scaling {
        ScalingMode::PerTensor => return shape_error(OP, "per-tensor scaling has no blocks"),
        ScalingMode::Block1x128 => BLOCK,
        ScalingMode::Block128x128 => 1,
    };
    scale_inv.fill(0.0);
    if r * c == 0 {
        return Ok(());
    }
    // The scales of a band are not contiguous in `scale_inv`, so they are copied there afterwards.
    let per_band = c.div_ceil(BLOCK) * each;
    let mut kept = vec![0f32; r.div_ceil(BLOCK) * per_band];
    let mut bands: Vec<_> = data
        .chunks_mut(BLOCK * width)
        .zip(kept.chunks_mut(per_band))
        .map(|(data, scales)| Band { data, scales })
        .collect();
    cpu.threads.parallel_chunks(&mut bands, 1, &|i, bands| {
        for band in bands {
            let band = Band { data: &mut *band.data, scales: &mut *band.scales };
            fill(cpu.isa, how, x, i * BLOCK, band, |rows, h| block_scales(cpu.isa, how, &blocks, rows, h));
        }
    });
    let columns = *blocks.scaling.scales(r, c).last().unwrap_or(&0);
    for (band, kept) in kept.chunks(per_band).enumerate() {
        for (block, kept) in kept.chunks(each).enumerate() {
            let at = if each == 1 { band * columns + block } else { block * columns + band * BLOCK };
            let n = if each == 1 { 1 } else { BLOCK.min(r - band * BLOCK) };
            scale_inv[at..at + n].copy_from_slice(&kept[..n]);
        }
    }
    Ok(())
}

/// Scales of a tile, per output row.
type Scales = [f32; BLOCK];

/// Computes the scales of a tile of `h` rows from the amax of its blocks; `rows` yields its rows of x.
fn block_scales<'a, T: Float>(
    isa: Isa,
    how: Orientation,
    blocks: &Blocks,
    rows: &dyn Fn(usize) -> &'a [T],
    h: usize,
) -> Scales {
    let rule = &blocks.rule;
    if blocks.scaling == ScalingMode::Block128x128 {
        let amax = (0..h).map(|i| amax_row(isa, rows(i))).max().unwrap_or(0);
        return [rule.scale(f32::from_bits(amax)); BLOCK];
    }
    let mut amax = [0u32; BLOCK];
    for i in 0..h {
        match how {
            Orientation::Rows => amax[i] = amax_row(isa, rows(i)),
            Orientation::Cols => amax_columns(isa, rows(i), &mut amax),
        }
    }
    amax.map(|bits| rule.scale(f32::from_bits(bits)))
}

/// Quantizes the output rows from `first`, tile by tile.
fn fill<'x, F: Format, T: Float>(
    isa: Isa,
    how: Orientation,
    x: RowsView<'x, T>,
    first: usize,
    band: Band<'_, F>,
    scales: impl Fn(&dyn Fn(usize) -> &'x [T], usize) -> Scales,
) {
    let ([_, c], width) = output(how, &x.rows);
    let Band { data, scales: kept } = band;
    let rows = data.len() / width.max(1);
    let each = kept.len() / c.div_ceil(BLOCK).max(1);
    let mut tile: Tile<F> = [F::zeroed(); BLOCK * BLOCK];
    for (block, at) in (0..c).step_by(BLOCK).enumerate() {
        let along = BLOCK.min(c - at);
        // First row and column of the tile in x, its height and width.
        let (top, left, h, w) = match how {
            Orientation::Rows => (first, at, rows, along),
            Orientation::Cols => (at, first, along, rows),
        };
        let row = |i: usize| &x.row(top + i)[left..left + w];
        let found = scales(&row, h);
        for i in 0..h {
            match how {
                Orientation::Rows => encode_row(isa, row(i), found[i], &mut data[i * width + at..][..w]),
                Orientation::Cols => encode_each(isa, row(i), &found, &mut tile[i * BLOCK..][..w]),
            }
        }
        if how == Orientation::Cols {
            transpose(&tile, [h, w], data, width, at);
        }
        for (kept, scale) in kept[block * each..][..each].iter_mut().zip(found) {
            *kept = 1.0 / scale;
        }
    }
    for row in data.chunks_mut(width.max(1)) {
        row[c..].fill(F::zeroed());
    }
}
