//! Load balancing of the router: auxiliary loss, z-loss, and their gradients.

use super::devices::*;
use super::router_oracle::*;
use ferrotron_kernels::{AuxLoss, AuxLossWeights, ScoreFunction, ZLossBackward};
use ferrotron_tensor::{Category, DType, Tensor};

/// Segment of each token (one segment, alternating, runs with padding, one of two) and the number of segments.
fn segments(kind: usize, n: usize) -> (Vec<i32>, usize) {
    let count = [1, 3, 5, 2][kind];
    let of = |t: usize| match kind {
        0 => 0,
        1 => (t % 3) as i32,
        2 if t % 7 == 6 => -1,
        2 => ((t / 9) % 5) as i32,
        _ if t % 3 == 1 => -5,
        _ => 1,
    };
    ((0..n).map(of).collect(), count)
}

const SIZES: [(usize, usize); 8] = [(1, 1), (4, 1), (7, 2), (8, 8), (64, 6), (130, 8), (256, 8), (1024, 32)];

fn tokens(experts: usize) -> &'static [usize] {
    if experts > 256 { &[33] } else { &[0, 1, 15, 129, 1000] }
}

fn i64s(h: &TestDevice, shape: &[usize], values: &[i64]) -> Tensor {
    h.s.upload(values, shape, Category::Workspace).unwrap()
}

/// Rows of a segment.
fn rows_of(of: &[i32], s: usize) -> impl Iterator<Item = usize> {
    (0..of.len()).filter(move |t| of[*t] == s as i32)
}

fn balance_gradient(score: ScoreFunction, x: &[f64], w: &[f64]) -> Vec<f64> {
    let y = normalized(score, x);
    let mean = dot(&y, w);
    let sum = if is_softmax(score) { 1.0 } else { x.iter().map(|x| alone(score, *x)).sum::<f64>() + 1e-20 };
    let d = |e: usize| match score {
        _ if x[e] == f64::NEG_INFINITY => 0.0,
        ScoreFunction::SoftmaxAfterTopK | ScoreFunction::Softmax => y[e] * (w[e] - mean),
        ScoreFunction::Sigmoid => (w[e] - mean) / sum * alone(score, x[e]) * alone(score, -x[e]),
        _ if x[e] > 20.0 => (w[e] - mean) / sum * 0.5 / x[e].sqrt(),
        _ => (w[e] - mean) / sum * alone(ScoreFunction::Sigmoid, x[e]) / (2.0 * alone(score, x[e]) + 1e-20),
    };
    (0..x.len()).map(d).collect()
}

#[test]
fn aux_loss_gradients_match_finite_differences() {
    for score in SCORES {
        let (x, w) = (numbers(DType::F32, 1, 9), numbers(DType::F32, 2, 9));
        let wanted = differences(&x, |x| dot(&normalized(score, x), &w));
        same(&format!("{score:?}"), DType::F32, &balance_gradient(score, &x, &w), &wanted, 1e-8);
        let wanted = differences(&x, |x| logsumexp(x).powi(2));
        let ours: Vec<f64> = softmax(&x).iter().map(|y| 2.0 * logsumexp(&x) * y).collect();
        same("z", DType::F32, &ours, &wanted, 1e-8);
    }
}

