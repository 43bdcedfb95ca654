//! Fused kernels match their unfused parts.

use super::devices::*;
use ferrotron_kernels::{Act, ActBackward, LinearAct, LinearActBackward, LinearWgrad};
use ferrotron_tensor::DType;

/// The last is large enough for the GPU to tune fused against unfused.
const SIZES: [(usize, usize, usize); 5] = [(1, 1, 1), (5, 7, 3), (0, 8, 8), (64, 96, 40), (2048, 1024, 1024)];
const ACTS: [Act; 3] = [Act::GeluTanh, Act::GeluErf, Act::Silu];

fn act(a: Act, x: f64) -> f64 {
    match a {
        Act::GeluTanh => {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
        }
        Act::GeluErf => 0.5 * x * (1.0 + libm::erf(x / std::f64::consts::SQRT_2)),
        _ => x / (1.0 + (-x).exp()),
    }
}

/// Derivative by finite differences in f64, far more precise than bf16 or f32.
fn slope(a: Act, x: f64) -> f64 {
    (act(a, x + 1e-5) - act(a, x - 1e-5)) / 2e-5
}

/// Elements to compare: all of a small result, a sample of a large one.
fn places(n: usize) -> Vec<usize> {
    if n <= 10_000 { (0..n).collect() } else { (0..n).step_by(n / 3001).collect() }
}

fn at(all: &[f64], places: &[usize]) -> Vec<f64> {
    places.iter().map(|i| all[*i]).collect()
}

/// Only the GPU runs the large size: it tunes there.
fn sizes(h: &TestDevice) -> impl Iterator<Item = (usize, usize, usize)> + use<> {
    let gpu = h.name == "CUDA";
    SIZES.into_iter().filter(move |(m, ..)| gpu || *m < 1000)
}

#[test]
fn gemm_with_activation_epilogue() {
    everywhere(|h, dtype| {
        for (rows, n, k) in sizes(h) {
            for (a, with_bias) in ACTS.into_iter().flat_map(|a| [(a, false), (a, true)]) {
                let scale = 4.0 / (k as f64).sqrt();
                let w: Vec<f64> =
                    numbers(dtype, 2, n * k).iter().map(|x| rounded(dtype, x * scale)).collect();
                let (x, bias) = (numbers(dtype, 1, rows * k), numbers(dtype, 3, n));
                let (xt, wt) = (h.tensor(dtype, &[rows, k], &x), h.tensor(dtype, &[n, k], &w));
                let bias_t = h.tensor(dtype, &[n], &bias);
                let (ht, y) = (h.poisoned(dtype, &[rows, n]), h.poisoned(dtype, &[rows, n]));
                let bias_t = with_bias.then_some(&bias_t);
                let f = LinearAct { act: a, x: &xt, w: &wt, bias: bias_t, h: &ht, y: &y };
                h.k.linear_act_forward(&h.s, &f).unwrap();
                let what = format!("{} {dtype} {a:?} {rows}x{n}x{k} bias {with_bias}", h.name);
                let places = places(rows * n);
                let pre: Vec<f64> = places
                    .iter()
                    .map(|i| {
                        let sum = dot(&x[i / n * k..][..k], &w[i % n * k..][..k]);
                        sum + if with_bias { bias[i % n] } else { 0.0 }
                    })
                    .collect();
                let slack = (k + 2) as f64 * scale * 2f64.powi(-23);
                let ours = at(&h.host(&ht), &places);
                close(&what, dtype, &ours, &pre, slack);
                // The activation may read its input before or after rounding.
                let wanted: Vec<f64> = pre.iter().map(|x| act(a, *x)).collect();
                let after: Vec<f64> = ours.iter().map(|x| act(a, *x)).collect();
                let got = at(&h.host(&y), &places);
                for (i, g) in got.iter().enumerate() {
                    let room = |w: f64| 1.01 * eps(dtype) * (w.abs() + slack) + slack + 1e-6;
                    let fits = |w: f64| (g - w).abs() <= room(w);
                    let (w, v) = (wanted[i], after[i]);
                    assert!(fits(w) || fits(v), "{what} [{i}]: {g} instead of {w} or {v}");
                }
            }
        }
    });
}

#[test]
fn dgrad_gemm_with_activation_backward() {
    everywhere(|h, dtype| {
        for (rows, n, k) in sizes(h) {
            for a in ACTS {
                let scale = 1.0 / (k as f64).sqrt();
                let w: Vec<f64> =
                    numbers(dtype, 2, n * k).iter().map(|x| rounded(dtype, x * scale)).collect();
                let pre: Vec<f64> =
                    numbers(dtype, 1, rows * n).iter().map(|x| rounded(dtype, x * 6.0)).collect();
                let dy = numbers(dtype, 3, rows * k);
                let (dyt, wt) = (h.tensor(dtype, &[rows, k], &dy), h.tensor(dtype, &[k, n], &w));
                let (ht, dh) = (h.tensor(dtype, &[rows, n], &pre), h.poisoned(dtype, &[rows, n]));
                let f = LinearActBackward { act: a, dy: &dyt, w: &wt, h: &ht, dh: &dh, dbias: None };
                h.k.linear_act_backward(&h.s, &f).unwrap();
                let places = places(rows * n);
                let got = at(&h.host(&dh), &places);
                let slack = (k + 2) as f64 * scale * 2f64.powi(-22);
                for (i, g) in places.iter().zip(got) {
                    let sum: f64 = (0..k).map(|p| dy[i / n * k + p] * w[p * n + i % n]).sum();
                    let wanted = sum * slope(a, pre[*i]);
                    // Rounded once or twice.
                    let room = 2.02 * eps(dtype) * (wanted.abs() + slack) + slack + 1e-6;
                    let what = format!("{} {dtype} {a:?} {rows}x{n}x{k}", h.name);
                    assert!((g - wanted).abs() <= room, "{what} [{i}]: {g} instead of {wanted}, {room:.1e}");
                }
            }
        }
    });
}

