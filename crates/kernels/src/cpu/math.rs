//! Branch-free f32 functions that loops over slices vectorise: a few units in the last place, no tables, no
//! fused multiply-add (so every instruction-set level computes the same bits).

const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// ln 2 cut after 15 binary places: `n · LN2_HIGH` is exact for every exponent `n`.
const LN2_HIGH: f32 = 0.693_145_75;
const LN2_LOW: f32 = 1.428_606_8e-6;
/// Adding 1.5·2²³ rounds to a whole number and leaves it in the low mantissa bits.
const ROUNDER: f32 = 12_582_912.0;

/// `eˣ`. Overflows to infinity, is 0 below −87 (no subnormal results), NaN stays NaN. At most 2 ulp off.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Comparisons written so that NaN passes through.
    let x = if x < -87.5 { -87.5 } else { x };
    let x = if x > 89.0 { 89.0 } else { x };
    let shifted = x * LOG2_E + ROUNDER;
    let n = shifted - ROUNDER;
    let r = x - n * LN2_HIGH - n * LN2_LOW;
    let q = 0.001_392_692_7;
    let q = q * r + 0.008_363_774;
    let q = q * r + 0.041_666_55;
    let q = q * r + 0.166_665_73;
    let q = q * r + 0.5;
    let p = 1.0 + (r + r * r * q);
    // 2ⁿ⁻¹, and the other factor 2 on p: n = 128 still works and n = −126 gives 0.
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f00_0000));
    (p + p) * scale
}

/// `1 / (1 + e⁻ˣ)`
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `σ(x)` and `1 − σ(x) = σ(−x)`, neither losing digits to cancellation.
#[inline(always)]
pub fn sigmoid_pair(x: f32) -> (f32, f32) {
    let e = exp(-x.abs());
    let large = 1.0 / (1.0 + e);
    let small = e * large;
    if x < 0.0 { (small, large) } else { (large, small) }
}

/// Hyperbolic tangent; keeps the sign of zero, NaN stays NaN.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let a = x.abs();
    let e = exp(-2.0 * a);
    let far = (1.0 - e) / (1.0 + e);
    // Near zero the quotient cancels; an odd polynomial does not.
    let z = x * x;
    let q = 0.002_269_501_7;
    let q = q * z - 0.008_323_187;
    let q = q * z + 0.021_762_503;
    let q = q * z - 0.053_958_46;
    let q = q * z + 0.133_333;
    let q = q * z - 0.333_333_34;
    let near = a + a * z * q;
    let magnitude = if a < 0.625 { near } else { far };
    magnitude.copysign(x)
}

/// Normal distribution: `Φ(x) = ½(1 + erf(x/√2))` and its density `φ(x) = e^(−x²/2)/√(2π)`.
#[inline(always)]
pub fn normal_cdf_pdf(x: f32) -> (f32, f32) {
    const INV_SQRT_2PI: f32 = 0.398_942_3;
    let z = x.abs() * std::f32::consts::FRAC_1_SQRT_2;
    let e = exp(-0.5 * (x * x));
    // erfc(z) = e^(−z²) · t · R(t) with t = 1/(1 + 0.4 z); relative error of R below 3e-8 for z <= 10.
    let t = 1.0 / (1.0 + 0.4 * z);
    let q = -0.033_501_126;
    let q = q * t + 0.218_785_36;
    let q = q * t - 0.546_502_6;
    let q = q * t + 0.609_342_2;
    let q = q * t - 0.334_311_88;
    let q = q * t + 0.297_973_2;
    let q = q * t + 0.121_059_984;
    let q = q * t + 0.216_689_4;
    let q = q * t + 0.224_748_67;
    let q = q * t + 0.225_716_86;
    let tail = 0.5 * (e * (t * q));
    (if x < 0.0 { tail } else { 1.0 - tail }, e * INV_SQRT_2PI)
}

/// Partial sums side by side: enough for two AVX-512 registers, the same on every level.
pub const LANES: usize = 32;

/// Add the lanes up in a fixed tree.
#[inline(always)]
pub fn fold(mut lanes: [f32; LANES]) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    lanes[0]
}
