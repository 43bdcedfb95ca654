//! Lion, and the kernels of Muon, against f64; Newton–Schulz by the singular values it leaves.

use super::devices::*;
use ferrotron_kernels::{
    AdaptiveScale, ApplyUpdate, BatchedGemm, CoefficientSet, GramSide, Lion, MomentumUpdate, MuonMomentum,
    NewtonSchulz, ParamUpdate, WeightDecay, newton_schulz, newton_schulz_batched, normuon_lines, scalars,
};
use ferrotron_tensor::{Category, DType, Tensor};

fn step_scalars(h: &TestDevice, norm: f64) -> (Tensor, [f64; 3]) {
    let [lr, wd, clip] = [0.01, 0.1, 0.7].map(|x| rounded(DType::F32, x));
    let mut s = vec![0.0; scalars::COUNT];
    (s[scalars::LR], s[scalars::WEIGHT_DECAY], s[scalars::CLIP]) = (lr, wd, clip);
    (s[scalars::STEPS_DONE], s[scalars::GRAD_NORM]) = (3.0, norm);
    (h.tensor(DType::F32, &[scalars::COUNT], &s), [lr, wd, clip])
}

/// Sizes of a list that needs several launches.
fn sizes() -> impl Iterator<Item = (usize, f32, f32)> {
    (0..41).map(|i| ([1, 7, 64, 5000, 0, 33][i % 6], [1.0, 0.5][i % 2], [1.0, 0.0, 2.0][i % 3]))
}

#[test]
fn lion_over_a_long_list() {
    let lion = Lion { beta1: 0.95, beta2: 0.98 };
    let (b1, b2) = (f64::from(0.95f32), f64::from(0.98f32));
    for h in devices() {
        for (dtype, norm) in [(DType::F32, 1.0), (DType::BF16, 1.0), (DType::F32, f64::INFINITY)] {
            let (st, [lr, wd, clip]) = step_scalars(&h, norm);
            let values: Vec<[Vec<f64>; 3]> = sizes()
                .enumerate()
                .map(|(i, (n, ..))| {
                    [(DType::F32, 1), (DType::F32, 2), (dtype, 3)]
                        .map(|(d, s)| numbers(d, s + 100 * i as u64, n))
                })
                .collect();
            let up = |d: DType, v: &Vec<f64>| h.tensor(d, &[v.len()], v);
            let tensors: Vec<[Tensor; 4]> = values
                .iter()
                .map(|[p, g, m]| {
                    let weight = h.poisoned(DType::BF16, &[p.len()]);
                    [up(DType::F32, p), up(DType::F32, g), up(dtype, m), weight]
                })
                .collect();
            let list: Vec<ParamUpdate> = tensors
                .iter()
                .zip(sizes())
                .map(|([p, g, m, w], (_, lr_mult, wd_mult))| ParamUpdate {
                    master: p,
                    weight: Some(w),
                    grad: g,
                    first: m.into(),
                    second: None,
                    lr_mult,
                    wd_mult,
                    fp8: None,
                })
                .collect();
            h.k.lion(&h.s, lion, &st, &list).unwrap();
            for (([p, g, m], [tp, _, tm, tw]), (_, lr_mult, wd_mult)) in
                values.iter().zip(&tensors).zip(sizes())
            {
                let what = format!("{} {dtype} norm {norm}", h.name);
                if norm.is_infinite() {
                    assert_eq!(h.host(tp), *p, "{what}: a skipped step");
                    assert_eq!(h.host(tm), *m, "{what}: a skipped step");
                    continue;
                }
                let (lr, wd) = (lr * f64::from(lr_mult), wd * f64::from(wd_mult));
                let of = |j: usize| {
                    let g = g[j] * clip;
                    let mixed = b1 * m[j] + (1.0 - b1) * g;
                    let sign = if mixed == 0.0 { 0.0 } else { mixed.signum() };
                    (p[j] - lr * (sign + wd * p[j]), b2 * m[j] + (1.0 - b2) * g)
                };
                let (want, held): (Vec<f64>, Vec<f64>) = (0..p.len()).map(of).unzip();
                close(&what, DType::F32, &h.host(tp), &want, 2e-7);
                close(&what, dtype, &h.host(tm), &held, 1e-6);
                let copy: Vec<f64> = h.host(tp).iter().map(|x| rounded(DType::BF16, *x)).collect();
                assert_eq!(h.host(tw), copy, "{what}: the copy is the rounded master");
            }
        }
    }
}