#[test]
fn aux_loss_statistics_per_segment() {
    for_moe_dtypes(|h, dtype| {
        for (experts, k) in SIZES {
            for (i, &n) in tokens(experts).iter().enumerate() {
                for kind in 0..4 {
                    let score = SCORES[(kind + i) % 4];
                    let what = format!("{} {dtype} {n}x{experts} kind {kind} {score:?}", h.name);
                    let ((of, count), x) = (segments(kind, n), logits(dtype, 3, n, experts, true));
                    let lt = shifted(h, n % 2, dtype, &[n, experts], &x);
                    let st = h.ids(&of);
                    let b = AuxLoss { logits: &lt, score, k, segments: &st };
                    let shape = [count, experts];
                    let run = || {
                        let sums = h.poisoned(DType::F32, &shape);
                        let counts = i64s(h, &shape, &vec![-9; count * experts]);
                        h.k.aux_loss_stats(&h.s, &b, &sums, &counts).unwrap();
                        (h.host(&sums), h.s.download::<i64>(&counts).unwrap())
                    };
                    let (sums, counts) = run();
                    assert!((sums.clone(), counts.clone()) == run(), "{what}: not the same twice");
                    let row = |t: usize| &x[t * experts..(t + 1) * experts];
                    let (mut wanted, mut times) = (vec![0.0; count * experts], vec![0i64; count * experts]);
                    for s in 0..count {
                        for t in rows_of(&of, s) {
                            let y = normalized(score, row(t));
                            (0..experts).for_each(|e| wanted[s * experts + e] += y[e]);
                            ranked(row(t))[..k].iter().for_each(|e| times[s * experts + e] += 1);
                        }
                    }
                    assert_eq!(counts, times, "{what}");
                    // Sums of up to a thousand scores, each with an error of a few ulp.
                    for (o, w) in sums.iter().zip(&wanted) {
                        assert!((o - w).abs() <= 2e-6 * w.abs() + 1e-8, "{what}: {o} {w}");
                    }
                    let weights = numbers(DType::F32, 5, count * experts);
                    let wt = h.tensor(DType::F32, &shape, &weights);
                    let old = numbers(dtype, 6, n * experts);
                    let dt = shifted(h, (n + 1) % 2, dtype, &[n, experts], &old);
                    h.k.aux_loss_backward(&h.s, &b, &wt, &dt).unwrap();
                    let mut wanted = old.clone();
                    for (t, s) in of.iter().enumerate().filter(|(_, s)| **s >= 0) {
                        let d = balance_gradient(score, row(t), &weights[*s as usize * experts..][..experts]);
                        (0..experts).for_each(|e| wanted[t * experts + e] += d[e]);
                    }
                    same(&format!("{what} dx"), dtype, &h.host(&dt), &wanted, 2e-6);
                }
            }
        }
    });
}

/// A row of NaN makes all sums NaN; a single NaN logit makes its own sum NaN, or all of them for a softmax.
#[test]
fn aux_loss_of_nan_is_nan() {
    for_moe_dtypes(|h, dtype| {
        for score in SCORES {
            let x = [0.0, 1.0, f64::NAN, 2.0, 0.0, 1.0, 2.0, 3.0];
            let (lt, st) = (h.tensor(dtype, &[2, 4], &x), h.ids(&[0, 1]));
            let b = AuxLoss { logits: &lt, score, k: 3, segments: &st };
            let (sums, counts) = (h.poisoned(DType::F32, &[2, 4]), i64s(h, &[2, 4], &[0; 8]));
            h.k.aux_loss_stats(&h.s, &b, &sums, &counts).unwrap();
            let sums = h.host(&sums);
            assert!(
                sums[..4].iter().all(|s| s.is_nan()) && sums[4..].iter().all(|s| s.is_finite()),
                "{sums:?}"
            );
            assert_eq!(h.s.download::<i64>(&counts).unwrap(), [1, 1, 0, 1, 0, 1, 1, 1]);
        }
    });
}

/// Segments without tokens change nothing, to the bit: a captured step has room for more documents than it holds.
#[test]
fn empty_segments_of_an_aux_loss_by_tokens_do_not_count() {
    for h in devices() {
        for (used, experts) in [(1, 7), (5, 64), (130, 16)] {
            let run = |segments: usize| {
                let (n, shape) = (used * experts, [segments, experts]);
                let mut counts: Vec<i64> = (0..n).map(|i| ((i * 37) % 101) as i64).collect();
                let mut sums = numbers(DType::F32, 1, n);
                counts.resize(segments * experts, 0);
                sums.resize(segments * experts, 0.0);
                let (weights, loss) = (h.poisoned(DType::F32, &shape), h.tensor(DType::F32, &[1], &[0.5]));
                h.k.aux_loss_weights(
                    &h.s,
                    &AuxLossWeights {
                        coefficient: 0.01,
                        k: 2,
                        sums: &h.tensor(DType::F32, &shape, &sums),
                        counts: &i64s(&h, &shape, &counts),
                        steps: None,
                        by_tokens: true,
                        weights: &weights,
                        loss: &loss,
                    },
                )
                .unwrap();
                (h.host(&weights), h.host(&loss))
            };
            let (weights, loss) = run(used);
            for segments in [used + 1, 2 * used + 30] {
                let (mut found, found_loss) = run(segments);
                assert!(found.split_off(weights.len()).iter().all(|w| *w == 0.0), "{}", h.name);
                assert!(found == weights && found_loss == loss, "{} {used} of {segments}", h.name);
            }
        }
    }
}

