//! Elementwise kernels: sums, casts, activations, soft caps, dropout; and column sums.

use super::devices::*;
use ferrotron_kernels::philox::RandomStream;
use ferrotron_kernels::{Act, ActBackward, ActForward, Dropout, NormalFill, RngKey, StepKey};
use ferrotron_tensor::DType;

const LENGTHS: [usize; 5] = [0, 1, 7, 64, 1000];

#[test]
fn add_and_scale() {
    everywhere(|h, dtype| {
        for n in LENGTHS {
            let (a, b) = (numbers(dtype, 1, n), numbers(dtype, 2, n));
            let (at, bt) = (h.tensor(dtype, &[n], &a), h.tensor(dtype, &[n], &b));
            let what = format!("{} {dtype} {n}", h.name);
            let out = h.poisoned(dtype, &[n]);
            h.k.add(&h.s, &at, &bt, &out).unwrap();
            let sum: Vec<f64> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
            close(&what, dtype, &h.host(&out), &sum, 1e-12);
            // No kernel mixes bf16 and f16.
            for to in DTYPES.into_iter().filter(|to| *to == dtype || [*to, dtype].contains(&DType::F32)) {
                let x = h.tensor(to, &[n], &a);
                h.k.add_assign(&h.s, &x, &bt).unwrap();
                close(
                    &format!("{what} into {to}"),
                    to,
                    &h.host(&x),
                    &sum,
                    if to == dtype { 1e-12 } else { 4e-3 },
                );
            }
            h.k.scale(&h.s, &out, -2.5).unwrap();
            let scaled: Vec<f64> = sum.iter().map(|x| -2.5 * rounded(dtype, *x)).collect();
            close(&what, dtype, &h.host(&out), &scaled, 1e-12);
            let total = h.poisoned(DType::F32, &[1]);
            let floats = |seed| h.tensor(DType::F32, &[n], &numbers(DType::F32, seed, n));
            h.k.dot(&h.s, &floats(3), &floats(4), &total).unwrap();
            let want = dot(&numbers(DType::F32, 3, n), &numbers(DType::F32, 4, n));
            close(&what, DType::F32, &h.host(&total), &[want], 1e-12);
        }
    });
}

