//! Stacks of matrices quantized in one launch: each matches the matrix quantized alone.

use super::devices::{TestDevice, devices};
use super::permutation::shifted;
use super::quant_oracle::*;
use ferrotron_kernels::{Fp8Tensor, QuantizeStack, ScaleSource, ScalingMode};
use ferrotron_tensor::{Category, DType, Tensor};

const FORMATS: [DType; 2] = [DType::E4M3, DType::E5M2];

/// FP8 tensor of `count` matrices `[r, c]`, filled with a value that the kernel must overwrite.
fn memory(
    h: &TestDevice,
    count: usize,
    [r, c]: [usize; 2],
    format: DType,
    scaling: ScalingMode,
) -> Fp8Tensor {
    let b = poisoned(h, [count * r, c], format, scaling);
    match scaling {
        ScalingMode::PerTensor => Fp8Tensor { scale_inv: each(h, &vec![f32::NAN; count]), ..b },
        _ => b,
    }
}

fn each(h: &TestDevice, values: &[f32]) -> Tensor {
    h.s.upload(values, &[values.len()], Category::Workspace).unwrap()
}

/// Checks `b` against the `codes` of each matrix.
fn check(h: &TestDevice, what: &str, table: &Table, b: &Fp8Tensor, codes: &[(Vec<Option<u8>>, Vec<f32>)]) {
    let (ours, wanted) = (raw(h, b), codes.iter().flat_map(|(c, _)| c));
    assert_eq!(ours.len(), wanted.clone().count(), "{what}");
    for (i, (o, w)) in ours.iter().zip(wanted).enumerate() {
        let right = w.map_or(table.value(*o).is_nan(), |w| *o == w);
        assert!(right, "{what} [{i}]: {o:#x} instead of {w:x?}");
    }
    let inverse: Vec<f32> = codes.iter().flat_map(|(_, s)| s.clone()).collect();
    same(&format!("{what} scales"), &host(h, &b.scale_inv), &inverse);
}

#[test]
fn stacked_matrices_match_single_ones() {
    for h in devices() {
        let mut number = 0usize;
        for ([count, n, k], tiles) in [
            ([3, 1, 1], false),
            ([4, 15, 127], false),
            ([2, 129, 16], false),
            ([5, 33, 96], false),
            ([0, 8, 16], false),
            ([3, 0, 16], false),
            ([1, 130, 257], false),
            ([3, 128, 256], true),
            ([2, 384, 128], true),
        ] {
            for kind in KINDS {
                for way in 0..5 {
                    number += 1;
                    let (dtype, format) = ([DType::F32, DType::BF16][number % 2], FORMATS[number / 2 % 2]);
                    let (pow2, scaling) =
                        (way % 2 == 1, [ScalingMode::PerTensor, ScalingMode::Block128x128][way / 3]);
                    if scaling == ScalingMode::Block128x128 && !tiles {
                        continue;
                    }
                    let what = format!("{} {kind} {dtype} {count}x[{n}, {k}] to {format}, way {way}", h.name);
                    let x = hostile(kind, dtype, number as u64, count * n * k);
                    // Matrices of different magnitudes.
                    let x: Vec<f32> = x
                        .iter()
                        .enumerate()
                        .map(|(i, x)| rounded(dtype, x * 2f32.powi((i / (n * k) % 3) as i32 - 1)))
                        .collect();
                    let wide: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
                    let xt = shifted(&h, number % 2, dtype, &[count, n, k], &wide);
                    let one = |e: usize| Matrix { r: n, c: k, x: x[e * n * k..][..n * k].to_vec() };
                    let most: Vec<f32> = (0..count).map(|e| amax(one(e).x.iter())).collect();
                    let found_amax = each(&h, &vec![0f32; count]);
                    h.k.amax_stack(&h.s, &xt, &found_amax).unwrap();
                    same(&format!("{what} amax"), &host(&h, &found_amax), &most);
                    let (given, seen) = (each(&h, &[0.37]), each(&h, &[1e-3]));
                    let range = match (scaling, way) {
                        (ScalingMode::PerTensor, 2) => ScaleSource::Given { scale: &given, amax: &seen },
                        (ScalingMode::PerTensor, _) => ScaleSource::Amax { amax: &found_amax, pow2 },
                        _ => ScaleSource::Blocks { pow2 },
                    };
                    let table = Table::new(format);
                    let beyond = if scaling == ScalingMode::PerTensor { f32::MAX } else { biggest(dtype) };
                    let scale_of = |a: f32| if way == 2 { 0.37 } else { scale(&table, a, pow2, beyond) };
                    let rows = memory(&h, count, [n, k], format, scaling);
                    let cols = memory(&h, count, [k, n], format, scaling);
                    let q = QuantizeStack { x: &xt, range, rows: Some(&rows), cols: Some(&cols) };
                    h.k.quantize_stack(&h.s, &q).unwrap();
                    let all = |transposed: bool| -> Vec<_> {
                        let of = |e| if transposed { one(e).transposed() } else { one(e) };
                        (0..count).map(|e| of(e).codes(&table, scaling, scale_of)).collect()
                    };
                    check(&h, &format!("{what} rows"), &table, &rows, &all(false));
                    check(&h, &format!("{what} cols"), &table, &cols, &all(true));
                    if way == 2 {
                        let largest = most.iter().fold(1e-3f32, |m, x| m.max(*x));
                        same(&format!("{what} seen"), &host(&h, &seen), &[largest]);
                    }
                    // amax computed by the same kernel, starting from its previous value.
                    if let ScaleSource::Amax { .. } = range {
                        let (rows, cols) = (
                            memory(&h, count, [n, k], format, scaling),
                            memory(&h, count, [k, n], format, scaling),
                        );
                        let found = each(&h, &vec![0f32; count]);
                        let range = ScaleSource::Amax { amax: &found, pow2 };
                        let q = QuantizeStack { x: &xt, range, rows: Some(&rows), cols: Some(&cols) };
                        h.k.amax_quantize_stack(&h.s, &q).unwrap();
                        same(&format!("{what} found"), &host(&h, &found), &most);
                        check(&h, &format!("{what} fused amax, rowwise"), &table, &rows, &all(false));
                        check(&h, &format!("{what} fused amax, columnwise"), &table, &cols, &all(true));
                    }
                    // Transposing the rowwise tensor gives the columnwise one.
                    let transposed = memory(&h, count, [k, n], format, scaling);
                    h.k.transpose_stack(&h.s, count, &rows, &transposed).unwrap();
                    assert_eq!(raw(&h, &transposed), raw(&h, &cols), "{what} transposed");
                    same(
                        &format!("{what} transposed"),
                        &host(&h, &transposed.scale_inv),
                        &host(&h, &cols.scale_inv),
                    );
                    for (r, c) in [(true, false), (false, true)] {
                        let (rows, cols) = (
                            memory(&h, count, [n, k], format, scaling),
                            memory(&h, count, [k, n], format, scaling),
                        );
                        let q = QuantizeStack { rows: r.then_some(&rows), cols: c.then_some(&cols), ..q };
                        h.k.quantize_stack(&h.s, &q).unwrap();
                        let (b, transposed) = if r { (&rows, false) } else { (&cols, true) };
                        check(&h, &format!("{what} alone"), &table, b, &all(transposed));
                    }
                }
            }
        }
    }
}

