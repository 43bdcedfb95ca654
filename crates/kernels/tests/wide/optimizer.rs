//! Optimizer steps over one flat bucket.

use super::scene::Scene;
use ferrotron_kernels::{Adam, ApplyUpdate, MomentumUpdate, MuonMomentum, ParamUpdate, WeightDecay, scalars};
use ferrotron_tensor::{DType, Tensor};

/// The scalars of a step, on both sides.
fn step(h: &Scene) -> [Tensor; 2] {
    let mut all = vec![0f32; scalars::COUNT];
    all[scalars::LR] = 0.01;
    all[scalars::WEIGHT_DECAY] = 0.1;
    (all[scalars::BIAS1], all[scalars::BIAS2]) = (0.271, 0.142_625);
    all[scalars::CLIP] = 0.7;
    all[scalars::STEPS_DONE] = 2.0;
    h.both(&all, &[scalars::COUNT])
}

fn bucket(h: &Scene) -> [usize; 2] {
    let width = h.size(4096, 64);
    [h.rows(width, 1), width]
}

pub fn adam(h: &Scene) {
    let shape = bucket(h);
    let [master, grad] = [1, 2].map(|seed| h.random(DType::F32, shape, seed));
    let first = h.random(DType::BF16, shape, 3);
    // Zeros: second moments are not negative.
    let second = h.large.s.zeros(&shape, DType::BF16, ferrotron_tensor::Category::Workspace).unwrap();
    let weight = h.empty(DType::BF16, &shape);
    let at = h.samples(&master);
    let [cm, cg, cf, cs, cw] = [&master, &grad, &first, &second, &weight].map(|t| h.gather(t, &at));
    let rule = Adam { beta1: 0.9, beta2: 0.95, eps: 1e-8, decoupled: true };
    let update = |[master, grad, first, second, weight]: [&Tensor; 5], large: bool| {
        let side = if large { &h.large } else { &h.cpu };
        let scalars = &step(h)[usize::from(!large)];
        let u = ParamUpdate {
            master,
            weight: Some(weight),
            grad,
            first: first.into(),
            second: Some(second.into()),
            lr_mult: 1.0,
            wd_mult: 1.0,
            fp8: None,
        };
        side.k.adam(&side.s, rule, scalars, &[u]).unwrap();
    };
    update([&master, &grad, &first, &second, &weight], true);
    update([&cm, &cg, &cf, &cs, &cw], false);
    for (what, t, want) in
        [("master", &master, &cm), ("weight", &weight, &cw), ("m", &first, &cf), ("v", &second, &cs)]
    {
        h.same(&format!("adam {what}"), t, &at, want);
    }
}

pub fn muon(h: &Scene) {
    let shape = bucket(h);
    let grad = h.random(DType::F32, shape, 1);
    let momentum = h.random(DType::BF16, shape, 2);
    let update = h.empty(DType::F32, &shape);
    let at = h.samples(&grad);
    let [cg, cm, cu] = [&grad, &momentum, &update].map(|t| h.gather(t, &at));
    let [scalars, cpu_scalars] = step(h);
    let m = MuonMomentum { momentum: 0.95, nesterov: true };
    let one = |grad, momentum, update| [MomentumUpdate { grad, momentum, l2: None, wd_mult: 1.0, update }];
    h.large.k.muon_momentum(&h.large.s, m, &scalars, &one(&grad, &momentum, &update)).unwrap();
    h.cpu.k.muon_momentum(&h.cpu.s, m, &cpu_scalars, &one(&cg, &cm, &cu)).unwrap();
    h.same("muon_momentum", &momentum, &at, &cm);
    h.same("muon_momentum's update", &update, &at, &cu);

    // The gradient's place holds the weights from here on.
    let apply = |master, update| [ApplyUpdate { master, weight: None, update, lr_mult: 1.0, wd_mult: 1.0 }];
    let decay = WeightDecay::Decoupled;
    h.large.k.apply_update(&h.large.s, decay, &scalars, &apply(&grad, &update)).unwrap();
    h.cpu.k.apply_update(&h.cpu.s, decay, &cpu_scalars, &apply(&cg, &cu)).unwrap();
    h.same("apply_update", &grad, &at, &cg);

    let [square, cpu_square] = h.both(&[16f64], &[1]);
    h.large.k.normalize(&h.large.s, &grad, &square, 1e-7, &momentum).unwrap();
    h.cpu.k.normalize(&h.cpu.s, &cg, &cpu_square, 1e-7, &cm).unwrap();
    h.same("normalize", &momentum, &at, &cm);
    h.large.k.combine(&h.large.s, [1.5, -0.5], &momentum, &update).unwrap();
    h.cpu.k.combine(&h.cpu.s, [1.5, -0.5], &cm, &cu).unwrap();
    h.same("combine", &momentum, &at, &cm);
}
