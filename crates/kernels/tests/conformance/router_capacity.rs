//! Tokens per expert, capacity, expert bias, quantile balancing, Sinkhorn.

use super::devices::*;
use super::router_oracle::{logits, ranked, shifted};
use ferrotron_kernels::{CapacityDrop, capacity};
use ferrotron_tensor::{Category, DType, Tensor};

fn i64s(h: &TestDevice, values: &[i64]) -> Tensor {
    h.s.upload(values, &[values.len()], Category::Workspace).unwrap()
}

/// Selections of each token, some slots empty, no expert twice.
fn selections(n: usize, k: usize, experts: usize) -> Vec<f64> {
    let some = |i: usize| (i * 31) % 11 != 3;
    // Unbalanced: half of the tokens select the same experts.
    let pick = |t: usize, j: usize| if t % 2 == 1 { j } else { (t * 13 / 7 + j) % experts };
    (0..n * k).map(|i| if some(i) { pick(i / k, i % k) as f64 } else { -1.0 }).collect()
}

const SIZES: [(usize, usize, usize); 8] = [
    (0, 2, 4),
    (1, 1, 1),
    (15, 3, 7),
    (129, 2, 8),
    (129, 1, 130),
    (1000, 6, 64),
    (2500, 8, 256),
    (300, 32, 1024),
];

#[test]
fn tokens_per_expert_are_counted() {
    for h in devices() {
        for (n, k, experts) in SIZES {
            let index = selections(n, k, experts);
            let of: Vec<i32> = (0..n).map(|t| if t % 4 == 1 { -1 } else { t as i32 }).collect();
            let it = h.tensor(DType::I32, &[n, k], &index);
            let counts = i64s(&h, &vec![5; experts]);
            h.k.count_tokens(&h.s, &it, &h.ids(&of), &counts).unwrap();
            let mut wanted = vec![5i64; experts];
            for (_, e) in index.iter().enumerate().filter(|(i, e)| of[i / k] >= 0 && **e >= 0.0) {
                wanted[*e as usize] += 1;
            }
            assert_eq!(h.s.download::<i64>(&counts).unwrap(), wanted, "{} {n}x{k} of {experts}", h.name);
        }
    }
}

#[test]
fn selections_over_capacity_are_dropped() {
    for h in devices() {
        for (n, k, experts) in SIZES {
            let index = selections(n, k, experts);
            // Coarse values with many ties, and one NaN.
            let mut probs: Vec<f64> =
                numbers(DType::F32, 3, n * k).iter().map(|p| (p * 20.0).round() / 32.0 + 1.0).collect();
            probs.iter_mut().zip(&index).filter(|(_, e)| **e < 0.0).for_each(|(p, _)| *p = 0.0);
            if let Some(p) = probs.get_mut(2) {
                *p = f64::NAN;
            }
            for (keep, by) in [0, 1, 2, 7, 40, n].into_iter().flat_map(|c| [(c, false), (c, true)]) {
                let what = format!("{} {n}x{k} of {experts} keep {keep} by {by}", h.name);
                let (it, pt) = (h.tensor(DType::I32, &[n, k], &index), h.tensor(DType::F32, &[n, k], &probs));
                let dropped = i64s(&h, &[100]);
                h.k.drop_over_capacity(
                    &h.s,
                    &CapacityDrop {
                        capacity: keep,
                        experts,
                        by_probability: by,
                        index: &it,
                        probs: &pt,
                        dropped: &dropped,
                    },
                )
                .unwrap();
                let (mut left, mut p) = (index.clone(), probs.clone());
                for e in 0..experts {
                    let of: Vec<usize> = (0..n * k).filter(|i| index[*i] == e as f64).collect();
                    let value = |i: &usize| if by { probs[*i] } else { 0.0 };
                    let order = ranked(&of.iter().map(value).collect::<Vec<_>>());
                    order.iter().skip(keep).for_each(|o| (left[of[*o]], p[of[*o]]) = (-1.0, 0.0));
                }
                let gone = (0..n * k).filter(|i| left[*i] != index[*i]).count() as i64;
                assert!(h.host(&it) == left, "{what}");
                let same = |(a, b): (&f64, &f64)| a == b || (a.is_nan() && b.is_nan());
                assert!(h.host(&pt).iter().zip(&p).all(same), "{what}: probabilities");
                assert_eq!(h.s.download::<i64>(&dropped).unwrap(), [100 + gone], "{what}");
            }
        }
    }
}

#[test]
fn expert_capacity() {
    assert_eq!([capacity(10, 2, 8, 1.0), capacity(10, 2, 8, 1.25)], [3, 4]);
    assert_eq!([capacity(10, 2, 8, 100.0), capacity(0, 2, 8, 1.0), capacity(10, 2, 8, -1.0)], [10, 0, 0]);
}

