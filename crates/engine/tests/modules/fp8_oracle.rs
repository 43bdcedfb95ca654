//! Reference quantization of GEMM operands: element by element, without kernels.

use ferrotron_engine::quant::{Exception, Method, Policy, Recipe, Role};
use ferrotron_kernels::DelayedScaling;
use ferrotron_kernels::philox::RandomStream;
use ferrotron_tensor::fp8::{E2m1, E4m3, E5m2};
use ferrotron_tensor::{DType, bf16};

/// Along which axis the GEMM contracts a matrix.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Use {
    Rows,
    Cols,
}

pub const CURRENT: Recipe = Recipe { method: Method::Current, hybrid: true, pow2: false };
pub const DELAYED: Recipe = Recipe {
    method: Method::Delayed { update: DelayedScaling { margin: 0, most_recent: false }, history: 3 },
    ..CURRENT
};
pub const BLOCK: Recipe = Recipe { method: Method::Block, hybrid: false, pow2: true };
pub const MXFP8: Recipe = Recipe { method: Method::Mxfp8, hybrid: false, pow2: true };
pub const NVFP4: Recipe = Recipe { method: Method::Nvfp4, hybrid: false, pow2: false };

/// Every recipe whose scales do not depend on earlier steps.
pub fn recipes() -> Vec<Recipe> {
    vec![
        CURRENT,
        Recipe { hybrid: false, ..CURRENT },
        Recipe { pow2: true, ..CURRENT },
        BLOCK,
        Recipe { pow2: false, ..BLOCK },
        Recipe { hybrid: true, ..BLOCK },
        MXFP8,
        Recipe { hybrid: true, ..MXFP8 },
        NVFP4,
    ]
}

/// The recipe for two layers, skipping `except`.
pub fn policy(recipe: Recipe, except: &[&str]) -> Policy {
    let except = except.iter().map(|e| e.parse::<Exception>().unwrap()).collect();
    Policy { recipe: Some(recipe), layers: 2, first: 0, last: 0, except, ..Policy::default() }
}

/// A matrix `[r, c]` split into equal parts that are quantized separately, as ranks do.
#[derive(Clone, Copy, Debug)]
pub struct Parts {
    pub down: usize,
    pub across: usize,
}

pub const ONE: Parts = Parts { down: 1, across: 1 };

/// The scale of delayed scaling and the state of stochastic rounding.
#[derive(Clone, Copy, Debug, Default)]
pub struct Given {
    pub scale: f32,
    /// Index of the tensor among those rounded stochastically.
    pub draw: u64,
}

fn encode(format: DType, x: f32) -> f32 {
    if format == DType::E4M3 { E4m3::encode(x).decode() } else { E5m2::encode(x).decode() }
}

pub fn largest(format: DType) -> f32 {
    if format == DType::E4M3 { 448.0 } else { 57344.0 }
}

/// The scale that maps `amax` to the format's maximum.
pub fn scale(format: DType, amax: f32, pow2: bool, beyond: f32) -> f32 {
    if amax == 0.0 || !amax.is_finite() {
        return 1.0;
    }
    let s = largest(format) / amax;
    let s = if s.is_infinite() { beyond } else { s };
    if pow2 { 2f64.powi(f64::from(s).log2().floor() as i32) as f32 } else { s }
}

fn amax(x: &[f64]) -> f32 {
    x.iter().fold(0f64, |m, x| m.max(x.abs())) as f32
}

