//! FP8, FP4 and scale formats: E4M3, E5M2, E2M1 and E8M0. Encoding saturates (out-of-range and infinite values become
//! the largest finite value), keeps NaN where the format has one, rounds to nearest with ties to even, and keeps
//! subnormals.
//!
//! All functions are free of branches and overflow checks, so that loops over them vectorize.

use bytemuck::{Pod, Zeroable};

/// E4M3: 4 exponent bits (bias 7), 3 mantissa bits, largest value 448, no infinity, NaN is `S.1111.111`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct E4m3(pub u8);

/// E5M2: 5 exponent bits (bias 15), 2 mantissa bits, largest finite value 57344, infinities as in IEEE 754.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct E5m2(pub u8);

/// E2M1 in the low four bits of a byte: 2 exponent bits (bias 1), 1 mantissa bit; ±{0, ½, 1, 1½, 2, 3, 4, 6}.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct E2m1(pub u8);

/// E8M0: a power of two from 2⁻¹²⁷ to 2¹²⁷; 0xFF is NaN. Used for block scales.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct E8m0(pub u8);

impl E4m3 {
    /// Largest finite value.
    pub const MAX: f32 = 448.0;

    /// Rounds `x` to the nearest representable value.
    #[inline(always)]
    pub fn encode(x: f32) -> E4m3 {
        let magnitude = if x.is_nan() { 0x7f } else { encode_magnitude::<3, 7>(x, Self::MAX) };
        E4m3(magnitude as u8 | sign(x))
    }

    /// The exact value.
    #[inline(always)]
    pub fn decode(self) -> f32 {
        let magnitude = u32::from(self.0 & 0x7f);
        let value = if magnitude == 0x7f { f32::NAN } else { decode_magnitude::<3, 7>(magnitude) };
        signed(value, self.0 >> 7)
    }
}

impl E5m2 {
    /// Largest finite value.
    pub const MAX: f32 = 57344.0;

    /// Rounds `x` to the nearest representable value.
    #[inline(always)]
    pub fn encode(x: f32) -> E5m2 {
        let magnitude = if x.is_nan() { 0x7f } else { encode_magnitude::<2, 15>(x, Self::MAX) };
        E5m2(magnitude as u8 | sign(x))
    }

    /// The exact value.
    #[inline(always)]
    pub fn decode(self) -> f32 {
        let magnitude = u32::from(self.0 & 0x7f);
        let beyond = if magnitude == 0x7c { f32::INFINITY } else { f32::NAN };
        let value = if magnitude >= 0x7c { beyond } else { decode_magnitude::<2, 15>(magnitude) };
        signed(value, self.0 >> 7)
    }
}

impl E2m1 {
    /// Largest value.
    pub const MAX: f32 = 6.0;

    /// Rounds `x` to the nearest representable value. NaN, which the format lacks, becomes the largest value, as on
    /// NVIDIA GPUs.
    #[inline(always)]
    pub fn encode(x: f32) -> E2m1 {
        let code = encode_magnitude::<1, 1>(x, Self::MAX) as u8 | sign(x) >> 4;
        E2m1(if x.is_nan() { 7 } else { code })
    }

    /// The exact value.
    #[inline(always)]
    pub fn decode(self) -> f32 {
        signed(decode_magnitude::<1, 1>(u32::from(self.0 & 7)), self.0 >> 3 & 1)
    }
}

impl E8m0 {
    /// The smallest power of two ≥ `x`, for `x` ≥ 0, clamped to 2⁻¹²⁷ … 2¹²⁷; NaN stays NaN.
    #[inline(always)]
    pub fn ceil(x: f32) -> E8m0 {
        let bits = x.to_bits();
        let (exponent, mantissa) = (bits >> 23 & 0xff, bits & 0x7f_ffff);
        // Subnormal f32 values up to 2⁻¹²⁷ have code 0.
        let up = if exponent == 0 { mantissa > 0x40_0000 } else { mantissa != 0 && exponent < 0xfe };
        let code = (exponent + u32::from(up)).min(0xfe);
        E8m0(if x.is_nan() { 0xff } else { code as u8 })
    }

    /// The exact value.
    #[inline(always)]
    pub fn decode(self) -> f32 {
        power_of_two(u32::from(self.0))
    }

    /// `1/value`, the factor applied to values before they are encoded.
    #[inline(always)]
    pub fn reciprocal(self) -> f32 {
        if self.0 == 0xff { f32::NAN } else { power_of_two(254 - u32::from(self.0)) }
    }
}

/// 2^(code − 127), NaN for 255.
#[inline(always)]
fn power_of_two(code: u32) -> f32 {
    match code {
        0 => f32::from_bits(0x40_0000),
        255 => f32::NAN,
        _ => f32::from_bits(code << 23),
    }
}

#[inline(always)]
fn sign(x: f32) -> u8 {
    (x.to_bits() >> 24) as u8 & 0x80
}

#[inline(always)]
fn signed(magnitude: f32, negative: u8) -> f32 {
    f32::from_bits(magnitude.to_bits() | u32::from(negative) << 31)
}

/// Magnitude bits of `|x|`, clamped to `max`, for M mantissa bits and exponent bias B.
#[inline(always)]
fn encode_magnitude<const M: u32, const B: u32>(x: f32, max: f32) -> u32 {
    // The bit patterns of non-negative floats are ordered like their values.
    let bits = (x.to_bits() & 0x7fff_ffff).min(max.to_bits());
    // Drops 23-M mantissa bits of the f32 pattern with ties to even; a carry moves into the exponent.
    let drop = 23 - M;
    let half = (1 << (drop - 1)) - 1;
    let rounded = bits.wrapping_add(half).wrapping_add(bits >> drop & 1) >> drop;
    let normal = rounded.wrapping_sub((127 - B) << M);
    // Below the smallest normal all values are multiples of 2^(1-B-M). Adding the float with that unit in the last
    // place rounds to it, and a carry to 2^M correctly gives the smallest normal.
    let shift = f32::from_bits((127 + 24 - B - M) << 23);
    let subnormal = (f32::from_bits(bits) + shift).to_bits().wrapping_sub(shift.to_bits());
    if bits < (128 - B) << 23 { subnormal } else { normal }
}

