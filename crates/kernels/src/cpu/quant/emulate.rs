//! Emulated formats: quantization followed by dequantization.

use super::encode::formats;
use super::hadamard::{POINTS, inverse_transform, transform};
use super::mxfp8::{MX_BLOCK, mxfp8_dequantize, mxfp8_quantize};
use super::nvfp4::{NV_BLOCK, nvfp4_dequantize, nvfp4_quantize};
use super::small_blocks::SmallBlocks;
use crate::cpu::CpuContext;
use crate::cpu::rows::{RowsView, check_len};
use crate::quant::microscaling::EmulatedFormat;
use ferrotron_tensor::fp8::{E2m1, E4m3, E8m0};
use ferrotron_tensor::{Float, Result};

/// `out [r, c]`, contiguous: `x` quantized to the format and dequantized.
pub fn emulate<T: Float>(
    cpu: CpuContext,
    how: EmulatedFormat,
    x: RowsView<'_, T>,
    out: &mut [T],
) -> Result<()> {
    const OP: &str = "emulate";
    how.check(OP)?;
    x.check(OP, "x")?;
    check_len(OP, "out", out.len(), x.rows.elements())?;
    let shape = [x.rows.outer, x.rows.width];
    match how {
        EmulatedFormat::Mxfp8 { format, along, square } => formats!(OP, format, F => {
            let grid = SmallBlocks::new(shape, MX_BLOCK, along, square);
            let mut codes = vec![<F as Float>::from_f32(0.0); out.len()];
            let mut scales = vec![E8m0(0); grid.blocks().iter().product()];
            mxfp8_quantize(cpu, grid, x, &mut codes, &mut scales)?;
            mxfp8_dequantize(cpu, grid, &codes, &scales, out)
        }),
        EmulatedFormat::Nvfp4 { along, square, hadamard, stochastic } => {
            if !hadamard {
                let grid = SmallBlocks::new(shape, NV_BLOCK, along, square);
                return quantize_dequantize(cpu, grid, stochastic, x, out);
            }
            let (transformed, padded) = transform(cpu, along, x);
            let grid = SmallBlocks::new(padded, NV_BLOCK, along, false);
            let mut rounded = vec![0f32; transformed.len()];
            let transformed = RowsView::dense(&transformed, padded[0], padded[1]);
            quantize_dequantize(cpu, grid, stochastic, transformed, &mut rounded)?;
            inverse_transform(cpu, along, padded, &mut rounded);
            cpu.threads.parallel_chunks(out, POINTS * shape[1], &|i, out| {
                let rows = rounded[i * POINTS * padded[1]..].chunks(padded[1]).zip(out.chunks_mut(shape[1]));
                for (from, to) in rows {
                    to.iter_mut().zip(from).for_each(|(to, from)| *to = T::from_f32(*from));
                }
            });
            Ok(())
        }
    }
}

fn quantize_dequantize<T: Float>(
    cpu: CpuContext,
    grid: SmallBlocks,
    stochastic: Option<crate::philox::RandomStream>,
    x: RowsView<'_, T>,
    out: &mut [T],
) -> Result<()> {
    let mut codes = vec![E2m1(0); out.len()];
    let mut scales = vec![E4m3(0); grid.blocks().iter().product()];
    let global = nvfp4_quantize(cpu, grid, stochastic, x, &mut codes, &mut scales)?;
    nvfp4_dequantize(cpu, grid, &codes, &scales, global, out)
}
