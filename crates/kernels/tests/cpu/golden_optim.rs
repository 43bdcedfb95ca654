//! Optimizers against golden vectors (area `optim`): Adam, AdamW and SGD of torch, TransformerEngine's fused Adam,
//! gradient clipping and the dynamic loss scale.

use super::golden::{
    Area, Report, Tensors, bf16_ulps, bf16s, count, flag, list, number, number_or, numbers, only_keys, text,
};
use super::support::everywhere;
use ferrotron_kernels::cpu::grad_norm::{NormType, clip_factor, norm_total};
use ferrotron_kernels::cpu::optimizer::{AdamFactors, UpdateSlices, adam, sgd};
use ferrotron_kernels::cpu::optimizer_chunks::{Grad, Param, State, join_master, split_master};
use ferrotron_kernels::cpu::{CpuContext, Isa, elementwise};
use ferrotron_kernels::grad_scaler::{DynamicScaler, ScalerConfig};
use ferrotron_kernels::{Adam, Sgd};
use ferrotron_tensor::{Threads, bf16};
use safetensors::Dtype;
use serde_json::Value;

#[test]
fn golden_optim() {
    for area in Area::all("optim") {
        let known = ["torch", "fused_adam", "clip", "grad_scaler", "muon"];
        area.known_files(|file| {
            let stem = file.strip_suffix(".json").or(file.strip_suffix(".safetensors"));
            stem.is_some_and(|stem| known.contains(&stem))
        });
        let mut report = area.report();
        for stem in known.iter().filter(|stem| area.has(&format!("{stem}.json"))) {
            let json = area.json(&format!("{stem}.json"));
            let more: &[&str] = if *stem == "grad_scaler" { &["columns"] } else { &[] };
            only_keys(stem, &json, &[&["producer", "cases"], more].concat());
            let tensors = || {
                let t = area.tensors(&format!("{stem}.safetensors"));
                t.only_cases(list(&json, "cases"));
                t
            };
            let cases = list(&json, "cases");
            match *stem {
                "torch" => each(&mut report, cases, &tensors(), torch),
                "fused_adam" => each(&mut report, cases, &tensors(), fused_adam),
                "clip" => each(&mut report, cases, &tensors(), clip),
                "grad_scaler" => grad_scaler(&mut report, &json),
                // The conformance suite runs these on every device.
                _ => {}
            }
        }
        report.finish();
    }
}

/// Runs every case; all tensors of a case must have been read.
fn each(report: &mut Report, cases: &[Value], t: &Tensors, run: impl Fn(&Tensors, &Value)) {
    for case in cases {
        let name = text(case, "name");
        report.case(name, || {
            run(t, case);
            t.all_read(&format!("{name}/"));
        });
    }
}

/// `|ours − wanted| <= relative·|wanted| + 1e-7·max|wanted|`
fn close(name: &str, ours: &[f32], wanted: &[f32], relative: f32) {
    let largest = wanted.iter().fold(0f32, |a, w| a.max(w.abs()));
    for (i, (o, w)) in ours.iter().zip(wanted).enumerate() {
        let room = relative * w.abs() + 1e-7 * largest;
        assert!((o - w).abs() <= room, "{name}[{i}]: {o} instead of {w}, allowed {room:e}");
    }
}

/// Parameters, first and second states after each step.
type Trace = Vec<(Vec<f32>, Vec<f32>, Vec<f32>)>;

