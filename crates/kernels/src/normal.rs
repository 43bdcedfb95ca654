//! Standard normal values from random words by the Box-Muller transform, with the same bits on every device.
//!
//! The computation uses only f64 addition, multiplication, division and square root, each correctly rounded, and integers, in
//! one fixed order. IEEE 754 determines the result, so `random_normal.cu`, which has the same lines, and every CPU agree.

use std::f64::consts::{LN_2, TAU};

/// The bits of √½.
const HALF_ROOT: u64 = 0x3fe6_a09e_667f_3bcd;
/// Angle of one unit of the second word.
const STEP: f64 = TAU / 4_294_967_296.0;

/// 1/3, 1/5, ... the series of artanh(s)/s − 1 in s². For s² < 0.0295 the truncation error is below 3·10⁻¹⁷.
const ARTANH: [f64; 9] =
    [1.0 / 3.0, 1.0 / 5.0, 1.0 / 7.0, 1.0 / 9.0, 1.0 / 11.0, 1.0 / 13.0, 1.0 / 15.0, 1.0 / 17.0, 1.0 / 19.0];

/// −1/3!, 1/5!, ... the series of sin(x)/x − 1 in x². For |x| <= π/4 the truncation error is below 2·10⁻¹⁹.
const SINE: [f64; 8] = [
    -1.0 / 6.0,
    1.0 / 120.0,
    -1.0 / 5040.0,
    1.0 / 362_880.0,
    -1.0 / 39_916_800.0,
    1.0 / 6_227_020_800.0,
    -1.0 / 1_307_674_368_000.0,
    1.0 / 355_687_428_096_000.0,
];

/// −1/2!, 1/4!, ... the series of cos(x) − 1 in x². For |x| <= π/4 the truncation error is below 3·10⁻¹⁸.
const COSINE: [f64; 8] = [
    -1.0 / 2.0,
    1.0 / 24.0,
    -1.0 / 720.0,
    1.0 / 40_320.0,
    -1.0 / 3_628_800.0,
    1.0 / 479_001_600.0,
    -1.0 / 87_178_291_200.0,
    1.0 / 20_922_789_888_000.0,
];

/// `x·(c₀ + x·(c₁ + …))`
#[inline(always)]
fn series<const N: usize>(x: f64, c: &[f64; N]) -> f64 {
    let mut sum = c[N - 1];
    for i in (0..N - 1).rev() {
        sum = sum * x + c[i];
    }
    sum * x
}

/// `√(−2·ln((a + 1)/2³²))`, 0 for the largest `a`.
///
/// With `a + 1 = m·2ᵉ` and m around 1, `ln m = 2·artanh((m − 1)/(m + 1))`: near the largest `a`, where the logarithm
/// goes to 0, no digits cancel.
#[inline(always)]
fn radius(a: u32) -> f64 {
    let bits = (f64::from(a) + 1.0).to_bits();
    let exponent = (bits - HALF_ROOT) >> 52;
    // Between √½ and √2.
    let m = f64::from_bits(bits - (exponent << 52));
    let s = (m - 1.0) / (m + 1.0);
    let artanh = s + s * series(s * s, &ARTANH);
    let below = f64::from(32 - exponent as i32);
    (below * (2.0 * LN_2) - 4.0 * artanh).sqrt()
}

/// cos and sin of `2π·b/2³²`.
///
/// The word is reduced to the nearest quarter turn in integer arithmetic; the remainder, at most an eighth of a turn, is
/// exact.
#[inline(always)]
fn cos_sin(b: u32) -> [f64; 2] {
    let quarter = b.wrapping_add(1 << 29) >> 30;
    let x = f64::from(b.wrapping_sub(quarter << 30) as i32) * STEP;
    let z = x * x;
    let (cos, sin) = (1.0 + series(z, &COSINE), x + x * series(z, &SINE));
    let (along, up) = if quarter & 1 == 0 { (cos, sin) } else { (sin, cos) };
    let flip = |x: f64, by: u32| f64::from_bits(x.to_bits() ^ (u64::from(by & 2) << 62));
    [flip(along, quarter + 1), flip(up, quarter)]
}

/// Two independent standard normal values from two words: a radius from `a`, an angle from `b`.
#[inline(always)]
pub fn pair(a: u32, b: u32) -> [f64; 2] {
    let (r, [cos, sin]) = (radius(a), cos_sin(b));
    [r * cos, r * sin]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Powers of two and their neighbours, both ends of the range, and a million values in between.
    fn words() -> impl Iterator<Item = u32> + Clone {
        let edges = (0..32).flat_map(|p| (-3..=3).map(move |d| (1u32 << p).wrapping_add_signed(d)));
        let eighths = (0..8u32).flat_map(|e| (-3..=3).map(move |d| (e << 29).wrapping_add_signed(d)));
        let mixed = (0..1_000_000u32).map(|i| i.wrapping_mul(0x9e37_79b9) ^ (i >> 3));
        edges.chain(eighths).chain(mixed)
    }

    fn near(what: &str, word: u32, found: f64, wanted: f64) {
        let room = 1e-15 * wanted.abs();
        assert!((found - wanted).abs() <= room, "{what} of {word:#x}: {found:e}, not {wanted:e}");
    }

    #[test]
    fn radius_matches_logarithm() {
        for a in words() {
            // log1p where the ratio is near 1, to keep its distance from 1.
            let short = (u64::from(u32::MAX) - u64::from(a)) as f64 / 4_294_967_296.0;
            let log = if short < 0.5 { libm::log1p(-short) } else { libm::log(1.0 - short) };
            near("radius", a, radius(a), (-2.0 * log).sqrt());
        }
        assert_eq!(radius(u32::MAX).to_bits(), 0);
        near("radius", 0, radius(0), (64.0 * LN_2).sqrt());
    }

    #[test]
    fn quarter_turn_reduction_matches_cos_and_sin() {
        for b in words() {
            // Reduce by quarter turns exactly, then use the library.
            let share = f64::from(b) / 4_294_967_296.0;
            let quarters = (4.0 * share).round();
            let (sin, cos) = libm::sincos(TAU * (share - quarters / 4.0));
            let (wanted_cos, wanted_sin) = match quarters as u32 {
                0 | 4 => (cos, sin),
                1 => (-sin, cos),
                2 => (-cos, -sin),
                _ => (sin, -cos),
            };
            let [cos, sin] = cos_sin(b);
            near("cosine", b, cos, wanted_cos);
            near("sine", b, sin, wanted_sin);
            let (sin, plain_cos) = (libm::sin(TAU * share), libm::cos(TAU * share));
            assert!(
                (cos_sin(b)[0] - plain_cos).abs() < 1e-15 && (cos_sin(b)[1] - sin).abs() < 1e-15,
                "{b:#x}"
            );
        }
    }
}
