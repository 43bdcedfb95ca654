//! FP8 quantization against its definition, bit for bit.

use super::devices::TestDevice;
use super::quant_oracle::*;
use ferrotron_kernels::cpu::{CpuKernels, Isa};
use ferrotron_kernels::{
    DelayedScaling, DelayedUpdate, Fp8Gemm, Fp8Tensor, GemmKernels, Kernels, QuantKernels, Quantize,
    ScaleSource, ScalingMode,
};
use ferrotron_tensor::{Category, DType, Device, Tensor, Threads};

const SHAPES: [[usize; 2]; 13] = [
    [1, 1],
    [1, 128],
    [128, 1],
    [15, 127],
    [127, 15],
    [16, 129],
    [129, 16],
    [128, 256],
    [130, 257],
    [1, 300],
    [33, 96],
    [0, 5],
    [5, 0],
];
const INPUTS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];
const FORMATS: [DType; 2] = [DType::E4M3, DType::E5M2];

fn one(h: &TestDevice, x: f32) -> Tensor {
    h.s.upload(&[x], &[1], Category::Workspace).unwrap()
}

fn check(h: &TestDevice, what: &str, table: &Table, b: &Fp8Tensor, codes: &[Option<u8>], inverse: &[f32]) {
    let ours = raw(h, b);
    assert_eq!(ours.len(), codes.len(), "{what}");
    for (i, (o, w)) in ours.iter().zip(codes).enumerate() {
        let right = w.map_or(table.value(*o).is_nan(), |w| *o == w);
        assert!(right, "{what} [{i}]: {o:#x} instead of {w:x?}");
    }
    same(&format!("{what} scales"), &host(h, &b.scale_inv), inverse);
}

fn sums(what: &str, m: &Matrix, ours: &[f32], before: f32) {
    for (j, ours) in ours.iter().enumerate() {
        let column = || (0..m.r).map(|i| f64::from(m.x[i * m.c + j]));
        let (want, size) = (column().sum::<f64>() + f64::from(before), column().map(f64::abs).sum::<f64>());
        let near = (f64::from(*ours) - want).abs() <= 1e-6 * (size + f64::from(before).abs());
        // With huge values a partial sum may overflow f32.
        let beyond = !want.is_finite() || size > f64::from(f32::MAX);
        assert!(near || (beyond && !ours.is_finite()), "{what} sum {j}: {ours} instead of {want}");
    }
}

#[test]
fn quantization_rounds_to_the_nearest_fp8_value() {
    everywhere(|h, k| {
        let mut number = 0usize;
        for [r, c] in SHAPES {
            for kind in KINDS {
                for (way, framed) in (0..7).map(|way| (way, way % 2 == 0)) {
                    // Covers every combination of dtype, format and scaling.
                    number += 1;
                    let (dtype, format) = (INPUTS[number % 3], FORMATS[number / 3 % 2]);
                    let m = Matrix { r, c, x: hostile(kind, dtype, number as u64, r * c) };
                    let what = format!("{} {kind} {dtype} [{r}, {c}] to {format}, way {way}", h.name);
                    case((h, k), &what, &m, [dtype, format], way, framed);
                }
            }
        }
    });
}

