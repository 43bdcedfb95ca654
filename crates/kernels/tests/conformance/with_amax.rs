//! Kernels that also compute the amax of their output: the output is that of the plain kernel, and amax is its maximum.

use crate::devices::{TestDevice, everywhere, for_moe_dtypes, numbers};
use ferrotron_kernels::{
    Act, ActBackward, ActForward, Norm, NormForward, ResidualAdd, WeightedAct, WeightedActBackward,
};
use ferrotron_tensor::{Category, DType, Tensor};

/// The amax tensor, with its value before the kernel.
fn amax(h: &TestDevice, from: f32) -> Tensor {
    h.s.upload(&[from], &[1], Category::Workspace).unwrap()
}

/// Checks that amax is the maximum of its value before and of `result`.
fn check(h: &TestDevice, what: &str, result: &Tensor, plain: &Tensor, from: f32, largest: &Tensor) {
    let (ours, wanted) = (h.host(result), h.host(plain));
    assert!(
        ours.iter().zip(&wanted).all(|(a, b)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())),
        "{what}: another result"
    );
    // f64::max ignores NaN.
    let wanted = wanted.iter().fold(f64::from(from), |m, x| m.max(x.abs()));
    assert_eq!(h.host(largest), [wanted], "{what}");
}

/// Finite values, values with NaN and with infinity; and the amax before.
const KINDS: [(usize, f32); 4] = [(0, 0.0), (0, 1e9), (1, 0.0), (2, 0.0)];

fn spoiled(mut v: Vec<f64>, kind: usize) -> Vec<f64> {
    let at = v.len() / 3;
    if let Some(x) = v.get_mut(at) {
        *x = [*x, f64::NAN, f64::INFINITY][kind];
    }
    v
}

#[test]
fn amax_of_activations_is_of_stored_values() {
    everywhere(|h, dtype| {
        for (rows, f) in [(0, 8), (1, 1), (3, 5), (7, 64), (33, 1000), (64, 2048)] {
            for gated in [false, true] {
                let wide = if gated { 2 * f } else { f };
                for (kind, from) in KINDS {
                    let what = format!("{} {dtype} {rows}x{f} gated {gated} kind {kind}", h.name);
                    let x = h.tensor(dtype, &[rows, wide], &spoiled(numbers(dtype, 1, rows * wide), kind));
                    let (y, plain) = (h.poisoned(dtype, &[rows, f]), h.poisoned(dtype, &[rows, f]));
                    let most = amax(h, from);
                    h.k.act_forward(&h.s, &ActForward { act: Act::Silu, gated, x: &x, y: &plain }).unwrap();
                    h.k.act_forward_amax(&h.s, &ActForward { act: Act::Silu, gated, x: &x, y: &y }, &most)
                        .unwrap();
                    check(h, &what, &y, &plain, from, &most);
                    let dy = h.tensor(dtype, &[rows, f], &spoiled(numbers(dtype, 2, rows * f), kind));
                    let (dx, plain) = (h.poisoned(dtype, &[rows, wide]), h.poisoned(dtype, &[rows, wide]));
                    let most = amax(h, from);
                    h.k.act_backward(
                        &h.s,
                        &ActBackward { act: Act::GeluTanh, gated, x: &x, dy: &dy, dx: &plain },
                    )
                    .unwrap();
                    h.k.act_backward_amax(
                        &h.s,
                        &ActBackward { act: Act::GeluTanh, gated, x: &x, dy: &dy, dx: &dx },
                        &most,
                    )
                    .unwrap();
                    check(h, &what, &dx, &plain, from, &most);
                }
            }
        }
    });
}

