//! Top-k selection of experts and their probabilities.

use super::devices::*;
use super::router_oracle::*;
use ferrotron_kernels::{ExpertSelection, GroupLimit, Route, RouteBackward, RouterParams, ScoreFunction};
use ferrotron_tensor::{DType, Tensor};

/// Number of experts, top-k, and a valid group limit.
const SIZES: [(usize, usize, Option<GroupLimit>); 13] = [
    (1, 1, None),
    (4, 4, None),
    (7, 1, None),
    (7, 3, None),
    (8, 2, Some(GroupLimit { count: 4, keep: 2, best: 1 })),
    (64, 6, Some(GroupLimit { count: 8, keep: 3, best: 2 })),
    (130, 8, None),
    // Groups with as many experts as rank the group, with more, and with fewer.
    (8, 1, Some(GroupLimit { count: 4, keep: 2, best: 2 })),
    (8, 3, Some(GroupLimit { count: 4, keep: 2, best: 2 })),
    (60, 7, Some(GroupLimit { count: 6, keep: 5, best: 10 })),
    (130, 4, Some(GroupLimit { count: 65, keep: 2, best: 2 })),
    (256, 8, Some(GroupLimit { count: 8, keep: 4, best: 2 })),
    (1024, 32, Some(GroupLimit { count: 32, keep: 16, best: 2 })),
];

fn tokens(experts: usize) -> &'static [usize] {
    if experts > 256 { &[0, 1, 33] } else { &[0, 1, 15, 129, 1000] }
}

fn chosen(row: &[f64]) -> Vec<Option<usize>> {
    row.iter().map(|e| (*e >= 0.0).then_some(*e as usize)).collect()
}

/// Tolerance for f32 arithmetic.
const SLACK: f64 = 3e-6;

/// Checks probabilities and gradients of the selections in `index`.
fn check_probs(
    h: &TestDevice,
    what: &str,
    how: RouterParams,
    x: &[f64],
    [logits, index, probs]: [&Tensor; 3],
) {
    let (experts, k) = (logits.shape()[1], index.shape()[1]);
    let (picked, p) = (h.host(index), h.host(probs));
    let slack = SLACK * f64::from(how.scale);
    let d = numbers(DType::F32, 77, picked.len());
    let dprobs = h.tensor(DType::F32, index.shape(), &d);
    let n = x.len();
    let frame = h.tensor(logits.dtype(), &[n + 1], &vec![f64::NAN; n + 1]);
    let dlogits = frame.narrow(0, 1, n).unwrap().view(logits.shape()).unwrap();
    h.k.route_backward(
        &h.s,
        &RouteBackward { params: how, logits, index, dprobs: &dprobs, dlogits: &dlogits },
    )
    .unwrap();
    let dx = h.host(&dlogits);
    for (t, (x, dx)) in x.chunks(experts).zip(dx.chunks(experts)).enumerate() {
        let at = t * k..(t + 1) * k;
        let (what, index) = (format!("{what} row {t}"), chosen(&picked[at.clone()]));
        same(&what, DType::F32, &p[at.clone()], &probs_of(how, x, &index), slack);
        same(&format!("{what} dx"), logits.dtype(), dx, &gradient(how, x, &index, &d[at]), slack);
    }
}

#[test]
fn top_k_selection_and_probabilities() {
    for_moe_dtypes(|h, dtype| {
        for (experts, k, groups) in SIZES {
            for (&n, seed) in tokens(experts).iter().zip(1..) {
                let x = logits(dtype, seed + experts as u64, n, experts, false);
                let lt = shifted(h, n % 2, dtype, &[n, experts], &x);
                for (which, score) in SCORES.into_iter().enumerate() {
                    // Biases of the magnitude of scores, some of them equal.
                    let size = if score == ScoreFunction::Softmax { experts as f64 } else { 2.0 };
                    let raw = numbers(DType::F32, 9, experts);
                    let b: Vec<f64> =
                        raw.iter().map(|x| rounded(DType::F32, (x * 8.0).round() / 8.0 / size)).collect();
                    let bt = h.tensor(DType::F32, &[experts], &b);
                    for kind in 0..4 {
                        // All combinations at small sizes, one of them at large sizes.
                        if n > 200 && kind != which {
                            continue;
                        }
                        let (biased, grouped) = (kind % 2 == 1, kind / 2 == 1);
                        if grouped && groups.is_none() {
                            continue;
                        }
                        let scale = if grouped { 2.5 } else { 1.0 };
                        // Both values of `normalize` for every k.
                        let normalize = (n + which + kind) % 3 != 0;
                        let groups = if grouped { groups } else { None };
                        let how = RouterParams { score, normalize, groups, scale };
                        let what = format!("{} {dtype} {n}x{experts} {how:?} biased {biased}", h.name);
                        let (it, pt) = (h.poisoned(DType::I32, &[n, k]), h.poisoned(DType::F32, &[n, k]));
                        let bias = biased.then_some(&bt);
                        h.k.route(
                            &h.s,
                            &Route {
                                params: how,
                                selection: ExpertSelection::TopK { bias },
                                logits: &lt,
                                index: &it,
                                probs: &pt,
                            },
                        )
                        .unwrap();
                        let index = h.host(&it);
                        let mut hanging = 0;
                        for (t, (x, ours)) in x.chunks(experts).zip(index.chunks(k)).enumerate() {
                            let Some(wanted) = selection(how, biased.then_some(&b), x, k) else {
                                hanging += 1;
                                continue;
                            };
                            let wanted: Vec<f64> = wanted.iter().map(|e| *e as f64).collect();
                            assert_eq!(ours, wanted, "{what} row {t}");
                        }
                        assert!(hanging <= n / 2 + 1, "{what}: {hanging} rows hang on roundings");
                        check_probs(h, &what, how, &x, [&lt, &it, &pt]);
                    }
                }
            }
        }
    });
}

