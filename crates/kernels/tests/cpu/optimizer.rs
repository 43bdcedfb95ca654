use super::support::{Random, close, everywhere, wide};
use ferrotron_kernels::cpu::grad_norm::{NormType, clip_factor, count_zeros, norm_total, scale_and_check};
use ferrotron_kernels::cpu::optimizer::{AdamFactors, UpdateSlices, adam, sgd};
use ferrotron_kernels::cpu::optimizer_chunks::{Grad, Param, State, join_master, split_master};
use ferrotron_kernels::cpu::{CpuContext, Isa};
use ferrotron_kernels::grad_scaler::{DynamicScaler, ScalerConfig};
use ferrotron_kernels::{Adam, Sgd};
use ferrotron_tensor::{Float, Threads, bf16};

const SIZES: [usize; 5] = [0, 1, 37, 5000, 40_000];

/// Three Adam steps over a list of mixed dtypes against f64.
#[test]
fn adam_matches_f64_on_a_mixed_list() {
    for decoupled in [true, false] {
        let mut random = Random(11);
        let init: Vec<Vec<f32>> = SIZES.iter().map(|n| random.vec(*n, 1.0)).collect();
        let grads: Vec<Vec<Vec<f32>>> =
            (0..3).map(|_| SIZES.iter().map(|n| random.vec(*n, 0.3)).collect()).collect();
        let (b1, b2, eps, scale) = (0.9, 0.95, 1e-8, 0.5);
        let (lr, wd) = (|i: usize| 1e-2 * (i + 1) as f32, |i: usize| [0.1, 0.0][i % 2]);
        let all = everywhere(|cpu| {
            let mut p = init.clone();
            let mut w: Vec<Vec<bf16>> = SIZES.iter().map(|n| vec![bf16::ZERO; *n]).collect();
            let zeros = || SIZES.iter().map(|n| vec![0f32; *n]).collect::<Vec<_>>();
            let (mut m, mut v) = (zeros(), zeros());
            for (step, grads) in grads.iter().enumerate() {
                let mut factors = AdamFactors::torch(b1, b2, eps, decoupled, step as u64 + 1);
                factors.grad_scale = scale;
                let list = p.iter_mut().zip(&mut w).zip(grads).zip(m.iter_mut().zip(&mut v)).enumerate();
                let list = list.map(|(i, (((p, w), g), (m, v)))| UpdateSlices {
                    param: if i % 2 == 0 { Param::Copied(p, w) } else { Param::Master(p) },
                    grad: Grad::F32(g),
                    first: State::F32(m),
                    second: State::F32(v),
                    lr: lr(i),
                    weight_decay: wd(i),
                    fp8: None,
                });
                adam(cpu, factors, list.collect()).unwrap();
            }
            (p, w, m, v)
        });
        for (i, n) in SIZES.into_iter().enumerate() {
            let (mut p, mut m, mut v) = (wide(&init[i]), vec![0f64; n], vec![0f64; n]);
            for (step, grads) in grads.iter().enumerate() {
                let t = step as i32 + 1;
                for j in 0..n {
                    let l2 = if decoupled { 0.0 } else { f64::from(wd(i)) * p[j] };
                    let g = f64::from(grads[i][j]) * f64::from(scale) + l2;
                    m[j] = b1 * m[j] + (1.0 - b1) * g;
                    v[j] = b2 * v[j] + (1.0 - b2) * g * g;
                    let update = m[j] / (1.0 - b1.powi(t)) / ((v[j] / (1.0 - b2.powi(t))).sqrt() + eps);
                    let decay = if decoupled { f64::from(wd(i)) * p[j] } else { 0.0 };
                    p[j] -= f64::from(lr(i)) * (update + decay);
                }
            }
            close("p", &all.0[i], &p, 1e-6, 5e-7);
            close("m", &all.2[i], &m, 1e-6, 1e-7);
            close("v", &all.3[i], &v, 1e-6, 1e-9);
            if i % 2 == 0 {
                assert!(all.0[i].iter().zip(&all.1[i]).all(|(p, w)| bf16::from_f32(*p) == *w));
            }
        }
    }
}

