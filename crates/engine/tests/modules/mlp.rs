//! MLP: up-projection, activation, down-projection.

use super::linear;
use super::support::*;
use ferrotron_engine::{Declarations, Mlp, MlpConfig, Recompute, StepContext};
use ferrotron_kernels::Act;

/// The activation function.
fn act(a: Act, x: f64) -> f64 {
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

pub fn gated(a: Act, gate: f64, up: f64) -> f64 {
    let up = match a {
        Act::ClampedSilu { limit, offset, .. } => {
            up.clamp(-f64::from(limit), f64::from(limit)) + f64::from(offset)
        }
        _ => up,
    };
    act(a, gate) * up
}

#[test]
fn mlp_matches_the_reference() {
    let clamped = Act::ClampedSilu { limit: 0.9, alpha: 1.7, offset: 1.0 };
    let mut cases: Vec<_> =
        [Act::GeluTanh, Act::GeluErf, Act::Silu, Act::SquaredRelu].map(|a| (a, false)).to_vec();
    cases.extend([Act::GeluTanh, Act::GeluErf, Act::Silu, clamped].map(|a| (a, true)));
    for dtype in DTYPES {
        for &(a, is_gated) in &cases {
            for bias in [false, true] {
                let (tokens, hidden, ffn) = (5, 6, 9);
                let mut d = Declarations::default();
                let mlp = Mlp::declare(
                    &mut d,
                    "mlp",
                    MlpConfig { hidden, ffn, act: a, gated: is_gated, bias, std: (0.1, 0.1) },
                )
                .unwrap();
                let s = Setup::new(d, dtype, 4, 1.0);
                let (x, xs) = s.input(14, &[tokens, hidden]);
                let (dy, dys) = s.input(24, &[tokens, hidden]);
                let f = |v: &[Vec<f64>]| {
                    let (up, b1, down, b2) = match v {
                        [_, up, b1, down, b2] => (up, Some(&b1[..]), down, Some(&b2[..])),
                        [_, up, down] => (up, None, down, None),
                        _ => panic!("{} arrays", v.len()),
                    };
                    let h = linear::reference(&v[0], up, b1, if is_gated { 2 * ffn } else { ffn });
                    let h: Vec<f64> = if is_gated {
                        h.chunks(2 * ffn).flat_map(|r| (0..ffn).map(|i| gated(a, r[i], r[ffn + i]))).collect()
                    } else {
                        h.iter().map(|x| act(a, *x)).collect()
                    };
                    linear::reference(&h, down, b2, hidden)
                };
                let what = format!("{a:?}, gated {is_gated}, bias {bias}");
                let run = |p: &StepContext| {
                    let (y, saved) = mlp.forward(p, &x).unwrap();
                    let (dx, work) = mlp.backward(p, saved, &dy).unwrap();
                    (s.host(&y), s.host(&dx), s.gradients(work))
                };
                let kept = run(&s.pass());
                let again = run(&StepContext {
                    recompute: Recompute { activation: true, ..Recompute::default() },
                    ..s.pass()
                });
                assert_eq!(kept, again, "{what}: recomputed");
                s.compare(&what, &f, &xs, &dys, kept);
            }
        }
    }
}