/// Read as an f32 pattern, the code is the value times 2^(B-127), subnormals included.
#[inline(always)]
fn decode_magnitude<const M: u32, const B: u32>(magnitude: u32) -> f32 {
    f32::from_bits(magnitude << (23 - M)) * f32::from_bits((127 + 127 - B) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The nearest code by exhaustive search: the definition itself.
    fn nearest(x: f32, max: u8, sign: u8, decode: impl Fn(u8) -> f32) -> u8 {
        // Saturation is part of the definition.
        let target = f64::from(x.abs().min(decode(max)));
        let mut best = 0u8;
        for code in 0..=max {
            let (d, b) = ((f64::from(decode(code)) - target).abs(), (f64::from(decode(best)) - target).abs());
            if d < b || (d == b && code % 2 == 0) {
                best = code;
            }
        }
        best | if x.is_sign_negative() { sign } else { 0 }
    }

    /// The value of a code by the definition of the format.
    fn by_definition(code: u8, mantissa_bits: u32, bias: i32) -> f32 {
        let (e, m) = (i32::from(code) >> mantissa_bits, f64::from(code & ((1 << mantissa_bits) - 1)));
        let fraction = m / f64::from(1u32 << mantissa_bits);
        (if e == 0 { fraction * 2f64.powi(1 - bias) } else { (1.0 + fraction) * 2f64.powi(e - bias) }) as f32
    }

    #[test]
    fn every_code_round_trips() {
        for c in 0..=255u8 {
            let (a, b) = (E4m3(c), E5m2(c));
            assert!(a.decode().is_nan() || E4m3::encode(a.decode()) == a);
            assert!(!b.decode().is_finite() || E5m2::encode(b.decode()) == b);
            let s = if c & 0x80 != 0 { -1.0 } else { 1.0 };
            match c & 0x7f {
                0x7f => assert!(a.decode().is_nan()),
                m => assert_eq!(a.decode().to_bits(), (s * by_definition(m, 3, 7)).to_bits()),
            }
            match c & 0x7f {
                0x7c => assert_eq!(b.decode(), s * f32::INFINITY),
                0x7d.. => assert!(b.decode().is_nan()),
                m => assert_eq!(b.decode().to_bits(), (s * by_definition(m, 2, 15)).to_bits()),
            }
            let e = E8m0(c);
            if c == 255 {
                assert!(e.decode().is_nan() && e.reciprocal().is_nan());
            } else {
                assert_eq!(E8m0::ceil(e.decode()), e);
                assert_eq!(f64::from(e.decode()), 2f64.powi(i32::from(c) - 127));
                assert_eq!(f64::from(e.reciprocal()), 2f64.powi(127 - i32::from(c)));
            }
        }
        for c in 0..16 {
            assert_eq!(E2m1::encode(E2m1(c).decode()), E2m1(c));
        }
        let all: Vec<f32> = (0..8).map(|c| E2m1(c).decode()).collect();
        assert_eq!(all, [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]);
        assert_eq!(E4m3(0x7e).decode(), E4m3::MAX);
        assert_eq!(E5m2(0x7b).decode(), E5m2::MAX);
    }

    #[test]
    fn every_bf16_encodes_to_the_nearest_code() {
        for bits in 0..=u16::MAX {
            let x = f32::from_bits(u32::from(bits) << 16);
            if x.is_nan() {
                assert!(E4m3::encode(x).decode().is_nan() && E5m2::encode(x).decode().is_nan());
                assert_eq!((E2m1::encode(x).0, E8m0::ceil(x).0), (7, 0xff));
                continue;
            }
            assert_eq!(E4m3::encode(x).0, nearest(x, 0x7e, 0x80, |c| E4m3(c).decode()), "e4m3 of {x:e}");
            assert_eq!(E5m2::encode(x).0, nearest(x, 0x7b, 0x80, |c| E5m2(c).decode()), "e5m2 of {x:e}");
            assert_eq!(E2m1::encode(x).0, nearest(x, 7, 8, |c| E2m1(c).decode()), "e2m1 of {x:e}");
            if bits < 0x8000 {
                let above = (0..=0xfe).find(|c| E8m0(*c).decode() >= x).unwrap_or(0xfe);
                assert_eq!(E8m0::ceil(x).0, above, "e8m0 of {x:e}");
            }
        }
    }

    /// Values right next to the midpoint of two neighbours, where double rounding would show.
    #[test]
    fn values_next_to_a_tie_round_to_the_nearer_code() {
        for c in 0..0x7eu8 {
            for (max, decode, encode) in [
                (0x7e, (|c| E4m3(c).decode()) as fn(u8) -> f32, (|x| E4m3::encode(x).0) as fn(f32) -> u8),
                (0x7b, |c| E5m2(c).decode(), |x| E5m2::encode(x).0),
                (7, |c| E2m1(c).decode(), |x| E2m1::encode(x).0),
            ] {
                if c < max {
                    let middle = (decode(c) + decode(c + 1)) / 2.0;
                    for x in [middle.next_down(), middle, middle.next_up()] {
                        assert_eq!(encode(x), nearest(x, max, 0, decode), "{x:e}");
                    }
                }
            }
        }
    }
}