#[test]
fn expert_bias_moves_towards_balance() {
    for h in devices() {
        for experts in [1, 4, 7, 130, 1024] {
            let mut counts: Vec<i64> = (0..experts).map(|e| ((e * 17) % 23) as i64).collect();
            if experts == 4 {
                counts = vec![5, 3, 4, 4];
            }
            let bias = numbers(DType::F32, 1, experts);
            let (ct, bt) = (i64s(&h, &counts), h.tensor(DType::F32, &[experts], &bias));
            h.k.update_expert_bias(&h.s, 1e-3, &ct, &bt).unwrap();
            let mean = counts.iter().sum::<i64>() as f64 / experts as f64;
            let sign = |c: i64| if mean == c as f64 { 0.0 } else { (mean - c as f64).signum() as f32 };
            let step = |(b, c): (&f64, &i64)| f64::from(*b as f32 + 1e-3f32 * sign(*c));
            let wanted: Vec<f64> = bias.iter().zip(&counts).map(step).collect();
            assert_eq!(h.host(&bt), wanted, "{} {experts}", h.name);
            assert_eq!(h.s.download::<i64>(&ct).unwrap(), vec![0; experts]);
        }
    }
}

#[test]
fn quantiles_match_sorted_columns() {
    for_moe_dtypes(|h, dtype| {
        for (n, k, experts) in
            [(0, 1, 4), (4, 1, 4), (15, 2, 3), (64, 3, 8), (128, 8, 64), (1000, 2, 8), (65, 8, 130)]
        {
            for tame in [true, false] {
                let x = logits(dtype, 8, n, experts, tame);
                let beta = numbers(DType::F32, 9, experts);
                let lt = shifted(h, n % 2, dtype, &[n, experts], &x);
                let (bt, et) = (
                    h.tensor(DType::F32, &[experts], &beta),
                    h.tensor(DType::F32, &[experts], &vec![0.5; experts]),
                );
                h.k.quantiles(&h.s, k, &lt, &bt, &et).unwrap();
                // Differences rounded to f32.
                let less = |a: f64, b: f64| f64::from(a as f32 - b as f32);
                let alpha = |row: &[f64]| {
                    let left: Vec<f64> = row.iter().zip(&beta).map(|(x, b)| less(*x, *b)).collect();
                    left[ranked(&left)[k]]
                };
                let alpha: Vec<f64> = x.chunks(experts).map(alpha).collect();
                let column =
                    |e: usize| -> Vec<f64> { (0..n).map(|t| less(x[t * experts + e], alpha[t])).collect() };
                let value = |e: usize| {
                    let column = column(e);
                    ranked(&column).get(n * k / experts).map_or(0.5, |t| f64::from(0.5 + column[*t] as f32))
                };
                for (e, ours) in h.host(&et).iter().enumerate() {
                    let wanted = value(e);
                    let same = *ours == wanted || (ours.is_nan() && wanted.is_nan());
                    assert!(same, "{} {dtype} {n}x{experts} k {k} [{e}]: {ours} {wanted}", h.name);
                }
            }
        }
    });
}

/// A running mean would keep a NaN of one step for good, and every token would go to the first experts.
#[test]
fn quantiles_that_are_not_finite_change_nothing() {
    for h in devices() {
        let beta = [0.25, -0.5, 0.75, -0.5];
        for (keep, bad) in [(0.0, f64::NAN), (0.5, f64::NAN), (0.5, f64::INFINITY)] {
            let found = h.tensor(DType::F32, &[4], &[1.0, bad, 2.0, 3.0]);
            let table = h.tensor(DType::F32, &[4], &beta);
            h.k.update_quantiles(&h.s, keep, 1.0, &found, &table).unwrap();
            assert_eq!(h.host(&table), beta, "{} {keep} {bad}", h.name);
        }
        let found = h.tensor(DType::F32, &[4], &[1.0, 2.0, 3.0, 2.0]);
        let table = h.tensor(DType::F32, &[4], &beta);
        h.k.update_quantiles(&h.s, 0.5, 0.5, &found, &table).unwrap();
        assert_eq!(h.host(&table), [-0.125, -0.25, 0.625, -0.25], "{}", h.name);
    }
}

/// Iterates to convergence, by definition.
fn balanced(x: &[f64], n: usize, experts: usize) -> Vec<f64> {
    let cost: Vec<f64> = x.iter().map(|x| x.exp()).collect();
    let (mut d0, mut d1) = (vec![1.0; n], vec![1.0; experts]);
    loop {
        for t in 0..n {
            let sum: f64 = (0..experts).map(|e| cost[t * experts + e] * d1[e]).sum();
            d0[t] = 1.0 / (n as f64 * (sum + 1e-8));
        }
        let mut change = 0.0;
        for e in 0..experts {
            let sum: f64 = (0..n).map(|t| cost[t * experts + e] * d0[t]).sum();
            let new = 1.0 / (experts as f64 * (sum + 1e-8));
            change += (new - d1[e]).abs() / experts as f64;
            d1[e] = new;
        }
        if change <= 1e-4 {
            return (0..x.len()).map(|i| d1[i % experts] * cost[i] * d0[i / experts]).collect();
        }
    }
}

