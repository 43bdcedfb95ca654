//! Scales from amax, for every recipe and device.

use ferrotron_tensor::fp8::{E4m3, E5m2, E8m0};
use ferrotron_tensor::{DType, Error, Result, f16};

/// Largest finite value of an FP8 format.
pub fn largest(op: &'static str, format: DType) -> Result<f32> {
    match format {
        DType::E4M3 => Ok(E4m3::MAX),
        DType::E5M2 => Ok(E5m2::MAX),
        found => Err(Error::DType { op, found, wanted: DType::E4M3 }),
    }
}

/// How a quantization scale follows from an amax.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScaleRule {
    /// Largest finite value of the format, which the amax maps to.
    pub largest: f32,
    /// Round the scale down to a power of two.
    pub pow2: bool,
    /// Lower bound of the amax.
    pub eps: f32,
    /// Scale to use where `largest/amax` overflows.
    pub beyond: f32,
}

impl ScaleRule {
    /// Per-tensor scaling.
    pub fn tensor(largest: f32, pow2: bool) -> ScaleRule {
        ScaleRule { largest, pow2, eps: 0.0, beyond: f32::MAX }
    }

    /// Block scaling of a matrix of type `input`, whose largest value bounds the scale.
    pub fn block(largest: f32, pow2: bool, input: DType) -> ScaleRule {
        let beyond = match input {
            DType::F16 => f16::MAX.to_f32(),
            DType::BF16 => f32::from_bits(0x7f7f_0000),
            _ => f32::MAX,
        };
        ScaleRule { largest, pow2, eps: 0.0, beyond }
    }

    /// The scale for an amax; 1 where it is zero, infinite or NaN.
    pub fn scale(&self, amax: f32) -> f32 {
        // Not `max`, which would drop NaN.
        let amax = if amax < self.eps { self.eps } else { amax };
        if !amax.is_finite() || amax == 0.0 {
            return 1.0;
        }
        let scale = self.largest / amax;
        let scale = if scale.is_infinite() { self.beyond } else { scale };
        if self.pow2 { f32::from_bits(scale.to_bits() & 0xff80_0000) } else { scale }
    }
}

/// E8M0 scale of an MXFP8 block: the smallest power of two that brings `amax` within `largest`.
pub fn power_of_two(amax: f32, largest: f32) -> E8m0 {
    E8m0::ceil(amax * (1.0 / largest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amax_maps_to_largest_value() {
        for largest in [E4m3::MAX, E5m2::MAX] {
            for pow2 in [false, true] {
                for bits in (1..0x7f80_0000u32).step_by(65_537) {
                    let amax = f32::from_bits(bits);
                    let scale = ScaleRule::tensor(largest, pow2).scale(amax);
                    let reached = f64::from(amax) * f64::from(scale) / f64::from(largest);
                    let lowest = if pow2 { 0.5 } else { 1.0 - 1e-7 };
                    let beyond = f64::from(largest) / f64::from(amax) > f64::from(f32::MAX);
                    assert!(
                        reached <= 1.0 + 1e-7 && (beyond || reached >= lowest),
                        "{amax:e} {scale:e} {reached}"
                    );
                    assert!(!pow2 || scale.to_bits() & 0x7f_ffff == 0);
                }
                for amax in [0.0, f32::INFINITY, f32::NAN] {
                    assert_eq!(ScaleRule::tensor(largest, pow2).scale(amax), 1.0);
                }
            }
        }
        let tiny = f32::from_bits(1);
        assert_eq!(ScaleRule::block(448.0, false, DType::F16).scale(tiny), 65504.0);
        assert_eq!(ScaleRule::block(448.0, true, DType::F16).scale(tiny), 32768.0);
    }
}