/// Balanced experts have the loss of the coefficient, whatever the lengths of the documents.
#[test]
fn aux_loss_by_tokens_of_balanced_experts_is_the_coefficient() {
    for h in devices() {
        let (lengths, experts, k) = ([4000, 1, 1, 0, 40, 7], 4, 2);
        let shape = [lengths.len(), experts];
        // Every expert has n·k/E of n tokens, all of them with the probability 1/E; twice that, to have whole numbers.
        let counts: Vec<i64> = lengths.iter().flat_map(|n| [n * k as i64 / 2; 4]).collect();
        let sums: Vec<f64> = lengths.iter().flat_map(|n| [*n as f64 * 2.0 / 4.0; 4]).collect();
        let (weights, loss) = (h.poisoned(DType::F32, &shape), h.tensor(DType::F32, &[1], &[0.0]));
        h.k.aux_loss_weights(
            &h.s,
            &AuxLossWeights {
                coefficient: 0.25,
                k,
                sums: &h.tensor(DType::F32, &shape, &sums),
                counts: &i64s(&h, &shape, &counts),
                steps: None,
                by_tokens: true,
                weights: &weights,
                loss: &loss,
            },
        )
        .unwrap();
        assert!((h.host(&loss)[0] - 0.25).abs() < 1e-6, "{} {:?}", h.name, h.host(&loss));
    }
}

#[test]
fn aux_loss_and_its_weights() {
    for h in devices() {
        for (count, experts, k) in [(0, 4, 2), (1, 1, 1), (1, 7, 3), (5, 64, 8), (300, 16, 2), (3, 1024, 32)]
        {
            for (steps, by_tokens) in [(None, false), (Some(3.0), false), (None, true), (Some(3.0), true)] {
                let what = format!("{} {count}x{experts} {steps:?} {by_tokens}", h.name);
                let n = count * experts;
                // Every fourth segment is empty.
                let tokens = |i: usize| if i / experts % 4 == 3 { 0 } else { (i * 37) % 101 };
                let counts: Vec<i64> = (0..n).map(|i| tokens(i) as i64).collect();
                let sums = numbers(DType::F32, 1, n);
                let shape = [count, experts];
                let (st, ct) = (h.tensor(DType::F32, &shape, &sums), i64s(&h, &shape, &counts));
                let divisor = steps.map(|s| h.tensor(DType::F32, &[1], &[s]));
                let (wt, loss) = (h.poisoned(DType::F32, &shape), h.tensor(DType::F32, &[1], &[0.5]));
                let factor = 0.01;
                h.k.aux_loss_weights(
                    &h.s,
                    &AuxLossWeights {
                        coefficient: factor,
                        k,
                        sums: &st,
                        counts: &ct,
                        steps: divisor.as_ref(),
                        by_tokens,
                        weights: &wt,
                        loss: &loss,
                    },
                )
                .unwrap();
                let real: Vec<f64> = counts.iter().map(|c| *c as f64 / steps.unwrap_or(1.0)).collect();
                let all = real.iter().sum::<f64>() / k as f64;
                let mean = all / count as f64;
                let each = |squared: f64| f64::from(factor) * experts as f64 / (k as f64 * squared);
                // L = Σ_s n_s/N·coefficient·E/(k·n_s²)·Σ_e P_se·c_se, or the mean number of tokens for every n_s.
                let weights: Vec<f64> = real
                    .chunks(experts)
                    .flat_map(|row| {
                        let own = row.iter().sum::<f64>() / k as f64;
                        let each = if by_tokens { own / all * each(own * own) } else { each(mean * mean) };
                        row.iter().map(move |c| if *c == 0.0 { 0.0 } else { each * c })
                    })
                    .collect();
                close(&what, DType::F32, &h.host(&wt), &weights, 1e-9);
                close(&what, DType::F32, &h.host(&loss), &[0.5 + dot(&weights, &sums)], 1e-7);
            }
        }
    }
}

