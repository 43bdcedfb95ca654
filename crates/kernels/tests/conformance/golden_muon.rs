//! Muon against golden vectors (area `optim`, `muon.json`): torch, emerging-optimizers and Megatron-LM.

use super::devices::*;
use super::golden::{Area, Tensors, count, flag, list, number, number_or, numbers, only_keys, text};
use ferrotron_kernels::{
    ApplyUpdate, CoefficientSet, Coefficients, GramSide, MomentumUpdate, MuonMomentum, NewtonSchulz,
    ScaleMode, WeightDecay, newton_schulz, scalars,
};
use ferrotron_tensor::{DType, Tensor};
use serde_json::Value;

const COMMON: [&str; 8] = [
    "name",
    "impl",
    "coefficient_type",
    "num_ns_steps",
    "extra_scale_factor",
    "scale_mode",
    "momentum",
    "nesterov",
];

#[test]
fn golden_muon() {
    for area in Area::all("optim").iter().filter(|a| a.has("muon.json")) {
        let json = area.json("muon.json");
        only_keys("muon", &json, &["producer", "cases"]);
        let (tensors, cases) = (area.tensors("muon.safetensors"), list(&json, "cases"));
        tensors.only_cases(cases);
        let mut report = area.report();
        for case in cases {
            let name = text(case, "name");
            report.case(name, || {
                for h in devices() {
                    match name {
                        _ if name.starts_with("ns_") => iteration(&h, &tensors, case),
                        _ if name.starts_with("mg") => megatron(&h, &tensors, case),
                        _ if name.starts_with('m') => torch(&h, &tensors, case),
                        _ if name.starts_with('e') => emerging(&h, &tensors, case),
                        other => panic!("the format has no case {other}"),
                    }
                }
                tensors.all_read(&format!("{name}/"));
            });
        }
        report.finish();
    }
}

fn set(name: &str) -> CoefficientSet {
    match name {
        "simple" => CoefficientSet::Simple,
        "quintic" => CoefficientSet::Quintic,
        "polar_express" => CoefficientSet::PolarExpress,
        "cans" => CoefficientSet::Cans,
        "aol" => CoefficientSet::Aol,
        "deepseekv4" => CoefficientSet::DeepseekV4,
        "cubic5" => CoefficientSet::Cubic5,
        other => panic!("the format has no coefficient_type {other}"),
    }
}

fn scale(case: &Value, shape: [usize; 2]) -> f32 {
    let mode = match text(case, "scale_mode") {
        "spectral" => ScaleMode::Spectral,
        "unit_rms_norm" => ScaleMode::UnitRmsNorm,
        "shape_scaling" => ScaleMode::ShapeScaling,
        other => panic!("the format has no scale_mode {other}"),
    };
    (mode.factor(shape) * number_or(case, "extra_scale_factor", 1.0)) as f32
}

fn orthogonalize(h: &TestDevice, coefficients: &[Coefficients], bf16: bool, x: &Tensor) {
    let gram = GramSide::shorter([x.shape()[0], x.shape()[1]]);
    newton_schulz(&*h.k, &h.s, &NewtonSchulz { coefficients, bf16, gram, sum: None }, x).unwrap();
}

fn matrix(h: &TestDevice, golden: &Tensors, name: &str) -> Tensor {
    let shape = golden.shape(name);
    h.s.upload(&golden.f32(name), &shape, ferrotron_tensor::Category::Workspace).unwrap()
}

fn within(what: &str, ours: &[f64], wanted: &[f32], room: f64) {
    assert_eq!(ours.len(), wanted.len(), "{what}");
    for (i, (o, w)) in ours.iter().zip(wanted).enumerate() {
        assert!((o - f64::from(*w)).abs() <= room, "{what}[{i}]: {o} instead of {w}, allowed {room:e}");
    }
}