fn case(
    (h, k): (&TestDevice, &dyn Kernels),
    what: &str,
    m: &Matrix,
    [dtype, format]: [DType; 2],
    way: usize,
    framed: bool,
) {
    let (table, pow2, x) = (Table::new(format), way % 2 == 1, place(h, dtype, m, framed));
    let scaling = [
        ScalingMode::PerTensor,
        ScalingMode::PerTensor,
        ScalingMode::Block1x128,
        ScalingMode::Block1x128,
        ScalingMode::Block128x128,
        ScalingMode::Block128x128,
    ]
    .get(way)
    .copied()
    .unwrap_or(ScalingMode::PerTensor);
    let most = amax(m.x.iter());
    let found_amax = one(h, 0.0);
    k.amax(&h.s, &x, &found_amax).unwrap();
    same(&format!("{what} amax"), &host(h, &found_amax), &[most]);
    let given = one(h, 0.37);
    let range = match (scaling, way) {
        (ScalingMode::PerTensor, 6) => ScaleSource::Given { scale: &given, amax: &found_amax },
        (ScalingMode::PerTensor, _) => ScaleSource::Amax { amax: &found_amax, pow2 },
        _ => ScaleSource::Blocks { pow2 },
    };
    let beyond = if scaling == ScalingMode::PerTensor { f32::MAX } else { biggest(dtype) };
    let scale_of = |a: f32| if way == 6 { 0.37 } else { scale(&table, a, pow2, beyond) };
    let (rows, cols) = (poisoned(h, [m.r, m.c], format, scaling), poisoned(h, [m.c, m.r], format, scaling));
    let total = h.s.upload(&vec![2f32; m.c], &[m.c], Category::Workspace).unwrap();
    let add = way.is_multiple_of(3);
    let q = Quantize { x: &x, range, rows: Some(&rows), cols: Some(&cols), sums: Some((&total, add)) };
    k.quantize(&h.s, &q).unwrap();
    let (codes, inverse) = m.codes(&table, scaling, scale_of);
    check(h, &format!("{what} rows"), &table, &rows, &codes, &inverse);
    let (codes, inverse) = m.transposed().codes(&table, scaling, scale_of);
    check(h, &format!("{what} cols"), &table, &cols, &codes, &inverse);
    sums(what, m, &host(h, &total), if add { 2.0 } else { 0.0 });
    // One orientation alone equals that orientation of both.
    let again = poisoned(h, [m.c, m.r], format, scaling);
    k.quantize(&h.s, &Quantize { rows: None, cols: Some(&again), sums: None, ..q }).unwrap();
    assert_eq!(raw(h, &again), raw(h, &cols), "{what} alone");
    if scaling == ScalingMode::PerTensor {
        let transposed = poisoned(h, [m.c, m.r], format, scaling);
        k.fp8_transpose(&h.s, &rows, &transposed).unwrap();
        assert_eq!(raw(h, &transposed), raw(h, &cols), "{what} transposed");
        same(what, &host(h, &transposed.scale_inv), &host(h, &cols.scale_inv));
    }
    back(h, k, what, &table, &rows);
}

/// Dequantized values are value·scale, rounded once.
fn back(h: &TestDevice, k: &dyn Kernels, what: &str, table: &Table, b: &Fp8Tensor) {
    let (r, c, width) = (b.rows(), b.cols, b.cols.next_multiple_of(16));
    let (codes, scales) = (raw(h, b), host(h, &b.scale_inv));
    let shape = b.scaling.scales(r, c);
    let scale = |i: usize, j: usize| match b.scaling {
        ScalingMode::PerTensor => scales[0],
        ScalingMode::Block1x128 => scales[j / 128 * shape[1] + i],
        ScalingMode::Block128x128 => scales[i / 128 * shape[1] + j / 128],
    };
    for dtype in [DType::F32, DType::BF16] {
        let filled = Matrix { r, c, x: vec![f32::NAN; r * c] };
        let out = place(h, dtype, &filled, dtype == DType::BF16);
        k.dequantize(&h.s, b, &out).unwrap();
        let want = |at: usize| {
            let (i, j) = (at / c, at % c);
            let x = table.value(codes[i * width + j]) as f32;
            rounded(dtype, (f64::from(x) * f64::from(scale(i, j))) as f32)
        };
        same(&format!("{what} back in {dtype}"), &host(h, &out), &(0..r * c).map(want).collect::<Vec<_>>());
    }
}

/// amax keeps its previous value unless a larger one occurs.
#[test]
fn amax_accumulates() {
    everywhere(|h, k| {
        for (before, values, after) in [
            (5.0, vec![1.0, -2.0], 5.0),
            (1.0, vec![1.0, -2.0], 2.0),
            (0.5, vec![f32::NAN, f32::NAN], 0.5),
            (0.0, vec![f32::NAN, -0.0], 0.0),
            (0.0, vec![f32::NEG_INFINITY, f32::NAN], f32::INFINITY),
            (f32::NAN, vec![3.0, -1.0], 3.0),
        ] {
            let x = Matrix { r: 1, c: values.len(), x: values };
            let (seen, scale) = (one(h, before), one(h, 2.0));
            k.amax(&h.s, &place(h, DType::F32, &x, true), &seen).unwrap();
            same(&h.name, &host(h, &seen), &[after]);
            let seen = one(h, before);
            let out = poisoned(h, [1, x.c], DType::E4M3, ScalingMode::PerTensor);
            let xt = place(h, DType::F32, &x, false);
            let range = ScaleSource::Given { scale: &scale, amax: &seen };
            k.quantize(&h.s, &Quantize { x: &xt, range, rows: Some(&out), cols: None, sums: None }).unwrap();
            same(&h.name, &host(h, &seen), &[after]);
            same(&h.name, &host(h, &out.scale_inv), &[0.5]);
        }
    });
}