#[test]
fn z_loss_skips_padding() {
    for_moe_dtypes(|h, dtype| {
        for (experts, _) in SIZES {
            for &n in tokens(experts) {
                for kind in 0..4 {
                    let what = format!("{} {dtype} {n}x{experts} kind {kind}", h.name);
                    let ((of, _), x) = (segments(kind, n), logits(dtype, 4, n, experts, true));
                    let lt = shifted(h, n % 2, dtype, &[n, experts], &x);
                    let (st, sums) =
                        (h.ids(&of), h.s.upload(&[10.0, 2.0], &[2], Category::Workspace).unwrap());
                    h.k.z_loss(&h.s, &lt, &st, &sums).unwrap();
                    let row = |t: usize| &x[t * experts..(t + 1) * experts];
                    let live = || (0..n).filter(|t| of[*t] >= 0);
                    let wanted = 10.0 + live().map(|t| logsumexp(row(t)).powi(2)).sum::<f64>();
                    let found = h.s.download::<f64>(&sums).unwrap();
                    assert!((found[0] - wanted).abs() <= 1e-6 * wanted, "{what}: {} {wanted}", found[0]);
                    assert_eq!(found[1], 2.0 + live().count() as f64, "{what}");
                    let old = numbers(dtype, 6, n * experts);
                    let dt = shifted(h, (n + 1) % 2, dtype, &[n, experts], &old);
                    h.k.z_loss_backward(
                        &h.s,
                        &ZLossBackward {
                            coefficient: 3.0,
                            sums: &sums,
                            logits: &lt,
                            segments: &st,
                            dlogits: &dt,
                        },
                    )
                    .unwrap();
                    let mut wanted = old.clone();
                    for t in live() {
                        let each = 3.0 / found[1] * 2.0 * logsumexp(row(t));
                        softmax(row(t))
                            .iter()
                            .enumerate()
                            .for_each(|(e, y)| wanted[t * experts + e] += each * y);
                    }
                    same(&format!("{what} dx"), dtype, &h.host(&dt), &wanted, 2e-6);
                }
            }
        }
    });
}

/// Only padding tokens: no division by zero.
#[test]
fn z_loss_without_tokens() {
    for h in devices() {
        let (lt, st) = (h.tensor(DType::F32, &[2, 3], &[1.0; 6]), h.ids(&[-1, -1]));
        let sums = h.s.zeros(&[2], DType::F64, Category::Workspace).unwrap();
        let dt = h.tensor(DType::F32, &[2, 3], &[0.25; 6]);
        h.k.z_loss(&h.s, &lt, &st, &sums).unwrap();
        h.k.z_loss_backward(
            &h.s,
            &ZLossBackward { coefficient: 1.0, sums: &sums, logits: &lt, segments: &st, dlogits: &dt },
        )
        .unwrap();
        assert_eq!(h.s.download::<f64>(&sums).unwrap(), [0.0, 0.0]);
        assert_eq!(h.host(&dt), [0.25; 6]);
    }
}

/// Inputs and outputs computed by the reference implementation of the specification.
#[test]
fn vectors_of_the_specification() {
    for h in devices() {
        let lt = h.tensor(DType::F32, &[3, 4], &[2., 1., 0., -1., 0., 2., 1., -1., 1., 0., 3., -2.]);
        let st = h.ids(&[0, 0, 0]);
        let b = AuxLoss { logits: &lt, score: ScoreFunction::Softmax, k: 1, segments: &st };
        let (sums, weights) = (h.poisoned(DType::F32, &[1, 4]), h.poisoned(DType::F32, &[1, 4]));
        let (counts, loss) = (i64s(&h, &[1, 4], &[0; 4]), h.tensor(DType::F32, &[1], &[0.0]));
        h.k.aux_loss_stats(&h.s, &b, &sums, &counts).unwrap();
        h.k.aux_loss_weights(
            &h.s,
            &AuxLossWeights {
                coefficient: 1.0,
                k: 1,
                sums: &sums,
                counts: &counts,
                steps: None,
                by_tokens: false,
                weights: &weights,
                loss: &loss,
            },
        )
        .unwrap();
        assert_eq!(h.s.download::<i64>(&counts).unwrap(), [1, 1, 1, 0]);
        assert!((h.host(&loss)[0] - 1.302324).abs() < 1e-6, "{}", h.name);
        let z = h.s.zeros(&[2], DType::F64, Category::Workspace).unwrap();
        h.k.z_loss(&h.s, &lt, &st, &z).unwrap();
        let z = h.s.download::<f64>(&z).unwrap();
        assert!((z[0] / z[1] - 7.330983).abs() < 1e-6, "{}", h.name);
        let out = h.poisoned(DType::F32, &[3, 4]);
        h.k.sinkhorn(&h.s, &lt, &out).unwrap();
        let wanted = [0.163718, 0.057918, 0.010109, 0.101593];
        assert!(h.host(&out).iter().zip(wanted).all(|(o, w)| (o - w).abs() < 1e-6), "{}", h.name);
    }
}

