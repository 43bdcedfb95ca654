//! Emulated microscaling formats against their definition, one value at a time.

use super::quant_oracle::*;
use ferrotron_kernels::philox::RandomStream;
use ferrotron_kernels::{
    BlockAxis, DelayedUpdate, EmulatedFormat, Fp8Tensor, QuantKernels, Quantize, QuantizeStack,
};
use ferrotron_tensor::{Category, DType, Result, Stream, Tensor};

const SHAPES: [[usize; 2]; 8] = [[1, 1], [1, 33], [33, 1], [16, 32], [15, 127], [129, 40], [0, 3], [3, 0]];

fn run(
    h: &super::devices::TestDevice,
    k: &dyn QuantKernels,
    how: EmulatedFormat,
    dtype: DType,
    m: &Matrix,
) -> Vec<f32> {
    let x = place(h, dtype, m, true);
    let out = Tensor::empty(&h.s, &[m.r, m.c], dtype, Category::Workspace).unwrap();
    k.emulate(&h.s, how, &x, &out).unwrap();
    host(h, &out)
}

/// Elements of the block that holds `(i, j)`.
fn block(m: &Matrix, n: usize, along: BlockAxis, square: bool, i: usize, j: usize) -> Vec<f32> {
    let whole = |at: usize, size: usize| at / n * n..(at / n * n + n).min(size);
    let rows = if square || along == BlockAxis::Cols { whole(i, m.r) } else { i..i + 1 };
    let cols = if square || along == BlockAxis::Rows { whole(j, m.c) } else { j..j + 1 };
    rows.flat_map(|i| cols.clone().map(move |j| m.x[i * m.c + j])).collect()
}

#[test]
fn mxfp8_by_definition() {
    everywhere(|h, k| {
        let mut number = 0;
        for [r, c] in SHAPES {
            for kind in KINDS {
                for (along, square) in
                    [(BlockAxis::Rows, false), (BlockAxis::Cols, false), (BlockAxis::Rows, true)]
                {
                    number += 1;
                    let dtype = [DType::F32, DType::BF16, DType::F16][number % 3];
                    let table = Table::new(if number % 2 == 0 { DType::E4M3 } else { DType::E5M2 });
                    let m = Matrix { r, c, x: hostile(kind, dtype, number as u64, r * c) };
                    let how = EmulatedFormat::Mxfp8 { format: table.format, along, square };
                    let want = |at: usize| {
                        let (i, j) = (at / c, at % c);
                        let most = amax(block(&m, 32, along, square, i, j).iter());
                        // The smallest E8M0 value that is at least this large.
                        let needed = f64::from(most * (1.0 / table.largest() as f32));
                        let e = (-127..127).find(|e| 2f64.powi(*e) >= needed).unwrap_or(127);
                        let moved = (f64::from(m.x[at]) * 2f64.powi(-e)) as f32;
                        let value = table.code(moved).map_or(f64::NAN, |code| table.value(code));
                        rounded(dtype, (value * 2f64.powi(e)) as f32)
                    };
                    let what = format!("{} {kind} {dtype} [{r}, {c}] {how:?}", h.name);
                    same(&what, &run(h, k, how, dtype, &m), &(0..r * c).map(want).collect::<Vec<_>>());
                }
            }
        }
    });
}

const FOUR: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// Rounds to the nearest of the eight E2M1 magnitudes, ties to the even code; NaN becomes the largest.
fn nearest4(x: f32) -> f32 {
    if x.is_nan() {
        return 6.0;
    }
    let off = |code: usize| (f64::from(x.abs().min(6.0)) - f64::from(FOUR[code])).abs();
    let best = (0..8).fold(0, |b, c| if off(c) < off(b) || (off(c) == off(b) && c % 2 == 0) { c } else { b });
    FOUR[best].copysign(x)
}

/// Stochastic rounding: adds a random part of the step in f32 and truncates.
fn random4(x: f32, byte: u32) -> f32 {
    if x.is_nan() {
        return 6.0;
    }
    let step = |x: f32| {
        if x < 2.0 {
            0.5
        } else if x < 4.0 {
            1.0
        } else {
            2.0
        }
    };
    let size = x.abs().min(6.0);
    let t = size + byte as f32 / 256.0 * step(size);
    // Magnitudes near the sum are multiples of the step there.
    FOUR.iter().rev().find(|v| **v <= t).unwrap().copysign(x)
}