fn iteration(h: &TestDevice, golden: &Tensors, case: &Value) {
    let name = text(case, "name");
    let keys = ["coefficients", "steps", "f64_error", "bf16_vs_f32", "bf16_stored"];
    only_keys(name, case, &[&COMMON[..3], &keys].concat());
    let set = set(text(case, "coefficient_type"));
    let rows: Vec<Coefficients> = list(case, "coefficients")
        .iter()
        .map(|r| std::array::from_fn(|i| r[i].as_f64().unwrap() as f32))
        .collect();
    assert_eq!(rows, set.rows(), "{name}");
    let schedule = set.schedule(count(case, "steps"));
    let x = matrix(h, golden, &format!("{name}/x"));
    orthogonalize(h, &schedule, false, &x);
    within(&format!("{} {name}", h.name), &h.host(&x), &golden.f32(&format!("{name}/y")), 1e-4);
    if flag(case, "bf16_stored") {
        let x = matrix(h, golden, &format!("{name}/x"));
        orthogonalize(h, &schedule, true, &x);
        let (ours, wanted) = (h.host(&x), golden.f32(&format!("{name}/y_bf16_iteration")));
        within(&format!("{} {name} bf16", h.name), &ours, &wanted, 0.1);
        let off: f64 = ours.iter().zip(&wanted).map(|(o, w)| (o - f64::from(*w)).powi(2)).sum();
        let all: f64 = wanted.iter().map(|w| f64::from(*w).powi(2)).sum();
        assert!(off.sqrt() <= 5e-2 * all.sqrt(), "{} {name} bf16: L2 {}", h.name, (off / all).sqrt());
    }
}

/// One parameter over the steps of a case.
struct Run<'a> {
    momentum: MuonMomentum,
    decay: WeightDecay,
    weight_decay: f64,
    coefficients: &'a [Coefficients],
    bf16: bool,
    /// Allowed error of the parameter.
    room: f64,
}

fn steps(h: &TestDevice, golden: &Tensors, at: &str, lrs: &[f64], factor: f32, run: &Run) {
    let p = matrix(h, golden, &format!("{at}/init"));
    let n = p.numel();
    let (held, update) = (h.tensor(DType::F32, p.shape(), &vec![0.0; n]), h.poisoned(DType::F32, p.shape()));
    let grads = golden.f32(&format!("{at}/grads"));
    let (params, buffers) =
        (golden.f32(&format!("{at}/param")), golden.f32(&format!("{at}/momentum_buffer")));
    for (step, lr) in lrs.iter().enumerate() {
        let values: Vec<f64> = grads[step * n..][..n].iter().map(|g| f64::from(*g)).collect();
        let grad = h.tensor(DType::F32, p.shape(), &values);
        let mut s = vec![0.0; scalars::COUNT];
        (s[scalars::LR], s[scalars::WEIGHT_DECAY]) = (*lr, run.weight_decay);
        (s[scalars::CLIP], s[scalars::GRAD_NORM]) = (1.0, 1.0);
        let s = h.tensor(DType::F32, &[scalars::COUNT], &s);
        let l2 = (run.decay == WeightDecay::L2).then_some(&p);
        let one = MomentumUpdate { grad: &grad, momentum: &held, l2, wd_mult: 1.0, update: &update };
        h.k.muon_momentum(&h.s, run.momentum, &s, &[one]).unwrap();
        orthogonalize(h, run.coefficients, run.bf16, &update);
        h.k.scale(&h.s, &update, factor).unwrap();
        let one = ApplyUpdate { master: &p, weight: None, update: &update, lr_mult: 1.0, wd_mult: 1.0 };
        h.k.apply_update(&h.s, run.decay, &s, &[one]).unwrap();
        let what = format!("{} {at} step {step}", h.name);
        within(&format!("{what} momentum"), &h.host(&held), &buffers[step * n..][..n], 1e-5);
        within(&what, &h.host(&p), &params[step * n..][..n], run.room);
    }
}

fn torch(h: &TestDevice, golden: &Tensors, case: &Value) {
    let name = text(case, "name");
    let keys = ["lrs", "num_params", "ns_steps", "ns_coefficients", "eps", "weight_decay", "adjust_lr_fn"];
    only_keys(name, case, &[&COMMON[..2], &COMMON[6..], &keys].concat());
    let row: Vec<f32> = numbers(case, "ns_coefficients").iter().map(|x| *x as f32).collect();
    let run = Run {
        momentum: MuonMomentum {
            momentum: number(case, "momentum") as f32,
            nesterov: flag(case, "nesterov"),
        },
        decay: WeightDecay::Decoupled,
        weight_decay: number(case, "weight_decay"),
        coefficients: &vec![[row[0], row[1], row[2]]; count(case, "ns_steps")],
        bf16: true,
        room: 5e-3,
    };
    for i in 0..count(case, "num_params") {
        let at = format!("{name}/p{i}");
        let shape = golden.shape(&format!("{at}/init"));
        let factor = match case["adjust_lr_fn"].as_str() {
            None | Some("original") => ScaleMode::ShapeScaling.factor([shape[0], shape[1]]),
            Some("match_rms_adamw") => 0.2 * ScaleMode::Spectral.factor([shape[0], shape[1]]),
            Some(other) => panic!("the format has no adjust_lr_fn {other}"),
        };
        steps(h, golden, &at, &numbers(case, "lrs"), factor as f32, &run);
    }
}

