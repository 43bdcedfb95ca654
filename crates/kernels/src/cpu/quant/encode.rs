//! FP8 and FP4 codes of rows of values, and back.

use crate::BLOCK;
use crate::cpu::multiversion;
use ferrotron_tensor::Float;
use ferrotron_tensor::fp8::{E2m1, E4m3, E5m2};

/// An FP8 or FP4 format, one code per byte.
pub trait Format: bytemuck::Pod + Send + Sync {
    /// Largest finite value.
    const LARGEST: f32;
    /// Code of the nearest value, saturating.
    fn code(x: f32) -> u8;
    /// Value of a code.
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

/// Dispatches an FP8 dtype to a Rust type.
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
    /// `out = round(x·scale)`, one scale for the row.
    pub(crate) fn encode_row<F: Format, T: Float>(x: &[T], scale: f32, out: &mut [F]) {
        let out: &mut [u8] = bytemuck::cast_slice_mut(out);
        for (out, x) in out.iter_mut().zip(x) {
            *out = F::code(x.to_f32() * scale);
        }
    }
}

multiversion! {
    /// `out = round(x·scale)`, a scale per element.
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
    /// `out = round(value·scale)`, a scale per element.
    pub(super) fn decode_each<F: Format, T: Float>(codes: &[F], scale: &[f32], out: &mut [T]) {
        let codes: &[u8] = bytemuck::cast_slice(codes);
        for ((out, code), scale) in out.iter_mut().zip(codes).zip(scale) {
            *out = T::from_f32(F::value(*code) * scale);
        }
    }
}

/// A 128x128 tile of codes, row-major.
pub(super) type Tile<F> = [F; BLOCK * BLOCK];

/// Transposes the `h` rows and `w` columns of a tile into `w` rows of `out`, `stride` apart, from column `at` on.
pub(super) fn transpose<F: Format>(
    tile: &Tile<F>,
    [h, w]: [usize; 2],
    out: &mut [F],
    stride: usize,
    at: usize,
) {
    // In 16x16 blocks, so that the cache lines read from the tile are used while they are cached.
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
