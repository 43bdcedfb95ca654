//! FP8 grouped GEMMs against f64.

use super::devices::{TestDevice, devices, numbers};
use super::grouped_gemm::Layout;
use super::quant_oracle::{Matrix, Table, host, place, poisoned, raw};
use ferrotron_kernels::{
    Fp8GroupedGemm, Fp8GroupedWgrad, Fp8Tensor, Quantize, ScaleSource, ScalingMode, Segments,
};
use ferrotron_tensor::{Category, DType, Tensor};

/// Quantizes values `[r, c]` whose magnitude varies from row to row; returns the FP8 tensor and its dequantized values.
/// Each of `stacked` matrices has its own scale.
fn operand(
    h: &TestDevice,
    x: &[f64],
    [r, c]: [usize; 2],
    format: DType,
    scaling: ScalingMode,
    stacked: usize,
) -> (Fp8Tensor, Vec<f64>) {
    let amax = |x: &Tensor| {
        let most = h.s.upload(&[0f32], &[1], Category::Workspace).unwrap();
        h.k.amax(&h.s, x, &most).unwrap();
        most
    };
    let b = poisoned(h, [r, c], format, scaling);
    let mut b = b;
    let m = Matrix { r, c, x: x.iter().map(|x| *x as f32).collect() };
    let quantize = |x: &Tensor, range: ScaleSource, out: &Fp8Tensor| {
        h.k.quantize(&h.s, &Quantize { x, range, rows: Some(out), cols: None, sums: None }).unwrap();
    };
    if scaling == ScalingMode::PerTensor {
        b.scale_inv = h.s.zeros(&[stacked], DType::F32, Category::Workspace).unwrap();
        let each = r / stacked.max(1);
        for e in 0..stacked {
            let x = m.x[e * each * c..][..each * c].to_vec();
            let x = place(h, DType::F32, &Matrix { r: each, c, x }, false);
            let part = Fp8Tensor {
                data: b.data.narrow(0, e * each, each).unwrap(),
                scale_inv: b.scale_inv.narrow(0, e, 1).unwrap(),
                ..b.clone()
            };
            quantize(&x, ScaleSource::Amax { amax: &amax(&x), pow2: false }, &part);
        }
    } else {
        quantize(&place(h, DType::F32, &m, false), ScaleSource::Blocks { pow2: false }, &b);
    }
    let (table, codes, scales) = (Table::new(format), raw(h, &b), host(h, &b.scale_inv));
    let shape = scaling.scales(r, c);
    let value = |at: usize| {
        let (i, j) = (at / c, at % c);
        let scale = match scaling {
            ScalingMode::PerTensor => scales[i / (r / stacked)],
            ScalingMode::Block1x128 => scales[j / 128 * shape[1] + i],
            ScalingMode::Block128x128 => scales[i / 128 * shape[1] + j / 128],
        };
        table.value(codes[i * c.next_multiple_of(16) + j]) * f64::from(scale)
    };
    let values = (0..r * c).map(value).collect();
    (b, values)
}

/// Random values whose magnitude varies from row to row.
fn sized(seed: u64, rows: usize, width: usize) -> Vec<f64> {
    let size = |(i, x): (usize, &f64)| x * 2f64.powi((i / width.max(1) % 5) as i32 - 2);
    numbers(DType::F32, seed, rows * width).iter().enumerate().map(size).collect()
}

const FORMATS: [(DType, DType); 3] =
    [(DType::E4M3, DType::E4M3), (DType::E5M2, DType::E4M3), (DType::E4M3, DType::E5M2)];

/// FP8 tensor-core accumulators keep about 14 bits.
fn room(h: &TestDevice) -> f64 {
    if h.name == "CUDA" { 2e-3 } else { 1e-5 }
}