#[test]
fn iota_counts_from_zero() {
    for h in devices() {
        for n in [0, 1, 3, 4, 7, 64, 1000, 4096, 70_001] {
            // Aligned to 16 bytes, and not.
            for first in [0, 1] {
                let all = h.poisoned(DType::I32, &[n + first]);
                h.k.iota(&h.s, &all.narrow(0, first, n).unwrap()).unwrap();
                let found = h.host(&all.narrow(0, first, n).unwrap());
                assert!(found.iter().copied().eq((0..n).map(|i| i as f64)), "{} {n}", h.name);
            }
        }
        let table = h.poisoned(DType::I32, &[3, 2]);
        h.k.iota(&h.s, &table).unwrap();
        assert_eq!(h.host(&table), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    }
}

#[test]
fn maximum_keeps_nan() {
    everywhere(|h, dtype| {
        for n in LENGTHS {
            let (mut a, mut b) = (numbers(dtype, 1, n), numbers(dtype, 2, n));
            // One after another: NaN on one side, on both, infinities of both signs, zero against a negative value.
            let special = [
                (f64::NAN, 1.0),
                (1.0, f64::NAN),
                (f64::NAN, f64::INFINITY),
                (f64::INFINITY, f64::NAN),
                (f64::NEG_INFINITY, -3.0),
                (f64::INFINITY, 7.0),
                (0.0, -1.0),
            ];
            for (i, (x, y)) in special.into_iter().enumerate().take(n) {
                (a[i], b[i]) = (x, y);
            }
            let (x, y) = (h.tensor(dtype, &[n], &a), h.tensor(dtype, &[n], &b));
            h.k.max_assign(&h.s, &x, &y).unwrap();
            for (i, (got, (a, b))) in h.host(&x).into_iter().zip(a.iter().zip(&b)).enumerate() {
                let nan = a.is_nan() || b.is_nan();
                assert!(
                    if nan { got.is_nan() } else { got == a.max(*b) },
                    "{} {dtype} {n}: {i}: {got}",
                    h.name
                );
            }
        }
    });
}

#[test]
fn copies_between_types_and_strides() {
    everywhere(|h, dtype| {
        for to in [DType::F32, DType::BF16] {
            for n in LENGTHS {
                let x = numbers(dtype, 1, n);
                let out = h.poisoned(to, &[n]);
                h.k.copy(&h.s, &h.tensor(dtype, &[n], &x), &out).unwrap();
                let want: Vec<f64> = x.iter().map(|x| rounded(to, *x)).collect();
                assert_eq!(h.host(&out), want, "{} {dtype}->{to}", h.name);
            }
        }
        for kind in [dtype, DType::I32] {
            for shape in [&[6usize][..], &[3, 5], &[2, 3, 4], &[2, 3, 2, 5], &[2, 0, 3]] {
                let n: usize = shape.iter().product();
                let x: Vec<f64> = (0..n).map(|i| i as f64).collect();
                let from = h.tensor(kind, shape, &x);
                if kind != DType::I32 {
                    let (from, to) = (h.framed(kind, shape, &x), h.framed(kind, shape, &vec![f64::NAN; n]));
                    h.k.copy(&h.s, &from.view, &to.view).unwrap();
                    assert_eq!(h.inside(&to), x, "{} {kind} {shape:?}", h.name);
                }
                let out = h.tensor(kind, shape, &vec![0.0; n]);
                h.k.copy(&h.s, &from, &out).unwrap();
                assert_eq!(h.host(&out), x, "{} {kind} {shape:?}", h.name);
                // Permuted leading axes.
                if shape.len() > 2 {
                    let transposed = from.transpose(0, 1).unwrap();
                    let out = h.tensor(kind, transposed.shape(), &vec![0.0; n]);
                    h.k.copy(&h.s, &transposed, &out).unwrap();
                    assert_eq!(h.host(&out), h.host(&transposed), "{} {kind} {shape:?} transposed", h.name);
                }
            }
        }
    });
}

#[test]
fn column_sums_of_strided_views() {
    everywhere(|h, dtype| {
        for (rows, n) in [(1, 1), (5, 7), (130, 40), (0, 3), (700, 2)] {
            let x = numbers(dtype, 1, rows * n);
            let framed = h.framed(dtype, &[rows, n], &x);
            for accumulate in [false, true] {
                let old = numbers(DType::F32, 2, n);
                let sums =
                    if accumulate { h.tensor(DType::F32, &[n], &old) } else { h.poisoned(DType::F32, &[n]) };
                h.k.column_sum(&h.s, &framed.view, accumulate, &sums).unwrap();
                let start = |c: usize| if accumulate { old[c] } else { 0.0 };
                let want: Vec<f64> =
                    (0..n).map(|c| start(c) + (0..rows).map(|r| x[r * n + c]).sum::<f64>()).collect();
                let slack = 2f64.powi(-23) * (rows + 1) as f64;
                close(&format!("{} {dtype} {rows}x{n}", h.name), DType::F32, &h.host(&sums), &want, slack);
            }
        }
    });
}

pub fn value(a: Act, x: f64) -> f64 {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    match a {
        Act::GeluTanh => {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
        }
        Act::GeluErf => 0.5 * x * (1.0 + libm::erf(x / std::f64::consts::SQRT_2)),
        Act::Silu => x * sigmoid(x),
        Act::SquaredRelu => x.max(0.0).powi(2),
        Act::ClampedSilu { limit, alpha, .. } => {
            let x = x.min(f64::from(limit));
            x * sigmoid(f64::from(alpha) * x)
        }
    }
}

pub fn linear_half(a: Act, u: f64) -> f64 {
    match a {
        Act::ClampedSilu { limit, offset, .. } => {
            u.clamp(-f64::from(limit), f64::from(limit)) + f64::from(offset)
        }
        _ => u,
    }
}

#[test]
fn activations_and_their_gradients() {
    let acts = [
        Act::GeluTanh,
        Act::GeluErf,
        Act::Silu,
        Act::SquaredRelu,
        Act::ClampedSilu { limit: 2.003, alpha: 1.702, offset: 1.0 },
    ];
    let slope = |f: &dyn Fn(f64) -> f64, x: f64| (f(x + 1e-5) - f(x - 1e-5)) / 2e-5;
    everywhere(|h, dtype| {
        for a in acts {
            for (gated, f) in [(false, 19), (true, 19), (false, 64), (true, 64)] {
                if !gated && matches!(a, Act::ClampedSilu { .. }) {
                    continue;
                }
                let rows = 7;
                let width = if gated { 2 * f } else { f };
                let x: Vec<f64> =
                    numbers(dtype, 1, rows * width).iter().map(|x| rounded(dtype, x * 3.0)).collect();
                let dy = numbers(dtype, 2, rows * f);
                let (xt, dyt) = (h.tensor(dtype, &[rows, width], &x), h.tensor(dtype, &[rows, f], &dy));
                let (y, dx) = (h.poisoned(dtype, &[rows, f]), h.poisoned(dtype, &[rows, width]));
                h.k.act_forward(&h.s, &ActForward { act: a, gated, x: &xt, y: &y }).unwrap();
                h.k.act_backward(&h.s, &ActBackward { act: a, gated, x: &xt, dy: &dyt, dx: &dx }).unwrap();
                let (mut wy, mut wdx) = (vec![0.0; rows * f], vec![0.0; rows * width]);
                for i in 0..rows * f {
                    let (r, c) = (i / f, i % f);
                    let g = x[r * width + c];
                    if gated {
                        let u = x[r * width + f + c];
                        wy[i] = value(a, g) * linear_half(a, u);
                        wdx[r * width + c] = dy[i] * slope(&|g| value(a, g), g) * linear_half(a, u);
                        wdx[r * width + f + c] = dy[i] * slope(&|u| linear_half(a, u), u) * value(a, g);
                    } else {
                        wy[i] = value(a, g);
                        wdx[r * width + c] = dy[i] * slope(&|g| value(a, g), g);
                    }
                }
                let what = format!("{} {dtype} {a:?} gated {gated} {f}", h.name);
                close(&format!("{what} y"), dtype, &h.host(&y), &wy, 2e-6);
                close(&format!("{what} dx"), dtype, &h.host(&dx), &wdx, 4e-6);
            }
        }
    });
}

#[test]
fn softcap_and_its_gradient() {
    everywhere(|h, dtype| {
        for n in LENGTHS {
            let x: Vec<f64> = numbers(dtype, 1, n).iter().map(|x| rounded(dtype, x * 20.0)).collect();
            let y = h.tensor(dtype, &[n], &x);
            h.k.softcap_forward(&h.s, 5.0, &y).unwrap();
            let want: Vec<f64> = x.iter().map(|x| 5.0 * (x / 5.0).tanh()).collect();
            close(&format!("{} {dtype} cap", h.name), dtype, &h.host(&y), &want, 3e-6);
            let dy = numbers(dtype, 2, n);
            let d = h.tensor(dtype, &[n], &dy);
            h.k.softcap_backward(&h.s, 5.0, &y, &d).unwrap();
            let want: Vec<f64> =
                h.host(&y).iter().zip(&dy).map(|(y, d)| d * (1.0 - (y / 5.0).powi(2))).collect();
            close(&format!("{} {dtype} slope", h.name), dtype, &h.host(&d), &want, 1e-6);
        }
    });
}

/// Whether an element is dropped depends only on the key, its row number and its column: on every device, in every dtype,
/// for rows in any order. The backward pass applies the same mask.
#[test]
fn dropout_depends_only_on_key_and_position() {
    let key = RngKey { seed: 9, step: 3, layer: 2, site: 1 };
    let stream = RandomStream::dropout(key);
    // Rows that begin inside a Philox block and at its start, and more rows than one thread block handles.
    for (rows, n) in [(40usize, 33usize), (1, 1), (7, 6), (300, 64), (33, 100), (0, 8)] {
        let numbered: Vec<i32> = (0..rows).map(|r| (r as i32 * 7919 + 13) % 100_003 * 21_000).collect();
        for h in devices() {
            for dtype in DTYPES {
                let what = format!("{} {dtype} [{rows}, {n}]", h.name);
                let x: Vec<f64> = numbers(dtype, 1, rows * n).iter().map(|x| x + 2.0).collect();
                let x: Vec<f64> = x.iter().map(|x| rounded(dtype, *x)).collect();
                let (xt, y) = (h.tensor(dtype, &[rows, n], &x), h.poisoned(dtype, &[rows, n]));
                let ids = h.ids(&numbered);
                h.k.dropout(&h.s, &Dropout { p: 0.3, key: key.into(), rows: &ids, x: &xt, y: &y }).unwrap();
                for (i, (x, y)) in x.iter().zip(&h.host(&y)).enumerate() {
                    let index = u64::from(numbered[i / n] as u32) * n as u64 + (i % n) as u64;
                    let dropped = f64::from(stream.word(index)) < f64::from(0.3f32) * 4_294_967_296.0;
                    let want = if dropped { 0.0 } else { x / f64::from(1.0 - 0.3f32) };
                    assert!((y - want).abs() <= 2.01 * eps(dtype) * want.abs(), "{what} {i}: {y} {want}");
                }
                // The same where the device knows the step.
                let (two, again) = (h.ids(&[2]), h.poisoned(dtype, &[rows, n]));
                let later = StepKey { key: RngKey { step: 1, ..key }, step: Some(&two) };
                h.k.dropout(&h.s, &Dropout { p: 0.3, key: later, rows: &ids, x: &xt, y: &again }).unwrap();
                assert_eq!(h.host(&again), h.host(&y), "{what}");
                // Nothing is dropped at 0.
                let all = h.poisoned(dtype, &[rows, n]);
                h.k.dropout(&h.s, &Dropout { p: 0.0, key: key.into(), rows: &ids, x: &xt, y: &all }).unwrap();
                assert_eq!(h.host(&all), x, "{what}");
            }
        }
    }
}

/// Normal values match the definition bit for bit, from any index on and with any row stride.
#[test]
fn normal_values_are_bit_equal_on_all_devices() {
    let stream = RandomStream::named(5, "w");
    // Rows, width, stride: rows that begin inside a Philox block and at its start, and more than one thread block handles.
    let shapes = [
        (1, 0, 0),
        (0, 5, 5),
        (1, 1, 9),
        (1, 3, 0),
        (1, 5, 7),
        (3, 4, 4),
        (7, 1, 3),
        (5, 3, 11),
        (40, 64, 256),
        (33, 30, 101),
        (1, 5001, 0),
        (9, 1100, 1 << 33),
    ];
    let firsts = [0, 1, 2, 3, 1000, (1 << 32) - 2, (1 << 34) - 3, (1 << 40) + 1, (1 << 62) + 7];
    for h in devices() {
        for (rows, n, stride) in shapes {
            for (first, lead) in firsts.into_iter().zip([0, 1, 4, 3, 2, 0, 1, 3, 4]) {
                let runs = NormalFill { stream, first, stride, std: 0.02 };
                // A view that may be unaligned to 16 bytes, with data on both sides that must survive.
                let whole = h.poisoned(DType::F32, &[lead + rows * n + 5]);
                let out = whole.narrow(0, lead, rows * n).unwrap().view(&[rows, n]).unwrap();
                h.k.normal(&h.s, runs, &out).unwrap();
                let found = h.s.download::<f32>(&whole).unwrap();
                for (i, x) in found.iter().enumerate() {
                    let what = format!("{} [{rows}, {n}] from {first} by {stride}: {i}", h.name);
                    if i < lead || i >= lead + rows * n {
                        assert!(x.is_nan(), "{what} is outside");
                        continue;
                    }
                    let (r, c) = ((i - lead) / n, (i - lead) % n);
                    let want = (0.02 * stream.normal(first + r as u64 * stride + c as u64)) as f32;
                    assert_eq!(x.to_bits(), want.to_bits(), "{what}: {x} {want}");
                }
            }
        }
    }
}
