//! Adam moments in 16 or 8 bits. [`BLOCK`] consecutive elements share a power-of-two scale stored as one byte, so that
//! scaling is exact and a block depends only on its own values.
//!
//! - Blocks of 32: every layout must form the same blocks, so they are counted in the row-major order of the logical
//!   tensor and no rank holds part of a block. Nearly all layouts shard at multiples of 32 anyway.
//! - Stochastic rounding: a moving average changes by `1 − β` of its distance per step, less than half an ulp of 8 bits
//!   (and, for β = 0.999, of 11 bits), so rounding to nearest would freeze it. Stochastic rounding is unbiased. Its random
//!   bits are a hash of the step and of the element's master weight and momentum, so threads, ranks and layouts do not
//!   change the result.
//! - The second moment has its own format: squares span twice the exponent range and need no sign. E4M3 with one scale
//!   loses squares below 2⁻¹⁸ of the largest; using the sign bit as a fifth exponent bit keeps them down to 2⁻³⁴. A
//!   positive value never rounds to zero, since a zero divisor would allow steps of any size.
//!
//! Every value of the 8-bit formats is exact in bf16 and every value of the 16-bit formats in f32, so checkpoints hold
//! plain numbers, and packing them again gives the same values.

use ferrotron_tensor::f16;

/// Elements that share a scale.
pub const BLOCK: usize = 32;

/// Scales are `2^k` with k in this range: magnitudes above 1e-31 keep full precision, and scales and values are normal in
/// f32 and bf16.
const LEAST: i32 = -100;
const MOST: i32 = 120;

/// A storage format of moments: a small float without infinities.
pub trait Format: Copy + Default {
    /// Storage type.
    type Code: Copy + Send + Sync;
    /// Mantissa bits.
    const MANTISSA: u32;
    /// Exponent bias.
    const BIAS: u32;
    /// Code of the largest magnitude.
    const LARGEST: u32;
    /// Sign bit; 0 for unsigned formats.
    const SIGN: u32;
    /// Whether positive values round to at least the smallest positive code.
    const ABOVE_ZERO: bool;
    /// Bits of a code.
    fn bits(code: Self::Code) -> u32;
    /// Code from its bits.
    fn code(bits: u32) -> Self::Code;
}