#[test]
fn amax_of_weighted_activations_is_of_stored_values() {
    for_moe_dtypes(|h, dtype| {
        for (rows, f) in [(0, 8), (1, 1), (3, 5), (7, 64), (33, 1000), (64, 768)] {
            for gated in [false, true] {
                let wide = if gated { 2 * f } else { f };
                for (kind, from) in KINDS {
                    let what = format!("{} {dtype} {rows}x{f} gated {gated} kind {kind}", h.name);
                    let x = h.tensor(dtype, &[rows, wide], &spoiled(numbers(dtype, 1, rows * wide), kind));
                    let p = h.tensor(DType::F32, &[rows], &numbers(DType::F32, 5, rows));
                    let live: Vec<i32> = (0..rows).map(|r| if r % 4 == 1 { -1 } else { r as i32 }).collect();
                    let live = h.ids(&live);
                    let (y, plain) = (h.poisoned(dtype, &[rows, f]), h.poisoned(dtype, &[rows, f]));
                    let most = amax(h, from);
                    h.k.weighted_act(
                        &h.s,
                        &WeightedAct { act: Act::Silu, gated, x: &x, probs: &p, y: &plain },
                    )
                    .unwrap();
                    h.k.weighted_act_amax(
                        &h.s,
                        &WeightedAct { act: Act::Silu, gated, x: &x, probs: &p, y: &y },
                        &most,
                    )
                    .unwrap();
                    check(h, &what, &y, &plain, from, &most);
                    let dy = h.tensor(dtype, &[rows, f], &spoiled(numbers(dtype, 2, rows * f), kind));
                    let (dx, plain) = (h.poisoned(dtype, &[rows, wide]), h.poisoned(dtype, &[rows, wide]));
                    let dps = [(); 2].map(|()| h.poisoned(DType::F32, &[rows]));
                    let (most, act) = (amax(h, from), Act::GeluTanh);
                    h.k.weighted_act_backward(
                        &h.s,
                        &WeightedActBackward {
                            act,
                            gated,
                            x: &x,
                            probs: &p,
                            source: &live,
                            dy: &dy,
                            dx: &plain,
                            dprobs: &dps[0],
                        },
                    )
                    .unwrap();
                    h.k.weighted_act_backward_amax(
                        &h.s,
                        &WeightedActBackward {
                            act,
                            gated,
                            x: &x,
                            probs: &p,
                            source: &live,
                            dy: &dy,
                            dx: &dx,
                            dprobs: &dps[1],
                        },
                        &most,
                    )
                    .unwrap();
                    check(h, &what, &dx, &plain, from, &most);
                    let bits = |t: &Tensor| -> Vec<u64> { h.host(t).iter().map(|x| x.to_bits()).collect() };
                    assert!(kind > 0 || bits(&dps[0]) == bits(&dps[1]), "{what}: other gradients of weights");
                }
            }
        }
    });
}

#[test]
fn amax_of_norms_is_of_stored_values() {
    everywhere(|h, dtype| {
        for (rows, width) in
            [(1, 8), (3, 5), (37, 64), (200, 768), (70, 2048), (33, 4096), (9, 8192), (3, 20_000)]
        {
            for (layer, (kind, from)) in
                [(false, KINDS[0]), (true, KINDS[0]), (false, KINDS[1]), (true, KINDS[2])]
            {
                let what = format!("{} {dtype} {rows}x{width} layer {layer} kind {kind}", h.name);
                let norm = Norm { subtract_mean: layer, eps: 1e-5, zero_centred: false };
                let shape = [rows, width];
                let make = |seed| h.tensor(dtype, &shape, &spoiled(numbers(dtype, seed, rows * width), kind));
                let (x, residual) = (make(1), make(2));
                let gamma = h.tensor(dtype, &[width], &numbers(dtype, 3, width));
                let beta = h.tensor(dtype, &[width], &numbers(dtype, 4, width));
                let stats = [(); 2].map(|()| h.poisoned(DType::F32, &[rows]));
                let out = [(); 4].map(|()| h.poisoned(dtype, &shape));
                let n = |y| NormForward {
                    x: &x,
                    gamma: &gamma,
                    beta: layer.then_some(&beta),
                    y,
                    mean: layer.then_some(&stats[0]),
                    rstd: &stats[1],
                };
                let most = amax(h, from);
                h.k.norm_forward(&h.s, norm, &n(&out[0])).unwrap();
                h.k.norm_forward_amax(&h.s, norm, &n(&out[1]), &most).unwrap();
                check(h, &what, &out[1], &out[0], from, &most);
                let (most, sum) = (amax(h, from), h.poisoned(dtype, &shape));
                h.k.add_norm_forward(
                    &h.s,
                    norm,
                    &ResidualAdd { residual: &residual, sum: &sum },
                    &n(&out[2]),
                )
                .unwrap();
                h.k.add_norm_forward_amax(
                    &h.s,
                    norm,
                    &ResidualAdd { residual: &residual, sum: &sum },
                    &n(&out[3]),
                    &most,
                )
                .unwrap();
                check(h, &what, &out[3], &out[2], from, &most);
            }
        }
    });
}
