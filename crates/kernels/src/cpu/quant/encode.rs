//! Rows of numbers to rows of bytes.

use crate::BLOCK;
use crate::cpu::multiversion;
use ferrotron_tensor::Float;
use ferrotron_tensor::fp8::{E2m1, E4m3, E5m2};

/// A small float in a byte.
pub trait Format: bytemuck::Pod + Send + Sync {
    /// Its biggest number.
    const LARGEST: f32;
    /// The nearest value's code.
    fn code(x: f32) -> u8;
    /// The value.
    fn value(code: u8) -> f32;
}

impl Format for E2m1 {
    const LARGEST: f32 = E2m1::MAX;
    #[inline(always)]
    fn code(x: f32) -> u8 {
        E2m1::encode(x).0
    }
    #[inline(always)]
    fn value(code: u8) -> f32 {
        E2m1(code).decode()
    }
}

impl Format for E4m3 {
    const LARGEST: f32 = E4m3::MAX;
    #[inline(always)]
    fn code(x: f32) -> u8 {
        E4m3::encode(x).0
    }
    #[inline(always)]
    fn value(code: u8) -> f32 {
        E4m3(code).decode()
    }
}

impl Format for E5m2 {
    const LARGEST: f32 = E5m2::MAX;
    #[inline(always)]
    fn code(x: f32) -> u8 {
        E5m2::encode(x).0
    }
    #[inline(always)]
    fn value(code: u8) -> f32 {
        E5m2(code).decode()
    }
}

/// Picks the Rust type of an 8-bit format.
macro_rules! formats {
    ($op:expr, $dtype:expr, $F:ident => $body:expr) => {
        match $dtype {
            ferrotron_tensor::DType::E4M3 => {
                type $F = ferrotron_tensor::fp8::E4m3;
                $body
            }
            ferrotron_tensor::DType::E5M2 => {
                type $F = ferrotron_tensor::fp8::E5m2;
                $body
            }
            found => {
                Err(ferrotron_tensor::Error::DType { op: $op, found, wanted: ferrotron_tensor::DType::E4M3 })
            }
        }
    };
}
pub(crate) use formats;

multiversion! {
    /// `out = round(x·scale)`, one scale for all.
    pub(crate) fn encode_row<F: Format, T: Float>(x: &[T], scale: f32, out: &mut [F]) {
        let out: &mut [u8] = bytemuck::cast_slice_mut(out);
        for (out, x) in out.iter_mut().zip(x) {
            *out = F::code(x.to_f32() * scale);
        }
    }
}

multiversion! {
    /// `out = round(x·scale)`, a scale for each.
    pub(super) fn encode_each<F: Format, T: Float>(x: &[T], scale: &[f32], out: &mut [F]) {
        let out: &mut [u8] = bytemuck::cast_slice_mut(out);
        for ((out, x), scale) in out.iter_mut().zip(x).zip(scale) {
            *out = F::code(x.to_f32() * scale);
        }
    }
}

multiversion! {
    /// `out = round(value·scale)`.
    pub(super) fn decode_row<F: Format, T: Float>(codes: &[F], scale: f32, out: &mut [T]) {
        let codes: &[u8] = bytemuck::cast_slice(codes);
        for (out, code) in out.iter_mut().zip(codes) {
            *out = T::from_f32(F::value(*code) * scale);
        }
    }
}

multiversion! {
    /// `out = round(value·scale)`, a scale for each.
    pub(super) fn decode_each<F: Format, T: Float>(codes: &[F], scale: &[f32], out: &mut [T]) {
        let codes: &[u8] = bytemuck::cast_slice(codes);
        for ((out, code), scale) in out.iter_mut().zip(codes).zip(scale) {
            *out = T::from_f32(F::value(*code) * scale);
        }
    }
}

/// A tile of bytes, one row after another.
pub(super) type Tile<F> = [F; BLOCK * BLOCK];

/// Writes a tile of `h` rows and `w` columns to `w` rows of `out`, `stride` apart, from column `at` on.
pub(super) fn transpose<F: Format>(
    tile: &Tile<F>,
    [h, w]: [usize; 2],
    out: &mut [F],
    stride: usize,
    at: usize,
) {
    // Sixteen at a time: what is read of a line of the tile is used while the line is near.
    for from in (0..w).step_by(16) {
        for row in (0..h).step_by(16) {
            for j in from..(from + 16).min(w) {
                let n = 16.min(h - row);
                let to = &mut out[j * stride + at + row..][..n];
                for (i, to) in to.iter_mut().enumerate() {
                    *to = tile[(row + i) * BLOCK + j];
                }
            }
        }
    }
}
