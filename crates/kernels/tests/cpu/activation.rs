use super::support::{Random, close, each_isa, wide};
use ferrotron_kernels::Act;
use ferrotron_kernels::cpu::activation::{activation, activation_backward, gated, gated_backward};
use ferrotron_kernels::cpu::{CpuContext, Isa};
use ferrotron_tensor::{Float, Threads, bf16};

const CLAMPED: Act = Act::ClampedSilu { limit: 7.0, alpha: 1.702, offset: 1.0 };
const ALL: [Act; 4] = [Act::GeluTanh, Act::GeluErf, Act::Silu, CLAMPED];

fn value(act: Act, x: f64) -> f64 {
    let a = (2.0 / std::f64::consts::PI).sqrt();
    match act {
        Act::GeluTanh => 0.5 * x * (1.0 + (a * (x + 0.044715 * x.powi(3))).tanh()),
        Act::GeluErf => 0.5 * x * libm::erfc(-x / 2f64.sqrt()),
        Act::Silu => x / (1.0 + (-x).exp()),
        Act::SquaredRelu => x.max(0.0).powi(2),
        Act::ClampedSilu { limit, alpha, .. } => {
            let c = x.min(f64::from(limit));
            c / (1.0 + (-f64::from(alpha) * c).exp())
        }
    }
}

/// Central difference in f64, one-sided at the kink of the clamp.
fn slope(act: Act, x: f64) -> f64 {
    // Constant beyond; differences of huge values would cancel the step.
    let x = x.clamp(-50.0, 50.0);
    if let Act::ClampedSilu { limit, .. } = act {
        if x > f64::from(limit) {
            return 0.0;
        }
        let h = 1e-5;
        // The function below the bound continues smoothly: take it without the clamp.
        let free = Act::ClampedSilu { limit: f32::INFINITY, alpha: 1.702, offset: 1.0 };
        return (value(free, x + h) - value(free, x - h)) / (2.0 * h);
    }
    let h = 1e-5;
    (value(act, x + h) - value(act, x - h)) / (2.0 * h)
}

fn gate(act: Act, u: f64) -> (f64, f64) {
    match act {
        Act::ClampedSilu { limit, offset, .. } => {
            let l = f64::from(limit);
            (u.clamp(-l, l) + f64::from(offset), f64::from(u8::from(u.abs() <= l)))
        }
        _ => (u, 1.0),
    }
}

fn inputs<T: Float>(n: usize) -> Vec<T> {
    let mut random = Random(n as u64 + 1);
    let mut x: Vec<T> = random.vec(n, 4.0);
    let special = [0.0, -0.0, 1e-40, -1e-40, 7.0, -7.0, 7.5, -7.5, 30.0, -30.0, 88.0, -88.0, 1e4, -1e4, 1e20];
    for (x, s) in x.iter_mut().zip(special) {
        *x = T::from_f32(s);
    }
    x
}

fn plain<T: Float>(n: usize) {
    let x: Vec<T> = inputs(n);
    let dy: Vec<T> = Random(9).vec(n, 1.0);
    for act in ALL {
        let results = each_isa(|cpu| {
            let (mut y, mut dx) = (vec![T::from_f32(9.0); n], vec![T::from_f32(9.0); n]);
            activation(cpu, act, &x, &mut y).unwrap();
            activation_backward(cpu, act, &x, &dy, &mut dx).unwrap();
            (y, dx)
        });
        let wanted: Vec<f64> = wide(&x).into_iter().map(|x| value(act, x)).collect();
        let slopes: Vec<f64> = wide(&x).iter().zip(wide(&dy)).map(|(x, dy)| slope(act, *x) * dy).collect();
        for (y, dx) in results {
            close(&format!("{act:?}"), &y, &wanted, 2e-6, 2e-7);
            close(&format!("{act:?}'"), &dx, &slopes, 2e-6, 2e-6);
        }
    }
}

#[test]
fn plain_activations_match_f64() {
    for n in [0, 1, 17, 100_003] {
        plain::<f32>(n);
        plain::<bf16>(n);
    }
}