fn emerging(h: &TestDevice, golden: &Tensors, case: &Value) {
    let name = text(case, "name");
    only_keys(
        name,
        case,
        &[&COMMON[..], &["lr", "num_params", "weight_decay", "weight_decay_method"]].concat(),
    );
    let set = set(text(case, "coefficient_type"));
    let run = Run {
        momentum: MuonMomentum {
            momentum: number(case, "momentum") as f32,
            nesterov: flag(case, "nesterov"),
        },
        decay: match case["weight_decay_method"].as_str() {
            None | Some("decoupled") => WeightDecay::Decoupled,
            Some("independent") => WeightDecay::Independent,
            Some("l2") => WeightDecay::L2,
            Some(other) => panic!("the format has no weight_decay_method {other}"),
        },
        weight_decay: number(case, "weight_decay"),
        coefficients: &set.schedule(number_or(case, "num_ns_steps", 5.0) as usize),
        bf16: false,
        room: 1e-4,
    };
    for i in 0..count(case, "num_params") {
        let at = format!("{name}/p{i}");
        let shape = golden.shape(&format!("{at}/init"));
        let steps_of = golden.shape(&format!("{at}/grads"))[0];
        let factor = scale(case, [shape[0], shape[1]]);
        steps(h, golden, &at, &vec![number(case, "lr"); steps_of], factor, &run);
    }
}

/// The scaled update of a matrix, of shares of it, and of stacked queries, keys and values.
fn megatron(h: &TestDevice, golden: &Tensors, case: &Value) {
    let name = text(case, "name");
    let keys = ["qkv_split_shapes", "shards", "tp_mode", "lr", "num_params", "weight_decay"];
    only_keys(name, case, &[&COMMON[..], &keys].concat());
    let schedule =
        set(text(case, "coefficient_type")).schedule(number_or(case, "num_ns_steps", 5.0) as usize);
    let shape = golden.shape(&format!("{name}/x"));
    let (rows, cols) = (shape[0], shape[1]);
    let x = golden.f32(&format!("{name}/x"));
    let (axis, parts) = match case["shards"].as_array() {
        Some(s) => (s[0].as_u64().unwrap() as usize, s[1].as_u64().unwrap() as usize),
        None => (0, 1),
    };
    let mut ours = vec![f64::NAN; x.len()];
    for share in 0..parts {
        let (r, c) = if axis == 0 { (rows / parts, cols) } else { (rows, cols / parts) };
        let (r0, c0) = if axis == 0 { (share * r, 0) } else { (0, share * c) };
        // Rows of each matrix of this share: all, or those of queries, keys and values of every group.
        let matrices: Vec<Vec<usize>> = match case["qkv_split_shapes"].as_array() {
            None => vec![(0..r).collect()],
            Some(split) => {
                let split: Vec<usize> = split.iter().map(|n| n.as_u64().unwrap() as usize).collect();
                let group: usize = split.iter().sum();
                let first = |k: usize| split[..k].iter().sum::<usize>();
                let own = |k: usize| first(k)..first(k) + split[k];
                (0..3).map(|k| (0..r).filter(|i| own(k).contains(&(i % group))).collect()).collect()
            }
        };
        for own in matrices {
            let index = |i: usize, j: usize| (r0 + own[i]) * cols + c0 + j;
            let values: Vec<f64> = (0..own.len() * c).map(|e| f64::from(x[index(e / c, e % c)])).collect();
            let m = h.tensor(DType::F32, &[own.len(), c], &values);
            orthogonalize(h, &schedule, false, &m);
            h.k.scale(&h.s, &m, scale(case, [own.len(), c])).unwrap();
            h.host(&m).iter().enumerate().for_each(|(e, y)| ours[index(e / c, e % c)] = *y);
        }
    }
    let wanted = golden.f32(&format!("{name}/y"));
    let largest = wanted.iter().fold(1f32, |a, w| a.max(w.abs()));
    within(&format!("{} {name}", h.name), &ours, &wanted, 1e-4 * f64::from(largest));
}