/// The matrix quantized to NVFP4 and dequantized to f32.
fn nvfp4(m: &Matrix, along: BlockAxis, square: bool, stochastic: Option<RandomStream>) -> Vec<f32> {
    let e4 = Table::new(DType::E4M3);
    let most = amax(m.x.iter());
    let all = (448.0f32 * 6.0 / most).min(f32::MAX);
    let all = if most == 0.0 || all == 0.0 { 1.0 } else { all };
    let value = |at: usize| {
        let amax = amax(block(m, 16, along, square, at / m.c, at % m.c).iter());
        let code = e4.code(amax * (all * (1.0f32 / 6.0)));
        let scale = code.map_or(f64::NAN, |code| e4.value(code)) as f32;
        let moved = m.x[at] * (1.0 / (scale * (1.0 / all))).min(f32::MAX);
        let value = match stochastic {
            Some(s) => random4(moved, s.word(at as u64 / 4) >> (at % 4 * 8) & 0xff),
            None => nearest4(moved),
        };
        value * (scale * (1.0 / all))
    };
    (0..m.r * m.c).map(value).collect()
}

#[test]
fn nvfp4_by_definition() {
    everywhere(|h, k| {
        let mut number = 0;
        for [r, c] in SHAPES {
            for kind in KINDS {
                for (along, square) in
                    [(BlockAxis::Rows, false), (BlockAxis::Cols, false), (BlockAxis::Cols, true)]
                {
                    number += 1;
                    let dtype = [DType::F32, DType::BF16, DType::F16][number % 3];
                    let m = Matrix { r, c, x: hostile(kind, dtype, number as u64, r * c) };
                    let stream = RandomStream { key: [number as u32, 5], lane: [6, 7] };
                    let stochastic = (number % 4 == 0).then_some(stream);
                    let how = EmulatedFormat::Nvfp4 { along, square, hadamard: false, stochastic };
                    let want: Vec<f32> =
                        nvfp4(&m, along, square, stochastic).iter().map(|x| rounded(dtype, *x)).collect();
                    let what = format!("{} {kind} {dtype} [{r}, {c}] {how:?}", h.name);
                    same(&what, &run(h, k, how, dtype, &m), &want);
                }
            }
        }
    });
}

/// Hadamard transform, or its inverse, by a 16x16 matrix: `out[i] = Σ` over the 16 values of `block(i)`.
fn by_matrix(m: &Matrix, along: BlockAxis, back: bool) -> Vec<f64> {
    let signs = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1];
    let element = |at: usize| {
        let (i, j) = (at / m.c, at % m.c);
        let place = if along == BlockAxis::Cols { i } else { j };
        (0..16)
            .map(|t| {
                let from = place / 16 * 16 + t;
                let x = if along == BlockAxis::Cols { m.x[from * m.c + j] } else { m.x[i * m.c + from] };
                let sign = if (t & (place % 16)).count_ones() % 2 == 0 { 0.25 } else { -0.25 };
                let diagonal = if back { signs[place % 16] } else { signs[t] };
                f64::from(x) * sign * f64::from(diagonal)
            })
            .sum()
    };
    (0..m.r * m.c).map(element).collect()
}

#[test]
fn nvfp4_turned_rounds_what_the_hadamard_matrix_makes() {
    everywhere(|h, k| {
        for (along, [r, c]) in [
            (BlockAxis::Cols, [64, 5]),
            (BlockAxis::Rows, [5, 64]),
            (BlockAxis::Cols, [37, 9]),
            (BlockAxis::Rows, [9, 37]),
            (BlockAxis::Cols, [1, 1]),
            (BlockAxis::Cols, [0, 4]),
        ] {
            // Integers, so that the Hadamard transform is exact in f32.
            let x: Vec<f32> =
                hostile("plain", DType::F32, 3, r * c).iter().map(|x| (x * 9.0).round()).collect();
            let (wide_r, wide_c) = match along {
                BlockAxis::Cols => (r.next_multiple_of(16), c),
                BlockAxis::Rows => (r, c.next_multiple_of(16)),
            };
            let inside =
                |at: usize| (at / wide_c < r && at % wide_c < c).then(|| at / wide_c * c + at % wide_c);
            let padded = (0..wide_r * wide_c).map(|at| inside(at).map_or(0.0, |at| x[at])).collect();
            let padded = Matrix { r: wide_r, c: wide_c, x: padded };
            let rotated = by_matrix(&padded, along, false).iter().map(|x| *x as f32).collect();
            let rotated = Matrix { x: rotated, ..padded };
            for stochastic in [None, Some(RandomStream { key: [1, 2], lane: [3, 4] })] {
                let held = Matrix { r: wide_r, c: wide_c, x: nvfp4(&rotated, along, false, stochastic) };
                let back = by_matrix(&held, along, true);
                let how = EmulatedFormat::Nvfp4 { along, square: false, hadamard: true, stochastic };
                let ours = run(h, k, how, DType::F32, &Matrix { r, c, x: x.clone() });
                for (at, want) in back.iter().enumerate() {
                    let Some(at) = inside(at) else { continue };
                    let off = (f64::from(ours[at]) - want).abs();
                    assert!(off <= 1e-5 * 30.0, "{} {along:?} [{at}]: {} {want}", h.name, ours[at]);
                }
            }
        }
        let both =
            EmulatedFormat::Nvfp4 { along: BlockAxis::Cols, square: true, hadamard: true, stochastic: None };
        let x = place(h, DType::F32, &Matrix { r: 1, c: 1, x: vec![1.0] }, false);
        let out = Tensor::empty(&h.s, &[1, 1], DType::F32, Category::Workspace).unwrap();
        assert!(k.emulate(&h.s, both, &x, &out).is_err());
    });
}