fn gated_form<T: Float>(rows: usize, f: usize) {
    let x: Vec<T> = inputs(rows * 2 * f);
    let dy: Vec<T> = Random(4).vec(rows * f, 1.0);
    for act in ALL {
        let results = each_isa(|cpu| {
            let (mut y, mut dx) = (vec![T::from_f32(9.0); rows * f], vec![T::from_f32(9.0); rows * 2 * f]);
            gated(cpu, act, f, &x, &mut y).unwrap();
            gated_backward(cpu, act, f, &x, &dy, &mut dx).unwrap();
            (y, dx)
        });
        let (mut wanted, mut grad) = (vec![], vec![]);
        for (x, dy) in x.chunks(2 * f.max(1)).zip(dy.chunks(f.max(1))) {
            let (a, u): (Vec<f64>, Vec<f64>) = (wide(&x[..f]), wide(&x[f..]));
            wanted.extend(a.iter().zip(&u).map(|(a, u)| value(act, *a) * gate(act, *u).0));
            grad.extend((0..f).map(|i| slope(act, a[i]) * gate(act, u[i]).0 * dy[i].to_f64()));
            grad.extend((0..f).map(|i| value(act, a[i]) * gate(act, u[i]).1 * dy[i].to_f64()));
        }
        for (y, dx) in results {
            close(&format!("{act:?} gated"), &y, &wanted, 3e-6, 1e-5);
            close(&format!("{act:?} gated'"), &dx, &grad, 5e-6, 2e-5);
        }
    }
}

#[test]
fn gated_activations_match_f64() {
    for (rows, f) in [(0, 4), (1, 8), (5, 33), (300, 96), (3, 20_001)] {
        gated_form::<f32>(rows, f);
        gated_form::<bf16>(rows, f);
    }
}

#[test]
fn nan_passes_and_shapes_are_checked() {
    let threads = Threads::new(1).unwrap();
    for isa in Isa::all() {
        let cpu = CpuContext::new(&threads, isa);
        for act in ALL {
            let mut y = [0f32];
            activation(cpu, act, &[f32::NAN], &mut y).unwrap();
            assert!(y[0].is_nan(), "{act:?}");
            activation_backward(cpu, act, &[f32::NAN], &[1.0], &mut y).unwrap();
            assert!(y[0].is_nan(), "{act:?}'");
        }
        assert!(activation(cpu, Act::Silu, &[1f32], &mut [0f32; 2]).is_err());
        assert!(gated(cpu, Act::Silu, 2, &[1f32; 6], &mut [0f32; 3]).is_err());
        assert!(gated_backward(cpu, Act::Silu, 2, &[1f32; 4], &[1f32; 2], &mut [0f32; 5]).is_err());
    }
}

/// Squared ReLU is compared by itself: its values and slopes grow without bound, so the list above holds inputs that
/// overflow.
#[test]
fn squared_relu_is_exact() {
    let x = [0f32, -0.0, -3.0, 1e-30, 0.5, 3.0, 1e4, -1e4, f32::INFINITY, f32::NEG_INFINITY];
    let dy = [1f32, 1.0, 2.0, 1.0, -2.0, 0.5, 1.0, 1.0, 1.0, 1.0];
    let (threads, n) = (Threads::new(1).unwrap(), x.len());
    for isa in Isa::all() {
        let cpu = CpuContext::new(&threads, isa);
        let (mut y, mut dx) = (vec![f32::NAN; n], vec![f32::NAN; n]);
        activation(cpu, Act::SquaredRelu, &x, &mut y).unwrap();
        activation_backward(cpu, Act::SquaredRelu, &x, &dy, &mut dx).unwrap();
        assert_eq!(y, x.map(|x| x.max(0.0) * x.max(0.0)));
        let slopes: Vec<f32> = x.iter().zip(&dy).map(|(x, d)| 2.0 * x.max(0.0) * d).collect();
        assert_eq!(dx, slopes);
    }
}
