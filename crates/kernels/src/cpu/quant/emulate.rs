//! Numbers rounded to a format and back.

use super::encode::formats;
use super::hadamard::{POINTS, inverse_transform, transform};
use super::mxfp8::{MX_BLOCK, mxfp8_dequantize, mxfp8_quantize};
use super::nvfp4::{NV_BLOCK, nvfp4_dequantize, nvfp4_quantize};
use super::small_blocks::SmallBlocks;
use crate::cpu::Isa;
use crate::cpu::rows::{Rows, check_len};
use crate::quant::microscaling::EmulatedFormat;
use ferrotron_tensor::fp8::{E2m1, E4m3, E8m0};
use ferrotron_tensor::{Float, Result, Threads};

/// `out [r, c]`, contiguous: `x` as the format holds it.
pub fn emulate<T: Float>(
    threads: &Threads,
    isa: Isa,
    how: EmulatedFormat,
    x: &[T],
    x_rows: Rows,
    out: &mut [T],
) -> Result<()> {
    const OP: &str = "emulate";
    how.check(OP)?;
    x_rows.check(OP, "x", x.len())?;
    check_len(OP, "out", out.len(), x_rows.elements())?;
    let shape = [x_rows.outer, x_rows.width];
    match how {
        EmulatedFormat::Mxfp8 { format, along, square } => formats!(OP, format, F => {
            let grid = SmallBlocks::new(shape, MX_BLOCK, along, square);
            let mut codes = vec![<F as Float>::from_f32(0.0); out.len()];
            let mut scales = vec![E8m0(0); grid.blocks().iter().product()];
            mxfp8_quantize(threads, isa, grid, x, x_rows, &mut codes, &mut scales)?;
            mxfp8_dequantize(threads, isa, grid, &codes, &scales, out)
        }),
        EmulatedFormat::Nvfp4 { along, square, hadamard, stochastic } => {
            if !hadamard {
                let grid = SmallBlocks::new(shape, NV_BLOCK, along, square);
                return quantize_dequantize(threads, isa, grid, stochastic, x, x_rows, out);
            }
            let (transformed, wide) = transform(threads, isa, along, x, x_rows);
            let grid = SmallBlocks::new(wide, NV_BLOCK, along, false);
            let mut rounded = vec![0f32; transformed.len()];
            let rows = Rows::dense(wide[0], wide[1]);
            quantize_dequantize(threads, isa, grid, stochastic, &transformed, rows, &mut rounded)?;
            inverse_transform(threads, isa, along, wide, &mut rounded);
            threads.parallel_chunks(out, POINTS * shape[1], &|i, out| {
                let rows = rounded[i * POINTS * wide[1]..].chunks(wide[1]).zip(out.chunks_mut(shape[1]));
                for (from, to) in rows {
                    to.iter_mut().zip(from).for_each(|(to, from)| *to = T::from_f32(*from));
                }
            });
            Ok(())
        }
    }
}

fn quantize_dequantize<T: Float>(
    threads: &Threads,
    isa: Isa,
    grid: SmallBlocks,
    stochastic: Option<crate::philox::RandomStream>,
    x: &[T],
    x_rows: Rows,
    out: &mut [T],
) -> Result<()> {
    let mut codes = vec![E2m1(0); out.len()];
    let mut scales = vec![E4m3(0); grid.blocks().iter().product()];
    let global = nvfp4_quantize(threads, isa, grid, stochastic, x, x_rows, &mut codes, &mut scales)?;
    nvfp4_dequantize(threads, isa, grid, &codes, &scales, global, out)
}