/// Stochastic rounding is unbiased.
#[test]
fn nvfp4_random_rounding_has_no_bias() {
    everywhere(|h, k| {
        let n = 64 * 1024;
        // Every block also holds a 6, the largest E2M1 value, so that values keep their distance from its steps.
        for value in [0.1f32, 0.7, 1.8, 2.3, 3.5, 4.4, 5.9] {
            let x: Vec<f32> = (0..n).map(|i| if i % 16 == 0 { 6.0 } else { -value }).collect();
            let m = Matrix { r: n / 64, c: 64, x };
            let stochastic = Some(RandomStream { key: [1, 2], lane: [3, value.to_bits()] });
            let how =
                EmulatedFormat::Nvfp4 { along: BlockAxis::Rows, square: false, hadamard: false, stochastic };
            let y = run(h, k, how, DType::F32, &m);
            let kept: Vec<f64> =
                y.iter().enumerate().filter(|(i, _)| i % 16 != 0).map(|(_, y)| f64::from(*y)).collect();
            let mean = kept.iter().sum::<f64>() / kept.len() as f64;
            // Four standard errors of the mean for a step of 2, plus half of the 1/256 step that truncation drops.
            assert!(
                (mean + f64::from(value)).abs() < 4.0 / (kept.len() as f64).sqrt() + 2.0 / 512.0,
                "{value} {mean}"
            );
        }
    });
}

/// A device that implements no optional kernel: the defaults run on the host.
struct Bare;

impl QuantKernels for Bare {
    fn amax(&self, _: &Stream, _: &Tensor, _: &Tensor) -> Result<()> {
        unreachable!()
    }
    fn quantize(&self, _: &Stream, _: &Quantize) -> Result<()> {
        unreachable!()
    }
    fn dequantize(&self, _: &Stream, _: &Fp8Tensor, _: &Tensor) -> Result<()> {
        unreachable!()
    }
    fn fp8_transpose(&self, _: &Stream, _: &Fp8Tensor, _: &Fp8Tensor) -> Result<()> {
        unreachable!()
    }
    fn amax_stack(&self, _: &Stream, _: &Tensor, _: &Tensor) -> Result<()> {
        unreachable!()
    }
    fn quantize_stack(&self, _: &Stream, _: &QuantizeStack) -> Result<()> {
        unreachable!()
    }
    fn transpose_stack(&self, _: &Stream, _: usize, _: &Fp8Tensor, _: &Fp8Tensor) -> Result<()> {
        unreachable!()
    }
    fn delayed_update(&self, _: &Stream, _: &DelayedUpdate) -> Result<()> {
        unreachable!()
    }
}

/// Every emulated format; those with stochastic rounding use one random stream.
pub fn ways(stream: RandomStream) -> Vec<EmulatedFormat> {
    let mut all = Vec::new();
    for (along, square) in [(BlockAxis::Rows, false), (BlockAxis::Cols, false), (BlockAxis::Cols, true)] {
        all.extend([DType::E4M3, DType::E5M2].map(|format| EmulatedFormat::Mxfp8 { format, along, square }));
        for stochastic in [None, Some(stream)] {
            for hadamard in if square { &[false][..] } else { &[false, true] } {
                all.push(EmulatedFormat::Nvfp4 { along, square, hadamard: *hadamard, stochastic });
            }
        }
    }
    all
}

/// Devices without an emulation kernel run it on the host; those with one give the same bits.
#[test]
fn every_device_emulates_like_the_host() {
    everywhere(|h, k| {
        let mut number = 0;
        for [r, c] in [[1, 1], [15, 127], [129, 33], [64, 96], [37, 50], [16, 17], [2, 300]] {
            for kind in KINDS {
                for how in ways(RandomStream { key: [number as u32, 2], lane: [3, 4] }) {
                    number += 1;
                    let dtype = [DType::F32, DType::BF16, DType::F16][number % 3];
                    let m = Matrix { r, c, x: hostile(kind, dtype, number as u64, r * c) };
                    let what = format!("{} {kind} {dtype} [{r}, {c}] {how:?}", h.name);
                    same(&what, &run(h, k, how, dtype, &m), &run(h, &Bare, how, dtype, &m));
                }
            }
        }
    });
}