#[test]
fn invalid_stacks_are_errors() {
    for h in devices() {
        let x = h.poisoned(DType::BF16, &[2, 128, 64]);
        let amax = each(&h, &[1.0, 1.0]);
        let rows = memory(&h, 2, [128, 64], DType::E4M3, ScalingMode::PerTensor);
        let cols = memory(&h, 2, [64, 128], DType::E4M3, ScalingMode::PerTensor);
        let range = ScaleSource::Amax { amax: &amax, pow2: false };
        let good = QuantizeStack { x: &x, range, rows: Some(&rows), cols: Some(&cols) };
        h.k.quantize_stack(&h.s, &good).unwrap();
        let one = each(&h, &[1.0]);
        let (flat, few) = (h.poisoned(DType::BF16, &[256, 64]), h.poisoned(DType::I32, &[2, 128, 64]));
        let other = memory(&h, 2, [64, 128], DType::E5M2, ScalingMode::PerTensor);
        let whole = poisoned(&h, [256, 64], DType::E4M3, ScalingMode::PerTensor);
        let tiles = poisoned(&h, [256, 64], DType::E4M3, ScalingMode::Block128x128);
        for (what, bad) in [
            ("no stack", QuantizeStack { x: &flat, ..good }),
            ("no numbers", QuantizeStack { x: &few, ..good }),
            ("one magnitude", QuantizeStack { range: ScaleSource::Amax { amax: &one, pow2: false }, ..good }),
            (
                "magnitudes of each",
                QuantizeStack { range: ScaleSource::Given { scale: &amax, amax: &amax }, ..good },
            ),
            ("two formats", QuantizeStack { cols: Some(&other), ..good }),
            ("not transposed", QuantizeStack { cols: Some(&rows), ..good }),
            ("one scale", QuantizeStack { rows: Some(&whole), ..good }),
            ("tiles", QuantizeStack { rows: Some(&tiles), cols: None, ..good }),
            (
                "parts of tiles",
                QuantizeStack {
                    rows: Some(&tiles),
                    cols: None,
                    range: ScaleSource::Blocks { pow2: true },
                    ..good
                },
            ),
        ] {
            assert!(h.k.quantize_stack(&h.s, &bad).is_err(), "{}: {what}", h.name);
        }
        for (what, count, rows, cols) in [
            ("another count", 1, &rows, &cols),
            ("not transposed", 2, &rows, &rows),
            ("two formats", 2, &rows, &other),
            ("one scale", 2, &whole, &cols),
            ("scales of tiles", 2, &tiles, &cols),
        ] {
            assert!(h.k.transpose_stack(&h.s, count, rows, cols).is_err(), "{}: {what}", h.name);
        }
        assert!(h.k.amax_stack(&h.s, &x, &one).is_err(), "{}: one magnitude", h.name);
    }
}