#[test]
fn given_selections_may_have_empty_slots() {
    for_moe_dtypes(|h, dtype| {
        for (experts, k, n) in [(4, 2, 15), (7, 1, 3), (64, 6, 129), (256, 8, 70), (1000, 32, 5)] {
            let x = logits(dtype, 5, n, experts, true);
            // Some rows have no selection.
            let some = |t: usize, j: usize| t % 5 != 4 && (t + j) % 3 != 1;
            let pick =
                |t: usize, j: usize| if some(t, j) { ((t * 7 + j * 3) % experts) as f64 } else { -1.0 };
            let index: Vec<f64> = (0..n * k).map(|i| pick(i / k, i % k)).collect();
            let (lt, it) = (h.tensor(dtype, &[n, experts], &x), h.tensor(DType::I32, &[n, k], &index));
            for score in SCORES {
                let groups = Some(GroupLimit { count: 99, keep: 1, best: 1 });
                let how = RouterParams { score, normalize: n % 2 == 1, groups, scale: 1.5 };
                let pt = h.poisoned(DType::F32, &[n, k]);
                h.k.route(
                    &h.s,
                    &Route {
                        params: how,
                        selection: ExpertSelection::Given,
                        logits: &lt,
                        index: &it,
                        probs: &pt,
                    },
                )
                .unwrap();
                assert_eq!(h.host(&it), index);
                check_probs(h, &format!("{} {dtype} {experts} {how:?}", h.name), how, &x, [&lt, &it, &pt]);
            }
        }
    });
}

/// The documented gradient formula against finite differences of the probabilities.
#[test]
fn gradients_match_finite_differences() {
    for score in SCORES {
        for (experts, k, normalize) in
            [(1, 1, false), (5, 1, false), (5, 1, true), (7, 3, true), (7, 3, false), (64, 6, true)]
        {
            let how = RouterParams { score, normalize, groups: None, scale: 1.75 };
            let (x, d) = (numbers(DType::F32, 3, experts), numbers(DType::F32, 4, k));
            let index: Vec<Option<usize>> = (0..k).map(|j| (j != 1).then_some((j * 5) % experts)).collect();
            let wanted = differences(&x, |x| dot(&probs_of(how, x, &index), &d));
            same(&format!("{how:?} {experts}"), DType::F32, &gradient(how, &x, &index, &d), &wanted, 1e-8);
        }
    }
}

#[test]
fn top_k_subtracts_first() {
    for h in devices() {
        for (experts, k, n) in [(1, 1, 3), (4, 4, 15), (7, 2, 129), (130, 8, 1000), (1024, 32, 17)] {
            let x = logits(DType::F32, 6, n, experts, false);
            let minus: Vec<f64> =
                numbers(DType::F32, 7, experts).iter().map(|x| (x * 8.0).round() / 8.0).collect();
            let (xt, mt) =
                (shifted(&h, 1, DType::F32, &[n, experts], &x), h.tensor(DType::F32, &[experts], &minus));
            for less in [None, Some(&mt)] {
                let it = h.poisoned(DType::I32, &[n, k]);
                h.k.top_k(&h.s, &xt, less, &it).unwrap();
                for (x, ours) in x.chunks(experts).zip(h.host(&it).chunks(k)) {
                    // Rounded to f32 like the kernel: rounding can create ties.
                    let part = |e: usize| if less.is_some() { minus[e] as f32 } else { 0.0 };
                    let left: Vec<f64> = (0..experts).map(|e| f64::from(x[e] as f32 - part(e))).collect();
                    let wanted: Vec<f64> = ranked(&left)[..k].iter().map(|e| *e as f64).collect();
                    assert_eq!(ours, wanted, "{} {n}x{experts} {}", h.name, less.is_some());
                }
            }
        }
    }
}