#[test]
fn fp8_segments_use_the_weight_of_their_expert() {
    for h in devices() {
        let mut number = 0;
        for l in layouts() {
            for [k, n] in [[16, 8], [40, 33], [128, 128], [300, 136], [520, 384]] {
                if l.counts.len() > 8 && k * n > 6000 {
                    continue;
                }
                for (sx, sw) in [
                    (ScalingMode::PerTensor, ScalingMode::PerTensor),
                    (ScalingMode::Block1x128, ScalingMode::Block128x128),
                ] {
                    number += 1;
                    let (fx, fw) = FORMATS[number % 3];
                    let e = l.counts.len();
                    let (x, xv) = operand(&h, &sized(number as u64, l.rows, k), [l.rows, k], fx, sx, 1);
                    let (w, wv) = operand(&h, &sized(number as u64 + 99, e * n, k), [e * n, k], fw, sw, e);
                    let (at, y) = (
                        l.on(&h),
                        h.placed(number % 4 == 0, DType::BF16, &[l.rows, n], &vec![f64::NAN; l.rows * n]),
                    );
                    let segments = Segments { offsets: &at[0], counts: &at[1] };
                    let (fast, name) = (number % 2 == 0, "grouped (output, fp8)");
                    let g = Fp8GroupedGemm { x: &x, w: &w, segments, y: &y.view, fast, name };
                    h.k.fp8_grouped_gemm(&h.s, &g).unwrap();
                    let (ours, what) = (
                        h.inside(&y),
                        format!("{} {:?} {k}x{n} {sx:?} {fx} {fw} fast {fast}", h.name, l.counts),
                    );
                    for (r, owner) in l.owners().iter().enumerate() {
                        let Some(e) = owner else {
                            assert!(
                                ours[r * n..][..n].iter().all(|x| *x == 0.0),
                                "{what}: row {r} is padding"
                            );
                            continue;
                        };
                        let terms = |j: usize| {
                            xv[r * k..][..k].iter().zip(&wv[(e * n + j) * k..][..k]).map(|(a, b)| a * b)
                        };
                        let norm = (0..n).map(|j| terms(j).map(|t| t * t).sum::<f64>()).sum::<f64>().sqrt();
                        for j in 0..n {
                            let want: f64 = terms(j).sum();
                            let off = (ours[r * n + j] - want).abs();
                            let allowed = room(&h) * norm + 2f64.powi(-8) * want.abs();
                            assert!(off <= allowed, "{what} [{r}, {j}]: off {off:e} of {want}, {allowed:e}");
                        }
                    }
                }
            }
        }
    }
}

fn layouts() -> Vec<Layout> {
    let many: Vec<usize> = (0..130).map(|i| i * 5 % 11).collect();
    vec![
        Layout::new(&[1], 1, 0),
        Layout::new(&[129, 0, 64, 300], 1, 5),
        Layout::new(&[0, 127, 1, 128, 15], 128, 140),
        Layout::new(&many, 1, 3),
    ]
}