#[test]
fn momentum_and_step_over_long_lists() {
    for h in devices() {
        for (dtype, nesterov, l2) in
            [(DType::F32, false, false), (DType::F32, true, true), (DType::BF16, true, false)]
        {
            let (m, mu) = (MuonMomentum { momentum: 0.95, nesterov }, f64::from(0.95f32));
            let (st, [lr, wd, clip]) = step_scalars(&h, 1.0);
            for (i, (n, lr_mult, wd_mult)) in sizes().enumerate() {
                let seed = |k| k + 10 * i as u64;
                let (p, g, b) = (
                    numbers(DType::F32, seed(1), n),
                    numbers(DType::F32, seed(2), n),
                    numbers(dtype, seed(3), n),
                );
                let (tp, tg, tb) = (
                    h.tensor(DType::F32, &[n], &p),
                    h.tensor(DType::F32, &[n], &g),
                    h.tensor(dtype, &[n], &b),
                );
                let update = h.poisoned(DType::F32, &[n]);
                let one = || MomentumUpdate {
                    grad: &tg,
                    momentum: &tb,
                    l2: l2.then_some(&tp),
                    wd_mult,
                    update: &update,
                };
                let (skipped, _) = step_scalars(&h, f64::NAN);
                h.k.muon_momentum(&h.s, m, &skipped, &[one()]).unwrap();
                assert_eq!(h.host(&tb), b, "a skipped step");
                h.k.muon_momentum(&h.s, m, &st, &[one()]).unwrap();
                let of = |j: usize| {
                    let g = g[j] * clip + if l2 { wd * f64::from(wd_mult) * p[j] } else { 0.0 };
                    let held = mu * b[j] + (1.0 - mu) * g;
                    (held, if nesterov { (1.0 - mu) * g + mu * held } else { held })
                };
                let (held, want): (Vec<f64>, Vec<f64>) = (0..n).map(of).unzip();
                let what = format!("{} {dtype} nesterov {nesterov} tensor {i}", h.name);
                close(&what, dtype, &h.host(&tb), &held, 1e-6);
                close(&what, DType::F32, &h.host(&update), &want, 2e-6);
                for decay in [WeightDecay::Decoupled, WeightDecay::Independent, WeightDecay::L2] {
                    let (tp, weight) = (h.tensor(DType::F32, &[n], &p), h.poisoned(DType::BF16, &[n]));
                    let of = |w| ApplyUpdate { master: &tp, weight: Some(w), update: &tg, lr_mult, wd_mult };
                    h.k.apply_update(&h.s, decay, &skipped, &[of(&weight)]).unwrap();
                    assert_eq!(h.host(&tp), p, "a skipped step");
                    h.k.apply_update(&h.s, decay, &st, &[of(&weight)]).unwrap();
                    let (lr, wd) = (lr * f64::from(lr_mult), wd * f64::from(wd_mult));
                    let keep = match decay {
                        WeightDecay::Decoupled => 1.0 - lr * wd,
                        WeightDecay::Independent => 1.0 - wd,
                        WeightDecay::L2 => 1.0,
                    };
                    let want: Vec<f64> = p.iter().zip(&g).map(|(p, g)| keep * p - lr * g).collect();
                    close(&format!("{what} {decay:?}"), DType::F32, &h.host(&tp), &want, 2e-6);
                    let copy: Vec<f64> = h.host(&tp).iter().map(|x| rounded(DType::BF16, *x)).collect();
                    assert_eq!(h.host(&weight), copy, "{what}: the copy is the rounded master");
                }
            }
        }
    }
}

/// Masters in two halves step to the bits of f32 masters.
#[test]
fn split_masters_step_as_f32_ones() {
    for h in devices() {
        let n = 5001;
        let (p, g) = (numbers(DType::F32, 1, n), numbers(DType::F32, 2, n));
        let (wide, grad) = (h.tensor(DType::F32, &[n], &p), h.tensor(DType::F32, &[n], &g));
        let (high, low) =
            (h.poisoned(DType::BF16, &[n]), h.s.zeros(&[n], DType::I16, Category::Workspace).unwrap());
        h.k.split_master(&h.s, &wide, &high, &low).unwrap();
        let (st, _) = step_scalars(&h, 1.0);
        let step = |master, weight| {
            let one = ApplyUpdate { master, weight, update: &grad, lr_mult: 1.0, wd_mult: 1.0 };
            h.k.apply_update(&h.s, WeightDecay::Decoupled, &st, &[one]).unwrap();
        };
        step(&wide, None);
        step(&low, Some(&high));
        let joined = h.poisoned(DType::F32, &[n]);
        h.k.join_master(&h.s, &high, &low, &joined).unwrap();
        assert_eq!(h.host(&joined), h.host(&wide), "{}", h.name);
    }
}

