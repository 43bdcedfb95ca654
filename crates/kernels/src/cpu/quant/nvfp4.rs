//! NVFP4: E2M1 with an E4M3 scale per 16 values and one f32 scale per tensor.

use super::amax::amax;
use super::small_blocks::{BlockEncoder, SmallBlocks, nearest};
use crate::cpu::CpuContext;
use crate::cpu::rows::RowsView;
use crate::philox::RandomStream;
use ferrotron_tensor::fp8::{E2m1, E4m3};
use ferrotron_tensor::{Float, Result};

/// Values that share a scale.
pub const NV_BLOCK: usize = 16;

/// Per-tensor scale that brings block scales into the range of E4M3.
pub fn global_scale(amax: f32) -> f32 {
    let scale = (E4m3::MAX * E2m1::MAX / amax).min(f32::MAX);
    if amax == 0.0 || scale == 0.0 { 1.0 } else { scale }
}

/// Scale of a block, and the factor on its values.
pub fn block_scale(amax: f32, global: f32) -> (E4m3, f32) {
    let scale = E4m3::encode(amax * (global * (1.0 / E2m1::MAX)));
    (scale, (1.0 / (scale.decode() * (1.0 / global))).min(f32::MAX))
}

/// Quantizes to `codes [r, c]` (one per byte) and one scale per block; returns the per-tensor scale. With `stochastic`, value
/// `i` is rounded stochastically by byte `i` of the stream, otherwise to nearest.
pub fn nvfp4_quantize<T: Float>(
    cpu: CpuContext,
    grid: SmallBlocks,
    stochastic: Option<RandomStream>,
    x: RowsView<'_, T>,
    codes: &mut [E2m1],
    scales: &mut [E4m3],
) -> Result<f32> {
    let global = global_scale(amax(cpu, x)?);
    let scale = |amax: f32| block_scale(amax, global);
    let randomly = |first: usize, x: &[T], factors: &[f32], codes: &mut [E2m1]| {
        let Some(stream) = stochastic else { return };
        let mut word = (u64::MAX, 0u32);
        for (i, code) in codes.iter_mut().enumerate() {
            let at = (first + i) as u64;
            if word.0 != at / 4 {
                word = (at / 4, stream.word(at / 4));
            }
            *code = round_randomly(x[i].to_f32() * factors[i], (word.1 >> (at % 4 * 8)) as u8);
        }
    };
    match stochastic {
        Some(_) => {
            let encoder = BlockEncoder { scale: &scale, encode: &randomly };
            grid.quantize(cpu, x, encoder, codes, scales)?;
        }
        None => {
            let encoder = BlockEncoder { scale: &scale, encode: &nearest::<E2m1, T>(cpu.isa) };
            grid.quantize(cpu, x, encoder, codes, scales)?;
        }
    }
    Ok(global)
}

/// `out [r, c] = value·scale/global`.
pub fn nvfp4_dequantize<T: Float>(
    cpu: CpuContext,
    grid: SmallBlocks,
    codes: &[E2m1],
    scales: &[E4m3],
    global: f32,
    out: &mut [T],
) -> Result<()> {
    let inverse = 1.0 / global;
    grid.dequantize(cpu, codes, scales, &|s| s.decode() * inverse, out)
}

/// Stochastic rounding to one of the two E2M1 neighbours of `x`: to the larger magnitude where `random/256` is at least the
/// relative distance to it.
pub fn round_randomly(x: f32, random: u8) -> E2m1 {
    if x.is_nan() {
        return E2m1::encode(x);
    }
    let step = |x: f32| match x {
        x if x < 2.0 => 0.5,
        x if x < 4.0 => 1.0,
        _ => 2.0,
    };
    let magnitude = x.abs().min(E2m1::MAX);
    let moved = magnitude + f32::from(random) / 256.0 * step(magnitude);
    let down = (moved / step(moved)).floor() * step(moved);
    E2m1::encode(down.min(E2m1::MAX).copysign(x))
}

/// Packs two codes per byte, the first in the low half; rows of odd length end with a zero.
pub fn pack(codes: &[E2m1], c: usize) -> Vec<u8> {
    let byte = |pair: &[E2m1]| pair[0].0 | pair.get(1).map_or(0, |high| high.0 << 4);
    codes.chunks(c.max(1)).flat_map(|row| row.chunks(2).map(byte)).collect()
}