fn torch(golden: &Tensors, case: &Value) {
    let (name, kind, steps) = (text(case, "name"), text(case, "kind"), count(case, "steps"));
    let own: &[&str] = match kind {
        "adamw" | "adam" => &["eps", "betas"],
        "sgd" => &["momentum", "nesterov", "dampening"],
        other => panic!("the format has no kind {other}"),
    };
    let common = ["name", "kind", "steps", "lrs", "special", "num_params", "weight_decay"];
    only_keys(name, case, &[&common, own].concat());
    let relative = match case["special"].as_str() {
        None | Some("sparse") => 1e-6,
        Some("nasty") => 1e-5,
        Some(other) => panic!("the format has no special {other}"),
    };
    let (lrs, wd) = (numbers(case, "lrs"), number_or(case, "weight_decay", 0.0) as f32);
    assert_eq!(lrs.len(), steps, "{name}: lrs");
    let momentum = number_or(case, "momentum", 0.0);
    for p in 0..count(case, "num_params") {
        let get = |part: &str| golden.f32(&format!("{name}/p{p}/{part}"));
        let (init, grads) = (get("init"), get("grads"));
        let n = init.len();
        let trace: Trace = everywhere(|cpu| {
            let (mut param, mut first, mut second) = (init.clone(), vec![0f32; n], vec![0f32; n]);
            let mut trace = Trace::new();
            for (step, lr) in lrs.iter().enumerate() {
                let stateless = kind == "sgd" && momentum == 0.0;
                let one = UpdateSlices {
                    param: Param::Master(&mut param),
                    grad: Grad::F32(&grads[step * n..][..n]),
                    first: if stateless { State::None } else { State::F32(&mut first) },
                    second: if kind == "sgd" { State::None } else { State::F32(&mut second) },
                    lr: *lr as f32,
                    weight_decay: wd,
                    fp8: None,
                };
                if kind == "sgd" {
                    let how = Sgd {
                        momentum: momentum as f32,
                        dampening: number_or(case, "dampening", 0.0) as f32,
                        nesterov: flag(case, "nesterov"),
                    };
                    sgd(cpu, how, step == 0, 1.0, 0, vec![one]).unwrap();
                } else {
                    let (b, eps) = (numbers(case, "betas"), number(case, "eps"));
                    let factors = AdamFactors::torch(b[0], b[1], eps, kind == "adamw", step as u64 + 1);
                    adam(cpu, factors, vec![one]).unwrap();
                }
                trace.push((param.clone(), first.clone(), second.clone()));
            }
            trace
        });
        let states: &[&str] = match kind {
            "sgd" if momentum == 0.0 => &["param"],
            "sgd" => &["param", "momentum_buffer"],
            _ => &["param", "exp_avg", "exp_avg_sq"],
        };
        for (which, part) in states.iter().enumerate() {
            let wanted = get(part);
            for (step, (param, first, second)) in trace.iter().enumerate() {
                let what = format!("{name}/p{p}/{part} step {step}");
                close(&what, [param, first, second][which], &wanted[step * n..][..n], relative);
            }
        }
    }
}

fn fused_adam(golden: &Tensors, case: &Value) {
    let name = text(case, "name");
    only_keys(
        name,
        case,
        &[
            "name",
            "mode",
            "moment_dtype",
            "grad_dtype",
            "param_dtype",
            "store_param_remainders",
            "betas",
            "eps",
            "weight_decay",
            "lrs",
            "steps",
            "num_params",
            "half_up_differs_from_rne",
        ],
    );
    match text(case, "mode") {
        "adamw" => fused_case(golden, case, true),
        "l2" => fused_case(golden, case, false),
        // The corner cases of the split have a mode in prose, and bit patterns instead of steps.
        _ if golden.has(&format!("{name}/rne_bits")) => split_case(golden, case),
        other => panic!("the format has no mode {other}"),
    }
}

fn split_case(golden: &Tensors, case: &Value) {
    let name = text(case, "name");
    let get = |part: &str| golden.i16(&format!("{name}/{part}"));
    let (high, low, nearest) = (get("param_bits"), get("remainder"), get("rne_bits"));
    for (i, master) in golden.f32(&format!("{name}/master")).into_iter().enumerate() {
        let (h, l) = split_master(master);
        assert_eq!((h.to_bits() as i16, l), (high[i], low[i]), "split of {master}");
        assert_eq!(join_master(h, l).to_bits(), master.to_bits(), "join of {master}");
        assert_eq!(bf16::from_f32(master).to_bits() as i16, nearest[i], "rounding of {master}");
    }
    let differ = high.iter().zip(&nearest).filter(|(h, n)| h != n).count();
    assert_eq!(differ, count(case, "half_up_differs_from_rne"), "{name}");
}

/// Values in the type that a case names for them.
#[derive(Clone)]
enum Typed {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

impl Typed {
    fn zeros(case: &Value, key: &str, n: usize) -> Typed {
        match text(case, key) {
            "f32" => Typed::F32(vec![0.0; n]),
            "bf16" => Typed::Bf16(vec![bf16::ZERO; n]),
            other => panic!("the format has no {key} {other}"),
        }
    }

    fn read(golden: &Tensors, name: &str) -> Typed {
        match golden.dtype(name) {
            Dtype::F32 => Typed::F32(golden.f32(name)),
            Dtype::BF16 => Typed::Bf16(bf16s(golden, name)),
            other => panic!("{name}: {other:?}"),
        }
    }

    fn state(&mut self) -> State<'_> {
        match self {
            Typed::F32(x) => State::F32(x),
            Typed::Bf16(x) => State::Bf16(x),
        }
    }

    fn values(&self) -> Vec<f32> {
        match self {
            Typed::F32(x) => x.clone(),
            Typed::Bf16(x) => x.iter().map(|x| x.to_f32()).collect(),
        }
    }