#[test]
fn adaptive_scaling() {
    let a = AdaptiveScale { beta2: 0.95, eps: 1e-8 };
    let (b2, eps) = (f64::from(0.95f32), f64::from(1e-8f32));
    for h in devices() {
        for [rows, cols] in [[7, 7], [40, 9], [5, 70], [1, 3], [300, 1], [33, 1000]] {
            let (o, n) = (numbers(DType::F32, 5, rows * cols), rows * cols);
            let (st, _) = step_scalars(&h, 1.0);
            let (skipped, _) = step_scalars(&h, f64::INFINITY);
            let what = format!("{} {rows}x{cols}", h.name);
            // Every element has its own second moment.
            let v: Vec<f64> = numbers(DType::F32, 6, n).iter().map(|x| x.abs()).collect();
            let (to, tv) = (h.tensor(DType::F32, &[n], &o), h.tensor(DType::F32, &[n], &v));
            h.k.adamuon(&h.s, a, &skipped, &to, &tv).unwrap();
            assert_eq!(h.host(&tv), v, "{what}: a skipped step");
            h.k.adamuon(&h.s, a, &st, &to, &tv).unwrap();
            let new: Vec<f64> = v.iter().zip(&o).map(|(v, o)| b2 * v + (1.0 - b2) * o * o).collect();
            let want: Vec<f64> = o.iter().zip(&new).map(|(o, v)| o / (v.sqrt() + eps)).collect();
            close(&format!("{what} v"), DType::F32, &h.host(&tv), &new, 1e-6);
            close(&what, DType::F32, &h.host(&to), &want, 1e-5);
            // Every row, or column, has one.
            let by_row = rows >= cols;
            let line = |e: usize| if by_row { e / cols } else { e % cols };
            let lines = normuon_lines([rows, cols]);
            let v: Vec<f64> = numbers(DType::F32, 7, lines).iter().map(|x| x.abs()).collect();
            let (to, tv) = (h.tensor(DType::F32, &[rows, cols], &o), h.tensor(DType::F32, &[lines], &v));
            h.k.normuon(&h.s, a, &skipped, &to, &tv).unwrap();
            assert_eq!(h.host(&tv), v, "{what}: a skipped step");
            let to = h.tensor(DType::F32, &[rows, cols], &o);
            h.k.normuon(&h.s, a, &st, &to, &tv).unwrap();
            let mut mean = vec![0.0; lines];
            o.iter().enumerate().for_each(|(e, o)| mean[line(e)] += o * o / (n / lines) as f64);
            let new: Vec<f64> = v.iter().zip(&mean).map(|(v, m)| b2 * v + (1.0 - b2) * m).collect();
            let scaled: Vec<f64> =
                o.iter().enumerate().map(|(e, o)| o / new[line(e)].max(eps).sqrt()).collect();
            let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
            let back = norm(&o) / norm(&scaled);
            let want: Vec<f64> = scaled.iter().map(|x| x * back).collect();
            close(&format!("{what} line v"), DType::F32, &h.host(&tv), &new, 1e-6);
            close(&format!("{what} lines"), DType::F32, &h.host(&to), &want, 1e-5);
        }
    }
}

/// `x − 2·v·vᵀ·x` for a unit vector v: a reflection of the columns of `x [rows, cols]`.
fn reflect(x: &mut [f64], v: &[f64], cols: usize) {
    for c in 0..cols {
        let along: f64 = v.iter().enumerate().map(|(r, v)| v * x[r * cols + c]).sum();
        v.iter().enumerate().for_each(|(r, v)| x[r * cols + c] -= 2.0 * along * v);
    }
}

fn transposed(x: &[f64], rows: usize, cols: usize) -> Vec<f64> {
    (0..rows * cols).map(|e| x[(e % rows) * cols + e / rows]).collect()
}

fn unit(seed: u64, n: usize) -> Vec<f64> {
    let v = numbers(DType::F32, seed, n);
    let norm = v.iter().map(|x| x * x).sum::<f64>().sqrt();
    v.iter().map(|x| x / norm).collect()
}

