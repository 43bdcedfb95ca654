//! The two 8-bit float formats. Encoding saturates (out of range and infinite values become the largest
//! finite value), NaN stays NaN, rounding is to nearest with ties to even, subnormals are kept.

use bytemuck::{Pod, Zeroable};

/// E4M3: 4 exponent bits (bias 7), 3 mantissa bits, largest 448, no infinity, NaN is `S.1111.111`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct E4m3(pub u8);

/// E5M2: 5 exponent bits (bias 15), 2 mantissa bits, largest finite 57344, infinities as in IEEE.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct E5m2(pub u8);

impl E4m3 {
    /// Largest finite value.
    pub const MAX: f32 = 448.0;

    /// Round `x` to the nearest representable value.
    pub fn encode(x: f32) -> E4m3 {
        if x.is_nan() {
            return E4m3(0x7f | sign(x));
        }
        E4m3(sign(x) | encode_magnitude::<3, 7>(x.abs().min(Self::MAX)))
    }

    /// Exact value.
    pub fn decode(self) -> f32 {
        if self.0 & 0x7f == 0x7f {
            return f32::NAN;
        }
        decode_bits::<3, 7>(self.0)
    }
}

impl E5m2 {
    /// Largest finite value.
    pub const MAX: f32 = 57344.0;

    /// Round `x` to the nearest representable value.
    pub fn encode(x: f32) -> E5m2 {
        if x.is_nan() {
            return E5m2(0x7f | sign(x));
        }
        E5m2(sign(x) | encode_magnitude::<2, 15>(x.abs().min(Self::MAX)))
    }

    /// Exact value.
    pub fn decode(self) -> f32 {
        match self.0 & 0x7f {
            0x7c => f32::INFINITY.copysign(if self.0 & 0x80 != 0 { -1.0 } else { 1.0 }),
            m if m > 0x7c => f32::NAN,
            _ => decode_bits::<2, 15>(self.0),
        }
    }
}

fn sign(x: f32) -> u8 {
    (x.to_bits() >> 24) as u8 & 0x80
}

/// Magnitude bits of a non-negative `x` within range, for M mantissa bits and exponent bias B.
fn encode_magnitude<const M: u32, const B: i32>(x: f32) -> u8 {
    // Everything below the smallest normal is a multiple of this step.
    let subnormal_step = (2f32).powi(1 - B - M as i32);
    let exponent = (x.to_bits() >> 23) as i32 - 127;
    if exponent < 1 - B {
        // Division by a power of two is exact; a carry to 2^M is the smallest normal, as it should be.
        return (x / subnormal_step).round_ties_even() as u8;
    }
    // Drop 23-M mantissa bits of the f32 pattern with ties to even; a carry moves into the exponent.
    let drop = 23 - M;
    let bits = x.to_bits();
    let rounded = (bits + (1 << (drop - 1)) - 1 + ((bits >> drop) & 1)) >> drop;
    (rounded as i32 - ((127 - B) << M)) as u8
}

fn decode_bits<const M: u32, const B: i32>(code: u8) -> f32 {
    let magnitude = i32::from(code & 0x7f);
    let (exponent, mantissa) = (magnitude >> M, magnitude & ((1 << M) - 1));
    let value = if exponent == 0 {
        mantissa as f32 * (2f32).powi(1 - B - M as i32)
    } else {
        (1.0 + mantissa as f32 / (1 << M) as f32) * (2f32).powi(exponent - B)
    };
    if code & 0x80 != 0 { -value } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The nearest code found by looking at all of them: the definition itself.
    fn nearest(x: f32, max: u8, decode: impl Fn(u8) -> f32) -> u8 {
        // Saturation is part of the definition.
        let target = f64::from(x.abs().min(decode(max)));
        let mut best = 0u8;
        for code in 0..=max {
            let (d, b) = ((f64::from(decode(code)) - target).abs(), (f64::from(decode(best)) - target).abs());
            if d < b || (d == b && code % 2 == 0) {
                best = code;
            }
        }
        best | sign(x)
    }

    #[test]
    fn every_code_round_trips() {
        for c in 0..=255u8 {
            let (a, b) = (E4m3(c), E5m2(c));
            assert!(a.decode().is_nan() || E4m3::encode(a.decode()) == a);
            assert!(!b.decode().is_finite() || E5m2::encode(b.decode()) == b);
        }
        assert_eq!(E4m3(0x7e).decode(), E4m3::MAX);
        assert_eq!(E5m2(0x7b).decode(), E5m2::MAX);
    }

    #[test]
    fn every_bf16_encodes_to_the_nearest_code() {
        for bits in 0..=u16::MAX {
            let x = f32::from_bits(u32::from(bits) << 16);
            if x.is_nan() {
                assert!(E4m3::encode(x).decode().is_nan() && E5m2::encode(x).decode().is_nan());
                continue;
            }
            assert_eq!(E4m3::encode(x).0, nearest(x, 0x7e, |c| E4m3(c).decode()), "e4m3 of {x:e}");
            assert_eq!(E5m2::encode(x).0, nearest(x, 0x7b, |c| E5m2(c).decode()), "e5m2 of {x:e}");
        }
    }
}