    /// Within `ulps` of bf16; f32 within 1e-6 relative to each value and 1e-7 of the largest.
    fn near(&self, what: &str, ours: &[f32], part: std::ops::Range<usize>, ulps: u32) {
        match self {
            Typed::F32(wanted) => close(what, ours, &wanted[part], 1e-6),
            Typed::Bf16(wanted) => {
                for (o, w) in ours.iter().zip(&wanted[part]) {
                    assert!(bf16_ulps(bf16::from_f32(*o), *w) <= ulps, "{what}: {o} instead of {w}");
                }
            }
        }
    }
}

fn fused_case(golden: &Tensors, case: &Value, decoupled: bool) {
    let (name, steps) = (text(case, "name"), count(case, "steps"));
    let betas = numbers(case, "betas");
    let settings =
        Adam { beta1: betas[0] as f32, beta2: betas[1] as f32, eps: number(case, "eps") as f32, decoupled };
    let remainders = flag(case, "store_param_remainders");
    let param_dtype = text(case, "param_dtype");
    assert!(!remainders || param_dtype == "bf16", "{name}: remainders belong to bf16 parameters");
    let (lrs, weight_decay) = (numbers(case, "lrs"), number_or(case, "weight_decay", 0.0) as f32);
    assert_eq!(lrs.len(), steps, "{name}: lrs");
    for p in 0..count(case, "num_params") {
        let at = |part: &str| format!("{name}/p{p}/{part}");
        let init = golden.f32(&at("init_master"));
        let (n, grads) = (init.len(), Typed::read(golden, &at("grads")));
        let stated = text(case, "grad_dtype");
        assert_eq!(matches!(grads, Typed::Bf16(_)), stated == "bf16", "{name}: grads are not {stated}");
        // Master, weight and moments after every step.
        let trace = everywhere(|cpu| {
            let mut master = init.clone();
            let (mut high, mut low): (Vec<bf16>, Vec<i16>) = init.iter().map(|m| split_master(*m)).unzip();
            let mut copy = vec![bf16::ZERO; n];
            let mut first = Typed::zeros(case, "moment_dtype", n);
            let mut second = Typed::zeros(case, "moment_dtype", n);
            let mut trace = vec![];
            for (step, lr) in lrs.iter().enumerate() {
                let part = step * n..(step + 1) * n;
                let one = UpdateSlices {
                    param: match param_dtype {
                        "bf16" if remainders => Param::Split(&mut high, &mut low),
                        "bf16" => Param::Copied(&mut master, &mut copy),
                        "f32" => Param::Master(&mut master),
                        other => panic!("the format has no param_dtype {other}"),
                    },
                    grad: match &grads {
                        Typed::F32(g) => Grad::F32(&g[part]),
                        Typed::Bf16(g) => Grad::Bf16(&g[part]),
                    },
                    first: first.state(),
                    second: second.state(),
                    lr: *lr as f32,
                    weight_decay,
                    fp8: None,
                };
                let factors = AdamFactors::transformer_engine(settings, step as u64 + 1);
                adam(cpu, factors, vec![one]).unwrap();
                if remainders {
                    master = high.iter().zip(&low).map(|(h, l)| join_master(*h, *l)).collect();
                }
                let weight: Vec<f32> = match param_dtype {
                    "bf16" if remainders => high.iter().map(|w| w.to_f32()).collect(),
                    "bf16" => copy.iter().map(|w| w.to_f32()).collect(),
                    _ => master.clone(),
                };
                if param_dtype == "bf16" && !remainders {
                    assert!(master.iter().zip(&copy).all(|(m, w)| bf16::from_f32(*m) == *w));
                }
                trace.push((master.clone(), weight, first.values(), second.values()));
            }
            trace
        });
        let wanted_master = golden.f32(&at("master"));
        let wanted_weight = Typed::read(golden, &at(if remainders { "param_half_up" } else { "param" }));
        let moments = ["exp_avg", "exp_avg_sq"].map(|part| (part, Typed::read(golden, &at(part))));
        for (step, (master, weight, first, second)) in trace.iter().enumerate() {
            let part = step * n..(step + 1) * n;
            for (o, w) in master.iter().zip(&wanted_master[part.clone()]) {
                assert!((o - w).abs() <= 1e-6, "{name} master step {step}: {o} instead of {w}");
            }
            match &wanted_weight {
                // The parameter is the master.
                Typed::F32(w) => assert_eq!(w[part.clone()], wanted_master[part.clone()], "{name} param"),
                bf16 => bf16.near(&format!("{name} param step {step}"), weight, part.clone(), 1),
            }
            for (ours, (kind, wanted)) in [first, second].into_iter().zip(&moments) {
                let what = format!("{name}/p{p}/{kind} step {step}");
                wanted.near(&what, ours, part.clone(), step as u32 + 1);
            }
        }
        if remainders {
            let lows = golden.i16(&at("remainder"));
            let highs = bf16s(golden, &at("param_half_up"));
            for ((m, h), l) in wanted_master.iter().zip(&highs).zip(&lows) {
                assert_eq!(split_master(*m), (*h, *l), "{name} split of {m}");
                assert_eq!(join_master(*h, *l), *m, "{name}");
            }
            // Rounded to nearest even beside the split, where the set has it.
            if golden.has(&at("param")) {
                for (m, w) in wanted_master.iter().zip(bf16s(golden, &at("param"))) {
                    assert_eq!(bf16::from_f32(*m), w, "{name} rounding of {m}");
                }
            }
        }
    }
}

