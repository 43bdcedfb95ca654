//! Branch-free f32 functions that vectorize in loops over slices; accurate to a few ulp, without tables.
//!
//! They are generic over [`Fma`] because a fused multiply-add is one instruction on levels that have it and a slow library
//! call on others.

/// `a·b + c`, fused or not.
pub trait Fma: Copy + Send + Sync + 'static {
    /// `a·b + c`
    fn fma(a: f32, b: f32, c: f32) -> f32;
}

/// One rounding: AVX2 and above.
#[derive(Clone, Copy, Debug)]
pub struct Fused;

/// Two roundings.
#[derive(Clone, Copy, Debug)]
pub struct Plain;

impl Fma for Fused {
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
}

impl Fma for Plain {
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        a * b + c
    }
}

/// Baseline of the architecture.
#[cfg(target_arch = "aarch64")]
pub type Baseline = Fused;
/// Baseline of the architecture.
#[cfg(not(target_arch = "aarch64"))]
pub type Baseline = Plain;

/// `multiversion!` for bodies whose first type parameter `F: Fma` is chosen by the instruction-set level.
macro_rules! multiversion_fma {
    ($(#[$meta:meta])* $vis:vis fn $name:ident <$f:ident : Fma $(, $g:ident : $bound:path)* $(,)?>
     ($($arg:ident : $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name <$($g: $bound),*> (isa: $crate::cpu::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body<$f: $crate::cpu::math::Fma $(, $g: $bound)*>($($arg: $ty),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi2")]
            fn v4<$($g: $bound),*>($($arg: $ty),*) $(-> $ret)? {
                body::<$crate::cpu::math::Fused $(, $g)*>($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn v3<$($g: $bound),*>($($arg: $ty),*) $(-> $ret)? {
                body::<$crate::cpu::math::Fused $(, $g)*>($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            match isa {
                // SAFETY: `isa` comes from `Isa::detect` or `Isa::all`, which ask the CPU.
                $crate::cpu::Isa::Avx512 | $crate::cpu::Isa::Amx => return unsafe { v4($($arg),*) },
                // SAFETY: as above.
                $crate::cpu::Isa::Avx2 => return unsafe { v3($($arg),*) },
                $crate::cpu::Isa::Portable => {}
            }
            let _ = isa;
            body::<$crate::cpu::math::Baseline $(, $g)*>($($arg),*)
        }
    };
}
pub(crate) use multiversion_fma;

const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// ln 2 truncated to 15 bits: `n · LN2_HIGH` is exact for every exponent `n`.
const LN2_HIGH: f32 = 0.693_145_75;
const LN2_LOW: f32 = 1.428_606_8e-6;
/// Adding 1.5·2²³ rounds to an integer, which ends up in the low mantissa bits.
const ROUNDER: f32 = 12_582_912.0;

/// `if x < low { low } else { x }`: NaN passes through.
#[inline(always)]
pub fn at_least(x: f32, low: f32) -> f32 {
    if x < low { low } else { x }
}

/// `if x > high { high } else { x }`: NaN passes through.
#[inline(always)]
pub fn at_most(x: f32, high: f32) -> f32 {
    if x > high { high } else { x }
}

/// `eˣ` for `−88 <= x <= 89`; see [`exp`].
#[inline(always)]
fn exp_bounded<F: Fma>(x: f32) -> f32 {
    let shifted = F::fma(x, LOG2_E, ROUNDER);
    let n = shifted - ROUNDER;
    let r = F::fma(n, -LN2_HIGH, x);
    let r = F::fma(n, -LN2_LOW, r);
    let q = 0.001_392_692_7;
    let q = F::fma(q, r, 0.008_363_774);
    let q = F::fma(q, r, 0.041_666_55);
    let q = F::fma(q, r, 0.166_665_73);
    let q = F::fma(q, r, 0.5);
    let p = 1.0 + F::fma(r * r, q, r);
    // 2ⁿ; the exponent field makes it 0 for n = −127 and infinity for n = 128.
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000));
    p * scale
}

/// `eˣ`, at most 2 ulp off. Exactly 0 below −87.7 (no subnormal results), infinity above 88.37 (a third of a
/// unit before f32 would overflow); NaN stays NaN.
#[inline(always)]
pub fn exp<F: Fma>(x: f32) -> f32 {
    exp_bounded::<F>(at_most(at_least(x, -88.0), 89.0))
}

/// Clamps to the range of [`sigmoid_pair`] and [`times_sigmoid`]: below it σ is under 10⁻³⁷, above it σ is 1.
#[inline(always)]
pub fn sigmoid_range(x: f32) -> f32 {
    at_most(at_least(x, SIGMOID_LOW), SIGMOID_HIGH)
}

/// Lower end of [`sigmoid_range`]: `e^86` and its reciprocal are normal numbers.
pub const SIGMOID_LOW: f32 = -86.0;
/// Upper end of [`sigmoid_range`].
pub const SIGMOID_HIGH: f32 = 88.0;

/// `σ(x) = 1/(1 + e⁻ˣ)` and `1 − σ(x)`, neither losing digits to cancellation; x in [`sigmoid_range`].
#[inline(always)]
pub fn sigmoid_pair<F: Fma>(x: f32) -> (f32, f32) {
    let e = exp_bounded::<F>(-x);
    let s = 1.0 / (1.0 + e);
    (s, e * s)
}

/// `y·σ(x)`; x in [`sigmoid_range`].
#[inline(always)]
pub fn times_sigmoid<F: Fma>(y: f32, x: f32) -> f32 {
    y / (1.0 + exp_bounded::<F>(-x))
}

/// Hyperbolic tangent; keeps the sign of zero, NaN stays NaN.
#[inline(always)]
pub fn tanh<F: Fma>(x: f32) -> f32 {
    let a = x.abs();
    let e = exp_bounded::<F>(-2.0 * at_most(a, 44.0));
    let far = (1.0 - e) / (1.0 + e);
    // Near zero the quotient cancels; an odd polynomial does not.
    let z = x * x;
    let q = 0.002_269_501_7;
    let q = F::fma(q, z, -0.008_323_187);
    let q = F::fma(q, z, 0.021_762_503);
    let q = F::fma(q, z, -0.053_958_46);
    let q = F::fma(q, z, 0.133_333);
    let q = F::fma(q, z, -0.333_333_34);
    let near = F::fma(a * z, q, a);
    let magnitude = if a < 0.625 { near } else { far };
    magnitude.copysign(x)
}

/// Normal distribution: `Φ(x) = ½(1 + erf(x/√2))` and its density `φ(x) = e^(−x²/2)/√(2π)`.
#[inline(always)]
pub fn normal_cdf_pdf<F: Fma>(x: f32) -> (f32, f32) {
    const INV_SQRT_2PI: f32 = 0.398_942_3;
    let z = x.abs() * std::f32::consts::FRAC_1_SQRT_2;
    let e = exp_bounded::<F>(at_least(-0.5 * (x * x), -88.0));
    // erfc(z) = e^(−z²) · t · R(t) with t = 1/(1 + 0.4 z); relative error of R below 3e-8 for z <= 10.
    let t = 1.0 / F::fma(z, 0.4, 1.0);
    let q = -0.033_501_126;
    let q = F::fma(q, t, 0.218_785_36);
    let q = F::fma(q, t, -0.546_502_6);
    let q = F::fma(q, t, 0.609_342_2);
    let q = F::fma(q, t, -0.334_311_88);
    let q = F::fma(q, t, 0.297_973_2);
    let q = F::fma(q, t, 0.121_059_984);
    let q = F::fma(q, t, 0.216_689_4);
    let q = F::fma(q, t, 0.224_748_67);
    let q = F::fma(q, t, 0.225_716_86);
    let tail = 0.5 * (e * (t * q));
    (if x < 0.0 { tail } else { 1.0 - tail }, e * INV_SQRT_2PI)
}

/// Number of parallel partial sums: two AVX-512 registers, the same on every level, so that results agree.
pub const LANES: usize = 32;

/// Sums the lanes in a fixed tree.
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
