//! exp and tanh that vectorise. `FMA` says whether the code is compiled for a CPU with fused multiply-add; without
//! one, `mul_add` would be a library call.
#![allow(clippy::excessive_precision)] // coefficients as they are published

/// `a * b + c`.
#[inline(always)]
pub(super) fn fma<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// e^x within 2 ulp for -87 <= x <= 88.3; 0 below (no denormals), infinity above; NaN stays NaN.
///
/// x = n ln 2 + r, |r| <= ln 2 / 2, and a polynomial in r (coefficients from Cephes' expf).
#[inline(always)]
pub(super) fn exp<const FMA: bool>(x: f32) -> f32 {
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits; 127 more make it an exponent.
    const SHIFT: f32 = 12_582_912.0 + 127.0;
    let x = if x > 89.0 { 89.0 } else { x };
    let shifted = fma::<FMA>(x, std::f32::consts::LOG2_E, SHIFT);
    let n = shifted - SHIFT;
    let r = fma::<FMA>(n, -0.693_359_4, x);
    let r = fma::<FMA>(n, 2.121_944_4e-4, r);
    let p = fma::<FMA>(1.987_569_1e-4, r, 1.398_2e-3);
    let p = fma::<FMA>(p, r, 8.333_452e-3);
    let p = fma::<FMA>(p, r, 4.166_579_6e-2);
    let p = fma::<FMA>(p, r, 1.666_666_5e-1);
    let p = fma::<FMA>(p, r, 5.000_000_1e-1);
    let p = fma::<FMA>(p, r * r, r) + 1.0;
    let y = p * f32::from_bits(shifted.to_bits() << 23);
    if x < -87.0 { 0.0 } else { y }
}

/// tanh x within 3 ulp; NaN stays NaN (small arguments: coefficients from Cephes' tanhf).
#[inline(always)]
pub(super) fn tanh<const FMA: bool>(x: f32) -> f32 {
    let a = x.abs();
    let z = x * x;
    let p = fma::<FMA>(-5.704_988_7e-3, z, 2.063_908_9e-2);
    let p = fma::<FMA>(p, z, -5.373_971_5e-2);
    let p = fma::<FMA>(p, z, 1.333_144_2e-1);
    let p = fma::<FMA>(p, z, -3.333_328_2e-1);
    let small = fma::<FMA>(p * z, x, x);
    let large = (1.0 - 2.0 / (exp::<FMA>(2.0 * a) + 1.0)).copysign(x);
    if a < 0.625 { small } else { large }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ulps(got: f32, want: f64) -> f64 {
        let unit = f64::from(f32::from_bits((want as f32).abs().to_bits() + 1)) - (want.abs() as f32) as f64;
        (f64::from(got) - want).abs() / unit
    }

    #[test]
    fn exp_is_within_two_ulp() {
        let mut worst = [0.0f64; 2];
        for i in 0..2_000_000 {
            let x = -87.0 + 175.0 * (i as f32 / 2_000_000.0);
            worst[0] = worst[0].max(ulps(exp::<false>(x), f64::from(x).exp()));
            worst[1] = worst[1].max(ulps(exp::<true>(x), f64::from(x).exp()));
        }
        assert!(worst[0] <= 2.0 && worst[1] <= 2.0, "{worst:?}");
        assert_eq!(exp::<true>(0.0), 1.0);
        assert_eq!(exp::<true>(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp::<true>(f32::MIN), 0.0);
        for x in [89.0, 100.0, f32::MAX, f32::INFINITY] {
            assert_eq!((exp::<true>(x), exp::<false>(x)), (f32::INFINITY, f32::INFINITY));
        }
        for payload in [0, 1, 0xff, 0x3f_ffff] {
            assert!(exp::<true>(f32::from_bits(0x7fc0_0000 | payload)).is_nan());
        }
        assert!(exp::<true>(f32::NAN).is_nan());
    }

    #[test]
    fn tanh_is_within_three_ulp() {
        let mut worst = [0.0f64; 2];
        for i in 0..2_000_000 {
            let x = -12.0 + 24.0 * (i as f32 / 2_000_000.0);
            worst[0] = worst[0].max(ulps(tanh::<false>(x), f64::from(x).tanh()));
            worst[1] = worst[1].max(ulps(tanh::<true>(x), f64::from(x).tanh()));
        }
        assert!(worst[0] <= 3.0 && worst[1] <= 3.0, "{worst:?}");
        assert_eq!(tanh::<true>(f32::INFINITY), 1.0);
        assert_eq!(tanh::<true>(f32::NEG_INFINITY), -1.0);
        assert_eq!(tanh::<true>(1e-30), 1e-30);
        assert!(tanh::<true>(f32::NAN).is_nan());
    }
}
