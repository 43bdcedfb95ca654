//! Activations with rows weighted by routing probabilities.

use super::devices::*;
use super::elementwise::{linear_half, value};
use super::permutation::{ints, shifted};
use ferrotron_kernels::{Act, WeightedAct, WeightedActBackward};
use ferrotron_tensor::{DType, Tensor};

const ACTS: [Act; 5] = [
    Act::GeluTanh,
    Act::GeluErf,
    Act::Silu,
    Act::SquaredRelu,
    Act::ClampedSilu { limit: 2.003, alpha: 1.702, offset: 1.0 },
];

fn forms() -> impl Iterator<Item = (Act, bool)> {
    let plain = ACTS.into_iter().filter(|a| !matches!(a, Act::ClampedSilu { .. }));
    ACTS.into_iter().map(|a| (a, true)).chain(plain.map(|a| (a, false)))
}

/// One element before weighting, from the first half of a row and, if gated, the second.
fn element(act: Act, gated: bool, g: f64, u: f64) -> f64 {
    value(act, g) * if gated { linear_half(act, u) } else { 1.0 }
}

fn slope(f: &dyn Fn(f64) -> f64, x: f64) -> f64 {
    (f(x + 1e-5) - f(x - 1e-5)) / 2e-5
}

#[test]
fn weighted_activation_and_its_gradients() {
    for_moe_dtypes(|h, dtype| {
        for ((act, gated), (rows, f)) in
            forms().flat_map(|a| [(0, 8), (1, 1), (7, 19), (5, 64), (33, 300), (3, 1030)].map(|z| (a, z)))
        {
            for shift in [0, 1] {
                let what = format!("{} {dtype} {act:?} gated {gated} {rows}x{f} shifted {shift}", h.name);
                let wide = if gated { 2 * f } else { f };
                let mut x: Vec<f64> =
                    numbers(dtype, 1, rows * wide).iter().map(|x| rounded(dtype, x * 3.0)).collect();
                let mut p = numbers(DType::F32, 2, rows);
                let mut dy = numbers(dtype, 3, rows * f);
                // Every third row is padding: probability 0 and uninitialized.
                let is_padding = |r: usize| r % 3 == 1;
                let live: Vec<i32> = (0..rows).map(|r| if is_padding(r) { -1 } else { r as i32 }).collect();
                for r in (0..rows).filter(|r| is_padding(*r)) {
                    p[r] = 0.0;
                    x[r * wide..][..wide].fill(if r % 2 == 0 { f64::NAN } else { f64::INFINITY });
                    dy[r * f..][..f].fill(f64::NAN);
                }
                let t = |dtype, shape: &[usize], v: &[f64]| shifted(h, shift, dtype, shape, v);
                let empty = |dtype, shape: &[usize]| t(dtype, shape, &vec![f64::NAN; shape.iter().product()]);
                let xt = t(dtype, &[rows, wide], &x);
                let (pt, livet) = (t(DType::F32, &[rows], &p), ints(h, &[rows], &live));
                let y = empty(dtype, &[rows, f]);
                h.k.weighted_act(&h.s, &WeightedAct { act, gated, x: &xt, probs: &pt, y: &y }).unwrap();
                let (dx, dp) = (empty(dtype, &[rows, wide]), empty(DType::F32, &[rows]));
                let dyt = t(dtype, &[rows, f], &dy);
                h.k.weighted_act_backward(
                    &h.s,
                    &WeightedActBackward {
                        act,
                        gated,
                        x: &xt,
                        probs: &pt,
                        source: &livet,
                        dy: &dyt,
                        dx: &dx,
                        dprobs: &dp,
                    },
                )
                .unwrap();

                let (mut wy, mut wdx, mut wdp) =
                    (vec![0.0; rows * f], vec![0.0; rows * wide], vec![0.0; rows]);
                for r in (0..rows).filter(|r| !is_padding(*r)) {
                    for c in 0..f {
                        let (g, u) = (x[r * wide + c], if gated { x[r * wide + f + c] } else { 0.0 });
                        let (plain, d) = (element(act, gated, g, u), dy[r * f + c]);
                        wy[r * f + c] = p[r] * plain;
                        wdp[r] += d * plain;
                        wdx[r * wide + c] = p[r] * d * slope(&|g| element(act, gated, g, u), g);
                        if gated {
                            wdx[r * wide + f + c] = p[r] * d * slope(&|u| element(act, gated, g, u), u);
                        }
                    }
                }
                close(&what, dtype, &h.host(&y), &wy, 4e-6);
                close(&format!("{what} dx"), dtype, &h.host(&dx), &wdx, 4e-6);
                close(
                    &format!("{what} dp"),
                    DType::F32,
                    &h.host(&dp),
                    &wdp,
                    1e-6 * (1.0 + f as f64).sqrt() * 3.0,
                );
            }
        }
    });
}