/// The dequantized values of `x [r, c]` as an operand contracted along `how`.
pub fn quantized(
    recipe: Recipe,
    role: Role,
    how: Use,
    (x, [r, c]): (&[f64], [usize; 2]),
    parts: Parts,
    given: Given,
) -> Vec<f64> {
    let format = recipe.format(role);
    let times = |x: f64, s: f32| f64::from(encode(format, x as f32 * s)) * f64::from(1.0 / s);
    match recipe.method {
        Method::Current => {
            let s = scale(format, amax(x), recipe.pow2, f32::MAX);
            return x.iter().map(|x| times(*x, s)).collect();
        }
        Method::Delayed { .. } => return x.iter().map(|x| times(*x, given.scale)).collect(),
        _ => {}
    }
    // Quantize part by part.
    let (h, w) = (r / parts.down, c / parts.across);
    let mut out = vec![0.0; r * c];
    for (down, across) in (0..parts.down).flat_map(|d| (0..parts.across).map(move |a| (d, a))) {
        let at = |i: usize, j: usize| (down * h + i) * c + across * w + j;
        let part: Vec<f64> = (0..h * w).map(|k| x[at(k / w, k % w)]).collect();
        let made = match recipe.method {
            Method::Block => {
                let n = if role == Role::Weight { [128, 128] } else { along(how, 128) };
                let limit = f32::from_bits(0x7f7f_0000);
                blocks(&part, [h, w], n, &|x, m| {
                    let s = scale(format, m, recipe.pow2, limit);
                    x.iter().map(|x| times(*x, s)).collect()
                })
            }
            Method::Mxfp8 => blocks(&part, [h, w], along(how, 32), &|x, m| {
                let s =
                    2f32.powi(((f64::from(m) / f64::from(largest(format))).log2().ceil() as i32).max(-127));
                let s = if m == 0.0 { 1.0 } else { s };
                x.iter().map(|x| f64::from(encode(format, *x as f32 / s) * s)).collect()
            }),
            _ => nvfp4(role, how, &part, [h, w], given.draw),
        };
        (0..h * w).for_each(|k| out[at(k / w, k % w)] = made[k]);
    }
    out
}

/// Block shape of n values along the contracted axis.
fn along(how: Use, n: usize) -> [usize; 2] {
    if how == Use::Rows { [1, n] } else { [n, 1] }
}

/// Applies `f` to the values and amax of every block.
fn blocks(
    x: &[f64],
    [r, c]: [usize; 2],
    [h, w]: [usize; 2],
    f: &dyn Fn(&[f64], f32) -> Vec<f64>,
) -> Vec<f64> {
    let mut out = vec![0.0; r * c];
    for (top, left) in (0..r).step_by(h).flat_map(|i| (0..c).step_by(w).map(move |j| (i, j))) {
        let inside = |i: usize| (left..(left + w).min(c)).map(move |j| i * c + j);
        let places: Vec<usize> = (top..(top + h).min(r)).flat_map(inside).collect();
        let block: Vec<f64> = places.iter().map(|i| x[*i]).collect();
        let made = f(&block, amax(&block));
        places.iter().zip(made).for_each(|(i, v)| out[*i] = v);
    }
    out
}

/// NVFP4 and back to bf16.
fn nvfp4(role: Role, how: Use, x: &[f64], [r, c]: [usize; 2], draw: u64) -> Vec<f64> {
    let turn = how == Use::Cols && role != Role::Weight;
    let tall = if turn { r.next_multiple_of(16) } else { r };
    let mut x = x.to_vec();
    x.resize(tall * c, 0.0);
    if turn {
        x = hadamard(&x, c, true);
    }
    let most = amax(&x);
    let global = if most == 0.0 { 1.0 } else { (448.0 * 6.0 / most).min(f32::MAX) };
    let n = if role == Role::Weight { [16, 16] } else { along(how, 16) };
    let which = if how == Use::Rows { "rows" } else { "columns" };
    let random = (role == Role::Gradient)
        .then(|| RandomStream::named(1 ^ draw, &format!("rounding of {which} by 0 of stage 0")));
    // Encode and decode factors.
    let factors = blocks(&x, [tall, c], n, &|x, m| {
        let s = E4m3::encode(m * (global * (1.0 / 6.0))).decode();
        vec![f64::from(s); x.len()]
    });
    let number = |(i, (x, s)): (usize, (&f64, &f64))| {
        let (s, inverse) = (*s as f32, 1.0 / global);
        let y = *x as f32 * (1.0 / (s * inverse)).min(f32::MAX);
        let y = match random {
            Some(stream) => at_random(y, (stream.word(i as u64 / 4) >> (i % 4 * 8)) as u8),
            None => E2m1::encode(y).decode(),
        };
        f64::from(y * (s * inverse))
    };
    let mut out: Vec<f64> = x.iter().zip(&factors).enumerate().map(number).collect();
    if turn {
        out = hadamard(&out, c, false);
    }
    out.truncate(r * c);
    out.into_iter().map(|x| bf16::from_f32(x as f32).to_f64()).collect()
}

