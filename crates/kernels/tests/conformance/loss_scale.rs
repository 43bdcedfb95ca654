//! Loss scaling on the device: the scaler step by step, and gradients unscaled by the clip factor.

use super::devices::*;
use ferrotron_kernels::grad_scaler::{DynamicScaler, ScalerConfig};
use ferrotron_kernels::{Adam, ParamUpdate, scalars, scaler};
use ferrotron_tensor::{Category, DType, Tensor};

fn state(h: &TestDevice, s: &DynamicScaler) -> Tensor {
    h.s.upload(&scaler::of(s), &[scaler::COUNT], Category::Workspace).unwrap()
}

/// Step scalars with a gradient norm and a clip factor.
fn after(h: &TestDevice, norm: f64, clip: f64) -> Tensor {
    let mut s: Vec<f64> = (0..scalars::COUNT).map(|i| 0.5 + i as f64).collect();
    (s[scalars::GRAD_NORM], s[scalars::CLIP]) = (norm, clip);
    h.tensor(DType::F32, &[scalars::COUNT], &s)
}

#[test]
fn loss_scale_grows_and_backs_off() {
    let configs = [
        ScalerConfig { initial: 16.0, growth_interval: 3, ..ScalerConfig::default() },
        ScalerConfig { initial: 3.0, min: 0.5, growth: 1.5, backoff: 0.3, growth_interval: 1, hysteresis: 1 },
        ScalerConfig { growth_interval: 2, hysteresis: 4, ..ScalerConfig::default() },
        ScalerConfig { initial: 2.0, min: 2.0, hysteresis: 0, ..ScalerConfig::default() },
    ];
    for h in devices() {
        for config in configs {
            let mut ours = DynamicScaler::new(config);
            let t = state(&h, &ours);
            // Finite and overflowing steps in every order, with more overflows in a row than the hysteresis.
            for (i, bad) in "..x.xx...xxxxx.....x..x.x.xx....xxxxxxxx.......".chars().enumerate() {
                let norm = match (bad == 'x', i % 2) {
                    (false, _) => 1.5,
                    (true, 0) => f64::NAN,
                    (true, _) => f64::INFINITY,
                };
                let s = after(&h, norm, 0.75);
                h.k.update_scaler(&h.s, config, &t, &s).unwrap();
                let found = h.host(&s);
                let what = format!("{} {config:?} step {i}", h.name);
                assert_eq!(found[scalars::LOSS_SCALE], f64::from(ours.scale), "{what}");
                assert_eq!(found[scalars::CLIP], f64::from(0.75 * ours.inverse()), "{what}");
                for k in (0..scalars::COUNT).filter(|k| ![scalars::CLIP, scalars::LOSS_SCALE].contains(k)) {
                    let before = if k == scalars::GRAD_NORM { norm } else { 0.5 + k as f64 };
                    assert!(found[k] == before || (found[k].is_nan() && before.is_nan()), "{what} {k}");
                }
                ours.update(bad == 'x');
                let now = h.s.download::<f64>(&t).unwrap();
                assert_eq!(now, scaler::of(&ours), "{what}");
                assert_eq!(scaler::from(config, &now), ours, "{what}");
            }
        }
    }
}

/// Gradients of a scaled loss give the same step as those of the loss itself, bit for bit where the scale is a power of two.
#[test]
fn loss_scaling_does_not_change_the_step() {
    const ADAM: Adam = Adam { beta1: 0.9, beta2: 0.95, eps: 1e-8, decoupled: true };
    let config = ScalerConfig { initial: 1024.0, ..ScalerConfig::default() };
    for h in devices() {
        for max in [None, Some(0.1f32), Some(1e6)] {
            let go = |scaled: bool| {
                let (n, s) = (300, DynamicScaler::new(config));
                let t = state(&h, &s);
                let mut grad = h.tensor(DType::F32, &[n], &numbers(DType::F32, 2, n));
                if scaled {
                    let out = h.poisoned(DType::F32, &[n]);
                    h.k.scale_loss(&h.s, &t, &grad, &out).unwrap();
                    let exact: Vec<f64> = h.host(&grad).iter().map(|x| 1024.0 * x).collect();
                    assert_eq!(h.host(&out), exact);
                    grad = out;
                }
                let square = h.s.zeros(&[1], DType::F64, Category::Workspace).unwrap();
                h.k.grad_square_sum(&h.s, &[&grad], &square).unwrap();
                let mut values = vec![0.0; scalars::COUNT];
                (values[scalars::LR], values[scalars::BIAS1], values[scalars::BIAS2]) = (0.01, 0.1, 0.05);
                let st = h.tensor(DType::F32, &[scalars::COUNT], &values);
                if scaled {
                    h.k.unscale_square(&h.s, &t, &square).unwrap();
                }
                h.k.clip_factor_from_square_sum(&h.s, &square, max, &st).unwrap();
                if scaled {
                    h.k.update_scaler(&h.s, config, &t, &st).unwrap();
                }
                let values = |seed| h.tensor(DType::F32, &[n], &numbers(DType::F32, seed, n));
                let (master, first) = (values(5), values(6));
                let second = h.tensor(DType::F32, &[n], &vec![0.5; n]);
                let weight = h.poisoned(DType::F16, &[n]);
                let update = ParamUpdate {
                    master: &master,
                    weight: Some(&weight),
                    grad: &grad,
                    first: (&first).into(),
                    second: Some((&second).into()),
                    lr_mult: 1.0,
                    wd_mult: 1.0,
                    fp8: None,
                };
                h.k.adam(&h.s, ADAM, &st, &[update]).unwrap();
                let rounded: Vec<f64> = h.host(&master).iter().map(|x| rounded(DType::F16, *x)).collect();
                assert_eq!(h.host(&weight), rounded, "{}: the copy is the rounded master", h.name);
                (h.host(&st)[scalars::GRAD_NORM], h.host(&master), h.host(&first), h.host(&second))
            };
            assert_eq!(go(true), go(false), "{} {max:?}", h.name);
        }
    }
}