/// U·diag(values)·Vᵀ with reflections U and V, `[rows, cols]`.
fn with_singular_values(values: &[f64], rows: usize, cols: usize) -> Vec<f64> {
    let mut x = vec![0.0; rows * cols];
    values.iter().enumerate().for_each(|(i, s)| x[i * cols + i] = *s);
    reflect(&mut x, &unit(1, rows), cols);
    let mut t = transposed(&x, rows, cols);
    reflect(&mut t, &unit(2, cols), rows);
    transposed(&t, cols, rows)
}

/// Singular values from 0.01 to 1 of the normalized matrix end in the bounds of each set of coefficients, from both sides of
/// the matrix, and the singular vectors stay.
#[test]
fn newton_schulz_takes_singular_values_to_one() {
    let bounds = [
        (CoefficientSet::Simple, 5, [0.682, 1.134]),
        (CoefficientSet::Quintic, 5, [0.978, 1.032]),
        (CoefficientSet::PolarExpress, 5, [0.870, 1.124]),
        (CoefficientSet::PolarExpress, 8, [0.9999, 1.0005]),
        (CoefficientSet::DeepseekV4, 10, [0.9999, 1.0005]),
    ];
    for h in devices() {
        for (set, steps, [least, most]) in bounds {
            for [rows, cols] in [[30, 30], [48, 20], [20, 48]] {
                let k = rows.min(cols);
                // From 0.011 up, of norm 1.
                let mut values: Vec<f64> = (0..k).map(|i| 0.011 * 1.2f64.powi(i as i32 % 12)).collect();
                let rest: f64 = values[1..].iter().map(|s| s * s).sum();
                values[0] = (1.0 - rest).sqrt();
                let x = with_singular_values(&values, rows, cols);
                for gram in [GramSide::Rows, GramSide::Columns] {
                    let t =
                        h.tensor(DType::F32, &[rows, cols], &x.iter().map(|x| 7.0 * x).collect::<Vec<_>>());
                    let coefficients = &set.schedule(steps);
                    let ns = NewtonSchulz { coefficients, bf16: false, gram, sum: None };
                    newton_schulz(&*h.k, &h.s, &ns, &t).unwrap();
                    // Undo the reflections: what is left is diagonal.
                    let mut y = h.host(&t);
                    reflect(&mut y, &unit(1, rows), cols);
                    let mut y = transposed(&y, rows, cols);
                    reflect(&mut y, &unit(2, cols), rows);
                    let what = format!("{} {set:?} x{steps} {rows}x{cols} {gram:?}", h.name);
                    for (e, y) in y.iter().enumerate() {
                        let (c, r) = (e / rows, e % rows);
                        if r == c {
                            assert!((least - 1e-3..=most + 1e-3).contains(y), "{what}: {y} of {}", values[r]);
                        } else {
                            assert!(y.abs() < 2e-3, "{what}: {y} beside the diagonal");
                        }
                    }
                }
            }
        }
    }
}

/// A batch has the bits of its matrices one by one where products do not depend on the batch: on a CPU, and in f32.
#[test]
fn a_batch_is_its_matrices_one_by_one() {
    for h in devices() {
        for (bf16, [rows, cols]) in
            [false, true].into_iter().flat_map(|b| [[24, 40], [40, 24], [9, 9]].map(|shape| (b, shape)))
        {
            let coefficients = &CoefficientSet::Quintic.schedule(5);
            let ns = NewtonSchulz { coefficients, bf16, gram: GramSide::shorter([rows, cols]), sum: None };
            let new = |i: u64| h.tensor(DType::F32, &[rows, cols], &numbers(DType::F32, i, rows * cols));
            let (alone, together): (Vec<Tensor>, Vec<Tensor>) = (1..6).map(|i| (new(i), new(i))).unzip();
            alone.iter().for_each(|x| newton_schulz(&*h.k, &h.s, &ns, x).unwrap());
            newton_schulz_batched(&*h.k, &h.s, &ns, &together.iter().collect::<Vec<_>>()).unwrap();
            for (a, b) in alone.iter().zip(&together) {
                let (a, b, what) = (h.host(a), h.host(b), format!("{} {rows}x{cols} {bf16}", h.name));
                if bf16 && h.name == "CUDA" {
                    a.iter().zip(&b).for_each(|(a, b)| assert!((a - b).abs() < 0.05, "{what}: {a} {b}"));
                } else {
                    assert_eq!(a, b, "{what}");
                }
            }
        }
    }
}

