//! Grouped bias: one bias per expert, weighted by routing probabilities.

use super::devices::*;
use super::permutation::{draws, ints, plan, shifted};
use ferrotron_kernels::{GroupedBias, Segments};
use ferrotron_tensor::{DType, Tensor};

#[test]
fn grouped_bias_and_its_gradients() {
    for_moe_dtypes(|h, dtype| {
        for (selections, experts, align) in [
            (0, 1, 1),
            (1, 4, 16),
            (15, 4, 1),
            (129, 7, 16),
            (400, 130, 16),
            (1000, 4, 128),
            (2000, 1, 1),
            (1000, 0, 1),
        ] {
            for n in [1, 8, 19, 300] {
                for (shift, skewed) in [(0, false), (1, false), (0, true)] {
                    // One expert has all tokens, or the last few have none.
                    let top = if skewed { 1 } else { experts.max(2) - 1 };
                    let index = draws(1, selections, 0, top as i32);
                    let rows = selections + experts * (align - 1) + 3;
                    let plan = plan(&index, 0, experts, align, rows);
                    let what =
                        format!("{} {dtype} {selections} of {experts} by {align} x {n} {shift}", h.name);
                    let owner = |r: usize| {
                        let ends = |e: usize| (plan.offsets[e] + plan.counts[e]) as usize;
                        (0..experts).find(|e| (plan.offsets[*e] as usize..ends(*e)).contains(&r))
                    };
                    let owners: Vec<Option<usize>> = (0..rows).map(owner).collect();
                    let t = |dtype, shape: &[usize], v: &[f64]| shifted(h, shift, dtype, shape, v);
                    let (b, w) = (numbers(dtype, 2, experts * n), numbers(DType::F32, 3, rows));
                    let (bias, weights) = (t(dtype, &[experts, n], &b), t(DType::F32, &[rows], &w));
                    let (offsets, counts) =
                        (ints(h, &[experts + 1], &plan.offsets), ints(h, &[experts], &plan.counts));
                    let segments = Segments { offsets: &offsets, counts: &counts };
                    let rb = GroupedBias { segments, bias: &bias, weights: Some(&weights) };

                    let y = numbers(dtype, 4, rows * n);
                    let yt = t(dtype, &[rows, n], &y);
                    h.k.grouped_bias(&h.s, &rb, &yt).unwrap();
                    let term = |i: usize| owners[i / n].map_or(0.0, |e| w[i / n] * b[e * n + i % n]);
                    let want: Vec<f64> = (0..rows * n).map(|i| y[i] + term(i)).collect();
                    close(&what, dtype, &h.host(&yt), &want, 1.3e-7);

                    // Without weights, all are 1.
                    let ones = t(DType::F32, &[rows], &vec![1.0; rows]);
                    let plain = [Some(&ones), None].map(|weights| {
                        let (rb, yt) = (GroupedBias { weights, ..rb }, t(dtype, &[rows, n], &y));
                        h.k.grouped_bias(&h.s, &rb, &yt).unwrap();
                        let dbias = t(DType::F32, &[experts, n], &vec![f64::NAN; experts * n]);
                        h.k.grouped_bias_backward(&h.s, &rb, &yt, (&dbias, false), None).unwrap();
                        (h.host(&yt), h.host(&dbias))
                    });
                    assert!(plain[0] == plain[1], "{what}");

                    // Padding rows are uninitialized.
                    let mut dy = numbers(dtype, 5, rows * n);
                    for r in (0..rows).filter(|r| owners[*r].is_none()) {
                        dy[r * n..][..n].fill(f64::NAN);
                    }
                    let dyt = t(dtype, &[rows, n], &dy);
                    for accumulate in [false, true] {
                        let old = numbers(DType::F32, 6, experts * n);
                        let before = if accumulate { old.clone() } else { vec![f64::NAN; experts * n] };
                        let dbias = t(DType::F32, &[experts, n], &before);
                        let dw = numbers(DType::F32, 7, rows);
                        let dweights = t(DType::F32, &[rows], &dw);
                        h.k.grouped_bias_backward(
                            &h.s,
                            &rb,
                            &dyt,
                            (&dbias, accumulate),
                            accumulate.then_some(&dweights),
                        )
                        .unwrap();
                        let mut want = if accumulate { old } else { vec![0.0; experts * n] };
                        let mut wanted_weights = dw.clone();
                        for (r, e) in owners.iter().enumerate().filter_map(|(r, e)| Some((r, (*e)?))) {
                            for c in 0..n {
                                want[e * n + c] += w[r] * dy[r * n + c];
                            }
                            if accumulate {
                                wanted_weights[r] += dot(&dy[r * n..][..n], &b[e * n..][..n]);
                            }
                        }
                        let most = plan.counts.iter().max().copied().unwrap_or(0);
                        let slack = 2f64.powi(-23) * f64::from(2 + most).sqrt() * 4.0;
                        close(&format!("{what} dbias"), DType::F32, &h.host(&dbias), &want, slack);
                        let slack = 2f64.powi(-23) * (2.0 + n as f64).sqrt() * 2.0;
                        let ours = h.host(&dweights);
                        close(&format!("{what} dweights"), DType::F32, &ours, &wanted_weights, slack);
                    }
                }
            }
        }
    });
}