#[test]
fn positive_and_negative_zero_tie() {
    for h in devices() {
        let x = h.tensor(DType::F32, &[2, 4], &[-0.0, 0.0, -1.0, 0.0, 0.0, -0.0, 0.0, -0.0]);
        let index = h.poisoned(DType::I32, &[2, 3]);
        h.k.top_k(&h.s, &x, None, &index).unwrap();
        assert_eq!(h.host(&index), [0.0, 1.0, 3.0, 0.0, 1.0, 2.0], "{}", h.name);
    }
}

/// Inputs and outputs computed by the reference implementation of the specification.
#[test]
fn vectors_of_the_specification() {
    let x = [2.0, -1.0, 0.5, 1.0, -0.5, 0.0, 1.5, -2.0];
    let bias = [0.0, 0.6, 0.0, -0.2, 0.1, 0.0, 0.0, 0.4];
    let dprobs = [1.0, -2.0, 0.5, 0.0, 0.0, 0.0, 0.25, 3.0];
    let plain = |score| RouterParams { score, normalize: true, groups: None, scale: 1.0 };
    let grouped = RouterParams {
        groups: Some(GroupLimit { count: 4, keep: 2, best: 2 }),
        scale: 2.5,
        ..plain(ScoreFunction::Sigmoid)
    };
    let before =
        [0.215945, -0.009299, -0.041677, -0.068714, -0.015332, -0.025278, -0.052223, -0.003421].map(Some);
    let none = [None; 8];
    let at = |list: &[(usize, f64)]| {
        let mut all = [Some(0.0); 8];
        list.iter().for_each(|(e, d)| all[*e] = Some(*d));
        all
    };
    type Row<'a> = (RouterParams, bool, &'a [(usize, f64)], [Option<f64>; 8]);
    let rows: [Row; 6] = [
        (
            plain(ScoreFunction::SoftmaxAfterTopK),
            false,
            &[(0, 0.622459), (6, 0.377541)],
            at(&[(0, 0.176253), (6, -0.176253)]),
        ),
        (plain(ScoreFunction::Softmax), false, &[(0, 0.402728), (6, 0.244267)], before),
        (plain(ScoreFunction::Sigmoid), false, &[(0, 0.518613), (6, 0.481387)], none),
        (
            plain(ScoreFunction::Sigmoid),
            true,
            &[(0, 0.766085), (1, 0.233915)],
            at(&[(0, 0.064083), (1, -0.393015)]),
        ),
        (grouped, true, &[(0, 1.055344), (1, 0.322237), (6, 0.979593), (7, 0.142825)], none),
        (
            plain(ScoreFunction::SqrtSoftplus),
            true,
            &[(0, 0.527874), (6, 0.472126)],
            at(&[(0, 0.038703), (6, -0.044909)]),
        ),
    ];
    for h in devices() {
        let (lt, bt) = (h.tensor(DType::F32, &[1, 8], &x), h.tensor(DType::F32, &[8], &bias));
        for (how, biased, wanted, dx) in &rows {
            let k = wanted.len();
            let (it, pt) = (h.poisoned(DType::I32, &[1, k]), h.poisoned(DType::F32, &[1, k]));
            h.k.route(
                &h.s,
                &Route {
                    params: *how,
                    selection: ExpertSelection::TopK { bias: biased.then_some(&bt) },
                    logits: &lt,
                    index: &it,
                    probs: &pt,
                },
            )
            .unwrap();
            let mut found: Vec<(usize, f64)> =
                h.host(&it).iter().map(|e| *e as usize).zip(h.host(&pt)).collect();
            found.sort_by_key(|f| f.0);
            for (found, wanted) in found.iter().zip(*wanted) {
                assert_eq!(found.0, wanted.0, "{} {how:?}", h.name);
                assert!((found.1 - wanted.1).abs() < 1e-6, "{} {how:?}: {found:?} {wanted:?}", h.name);
            }
            let d: Vec<f64> = h.host(&it).iter().map(|e| dprobs[*e as usize]).collect();
            let (dt, out) = (h.tensor(DType::F32, &[1, k], &d), h.poisoned(DType::F32, &[1, 8]));
            h.k.route_backward(
                &h.s,
                &RouteBackward { params: *how, logits: &lt, index: &it, dprobs: &dt, dlogits: &out },
            )
            .unwrap();
            for (ours, wanted) in h.host(&out).iter().zip(dx).filter_map(|(o, w)| w.map(|w| (o, w))) {
                assert!((ours - wanted).abs() < 1e-6, "{} {how:?}: {ours} {wanted}", h.name);
            }
        }
    }
}
