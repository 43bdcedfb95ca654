//! FP8 GEMMs against f64.

use super::devices::{TestDevice, numbers};
use super::quant_oracle::*;
use ferrotron_kernels::{Fp8Gemm, Fp8Tensor, Kernels, Quantize, ScaleSource, ScalingMode};
use ferrotron_tensor::{Category, DType, bf16};

/// Quantizes random values whose magnitude varies from row to row; returns the FP8 tensor and its dequantized values.
fn operand(
    (h, k): (&TestDevice, &dyn Kernels),
    seed: u64,
    [r, c]: [usize; 2],
    format: DType,
    scaling: ScalingMode,
    pow2: bool,
) -> (Fp8Tensor, Vec<f64>) {
    let sized = |(i, x): (usize, &f64)| *x as f32 * 2f32.powi((i / c.max(1) % 5) as i32 - 2);
    let m = Matrix { r, c, x: numbers(DType::F32, seed, r * c).iter().enumerate().map(sized).collect() };
    let x = place(h, DType::F32, &m, false);
    let amax = h.s.upload(&[0f32], &[1], Category::Workspace).unwrap();
    k.amax(&h.s, &x, &amax).unwrap();
    let range = match scaling {
        ScalingMode::PerTensor => ScaleSource::Amax { amax: &amax, pow2 },
        _ => ScaleSource::Blocks { pow2 },
    };
    let b = poisoned(h, [r, c], format, scaling);
    k.quantize(&h.s, &Quantize { x: &x, range, rows: Some(&b), cols: None, sums: None }).unwrap();
    let (table, codes, scales) = (Table::new(format), raw(h, &b), host(h, &b.scale_inv));
    let shape = scaling.scales(r, c);
    let value = |at: usize| {
        let (i, j) = (at / c, at % c);
        let scale = match scaling {
            ScalingMode::PerTensor => scales[0],
            ScalingMode::Block1x128 => scales[j / 128 * shape[1] + i],
            ScalingMode::Block128x128 => scales[i / 128 * shape[1] + j / 128],
        };
        table.value(codes[i * c.next_multiple_of(16) + j]) * f64::from(scale)
    };
    let values = (0..r * c).map(value).collect();
    (b, values)
}

#[test]
fn fp8_gemm_matches_f64_on_dequantized_operands() {
    const SHAPES: [[usize; 3]; 11] = [
        [1, 1, 1],
        [1, 16, 16],
        [16, 1, 15],
        [15, 127, 129],
        [129, 15, 127],
        [32, 48, 256],
        [128, 136, 128],
        [40, 33, 300],
        [8, 8, 0],
        [0, 8, 16],
        [8, 0, 16],
    ];
    use ScalingMode::{Block1x128 as Rows, Block128x128 as Tiles, PerTensor as Tensor};
    everywhere(|h, k| {
        let mut number = 0;
        for [m, n, depth] in SHAPES {
            for (sa, sb) in [(Tensor, Tensor), (Rows, Tiles), (Tiles, Rows), (Rows, Rows)] {
                for (fa, fb) in
                    [(DType::E4M3, DType::E4M3), (DType::E4M3, DType::E5M2), (DType::E5M2, DType::E4M3)]
                {
                    number += 1;
                    let (a, av) = operand((h, k), number, [m, depth], fa, sa, number % 2 == 0);
                    let (b, bv) = operand((h, k), number + 1000, [n, depth], fb, sb, number % 2 == 0);
                    let dtype = if number % 3 == 0 { DType::BF16 } else { DType::F32 };
                    let (accumulate, biased) = (number % 3 == 1, number % 2 == 1);
                    let before: Vec<f32> =
                        numbers(DType::F32, number, m * n).iter().map(|x| *x as f32).collect();
                    let start = if accumulate { before.clone() } else { vec![f32::NAN; m * n] };
                    let c = place(h, dtype, &Matrix { r: m, c: n, x: start }, number % 4 == 0);
                    let bias: Vec<bf16> =
                        numbers(DType::BF16, number, n).iter().map(|x| bf16::from_f64(*x)).collect();
                    let bt = h.s.upload(&bias, &[n], Category::Workspace).unwrap();
                    let g = Fp8Gemm {
                        a: &a,
                        b: &b,
                        bias: biased.then_some(&bt),
                        accumulate,
                        fast: number % 5 == 0,
                        name: "gemm (output, fp8)",
                        c: &c,
                    };
                    k.fp8_gemm(&h.s, &g).unwrap();
                    let what = format!("{} {m}x{n}x{depth} {sa:?} {fa} · {sb:?} {fb}", h.name);
                    let ours = host(h, &c);
                    for i in 0..m {
                        let terms = |j: usize| {
                            let row = av[i * depth..][..depth].iter();
                            row.zip(&bv[j * depth..][..depth]).map(|(a, b)| a * b).collect::<Vec<_>>()
                        };
                        // Expected norm of a row with random signs: single sums may cancel.
                        let norm =
                            (0..n).map(|j| terms(j).iter().map(|t| t * t).sum::<f64>()).sum::<f64>().sqrt();
                        let room = if h.name == "CUDA" { 2e-3 } else { 1e-5 } * norm;
                        for j in 0..n {
                            let old = if accumulate { f64::from(before[i * n + j]) } else { 0.0 };
                            let extra = if biased { bias[j].to_f64() } else { 0.0 };
                            let want = terms(j).iter().sum::<f64>() + old + extra;
                            let digits = if dtype == DType::BF16 { 2f64.powi(-8) } else { 2f64.powi(-22) };
                            let off = (f64::from(ours[i * n + j]) - want).abs();
                            let allowed = room + digits * (want.abs() + old.abs() + extra.abs());
                            assert!(off <= allowed, "{what} [{i}, {j}]: off {off:e} of {want}, {allowed:e}");
                        }
                    }
                }
            }
        }
    });
}

/// A NaN shows up in its own row and column of C, and nowhere else.
#[test]
fn nan_stays_in_its_row_and_column() {
    everywhere(|h, k| {
        let (m, n, depth) = (16, 32, 64);
        let amax = h.s.upload(&[1f32], &[1], Category::Workspace).unwrap();
        let make = |r: usize, poison: Option<usize>| {
            let mut x = vec![0.5f32; r * depth];
            if let Some(at) = poison {
                x[at] = f32::NAN;
            }
            let x = place(h, DType::F32, &Matrix { r, c: depth, x }, false);
            let b = poisoned(h, [r, depth], DType::E4M3, ScalingMode::PerTensor);
            let range = ScaleSource::Amax { amax: &amax, pow2: true };
            k.quantize(&h.s, &Quantize { x: &x, range, rows: Some(&b), cols: None, sums: None }).unwrap();
            b
        };
        let (a, b) = (make(m, Some(3 * depth + 7)), make(n, Some(5 * depth)));
        let c = place(h, DType::F32, &Matrix { r: m, c: n, x: vec![7.0; m * n] }, false);
        let g = Fp8Gemm { a: &a, b: &b, bias: None, accumulate: false, fast: false, name: "fp8_gemm", c: &c };
        k.fp8_gemm(&h.s, &g).unwrap();
        for (at, x) in host(h, &c).iter().enumerate() {
            let poisoned = at / n == 3 || at % n == 5;
            assert!(if poisoned { x.is_nan() } else { *x == 16.0 }, "{} {at}: {x}", h.name);
        }
    });
}