#[test]
fn invalid_arguments_are_errors() {
    for h in devices() {
        let (k, s) = (&h.k, &h.s);
        let z = |dtype, shape: &[usize]| h.tensor(dtype, shape, &vec![0.0; shape.iter().product()]);
        let (x, st, far) = (z(DType::F32, &[3, 4]), h.ids(&[0, 1, -1]), h.ids(&[0, 2, 0]));
        let (sums, counts, one) = (z(DType::F32, &[2, 4]), i64s(&h, &[2, 4], &[0; 8]), z(DType::F32, &[1]));
        let (weights, bf16_dlogits) = (z(DType::F32, &[2, 4]), z(DType::BF16, &[3, 4]));
        let b = AuxLoss { logits: &x, score: ScoreFunction::Sigmoid, k: 2, segments: &st };
        let zs = s.zeros(&[2], DType::F64, Category::Workspace).unwrap();
        let short = h.ids(&[0, 1]);
        refused(
            &h,
            "a segment that is not",
            k.aux_loss_stats(s, &AuxLoss { segments: &far, ..b }, &sums, &counts),
        );
        refused(
            &h,
            "its weights",
            k.aux_loss_backward(s, &AuxLoss { segments: &far, ..b }, &weights, &z(DType::F32, &[3, 4])),
        );
        refused(&h, "rows", k.aux_loss_stats(s, &AuxLoss { segments: &short, ..b }, &sums, &counts));
        refused(&h, "selections", k.aux_loss_stats(s, &AuxLoss { k: 5, ..b }, &sums, &counts));
        refused(&h, "no selections", k.aux_loss_stats(s, &AuxLoss { k: 0, ..b }, &sums, &counts));
        refused(&h, "counts", k.aux_loss_stats(s, &b, &sums, &i64s(&h, &[2, 3], &[0; 6])));
        refused(&h, "small counts", k.aux_loss_stats(s, &b, &sums, &z(DType::I32, &[2, 4])));
        refused(&h, "type of the gradient", k.aux_loss_backward(s, &b, &weights, &bf16_dlogits));
        refused(
            &h,
            "experts of weights",
            k.aux_loss_backward(s, &b, &z(DType::F32, &[2, 3]), &z(DType::F32, &[3, 4])),
        );
        refused(
            &h,
            "steps",
            k.aux_loss_weights(
                s,
                &AuxLossWeights {
                    coefficient: 1.0,
                    k: 2,
                    sums: &sums,
                    counts: &counts,
                    steps: Some(&sums),
                    by_tokens: false,
                    weights: &weights,
                    loss: &one,
                },
            ),
        );
        refused(
            &h,
            "loss",
            k.aux_loss_weights(
                s,
                &AuxLossWeights {
                    coefficient: 1.0,
                    k: 2,
                    sums: &sums,
                    counts: &counts,
                    steps: None,
                    by_tokens: false,
                    weights: &weights,
                    loss: &z(DType::F32, &[2]),
                },
            ),
        );
        refused(&h, "f32 sums", k.z_loss(s, &x, &st, &z(DType::F32, &[2])));
        refused(&h, "rows of z", k.z_loss(s, &x, &short, &zs));
        refused(
            &h,
            "gradient of z",
            k.z_loss_backward(
                s,
                &ZLossBackward {
                    coefficient: 1.0,
                    sums: &zs,
                    logits: &x,
                    segments: &st,
                    dlogits: &bf16_dlogits,
                },
            ),
        );
    }
}