#[test]
fn split_masters_step_like_f32_masters() {
    let mut random = Random(4);
    let (init, grad): (Vec<f32>, Vec<bf16>) = (random.vec(5001, 1.0), random.vec(5001, 0.1));
    let settings = Adam { beta1: 0.9, beta2: 0.95, eps: 1e-8, decoupled: true };
    let step = |cpu: CpuContext, param: Param, m: &mut [bf16], v: &mut [bf16]| {
        let one = UpdateSlices {
            param,
            grad: Grad::Bf16(&grad),
            first: State::Bf16(m),
            second: State::Bf16(v),
            lr: 1e-3,
            weight_decay: 0.1,
            fp8: None,
        };
        adam(cpu, AdamFactors::transformer_engine(settings, 1), vec![one]).unwrap();
    };
    let zeros = vec![bf16::ZERO; init.len()];
    let whole = everywhere(|cpu| {
        let (mut p, mut m, mut v) = (init.clone(), zeros.clone(), zeros.clone());
        step(cpu, Param::Master(&mut p), &mut m, &mut v);
        (p, m, v)
    });
    let split = everywhere(|cpu| {
        let (mut high, mut low): (Vec<bf16>, Vec<i16>) = init.iter().map(|p| split_master(*p)).unzip();
        let (mut m, mut v) = (zeros.clone(), zeros.clone());
        step(cpu, Param::Split(&mut high, &mut low), &mut m, &mut v);
        (high.iter().zip(&low).map(|(h, l)| join_master(*h, *l)).collect::<Vec<_>>(), m, v)
    });
    assert_eq!(whole, split);
}

#[test]
fn every_master_splits_and_joins() {
    let mut random = Random(1);
    let special = [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN_POSITIVE, 1e-45];
    for x in special.into_iter().chain((0..100_000).map(|_| f32::from_bits(random.next() as u32))) {
        let (high, low) = split_master(x);
        assert_eq!(join_master(high, low).to_bits(), x.to_bits());
        let lost = (high.to_f32() - x).abs();
        let step = f32::from_bits((x.to_bits() & 0x7f80_0000).max(0x0080_0000)) / 128.0;
        assert!(!x.is_finite() || !high.to_f32().is_finite() || lost <= step / 2.0, "{x}");
    }
}

#[test]
fn sgd_matches_f64() {
    for (momentum, dampening, nesterov) in
        [(0.0, 0.0, false), (0.9, 0.0, false), (0.9, 0.1, false), (0.8, 0.0, true)]
    {
        for n in SIZES {
            let mut random = Random(n as u64);
            let init: Vec<f32> = random.vec(n, 1.0);
            let grads: Vec<Vec<f32>> = (0..3).map(|_| random.vec(n, 1.0)).collect();
            let how = Sgd { momentum, dampening, nesterov };
            let (ours, buffer) = everywhere(|cpu| {
                // The first step must not read the buffer.
                let (mut p, mut b) = (init.clone(), vec![f32::NAN; n]);
                for (step, g) in grads.iter().enumerate() {
                    let one = UpdateSlices {
                        param: Param::Master(&mut p),
                        grad: Grad::F32(g),
                        first: if momentum == 0.0 { State::None } else { State::F32(&mut b) },
                        second: State::None,
                        lr: 0.1,
                        weight_decay: 0.01,
                        fp8: None,
                    };
                    sgd(cpu, how, step == 0, 0.5, 0, vec![one]).unwrap();
                }
                (p, if momentum == 0.0 { vec![0.0; n] } else { b })
            });
            let (mut p, mut b) = (wide(&init), vec![0f64; n]);
            let (mu, damp) = (f64::from(momentum), f64::from(dampening));
            for (step, grads) in grads.iter().enumerate() {
                for j in 0..n {
                    let g = f64::from(grads[j]) * 0.5 + f64::from(0.01f32) * p[j];
                    b[j] = if step == 0 { g } else { mu * b[j] + (1.0 - damp) * g };
                    let update = match (momentum == 0.0, nesterov) {
                        (true, _) => g,
                        (_, true) => g + mu * b[j],
                        _ => b[j],
                    };
                    p[j] -= f64::from(0.1f32) * update;
                }
            }
            close("p", &ours, &p, 1e-6, 5e-7);
            if momentum != 0.0 {
                close("momentum", &buffer, &b, 1e-6, 5e-7);
            }
        }
    }
}