#[test]
fn delayed_scales_follow_the_amax_history() {
    everywhere(|h, k| {
        for (len, n, most_recent, margin) in
            [(1, 3, true, 0), (1, 2, false, 0), (4, 5, false, 1), (7, 70, true, -1)]
        {
            let how = DelayedScaling { margin, most_recent };
            let mut history = vec![vec![0f32; n]; len];
            let mut scale = vec![1f32; n];
            let largest: Vec<f32> = (0..n).map(|i| if i % 2 == 0 { 448.0 } else { 57344.0 }).collect();
            let up = |x: &[f32], shape: &[usize]| h.s.upload(x, shape, Category::Workspace).unwrap();
            let (ht, st, lt) = (up(&history.concat(), &[len, n]), up(&scale, &[n]), up(&largest, &[n]));
            for step in 0..12u64 {
                let special = [0.0, f32::NAN, f32::INFINITY, 1e-44, 3.0, 1e30];
                let seen: Vec<f32> = (0..n)
                    .map(|i| {
                        let at = (step as usize * 5 + i * 7) % 11;
                        special.get(at).copied().unwrap_or((at * (step as usize + 1)) as f32 * 0.37)
                    })
                    .collect();
                let own = step % 2 == 0;
                history[0] = seen.clone();
                h.s.upload_into(&ht.select(0, 0).unwrap(), &seen).unwrap();
                let agreed: Vec<f32> = (0..n).map(|i| if i % 3 == 0 { 0.0 } else { seen[i] * 2.0 }).collect();
                let rt = if own { ht.select(0, 0).unwrap() } else { up(&agreed, &[n]) };
                k.delayed_update(
                    &h.s,
                    &DelayedUpdate { scaling: how, history: &ht, reduced: &rt, largest: &lt, scale: &st },
                )
                .unwrap();
                for i in 0..n {
                    let last = if own || agreed[i] == 0.0 { seen[i] } else { agreed[i] };
                    if last == 0.0 {
                        continue;
                    }
                    let mut column: Vec<f32> = (1..len).map(|t| history[t][i]).collect();
                    column.push(last);
                    let most = column.iter().copied().fold(f32::NAN, f32::max);
                    let used = if most_recent { last } else { most };
                    (0..len).for_each(|t| history[t][i] = column[t]);
                    history[0][i] = 0.0;
                    if used.is_finite() && used > 0.0 {
                        let top = f64::from(largest[i]) * 2f64.powi(-margin);
                        scale[i] = ((top / f64::from(used)) as f32).min(f32::MAX);
                    }
                }
                let what = format!("{} {len}x{n} step {step}", h.name);
                same(&what, &host(h, &ht), &history.concat());
                same(&what, &host(h, &st), &scale);
            }
        }
    });
}