/// A row of probability 0 that is not padding gets a gradient; infinities stay in their rows.
#[test]
fn probability_gradient_exists_where_the_probability_is_zero() {
    for_moe_dtypes(|h, dtype| {
        let x = h.tensor(dtype, &[2, 4], &[0.5, 1.0, 2.0, -1.0, f64::INFINITY, 1.0, 1.0, f64::NAN]);
        let (p, live) = (h.tensor(DType::F32, &[2], &[0.0, 1.0]), ints(h, &[2], &[0, 1]));
        let y = h.poisoned(dtype, &[2, 2]);
        h.k.weighted_act(&h.s, &WeightedAct { act: Act::Silu, gated: true, x: &x, probs: &p, y: &y })
            .unwrap();
        let y = h.host(&y);
        assert_eq!(y[..3], [0.0, 0.0, f64::INFINITY], "{} {dtype}", h.name);
        assert!(y[3].is_nan(), "{} {dtype}", h.name);
        let (dx, dp) = (h.poisoned(dtype, &[2, 4]), h.poisoned(DType::F32, &[2]));
        let dy = h.tensor(dtype, &[2, 2], &[1.0, 0.5, 1.0, 1.0]);
        h.k.weighted_act_backward(
            &h.s,
            &WeightedActBackward {
                act: Act::Silu,
                gated: true,
                x: &x,
                probs: &p,
                source: &live,
                dy: &dy,
                dx: &dx,
                dprobs: &dp,
            },
        )
        .unwrap();
        let want = value(Act::Silu, 0.5) * 2.0 - value(Act::Silu, 1.0) * 0.5;
        close(&h.name, DType::F32, &h.host(&dp)[..1], &[want], 1e-6);
        assert!(h.host(&dx)[..4].iter().all(|x| *x == 0.0), "{} {dtype}", h.name);
    });
}

#[test]
fn invalid_arguments_are_errors() {
    for_moe_dtypes(|h, dtype| {
        let z =
            |dtype, shape: &[usize]| -> Tensor { h.tensor(dtype, shape, &vec![0.0; shape.iter().product()]) };
        let (x, p, y) = (z(dtype, &[4, 6]), z(DType::F32, &[4]), z(dtype, &[4, 3]));
        let live = z(DType::I32, &[4]);
        let other = if dtype == DType::F32 { DType::BF16 } else { DType::F32 };
        let clamped = ACTS[4];
        for (what, act, gated, x, p, y) in [
            ("halves", Act::Silu, true, &z(dtype, &[4, 5]), &p, &y),
            ("rows", Act::Silu, true, &z(dtype, &[3, 6]), &p, &y),
            ("weights", Act::Silu, true, &x, &z(DType::F32, &[3]), &y),
            ("weights of two axes", Act::Silu, true, &x, &z(DType::F32, &[4, 1]), &y),
            ("16-bit weights", Act::Silu, true, &x, &z(DType::BF16, &[4]), &y),
            ("types", Act::Silu, true, &x, &p, &z(other, &[4, 3])),
            ("integers", Act::Silu, true, &z(DType::I32, &[4, 6]), &p, &z(DType::I32, &[4, 3])),
            ("transposed", Act::Silu, true, &z(dtype, &[6, 4]).transpose(0, 1).unwrap(), &p, &y),
            ("plain halves", Act::Silu, false, &x, &p, &y),
            ("clamped without a gate", clamped, false, &y, &p, &z(dtype, &[4, 3])),
        ] {
            assert!(
                h.k.weighted_act(&h.s, &WeightedAct { act, gated, x, probs: p, y }).is_err(),
                "{} {what}",
                h.name
            );
        }
        for (what, live, dx, dp) in [
            ("short rows", &z(DType::I32, &[3]), &z(dtype, &[4, 6]), &z(DType::F32, &[4])),
            ("float rows", &z(DType::F32, &[4]), &z(dtype, &[4, 6]), &z(DType::F32, &[4])),
            ("dx", &live, &z(dtype, &[4, 3]), &z(DType::F32, &[4])),
            ("dx of another type", &live, &z(other, &[4, 6]), &z(DType::F32, &[4])),
            ("dp", &live, &z(dtype, &[4, 6]), &z(DType::F32, &[5])),
            ("16-bit dp", &live, &z(dtype, &[4, 6]), &z(DType::BF16, &[4])),
        ] {
            let go = h.k.weighted_act_backward(
                &h.s,
                &WeightedActBackward {
                    act: Act::Silu,
                    gated: true,
                    x: &x,
                    probs: &p,
                    source: live,
                    dy: &y,
                    dx,
                    dprobs: dp,
                },
            );
            assert!(go.is_err(), "{} {what}", h.name);
        }
    });
}