#[test]
fn sinkhorn_balances() {
    for_moe_dtypes(|h, dtype| {
        for (n, experts) in [(1, 1), (3, 4), (15, 7), (129, 8), (1000, 64), (70, 130), (33, 1024)] {
            let x: Vec<f64> =
                numbers(DType::F32, 2, n * experts).iter().map(|x| rounded(dtype, 3.0 * x)).collect();
            let lt = shifted(h, n % 2, dtype, &[n, experts], &x);
            let out = h.poisoned(DType::F32, &[n, experts]);
            h.k.sinkhorn(&h.s, &lt, &out).unwrap();
            let what = format!("{} {dtype} {n}x{experts}", h.name);
            for (o, w) in h.host(&out).iter().zip(balanced(&x, n, experts)) {
                assert!((o - w).abs() <= 3e-6 * w, "{what}: {o} {w}");
            }
        }
        // No tokens, and an input that does not converge.
        let none = h.poisoned(dtype, &[0, 4]);
        h.k.sinkhorn(&h.s, &none, &h.poisoned(DType::F32, &[0, 4])).unwrap();
        let (nan, out) = (h.poisoned(dtype, &[3, 4]), h.tensor(DType::F32, &[3, 4], &[0.0; 12]));
        h.k.sinkhorn(&h.s, &nan, &out).unwrap();
        assert!(h.host(&out).iter().all(|x| x.is_nan()), "{}", h.name);
    });
}

#[test]
fn invalid_arguments_are_errors() {
    for h in devices() {
        let (k, s) = (&h.k, &h.s);
        let z = |dtype, shape: &[usize]| h.tensor(dtype, shape, &vec![0.0; shape.iter().product()]);
        let (i, p, one) = (z(DType::I32, &[3, 2]), z(DType::F32, &[3, 2]), i64s(&h, &[0]));
        let (x, four) = (z(DType::F32, &[3, 4]), z(DType::F32, &[4]));
        let of = h.ids(&[0, 0, 0]);
        let far = h.tensor(DType::I32, &[3, 2], &[0.0, 4.0, 0.0, 0.0, 0.0, 0.0]);
        refused(&h, "an expert that is not", k.count_tokens(s, &far, &of, &i64s(&h, &[0; 4])));
        refused(&h, "rows", k.count_tokens(s, &i, &h.ids(&[0]), &i64s(&h, &[0; 4])));
        refused(&h, "small counts", k.count_tokens(s, &i, &of, &z(DType::I32, &[4])));
        refused(
            &h,
            "to drop an expert that is not",
            k.drop_over_capacity(
                s,
                &CapacityDrop {
                    capacity: 1,
                    experts: 4,
                    by_probability: true,
                    index: &far,
                    probs: &p,
                    dropped: &one,
                },
            ),
        );
        refused(
            &h,
            "probabilities",
            k.drop_over_capacity(
                s,
                &CapacityDrop {
                    capacity: 1,
                    experts: 4,
                    by_probability: true,
                    index: &i,
                    probs: &z(DType::F32, &[2, 2]),
                    dropped: &one,
                },
            ),
        );
        refused(
            &h,
            "no experts",
            k.drop_over_capacity(
                s,
                &CapacityDrop {
                    capacity: 1,
                    experts: 0,
                    by_probability: true,
                    index: &i,
                    probs: &p,
                    dropped: &one,
                },
            ),
        );
        refused(
            &h,
            "dropped",
            k.drop_over_capacity(
                s,
                &CapacityDrop {
                    capacity: 1,
                    experts: 4,
                    by_probability: true,
                    index: &i,
                    probs: &p,
                    dropped: &i64s(&h, &[0; 2]),
                },
            ),
        );
        refused(&h, "bias", k.update_expert_bias(s, 1.0, &i64s(&h, &[0; 3]), &four));
        refused(&h, "16-bit balance", k.sinkhorn(s, &x, &z(DType::BF16, &[3, 4])));
        refused(&h, "uneven quantiles", k.quantiles(s, 1, &x, &four, &z(DType::F32, &[4])));
        refused(&h, "quantiles of all", k.quantiles(s, 4, &x, &four, &z(DType::F32, &[4])));
        refused(&h, "beta", k.quantiles(s, 1, &z(DType::F32, &[4, 4]), &p, &four));
    }
}