/// Bit-equal to the plain kernel; the partial column sums add up to those of the stored values.
#[test]
fn activation_backward_with_column_sums() {
    everywhere(|h, dtype| {
        let sizes =
            [(0, 5), (1, 1), (3, 7), (9, 264), (65, 256), (130, 300), (700, 96), (1000, 513), (33000, 16)];
        for (rows, n) in sizes {
            for a in ACTS {
                let what = format!("{} {dtype} {a:?} {rows}x{n}", h.name);
                let shape = [rows, n];
                let x: Vec<f64> =
                    numbers(dtype, 1, rows * n).iter().map(|x| rounded(dtype, x * 6.0)).collect();
                let (x, dy) =
                    (h.tensor(dtype, &shape, &x), h.tensor(dtype, &shape, &numbers(dtype, 2, rows * n)));
                let parts = h.k.act_partials(dtype, rows, n);
                let (plain, dx) = (h.poisoned(dtype, &shape), h.poisoned(dtype, &shape));
                let sums = [(); 2].map(|()| h.poisoned(DType::F32, &[parts, n]));
                h.k.act_backward(&h.s, &ActBackward { act: a, gated: false, x: &x, dy: &dy, dx: &plain })
                    .unwrap();
                h.k.act_backward_dbias(
                    &h.s,
                    &ActBackward { act: a, gated: false, x: &x, dy: &dy, dx: &dx },
                    &sums[0],
                )
                .unwrap();
                let got = h.host(&dx);
                assert!(got == h.host(&plain), "{what}: another gradient");
                let ours = h.host(&sums[0]);
                for c in 0..n {
                    let column = || (0..rows).map(|r| got[r * n + c]);
                    let (wanted, size): (f64, f64) = (column().sum(), column().map(f64::abs).sum());
                    let sum: f64 = (0..parts).map(|p| ours[p * n + c]).sum();
                    let room = (rows + 1) as f64 * 2f64.powi(-24) * size;
                    assert!((sum - wanted).abs() <= room, "{what} column {c}: {sum} instead of {wanted}");
                }
                h.k.act_backward_dbias(
                    &h.s,
                    &ActBackward { act: a, gated: false, x: &x, dy: &dy, dx: &dx },
                    &sums[1],
                )
                .unwrap();
                assert!(h.host(&sums[1]) == ours, "{what}: another time other bits");
                let other = h.poisoned(DType::F32, &[parts + 1, n]);
                assert!(
                    h.k.act_backward_dbias(
                        &h.s,
                        &ActBackward { act: a, gated: false, x: &x, dy: &dy, dx: &dx },
                        &other
                    )
                    .is_err(),
                    "{what}"
                );
            }
        }
    });
}

#[test]
fn wgrad_gemm_with_bias_gradient() {
    everywhere(|h, dtype| {
        for (rows, n, k) in sizes(h) {
            for (onto_w, onto_b) in [(false, false), (true, false), (false, true), (true, true)] {
                let (dy, x) = (numbers(dtype, 1, rows * n), numbers(dtype, 2, rows * k));
                let (dyt, xt) = (h.tensor(dtype, &[rows, n], &dy), h.tensor(dtype, &[rows, k], &x));
                let old = (numbers(DType::F32, 3, n * k), numbers(DType::F32, 4, n));
                let place = |onto: bool, shape: &[usize], old: &[f64]| match onto {
                    true => h.tensor(DType::F32, shape, old),
                    false => h.poisoned(DType::F32, shape),
                };
                let (dw, db) = (place(onto_w, &[n, k], &old.0), place(onto_b, &[n], &old.1));
                let f = LinearWgrad { dy: &dyt, x: &xt, dw: (&dw, onto_w), db: (&db, onto_b) };
                h.k.linear_wgrad(&h.s, &f).unwrap();
                let what = format!("{} {dtype} {rows}x{n}x{k} onto {onto_w} {onto_b}", h.name);
                let slack = (rows + 2) as f64 * 2f64.powi(-23);
                let places = places(n * k);
                let wanted: Vec<f64> = places
                    .iter()
                    .map(|i| {
                        let sum: f64 = (0..rows).map(|r| dy[r * n + i / k] * x[r * k + i % k]).sum();
                        sum + if onto_w { old.0[*i] } else { 0.0 }
                    })
                    .collect();
                close(&what, DType::F32, &at(&h.host(&dw), &places), &wanted, slack);
                let sums: Vec<f64> = (0..n)
                    .map(|c| {
                        let sum: f64 = (0..rows).map(|r| dy[r * n + c]).sum();
                        sum + if onto_b { old.1[c] } else { 0.0 }
                    })
                    .collect();
                close(&what, DType::F32, &h.host(&db), &sums, slack);
            }
        }
    });
}