/// Expected split sizes of messages leave room behind the segments, which changes from step to step.
#[test]
fn room_behind_the_segments_changes_no_bits_of_the_gradient() {
    for_moe_dtypes(|h, dtype| {
        let (counts, n, taken) = ([20_000, 0, 5, 30_000], 3, 50_005);
        let gradient = |room: usize| {
            let mut dy = numbers(dtype, 5, taken * n);
            dy.resize((taken + room) * n, f64::NAN);
            let dy = h.tensor(dtype, &[taken + room, n], &dy);
            let (offsets, counts) = (h.ids(&[0, 20_000, 20_000, 20_005, 50_005]), h.ids(&counts));
            let segments = Segments { offsets: &offsets, counts: &counts };
            let bias = h.tensor(dtype, &[4, n], &vec![0.0; 4 * n]);
            let dbias = h.tensor(DType::F32, &[4, n], &vec![f64::NAN; 4 * n]);
            let b = GroupedBias { segments, bias: &bias, weights: None };
            h.k.grouped_bias_backward(&h.s, &b, &dy, (&dbias, false), None).unwrap();
            h.host(&dbias)
        };
        let exact = gradient(0);
        for room in [70, 15_000, 80_000] {
            assert!(gradient(room) == exact, "{} {dtype} {room}", h.name);
        }
    });
}

#[test]
fn invalid_biases_are_errors() {
    for_moe_dtypes(|h, dtype| {
        let z = |dtype, shape: &[usize]| h.tensor(dtype, shape, &vec![0.0; shape.iter().product()]);
        let other = if dtype == DType::F32 { DType::BF16 } else { DType::F32 };
        let (f, i) = (DType::F32, DType::I32);
        let go = |what: &str,
                  o: &[usize],
                  c: &[usize],
                  b: (DType, &[usize]),
                  w: (DType, &[usize]),
                  y: &[usize]| {
            let (offsets, counts, bias, weights) = (z(i, o), z(i, c), z(b.0, b.1), z(w.0, w.1));
            let segments = Segments { offsets: &offsets, counts: &counts };
            let rb = GroupedBias { segments, bias: &bias, weights: Some(&weights) };
            assert!(h.k.grouped_bias(&h.s, &rb, &z(dtype, y)).is_err(), "{} {what}", h.name);
        };
        go("offsets", &[3], &[3], (dtype, &[3, 5]), (f, &[9]), &[9, 5]);
        go("counts", &[4], &[2], (dtype, &[3, 5]), (f, &[9]), &[9, 5]);
        go("bias", &[4], &[3], (dtype, &[3, 4]), (f, &[9]), &[9, 5]);
        go("a bias of another type", &[4], &[3], (other, &[3, 5]), (f, &[9]), &[9, 5]);
        go("weights", &[4], &[3], (dtype, &[3, 5]), (f, &[8]), &[9, 5]);
        go("16-bit weights", &[4], &[3], (dtype, &[3, 5]), (DType::BF16, &[9]), &[9, 5]);
        go("flat rows", &[4], &[3], (dtype, &[3, 5]), (f, &[9]), &[45]);
        let (offsets, counts) = (z(i, &[4]), z(i, &[3]));
        let (bias, weights, dy) = (z(dtype, &[3, 5]), z(f, &[9]), z(dtype, &[9, 5]));
        let segments = Segments { offsets: &offsets, counts: &counts };
        let rb = GroupedBias { segments, bias: &bias, weights: Some(&weights) };
        let back = |dbias: &Tensor, dweights: &Tensor| {
            h.k.grouped_bias_backward(&h.s, &rb, &dy, (dbias, true), Some(dweights))
        };
        assert!(back(&z(f, &[3, 4]), &z(f, &[9])).is_err(), "{}", h.name);
        assert!(back(&z(DType::BF16, &[3, 5]), &z(f, &[9])).is_err(), "{}", h.name);
        assert!(back(&z(f, &[3, 5]), &z(f, &[8])).is_err(), "{}", h.name);
        assert!(back(&z(f, &[3, 5]), &z(DType::BF16, &[9])).is_err(), "{}", h.name);
        let same = z(f, &[9]);
        let rb = GroupedBias { weights: Some(&same), ..rb };
        let go = h.k.grouped_bias_backward(&h.s, &rb, &dy, (&z(f, &[3, 5]), true), Some(&same));
        assert!(go.is_err(), "{}: weights over their gradient", h.name);
    });
}
