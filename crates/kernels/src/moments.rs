//! Moments in 16 or 8 bits. [`BLOCK`] consecutive elements share a scale, a power of two kept as one byte, so that
//! scaling rounds nothing and a block depends on its own values only.
//!
//! - Why blocks of 32: every layout must see the same blocks, so they are counted in the row-major order of the logical
//!   tensor and no rank may hold a part of one. Cuts at multiples of 32 are what nearly all layouts make anyway.
//! - Why rounding is random: an average moves by `1 − β` of its distance a step, less than half a unit of 8 bits (and,
//!   for β = 0.999, of 11): rounded to nearest it would stand still. Random rounding is right in the mean. The dice are
//!   a hash of the step and of the element's own master and momentum, so that neither threads, ranks nor layouts
//!   change a bit.
//! - Why the second moment has a format of its own: a square spans twice the exponents and needs no sign. E4M3 with
//!   one scale loses squares below 2⁻¹⁸ of the largest; five exponent bits in the place of the sign keep them to 2⁻³⁴.
//!   What is above zero never becomes zero: a vanishing divisor would make a step of any size.
//!
//! Every value of the 8-bit formats is a bf16 and every value of the 16-bit ones an f32, so checkpoints hold plain
//! numbers, and packing these again gives the same values.

use ferrotron_tensor::f16;

/// Elements that share a scale.
pub const BLOCK: usize = 32;

/// Scales are `2^k`, k in this range: wide enough that nothing above 1e-31 loses precision, narrow enough that powers of
/// two, and all values, are normal f32 and bf16.
const LEAST: i32 = -100;
const MOST: i32 = 120;

/// How a moment's magnitude becomes a code: a small float without infinities.
pub trait Format: Copy + Default {
    /// What is stored.
    type Code: Copy + Send + Sync;
    /// Bits of the mantissa.
    const MANTISSA: u32;
    /// Offset of the exponent.
    const BIAS: u32;
    /// The largest magnitude.
    const LARGEST: u32;
    /// The bit of the sign; 0 where there is none.
    const SIGN: u32;
    /// Is what is above zero kept above it?
    const ABOVE_ZERO: bool;
    /// As a number.
    fn bits(code: Self::Code) -> u32;
    /// From a number.
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

/// A block's scale, from the largest magnitude in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scale(i32);

impl Scale {
    /// The least power of two that brings `largest` into range. Zero, like all that is too small, gets the least
    /// there is; an infinite value the largest, and becomes the largest code.
    #[inline(always)]
    pub fn of<F: Format>(largest: f32) -> Scale {
        let top = F::LARGEST << (23 - F::MANTISSA);
        // Carries into the exponent where the mantissa is above that of the largest code.
        let above = 0x7f_ffff - (top & 0x7f_ffff);
        let exponent = (largest.to_bits().wrapping_add(above) >> 23) as i32;
        Scale((exponent - (top >> 23) as i32 - 127 + F::BIAS as i32).clamp(LEAST, MOST))
    }

    /// As it is kept.
    #[inline(always)]
    pub fn byte(self) -> u8 {
        (self.0 + 127) as u8
    }

    /// What values are multiplied by before they are packed.
    #[inline(always)]
    pub fn inverse(self) -> f32 {
        f32::from_bits(((127 - self.0) as u32) << 23)
    }
}

/// `2^(127 − bias)`: between an f32 whose exponent is the code's, and the value of the code.
#[inline(always)]
fn unit<F: Format>() -> f32 {
    f32::from_bits((254 - F::BIAS) << 23)
}

/// The value of a code in a block of scale `byte`. Memory of zeros holds zeros.
#[inline(always)]
pub fn unpack<F: Format>(code: F::Code, byte: u8) -> f32 {
    let bits = F::bits(code);
    let magnitude = f32::from_bits((bits & !F::SIGN) << (23 - F::MANTISSA)) * unit::<F>();
    let value = magnitude * f32::from_bits(u32::from(byte) << 23);
    if F::SIGN != 0 && bits & F::SIGN != 0 { -value } else { value }
}

/// The code of `x`, where `inverse` is that of its block's scale and `dice` a random number: rounded up with the
/// probability that makes the mean right. NaN, which only a broken master can have made, becomes the largest code.
#[inline(always)]
pub fn pack<F: Format>(x: f32, inverse: f32, dice: u32) -> F::Code {
    finish::<F>(x, scaled::<F>(x, inverse) + (dice >> (9 + F::MANTISSA)))
}

/// The code of `x`, rounded to nearest, ties to even.
#[inline(always)]
pub fn pack_nearest<F: Format>(x: f32, inverse: f32) -> F::Code {
    let (bits, drop) = (scaled::<F>(x, inverse), 23 - F::MANTISSA);
    finish::<F>(x, bits + ((1 << (drop - 1)) - 1 + ((bits >> drop) & 1)))
}

/// Bits of an f32 whose exponent is that of the code: from code to code they are linear in the value, below the least
/// normal too, because there the f32 is subnormal itself.
#[inline(always)]
fn scaled<F: Format>(x: f32, inverse: f32) -> u32 {
    // Without the sign, which a NaN may have: nothing added below can overflow.
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

/// What the dice of a step are mixed with.
#[inline(always)]
pub fn seed(steps_done: f32) -> u32 {
    steps_done.to_bits().wrapping_mul(0x9e37_79b1)
}

/// The dice of an element: of its master after the step and its momentum. The second moment's are these turned by 16.
#[inline(always)]
pub fn dice(seed: u32, master: f32, momentum: f32) -> u32 {
    let h = (master.to_bits() ^ momentum.to_bits().rotate_left(16) ^ seed).wrapping_mul(0x85eb_ca6b);
    (h ^ (h >> 16)).wrapping_mul(0xc2b2_ae35)
}