#[test]
fn invalid_arguments_are_errors() {
    everywhere(|h, k| {
        let m = |r: usize, c: usize| Matrix { r, c, x: vec![1.0; r * c] };
        let x = place(h, DType::BF16, &m(4, 32), false);
        let make = |r, c, format, scaling| poisoned(h, [r, c], format, scaling);
        let amax = one(h, 1.0);
        let tensor = ScaleSource::Amax { amax: &amax, pow2: false };
        let quantize = |x: &Tensor, range, rows: &Fp8Tensor| {
            k.quantize(&h.s, &Quantize { x, range, rows: Some(rows), cols: None, sums: None })
        };
        let e4 = DType::E4M3;
        let fitting = make(4, 32, e4, ScalingMode::PerTensor);
        assert!(quantize(&x, tensor, &fitting).is_ok());
        assert!(quantize(&x, tensor, &make(32, 4, e4, ScalingMode::PerTensor)).is_err(), "transposed");
        assert!(quantize(&x, tensor, &make(4, 32, e4, ScalingMode::Block1x128)).is_err(), "scales of rows");
        assert!(quantize(&x, ScaleSource::Blocks { pow2: true }, &fitting).is_err(), "one scale for blocks");
        let transposed = place(h, DType::BF16, &m(32, 4), false).transpose(0, 1).unwrap();
        assert!(quantize(&transposed, tensor, &fitting).is_err(), "columns instead of rows");
        let ids = h.s.upload(&[1i32; 128], &[4, 32], Category::Workspace).unwrap();
        assert!(quantize(&ids, tensor, &fitting).is_err(), "numbers that are none");
        let two = h.s.upload(&[1f32; 2], &[2], Category::Workspace).unwrap();
        assert!(
            quantize(&x, ScaleSource::Amax { amax: &two, pow2: false }, &fitting).is_err(),
            "two magnitudes"
        );
        let short = h.s.upload(&[1f32; 3], &[3], Category::Workspace).unwrap();
        let with = Quantize { x: &x, range: tensor, rows: None, cols: None, sums: Some((&short, false)) };
        assert!(k.quantize(&h.s, &with).is_err(), "sums of too few columns");
        let c32 = place(h, DType::F32, &m(4, 8), false);
        let c16 = place(h, DType::BF16, &m(4, 8), false);
        let gemm = |a: &Fp8Tensor, b: &Fp8Tensor, c: &Tensor, accumulate| {
            k.fp8_gemm(&h.s, &Fp8Gemm { a, b, bias: None, accumulate, fast: false, name: "fp8_gemm", c })
        };
        let b = make(8, 32, e4, ScalingMode::PerTensor);
        assert!(gemm(&fitting, &b, &c32, false).is_ok());
        assert!(gemm(&fitting, &b, &c16, true).is_err(), "accumulating into bf16");
        assert!(gemm(&b, &fitting, &c32, false).is_err(), "result transposed");
        assert!(
            gemm(&fitting, &make(8, 48, e4, ScalingMode::PerTensor), &c32, false).is_err(),
            "inner sizes"
        );
        let five = |r| make(r, 32, DType::E5M2, ScalingMode::PerTensor);
        assert!(gemm(&five(4), &five(8), &c32, false).is_err(), "both e5m2");
        let tiles = |r| make(r, 32, e4, ScalingMode::Block128x128);
        assert!(gemm(&tiles(4), &tiles(8), &c32, false).is_err(), "both in 128x128 blocks");
        assert!(gemm(&fitting, &tiles(8), &c32, false).is_err(), "one scale and many");
        assert!(k.dequantize(&h.s, &fitting, &c32).is_err(), "another shape");
    });
}

/// Results are bit-equal for any number of threads.
#[test]
fn quantization_does_not_depend_on_the_number_of_threads() {
    let shape @ [r, c] = [300, 520];
    let m = Matrix { r, c, x: hostile("spread", DType::BF16, 1, r * c) };
    let run = |threads: usize, scaling: ScalingMode| {
        let (k, isa) = (CpuKernels::detect(), Isa::detect());
        let s = Device::cpu(Threads::new(threads).unwrap()).stream("compute").unwrap();
        let h = TestDevice { name: isa.name().into(), k: Box::new(k), s };
        let x = place(&h, DType::BF16, &m, true);
        let (rows, cols) =
            (poisoned(&h, shape, DType::E4M3, scaling), poisoned(&h, [c, r], DType::E4M3, scaling));
        let sums = h.s.upload(&vec![0f32; c], &[c], Category::Workspace).unwrap();
        let range = ScaleSource::Blocks { pow2: false };
        let q = Quantize { x: &x, range, rows: Some(&rows), cols: Some(&cols), sums: Some((&sums, false)) };
        k.quantize(&h.s, &q).unwrap();
        let other = poisoned(&h, shape, DType::E4M3, ScalingMode::Block1x128);
        k.quantize(&h.s, &Quantize { rows: Some(&other), cols: None, sums: None, ..q }).unwrap();
        let c = place(&h, DType::F32, &Matrix { r, c: r, x: vec![0.0; r * r] }, false);
        let g = Fp8Gemm {
            a: &other,
            b: &rows,
            bias: None,
            accumulate: false,
            fast: false,
            name: "fp8_gemm",
            c: &c,
        };
        k.fp8_gemm(&h.s, &g).unwrap();
        let numbers = [&rows.scale_inv, &cols.scale_inv, &sums, &c].map(|t| host(&h, t));
        (raw(&h, &rows), raw(&h, &cols), numbers)
    };
    for scaling in [ScalingMode::Block1x128, ScalingMode::Block128x128] {
        let first = run(1, scaling);
        assert!(first.2.iter().flatten().all(|x| x.is_finite()));
        assert!([2, 5].into_iter().all(|threads| run(threads, scaling) == first), "{scaling:?}");
    }
}