macro_rules! format {
    ($(#[doc = $doc:literal])+ $name:ident: $code:ty, $mantissa:literal, $bias:literal, $largest:literal,
     $sign:literal, $above:literal, $bits:expr, $from:expr) => {
        $(#[doc = $doc])+
        #[derive(Clone, Copy, Debug, Default)]
        pub struct $name;
        impl Format for $name {
            type Code = $code;
            const MANTISSA: u32 = $mantissa;
            const BIAS: u32 = $bias;
            const LARGEST: u32 = $largest;
            const SIGN: u32 = $sign;
            const ABOVE_ZERO: bool = $above;
            #[inline(always)]
            fn bits(code: $code) -> u32 {
                let bits: fn($code) -> u32 = $bits;
                bits(code)
            }
            #[inline(always)]
            fn code(bits: u32) -> $code {
                let from: fn(u32) -> $code = $from;
                from(bits)
            }
        }
    };
}

format! {
    /// First moments in 8 bits: E4M3, largest 448.
    FirstMoment8: u8, 3, 7, 0x7e, 0x80, false, |c| u32::from(c), |b| b as u8
}
format! {
    /// Second moments in 8 bits: five exponent bits, three of mantissa, no sign; largest 1.875·2¹⁶.
    SecondMoment8: u8, 3, 15, 0xff, 0, true, |c| u32::from(c), |b| b as u8
}
format! {
    /// First moments in 16 bits: f16.
    FirstMoment16: f16, 10, 15, 0x7bff, 0x8000, false, |c| u32::from(c.to_bits()), |b| f16::from_bits(b as u16)
}
format! {
    /// Second moments in 16 bits: f16 without sign.
    SecondMoment16: f16, 10, 15, 0x7bff, 0, true, |c| u32::from(c.to_bits()), |b| f16::from_bits(b as u16)
}

/// Scale of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scale(i32);

impl Scale {
    /// The smallest power of two that brings the block's amax `largest` into range, clamped to the smallest scale for tiny
    /// and zero values. An infinite value gets the largest scale and saturates.
    #[inline(always)]
    pub fn of<F: Format>(largest: f32) -> Scale {
        let top = F::LARGEST << (23 - F::MANTISSA);
        // Carries into the exponent where the mantissa exceeds that of the largest code.
        let above = 0x7f_ffff - (top & 0x7f_ffff);
        let exponent = (largest.to_bits().wrapping_add(above) >> 23) as i32;
        Scale((exponent - (top >> 23) as i32 - 127 + F::BIAS as i32).clamp(LEAST, MOST))
    }

    /// Stored byte.
    #[inline(always)]
    pub fn byte(self) -> u8 {
        (self.0 + 127) as u8
    }

    /// Factor on values before they are packed.
    #[inline(always)]
    pub fn inverse(self) -> f32 {
        f32::from_bits(((127 - self.0) as u32) << 23)
    }
}

/// `2^(127 − bias)`: the factor from an f32 with the code's exponent field to the code's value.
#[inline(always)]
fn unit<F: Format>() -> f32 {
    f32::from_bits((254 - F::BIAS) << 23)
}

/// Value of a code in a block with scale `byte`. Zeroed memory decodes to zeros.
#[inline(always)]
pub fn unpack<F: Format>(code: F::Code, byte: u8) -> f32 {
    let bits = F::bits(code);
    let magnitude = f32::from_bits((bits & !F::SIGN) << (23 - F::MANTISSA)) * unit::<F>();
    let value = magnitude * f32::from_bits(u32::from(byte) << 23);
    if F::SIGN != 0 && bits & F::SIGN != 0 { -value } else { value }
}

/// Code of `x` by stochastic rounding with the random bits `random`; `inverse` is the inverse of the block's scale. NaN
/// becomes the largest code.
#[inline(always)]
pub fn pack<F: Format>(x: f32, inverse: f32, random: u32) -> F::Code {
    finish::<F>(x, scaled::<F>(x, inverse) + (random >> (9 + F::MANTISSA)))
}

/// Code of `x`, rounded to nearest even.
#[inline(always)]
pub fn pack_nearest<F: Format>(x: f32, inverse: f32) -> F::Code {
    let (bits, drop) = (scaled::<F>(x, inverse), 23 - F::MANTISSA);
    finish::<F>(x, bits + ((1 << (drop - 1)) - 1 + ((bits >> drop) & 1)))
}

/// Bits of an f32 with the code's exponent field. Between adjacent codes they are linear in the value, also in the
/// subnormal range, where the f32 is subnormal as well.
#[inline(always)]
fn scaled<F: Format>(x: f32, inverse: f32) -> u32 {
    // Masking the sign, which a NaN may have, leaves at most 0x7fff_ffff: the rounding increments below stay within u32.
    (x.abs() * inverse * (1.0 / unit::<F>())).to_bits() & 0x7fff_ffff
}

#[inline(always)]
fn finish<F: Format>(x: f32, bits: u32) -> F::Code {
    let magnitude = (bits >> (23 - F::MANTISSA)).min(F::LARGEST);
    if F::ABOVE_ZERO {
        return F::code(magnitude.max(u32::from(x > 0.0)));
    }
    F::code(magnitude | if x.is_sign_negative() { F::SIGN } else { 0 })
}

/// Seed of a step's random bits.
#[inline(always)]
pub fn seed(steps_done: f32) -> u32 {
    steps_done.to_bits().wrapping_mul(0x9e37_79b1)
}

/// Random bits of an element: a hash of its master weight after the step and its momentum. The second moment uses them
/// rotated by 16 bits.
#[inline(always)]
pub fn random_bits(seed: u32, master: f32, momentum: f32) -> u32 {
    let h = (master.to_bits() ^ momentum.to_bits().rotate_left(16) ^ seed).wrapping_mul(0x85eb_ca6b);
    (h ^ (h >> 16)).wrapping_mul(0xc2b2_ae35)
}