/// Stochastic rounding to one of the two neighbouring E2M1 values.
fn at_random(x: f32, random: u8) -> f32 {
    const ALL: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let size = x.abs().min(6.0);
    let below = ALL.iter().rposition(|v| *v <= size).unwrap();
    let Some(above) = ALL.get(below + 1) else { return 6f32.copysign(x) };
    let share = (size - ALL[below]) / (above - ALL[below]);
    let up = share + f32::from(random) / 256.0 >= 1.0;
    (if up { *above } else { ALL[below] }).copysign(x)
}

/// Random Hadamard transform of every 16 values of a column, or its inverse.
fn hadamard(x: &[f64], c: usize, forth: bool) -> Vec<f64> {
    const SIGNS: [f32; 16] = [1., 1., 1., -1., 1., -1., -1., -1., -1., -1., -1., 1., -1., 1., -1., -1.];
    let mut out = vec![0.0; x.len()];
    for (band, j) in (0..x.len() / c / 16).flat_map(|b| (0..c).map(move |j| (b, j))) {
        let at = |i: usize| (band * 16 + i) * c + j;
        let mut v: Vec<f32> = (0..16).map(|i| x[at(i)] as f32 * if forth { SIGNS[i] } else { 1.0 }).collect();
        for step in [1, 2, 4, 8] {
            for i in (0..16).filter(|i| i & step == 0) {
                (v[i], v[i + step]) = (v[i] + v[i + step], v[i] - v[i + step]);
            }
        }
        (0..16).for_each(|i| out[at(i)] = f64::from(v[i] * 0.25 * if forth { 1.0 } else { SIGNS[i] }));
    }
    out
}

/// `Σ_k a[i, k]·b[j, k]` and the error bound of f32 accumulation, with `parts` partial sums rounded to bf16.
pub fn product(a: &[f64], b: &[f64], k: usize, parts: usize) -> (Vec<f64>, Vec<f64>) {
    let (m, n) = (a.len() / k, b.len() / k);
    let (mut sums, mut room) = (Vec::with_capacity(m * n), Vec::with_capacity(m * n));
    for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
        let (a, b) = (&a[i * k..][..k], &b[j * k..][..k]);
        let each: Vec<f64> = a.iter().zip(b).map(|(a, b)| a * b).collect();
        let size: f64 = each.iter().map(|x| x.abs()).sum();
        let rounded: f64 = match parts {
            1 => 0.0,
            _ => each.chunks(k.div_ceil(parts)).map(|p| p.iter().sum::<f64>().abs()).sum(),
        };
        sums.push(each.iter().sum());
        room.push(size * (k as f64 + 8.0) * 2f64.powi(-24) + rounded * 1.01 * 2f64.powi(-8));
    }
    (sums, room)
}

pub fn transposed(x: &[f64], c: usize) -> Vec<f64> {
    let r = x.len() / c;
    (0..c).flat_map(|j| (0..r).map(move |i| x[i * c + j])).collect()
}

/// Asserts that `ours` equals `wanted` (rounded to bf16 if `rounds`) within `room`.
pub fn same(what: &str, rounds: bool, ours: &[f64], wanted: &[f64], room: &[f64]) {
    assert_eq!(ours.len(), wanted.len(), "{what}");
    for (i, ((o, w), room)) in ours.iter().zip(wanted).zip(room).enumerate() {
        let room = room + if rounds { 1.01 * 2f64.powi(-8) * (w.abs() + room) } else { 0.0 };
        assert!((o - w).abs() <= room, "{what} [{i}]: {o} instead of {w}, allowed {room:.1e}");
    }
}