#[test]
fn mismatched_lengths_are_errors() {
    let threads = Threads::new(1).unwrap();
    let cpu = CpuContext::new(&threads, Isa::detect());
    let (mut p, mut w, mut m, mut v) = ([0f32; 4], [bf16::ZERO; 3], [0f32; 4], [bf16::ZERO; 4]);
    let g = [1f32; 4];
    fn refused(cpu: CpuContext, param: Param, grad: Grad, first: State, second: State) -> bool {
        let factors = AdamFactors::torch(0.9, 0.95, 1e-8, true, 1);
        let one = UpdateSlices { param, grad, first, second, lr: 0.1, weight_decay: 0.0, fp8: None };
        adam(cpu, factors, vec![one]).is_err()
    }
    assert!(refused(cpu, Param::Master(&mut p), Grad::F32(&g), State::F32(&mut m), State::Bf16(&mut v)));
    assert!(refused(cpu, Param::Master(&mut p), Grad::F32(&g), State::F32(&mut m), State::None));
    assert!(refused(
        cpu,
        Param::Copied(&mut p, &mut w),
        Grad::F32(&g),
        State::F32(&mut m),
        State::F32(&mut [0.0; 4])
    ));
    assert!(refused(
        cpu,
        Param::Master(&mut p),
        Grad::F32(&g[..3]),
        State::F32(&mut m),
        State::F32(&mut [0.0; 4])
    ));
    assert_eq!(p, [0f32; 4]);
}

fn norms<T: Float>() {
    let lists: Vec<Vec<T>> = SIZES.iter().map(|n| Random(*n as u64).vec(*n, 3.0)).collect();
    let views: Vec<&[T]> = lists.iter().map(Vec::as_slice).collect();
    let all: Vec<f64> = lists.iter().flat_map(|l| wide(l)).collect();
    for (kind, wanted) in [
        (NormType::L1, all.iter().map(|x| x.abs()).sum::<f64>()),
        (NormType::L2, all.iter().map(|x| x * x).sum::<f64>().sqrt()),
        (NormType::Max, all.iter().fold(0f64, |a, x| a.max(x.abs()))),
    ] {
        let ours = everywhere(|cpu| kind.finish(norm_total(cpu, kind, &views)));
        assert!((ours - wanted).abs() <= 1e-12 * wanted, "{kind:?}: {ours} instead of {wanted}");
        for bad in [f32::NAN, f32::INFINITY] {
            let mut with = lists.clone();
            with[4][12_345] = T::from_f32(bad);
            let views: Vec<&[T]> = with.iter().map(Vec::as_slice).collect();
            let bits = everywhere(|cpu| kind.finish(norm_total(cpu, kind, &views)).to_bits());
            let ours = f64::from_bits(bits);
            assert!(
                if bad.is_nan() { ours.is_nan() } else { ours == f64::INFINITY },
                "{kind:?} of {bad}: {ours}"
            );
        }
        assert_eq!(everywhere(|cpu| norm_total::<T>(cpu, kind, &[])), 0.0);
    }
}

#[test]
fn norms_match_f64() {
    norms::<f32>();
    norms::<bf16>();
    // Squares of large f32 do not overflow.
    let big = [3e30f32, 4e30];
    let norm = NormType::L2.finish(everywhere(|cpu| norm_total(cpu, NormType::L2, &[&big])));
    assert!((norm - 5e30).abs() < 1e24);
    assert_eq!((clip_factor(0.5, 1.0), clip_factor(f64::INFINITY, 1.0)), (1.0, 0.0));
    assert!((clip_factor(4.0, 1.0) - 0.25).abs() < 1e-6 && clip_factor(f64::NAN, 1.0).is_nan());
}

#[test]
fn unscaling_flags_non_finite_values_and_zeros_are_counted() {
    for bad in [None, Some(f32::NAN), Some(f32::INFINITY), Some(f32::NEG_INFINITY)] {
        let (flag, scaled, zeros) = everywhere(|cpu| {
            let mut lists: Vec<Vec<f32>> = SIZES.iter().map(|n| vec![f32::MAX; *n]).collect();
            lists[3][17] = 0.0;
            lists[4][39_999] = -0.0;
            if let Some(bad) = bad {
                lists[4][20_000] = bad;
            }
            let views: Vec<&[f32]> = lists.iter().map(Vec::as_slice).collect();
            let zeros = count_zeros(cpu, &views);
            // Overflow caused by the factor is not reported as an overflow of the input.
            let flag = scale_and_check(cpu, lists.iter_mut().map(Vec::as_mut_slice).collect(), 4.0);
            (flag, lists[2][3], zeros)
        });
        assert_eq!((flag, scaled, zeros), (bad.is_some(), f32::INFINITY, 2));
    }
}

#[test]
fn the_scale_stays_above_its_floor() {
    let mut scaler =
        DynamicScaler::new(ScalerConfig { initial: 8.0, min: 2.0, hysteresis: 1, ..ScalerConfig::default() });
    let scales: Vec<f32> = (0..4)
        .map(|_| {
            scaler.update(true);
            scaler.scale
        })
        .collect();
    assert_eq!(scales, [4.0, 2.0, 2.0, 2.0]);
    assert_eq!(scaler.inverse(), 0.5);
}