#[test]
fn fp8_wgrad_of_every_segment() {
    for h in devices() {
        let mut number = 0;
        for counts in [vec![1], vec![129, 0, 127, 128, 15], vec![300, 2500, 0, 64]] {
            let l = Layout::new(&counts, 128, 128);
            for [k, n] in [[8, 8], [33, 40], [136, 128], [200, 264]] {
                for scaling in [ScalingMode::PerTensor, ScalingMode::Block1x128] {
                    for accumulate in [false, true] {
                        number += 1;
                        let (fy, fx) = FORMATS[number % 3];
                        // Padding columns are zero.
                        let owners = l.owners();
                        let make = |seed: usize, rows: usize| {
                            let x = sized(seed as u64, rows, l.rows);
                            let own =
                                |(i, x): (usize, &f64)| if owners[i % l.rows].is_some() { *x } else { 0.0 };
                            x.iter().enumerate().map(own).collect::<Vec<_>>()
                        };
                        let (dy, dyv) = operand(&h, &make(number, n), [n, l.rows], fy, scaling, 1);
                        let (x, xv) = operand(&h, &make(number + 99, k), [k, l.rows], fx, scaling, 1);
                        let old = numbers(DType::F32, 7, counts.len() * n * k);
                        let before = if accumulate { old.clone() } else { vec![f64::NAN; old.len()] };
                        let dw = h.placed(number % 4 == 0, DType::F32, &[counts.len(), n, k], &before);
                        let at = l.on(&h);
                        let segments = Segments { offsets: &at[0], counts: &at[1] };
                        let fast = number % 2 == 0;
                        let g =
                            Fp8GroupedWgrad { dy: &dy, x: &x, segments, dw: (&dw.view, accumulate), fast };
                        h.k.fp8_grouped_wgrad(&h.s, &g).unwrap();
                        let ours = h.inside(&dw);
                        for (at, ours) in ours.iter().enumerate() {
                            let (e, i, j) = (at / (n * k), at / k % n, at % k);
                            let span = l.offsets[e]..l.offsets[e] + counts[e];
                            let terms = span.map(|c| dyv[i * l.rows + c] * xv[j * l.rows + c]);
                            let (sum, squares) = terms.fold((0.0, 0.0), |(s, q), t| (s + t, q + t * t));
                            let want = sum + if accumulate { old[at] } else { 0.0 };
                            let allowed =
                                room(&h) * 10.0 * squares.sqrt() + 2f64.powi(-22) * (want.abs() + 1.0);
                            let off = (ours - want).abs();
                            assert!(
                                off <= allowed,
                                "{} {counts:?} {k}x{n} {scaling:?} {fy} {fx} fast {fast} [{e}, {i}, {j}]: {off:e} of {want}, {allowed:e}",
                                h.name
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn invalid_fp8_operands_are_errors() {
    for h in devices() {
        let l = Layout::new(&[3, 2], 1, 0);
        let at = l.on(&h);
        let segments = Segments { offsets: &at[0], counts: &at[1] };
        let make = |shape: [usize; 2], format, scaling| poisoned(&h, shape, format, scaling);
        let x = make([5, 32], DType::E4M3, ScalingMode::PerTensor);
        let mut w = make([12, 32], DType::E4M3, ScalingMode::PerTensor);
        w.scale_inv = h.s.zeros(&[2], DType::F32, Category::Workspace).unwrap();
        let y = h.poisoned(DType::BF16, &[5, 6]);
        let good = Fp8GroupedGemm { x: &x, w: &w, segments, y: &y, fast: true, name: "fp8_grouped_gemm" };
        let one = make([12, 32], DType::E4M3, ScalingMode::PerTensor);
        let tiles = make([12, 32], DType::E4M3, ScalingMode::Block128x128);
        let short_rows = make([12, 16], DType::E4M3, ScalingMode::PerTensor);
        let wide = h.poisoned(DType::F32, &[5, 6]);
        let both = make([5, 32], DType::E5M2, ScalingMode::PerTensor);
        let other = Fp8Tensor {
            scale_inv: w.scale_inv.clone(),
            ..make([12, 32], DType::E5M2, ScalingMode::PerTensor)
        };
        for (what, bad) in [
            ("one scale for all matrices", Fp8GroupedGemm { w: &one, ..good }),
            ("tiles with one scale", Fp8GroupedGemm { w: &tiles, ..good }),
            ("inner sizes", Fp8GroupedGemm { w: &short_rows, ..good }),
            ("type of y", Fp8GroupedGemm { y: &wide, ..good }),
            ("both in e5m2", Fp8GroupedGemm { x: &both, w: &other, ..good }),
        ] {
            assert!(h.k.fp8_grouped_gemm(&h.s, &bad).is_err(), "{}: {what}", h.name);
        }
        let (dy, x) = (
            make([6, 5], DType::E4M3, ScalingMode::PerTensor),
            make([4, 5], DType::E4M3, ScalingMode::PerTensor),
        );
        let dw = h.poisoned(DType::F32, &[2, 6, 4]);
        let good = Fp8GroupedWgrad { dy: &dy, x: &x, segments, dw: (&dw, false), fast: false };
        let (rows, short) = (
            make([4, 5], DType::E4M3, ScalingMode::Block1x128),
            make([4, 7], DType::E4M3, ScalingMode::PerTensor),
        );
        let transposed = h.poisoned(DType::F32, &[2, 4, 6]);
        for (what, bad) in [
            ("scales", Fp8GroupedWgrad { x: &rows, ..good }),
            ("columns", Fp8GroupedWgrad { x: &short, ..good }),
            ("gradient", Fp8GroupedWgrad { dw: (&transposed, false), ..good }),
        ] {
            assert!(h.k.fp8_grouped_wgrad(&h.s, &bad).is_err(), "{}: {what}", h.name);
        }
    }
}