/// From 2048 rows on the Gram matrix is computed by its lower blocks: the same polynomial as by the other, small one.
#[test]
fn symmetric_gram_matrices() {
    for h in devices() {
        for bf16 in [false, true] {
            let x = numbers(DType::F32, 3, 2050 * 6);
            let of = |gram, wide: bool| {
                let shape = if wide { [6, 2050] } else { [2050, 6] };
                let (t, coefficients) = (h.tensor(DType::F32, &shape, &x), &[[3.4, -3.3, 0.0]]);
                let ns = NewtonSchulz { coefficients, bf16, gram, sum: None };
                newton_schulz(&*h.k, &h.s, &ns, &t).unwrap();
                h.host(&t)
            };
            for wide in [false, true] {
                let (rows, columns) = (of(GramSide::Rows, wide), of(GramSide::Columns, wide));
                let room = if bf16 { 2e-3 } else { 1e-6 };
                for (a, b) in rows.iter().zip(&columns) {
                    assert!((a - b).abs() < room, "{} bf16 {bf16} wide {wide}: {a} and {b}", h.name);
                }
            }
        }
    }
}

#[test]
fn mirrored_matrices_are_symmetric() {
    for h in devices() {
        for (dtype, [count, m, from]) in [DType::F32, DType::BF16]
            .into_iter()
            .flat_map(|d| [[1, 1, 0], [3, 70, 33], [2, 128, 64], [2, 37, 37]].map(|s| (d, s)))
        {
            let x = numbers(dtype, 9, count * m * m);
            let t = h.tensor(dtype, &[count, m, m], &x);
            h.k.mirror(&h.s, &t, from).unwrap();
            let want: Vec<f64> = (0..x.len())
                .map(|e| {
                    let (matrix, r, c) = (e / (m * m), e / m % m, e % m);
                    if r < from && c >= from { x[matrix * m * m + c * m + r] } else { x[e] }
                })
                .collect();
            assert_eq!(h.host(&t), want, "{} {dtype} {m} {from}", h.name);
        }
    }
}

/// Products of stacks, of whole ones and of blocks of larger ones, against single products.
#[test]
fn batched_gemms() {
    for h in devices() {
        for (dtype, out) in [(DType::F32, DType::F32), (DType::BF16, DType::F32), (DType::BF16, DType::BF16)]
        {
            for (trans_a, trans_b) in [(false, false), (false, true), (true, false)] {
                let stack = |seed, dtype, [rows, cols]: [usize; 2]| {
                    let t = h.tensor(dtype, &[3, 80, 96], &numbers(dtype, seed, 3 * 80 * 96));
                    t.narrow(1, 8, rows).unwrap().narrow(2, 16, cols).unwrap()
                };
                let (m, n, k) = (24, 40, 32);
                let a = stack(1, dtype, if trans_a { [k, m] } else { [m, k] });
                let b = stack(2, dtype, if trans_b { [n, k] } else { [k, n] });
                let (ours, single) = (stack(3, out, [m, n]), stack(3, out, [m, n]));
                h.k.gemm_batched(&h.s, &BatchedGemm { a: &a, trans_a, b: &b, trans_b, c: &ours }).unwrap();
                let each = BatchedGemm { a: &a, trans_a, b: &b, trans_b, c: &single };
                (0..3).for_each(|i| each.with(i, |g| h.k.gemm(&h.s, g)).unwrap());
                for i in 0..3 {
                    let rows = |t: &Tensor| -> Vec<f64> {
                        let t = t.select(0, i).unwrap();
                        (0..m).flat_map(|r| h.host(&t.select(0, r).unwrap())).collect()
                    };
                    let what = format!("{} {dtype} to {out} {trans_a} {trans_b}", h.name);
                    close(&what, out, &rows(&ours), &rows(&single), 1e-5);
                }
            }
        }
    }
}

/// A zero matrix, one element, and no element.
#[test]
fn newton_schulz_of_degenerate_matrices() {
    for h in devices() {
        for bf16 in [false, true] {
            let coefficients = &CoefficientSet::Quintic.schedule(5);
            let ns = NewtonSchulz { coefficients, bf16, gram: GramSide::Rows, sum: None };
            for (shape, x) in [([3, 4], vec![0.0; 12]), ([1, 1], vec![-4.0]), ([0, 4], vec![])] {
                let t = h.tensor(DType::F32, &shape, &x);
                newton_schulz(&*h.k, &h.s, &ns, &t).unwrap();
                let want: f64 = if x.len() == 1 { -1.0 } else { 0.0 };
                assert!(h.host(&t).iter().all(|y| (y - want).abs() < 0.05), "{} {shape:?}", h.name);
            }
        }
    }
}
