//! Powers, logarithm and tanh that vectorize. `FMA` says whether the code is compiled for a CPU with fused
//! multiply-add; without one, `mul_add` would be a library call.

/// `a * b + c`.
#[inline(always)]
pub(super) fn fma<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// 2^x within 2 ulp for -126 <= x < 127.5; 0 below (no denormals); NaN stays NaN. Not for anything above.
///
/// x = n + r with |r| <= 1/2, and the polynomial in r of degree 6 whose largest relative error is smallest.
#[inline(always)]
pub(super) fn exp2<const FMA: bool>(x: f32) -> f32 {
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits; 127 more make it an exponent.
    const SHIFT: f32 = 12_582_912.0 + 127.0;
    let shifted = x + SHIFT;
    let r = x - (shifted - SHIFT);
    let p = fma::<FMA>(1.534_581_2e-4, r, 1.339_993_1e-3);
    let p = fma::<FMA>(p, r, 9.618_489e-3);
    let p = fma::<FMA>(p, r, 5.550_328_6e-2);
    let p = fma::<FMA>(p, r, 2.402_264_6e-1);
    let p = fma::<FMA>(p, r, std::f32::consts::LN_2);
    let p = fma::<FMA>(p, r, 1.0);
    let y = p * f32::from_bits(shifted.to_bits() << 23);
    if x < -126.0 { 0.0 } else { y }
}

/// As [`exp2`], and infinity from 127.5 on.
#[inline(always)]
pub(super) fn exp2_any<const FMA: bool>(x: f32) -> f32 {
    exp2::<FMA>(if x > 128.0 { 128.0 } else { x })
}

/// tanh x within 3 ulp; NaN stays NaN (small arguments: coefficients from Cephes' tanhf).
#[inline(always)]
pub(super) fn tanh<const FMA: bool>(x: f32) -> f32 {
    let a = x.abs();
    let z = x * x;
    let p = fma::<FMA>(-5.704_988_7e-3, z, 2.063_909e-2);
    let p = fma::<FMA>(p, z, -5.373_971_5e-2);
    let p = fma::<FMA>(p, z, 1.333_144_2e-1);
    let p = fma::<FMA>(p, z, -3.333_328e-1);
    let small = fma::<FMA>(p * z, x, x);
    let e = exp2_any::<FMA>(a * (2.0 * std::f32::consts::LOG2_E));
    let large = (1.0 - 2.0 / (e + 1.0)).copysign(x);
    if a < 0.625 { small } else { large }
}

/// ln x within 2 ulp (or 1e-7 near 1) for positive normal x; NaN stays NaN. Not for anything else.
///
/// x = 2^e m with m around 1, and a polynomial in m - 1 (coefficients from Cephes' logf).
#[inline(always)]
pub(super) fn ln<const FMA: bool>(x: f32) -> f32 {
    const ROOT_HALF: u32 = 0x3f35_04f3;
    let shifted = x.to_bits().wrapping_sub(ROOT_HALF);
    let e = (shifted as i32 >> 23) as f32;
    let m = f32::from_bits((shifted & 0x7f_ffff) + ROOT_HALF);
    let r = m - 1.0;
    let z = r * r;
    let p = fma::<FMA>(7.037_683_6e-2, r, -1.151_461e-1);
    let p = fma::<FMA>(p, r, 1.167_699_9e-1);
    let p = fma::<FMA>(p, r, -1.242_014_1e-1);
    let p = fma::<FMA>(p, r, 1.424_932_3e-1);
    let p = fma::<FMA>(p, r, -1.666_805_7e-1);
    let p = fma::<FMA>(p, r, 2.000_071_5e-1);
    let p = fma::<FMA>(p, r, -2.499_999_4e-1);
    let p = fma::<FMA>(p, r, 3.333_333e-1);
    let y = fma::<FMA>(e, -2.121_944_4e-4, p * r * z);
    let y = fma::<FMA>(-0.5, z, y);
    let y = fma::<FMA>(e, 0.693_359_4, r + y);
    if x.is_nan() { x } else { y }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ulps(got: f32, want: f64) -> f64 {
        let unit = f64::from(f32::from_bits((want as f32).abs().to_bits() + 1)) - (want.abs() as f32) as f64;
        (f64::from(got) - want).abs() / unit
    }

    /// NaN of every sign of a payload.
    fn nans() -> impl Iterator<Item = f32> {
        [0, 1, 0xff, 0x1ff, 0x3f_ffff, 0x8000_0000].into_iter().map(|p| f32::from_bits(0x7fc0_0000 | p))
    }

    #[test]
    fn exp2_is_within_two_ulp() {
        let mut worst = [0.0f64; 2];
        for i in 0..2_000_000 {
            let x = -126.0 + 253.4 * (i as f32 / 2_000_000.0);
            worst[0] = worst[0].max(ulps(exp2::<false>(x), f64::from(x).exp2()));
            worst[1] = worst[1].max(ulps(exp2_any::<true>(x), f64::from(x).exp2()));
        }
        assert!(worst[0] <= 2.0 && worst[1] <= 2.0, "{worst:?}");
        assert_eq!(exp2::<true>(0.0), 1.0);
        assert_eq!(exp2::<true>(-126.0), f32::MIN_POSITIVE);
        for x in [-126.1, f32::MIN, f32::NEG_INFINITY] {
            assert_eq!((exp2::<true>(x), exp2_any::<false>(x)), (0.0, 0.0));
        }
        for x in [127.6, 128.0, 129.0, 1000.0, f32::MAX, f32::INFINITY] {
            assert_eq!((exp2_any::<true>(x), exp2_any::<false>(x)), (f32::INFINITY, f32::INFINITY), "{x}");
        }
        assert!(nans().all(|x| exp2::<true>(x).is_nan() && exp2_any::<false>(x).is_nan()));
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
        assert!(nans().all(|x| tanh::<true>(x).is_nan()));
    }

    #[test]
    fn ln_is_within_two_ulp() {
        let mut worst = [0.0f64; 2];
        for i in 0..2_000_000u32 {
            // Every binade, and numbers near 1 in turn.
            let x = if i % 2 == 0 { f32::from_bits(0x0080_0000 + i * 1060) } else { 0.5 + i as f32 * 1e-6 };
            let want = f64::from(x).ln();
            let off = |got: f32| if (f64::from(got) - want).abs() <= 1e-7 { 0.0 } else { ulps(got, want) };
            worst[0] = worst[0].max(off(ln::<false>(x)));
            worst[1] = worst[1].max(off(ln::<true>(x)));
        }
        assert!(worst[0] <= 2.0 && worst[1] <= 2.0, "{worst:?}");
        assert_eq!(ln::<true>(1.0), 0.0);
        assert!(nans().all(|x| ln::<true>(x).is_nan()));
    }
}
