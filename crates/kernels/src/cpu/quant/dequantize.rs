//! Dequantization, decoding and transposition of FP8 tensors.

use super::encode::{Format, decode_row};
use crate::cpu::CpuContext;
use crate::cpu::rows::{PIECE, RowsViewMut, check_len};
use crate::{ALIGN, BLOCK, ScalingMode};
use ferrotron_tensor::{Element, Float, Result, Threads};

/// `out = value`, elementwise and exact: bf16 represents every FP8 value.
pub fn decode<F: Format, T: Float>(cpu: CpuContext, codes: &[F], out: &mut [T]) {
    cpu.threads.parallel_chunks(out, PIECE, &|i, out| {
        decode_row(cpu.isa, &codes[i * PIECE..][..out.len()], 1.0, out);
    });
}

/// `out [r, c] = value·scale_inv`; `data` and `scale_inv` have the layout of [`crate::Fp8Tensor`].
pub fn dequantize<F: Format, T: Float>(
    cpu: CpuContext,
    data: &[F],
    scale_inv: &[f32],
    scaling: ScalingMode,
    out: RowsViewMut<'_, T>,
) -> Result<()> {
    const OP: &str = "dequantize";
    out.check(OP, "out")?;
    let RowsViewMut { data: out, rows: out_rows } = out;
    let (r, c) = (out_rows.outer, out_rows.width);
    let (width, shape) = (c.next_multiple_of(ALIGN), scaling.scales(r, c));
    check_len(OP, "data", data.len(), r * width)?;
    check_len(OP, "scale_inv", scale_inv.len(), shape.iter().product())?;
    if out_rows.elements() == 0 {
        return Ok(());
    }
    let columns = shape[shape.len() - 1];
    let scale = |row: usize, block: usize| match scaling {
        ScalingMode::PerTensor => scale_inv[0],
        ScalingMode::Block1x128 => scale_inv[block * columns + row],
        ScalingMode::Block128x128 => scale_inv[row / BLOCK * columns + block],
    };
    let grain = out_rows.grain();
    let mut pieces: Vec<_> = out_rows.cut_mut(out, grain).collect();
    cpu.threads.parallel_chunks(&mut pieces, 1, &|i, pieces| {
        for out in pieces {
            let view = out_rows.piece(i * grain, grain);
            for at in 0..view.count() {
                let row = i * grain + at;
                let codes = data[row * width..][..c].chunks(BLOCK);
                for (block, (codes, out)) in codes.zip(view.row_mut(out, at).chunks_mut(BLOCK)).enumerate() {
                    decode_row(cpu.isa, codes, scale(row, block), out);
                }
            }
        }
    });
    Ok(())
}

/// Transposes `from [r, c]` into `to [c, r]`. Rows of both are padded to a multiple of 16; the padding of `to` becomes 0.
pub fn transpose<F: Element>(threads: &Threads, from: &[F], to: &mut [F], r: usize, c: usize) {
    let (pitch, to_pitch) = (c.next_multiple_of(ALIGN), r.next_multiple_of(ALIGN));
    if r == 0 || c == 0 {
        return;
    }
    // Output rows per chunk: a cache line, so that all elements of a line read from `from` are used.
    const ROWS: usize = 64;
    threads.parallel_chunks(to, ROWS * to_pitch, &|piece, to| {
        for (row, to) in to.chunks_mut(to_pitch).enumerate() {
            for (at, to) in to.iter_mut().enumerate() {
                *to = if at < r { from[at * pitch + piece * ROWS + row] } else { F::zeroed() };
            }
        }
    });
}
