//! MXFP8: E4M3 or E5M2 with an E8M0 scale per 32 values.

use super::encode::Format;
use super::small_blocks::{BlockEncoder, SmallBlocks, nearest};
use crate::cpu::CpuContext;
use crate::cpu::rows::RowsView;
use crate::quant::scale::power_of_two;
use ferrotron_tensor::fp8::E8m0;
use ferrotron_tensor::{Float, Result};

/// Values that share a scale.
pub const MX_BLOCK: usize = 32;

/// `codes [r, c] = round(x/scale)` with one scale per block. Both orientations are quantized from `x`, and neither is stored
/// transposed.
pub fn mxfp8_quantize<F: Format, T: Float>(
    cpu: CpuContext,
    grid: SmallBlocks,
    x: RowsView<'_, T>,
    codes: &mut [F],
    scales: &mut [E8m0],
) -> Result<()> {
    let scale = |amax: f32| {
        let scale = power_of_two(amax, F::LARGEST);
        (scale, scale.reciprocal())
    };
    grid.quantize(cpu, x, BlockEncoder { scale: &scale, encode: &nearest::<F, T>(cpu.isa) }, codes, scales)
}

/// `out [r, c] = value·scale`.
pub fn mxfp8_dequantize<F: Format, T: Float>(
    cpu: CpuContext,
    grid: SmallBlocks,
    codes: &[F],
    scales: &[E8m0],
    out: &mut [T],
) -> Result<()> {
    grid.dequantize(cpu, codes, scales, &|s| s.decode(), out)
}

/// Swizzles scales `[r, c]`, E8M0 or E4M3, for tensor cores: zero-padded to multiples of 128 and 4, in consecutive 128x4 tiles whose rows of
/// four bytes are ordered 0, 32, 64, 96, 1, 33, …
pub fn swizzle(scales: &[u8], [r, c]: [usize; 2]) -> Vec<u8> {
    let across = c.div_ceil(4);
    let mut out = vec![0; r.div_ceil(128) * across * 512];
    for (row, scales) in scales.chunks(c.max(1)).enumerate() {
        let (tile, row) = (row / 128 * across, row % 128);
        let at = row % 32 * 16 + row / 32 * 4;
        for (k, scale) in scales.iter().enumerate() {
            out[(tile + k / 4) * 512 + at + k % 4] = *scale;
        }
    }
    out
}