fn clip(golden: &Tensors, case: &Value) {
    let name = text(case, "name");
    only_keys(name, case, &["name", "max_norm", "norm_type", "scale", "total_norm_f64", "num"]);
    let kind = match (case["norm_type"].as_f64(), case["norm_type"].as_str()) {
        (Some(p), _) if p == f64::INFINITY => NormType::Max,
        (Some(2.0), _) => NormType::L2,
        (Some(1.0), _) => NormType::L1,
        (Some(p), _) => NormType::Power(p),
        (_, Some("inf")) => NormType::Max,
        (_, other) => panic!("the format has no norm_type {other:?}"),
    };
    let grads: Vec<Vec<f32>> = (0..count(case, "num")).map(|i| golden.f32(&format!("{name}/g{i}"))).collect();
    let views: Vec<&[f32]> = grads.iter().map(Vec::as_slice).collect();
    let norm = everywhere(|cpu| kind.finish(norm_total(cpu, kind, &views)).to_bits());
    let norm = f64::from_bits(norm);
    // Equal infinities and NaN count as near.
    let near = |ours: f64, wanted: f64, room: f64| {
        ours == wanted || (ours.is_nan() && wanted.is_nan()) || (ours - wanted).abs() <= room
    };
    let wanted = f64::from(golden.f32(&format!("{name}/total_norm"))[0]);
    // Sums of squares beyond the range of f32 are finite in f64, which is what we compute in.
    let exact = number_or(case, "total_norm_f64", wanted);
    let overflowed = wanted.is_infinite() && exact.is_finite();
    assert!(overflowed || near(norm, wanted, 1e-6 * wanted), "{name}: norm {norm} instead of {wanted}");
    assert!(near(norm, exact, 1e-6 * exact), "{name}: norm {norm} instead of {exact}");
    let factor = clip_factor(norm, number(case, "max_norm"));
    for (i, mut grad) in grads.into_iter().enumerate() {
        let threads = Threads::new(1).unwrap();
        elementwise::scale(CpuContext::new(&threads, Isa::detect()), &mut grad, factor);
        for (o, w) in grad.iter().zip(golden.f32(&format!("{name}/clipped{i}"))) {
            let (o, w) = (f64::from(*o), f64::from(w));
            assert!(overflowed || near(o, w, 1e-6 * w.abs()), "{name} clipped{i}: {o} instead of {w}");
        }
    }
}

fn grad_scaler(report: &mut Report, json: &Value) {
    let columns = ["found_inf", "scale", "growth_tracker", "hysteresis_tracker"];
    assert!(list(json, "columns").iter().map(|c| c.as_str().unwrap()).eq(columns));
    for (i, case) in list(json, "cases").iter().enumerate() {
        report.case(&format!("grad_scaler {i}"), || {
            only_keys(
                "grad_scaler",
                case,
                &["name", "initial", "min", "growth", "backoff", "growth_interval", "hysteresis", "rows"],
            );
            let mut scaler = DynamicScaler::new(ScalerConfig {
                initial: number(case, "initial") as f32,
                min: number(case, "min") as f32,
                growth: number(case, "growth") as f32,
                backoff: number(case, "backoff") as f32,
                growth_interval: count(case, "growth_interval") as u32,
                hysteresis: count(case, "hysteresis") as i32,
            });
            for row in list(case, "rows") {
                scaler.update(row[0].as_bool().unwrap_or_else(|| row[0].as_f64() == Some(1.0)));
                let ours = (
                    f64::from(scaler.scale),
                    i64::from(scaler.growth_tracker),
                    i64::from(scaler.hysteresis_tracker),
                );
                let wanted = (row[1].as_f64().unwrap(), row[2].as_i64().unwrap(), row[3].as_i64().unwrap());
                assert_eq!(ours, wanted, "{row}");
            }
        });
    }
}
