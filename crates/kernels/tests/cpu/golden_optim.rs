use super::golden::{Golden, bf16_ulps, count, folder, number, text};
use super::support::everywhere;
use ferrotron_kernels::cpu::grad_norm::{NormType, clip_factor, norm_total};
use ferrotron_kernels::cpu::optimizer::{AdamFactors, UpdateSlices, adam, sgd};
use ferrotron_kernels::cpu::optimizer_chunks::{Grad, Param, State, join_master, split_master};
use ferrotron_kernels::cpu::{Isa, elementwise};
use ferrotron_kernels::grad_scaler::{DynamicScaler, ScalerConfig};
use ferrotron_kernels::{Adam, Sgd};
use ferrotron_tensor::{Threads, bf16};
use safetensors::Dtype;
use serde_json::Value;

/// Not here: orthogonalised updates are built on matrix products.
const NOT_COVERED: [&str; 1] = ["muon"];

#[test]
fn golden_optim() {
    let mut files: Vec<String> = std::fs::read_dir(folder("optim"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "json"))
        .map(|path| path.file_stem().unwrap().to_string_lossy().into_owned())
        .collect();
    files.sort();
    files.retain(|name| !NOT_COVERED.contains(&name.as_str()));
    assert!(!files.is_empty(), "no cases");
    for name in files {
        match name.as_str() {
            "torch" => torch(&Golden::open("optim", "torch")),
            "fused_adam" => fused_adam(&Golden::open("optim", "fused_adam")),
            "clip" => clip(&Golden::open("optim", "clip")),
            "grad_scaler" => grad_scaler(),
            other => panic!("unknown golden file {other}.json"),
        }
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

fn numbers(case: &Value, key: &str) -> Vec<f64> {
    case[key].as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect()
}

/// Parameters, first and second states after each step.
type Trace = Vec<(Vec<f32>, Vec<f32>, Vec<f32>)>;

fn torch(golden: &Golden) {
    for case in golden.cases() {
        let (name, kind, steps) = (text(case, "name"), text(case, "kind"), count(case, "steps"));
        let relative = match case["special"].as_str() {
            None | Some("sparse") => 1e-6,
            Some("nasty") => 1e-5,
            Some(other) => panic!("{name}: unknown special {other}"),
        };
        let (lrs, wd) = (numbers(case, "lrs"), number(case, "weight_decay") as f32);
        for p in 0..count(case, "num_params") {
            let get = |part: &str| golden.f32(&format!("{name}/p{p}/{part}"));
            let (init, grads) = (get("init"), get("grads"));
            let n = init.len();
            let trace: Trace = everywhere(|threads, isa| {
                let (mut param, mut first, mut second) = (init.clone(), vec![0f32; n], vec![0f32; n]);
                (0..steps)
                    .map(|step| {
                        let stateless = kind == "sgd" && number(case, "momentum") == 0.0;
                        let one = UpdateSlices {
                            param: Param::Master(&mut param),
                            grad: Grad::F32(&grads[step * n..][..n]),
                            first: if stateless { State::None } else { State::F32(&mut first) },
                            second: if kind == "sgd" { State::None } else { State::F32(&mut second) },
                            lr: lrs[step] as f32,
                            weight_decay: wd,
                            fp8: None,
                        };
                        match kind {
                            "adamw" | "adam" => {
                                let b = numbers(case, "betas");
                                let (eps, t) = (number(case, "eps"), step as u64 + 1);
                                let factors = AdamFactors::torch(b[0], b[1], eps, kind == "adamw", t);
                                adam(threads, isa, factors, vec![one]).unwrap();
                            }
                            "sgd" => {
                                let how = Sgd {
                                    momentum: number(case, "momentum") as f32,
                                    dampening: number(case, "dampening") as f32,
                                    nesterov: case["nesterov"].as_bool().unwrap(),
                                };
                                sgd(threads, isa, how, step == 0, 1.0, 0, vec![one]).unwrap();
                            }
                            other => panic!("{name}: unknown kind {other}"),
                        }
                        (param.clone(), first.clone(), second.clone())
                    })
                    .collect()
            });
            let states: &[&str] = match kind {
                "sgd" if number(case, "momentum") == 0.0 => &["param"],
                "sgd" => &["param", "momentum_buffer"],
                _ => &["param", "exp_avg", "exp_avg_sq"],
            };
            for (which, part) in states.iter().enumerate() {
                let wanted = get(part);
                for (step, (param, first, second)) in trace.iter().enumerate() {
                    let ours = [param, first, second][which];
                    close(
                        &format!("{name}/p{p}/{part} step {step}"),
                        ours,
                        &wanted[step * n..][..n],
                        relative,
                    );
                }
            }
        }
    }
}

fn fused_adam(golden: &Golden) {
    for case in golden.cases() {
        let name = text(case, "name");
        match text(case, "mode") {
            "adamw" => fused_case(golden, case, true),
            "adam" | "l2" => fused_case(golden, case, false),
            mode if mode.contains("remainder split") => split_case(golden, name),
            other => panic!("{name}: unknown mode {other}"),
        }
    }
}

fn split_case(golden: &Golden, name: &str) {
    let get = |part: &str| golden.i16(&format!("{name}/{part}"));
    let (high, low, nearest) = (get("param_bits"), get("remainder"), get("rne_bits"));
    for (i, master) in golden.f32(&format!("{name}/master")).into_iter().enumerate() {
        let (h, l) = split_master(master);
        assert_eq!((h.to_bits() as i16, l), (high[i], low[i]), "split of {master}");
        assert_eq!(join_master(h, l).to_bits(), master.to_bits(), "join of {master}");
        assert_eq!(bf16::from_f32(master).to_bits() as i16, nearest[i], "rounding of {master}");
    }
}

fn fused_case(golden: &Golden, case: &Value, decoupled: bool) {
    let (name, steps) = (text(case, "name"), count(case, "steps"));
    let betas = numbers(case, "betas");
    let settings =
        Adam { beta1: betas[0] as f32, beta2: betas[1] as f32, eps: number(case, "eps") as f32, decoupled };
    let bf16_moments = match text(case, "moment_dtype") {
        "bf16" => true,
        "f32" => false,
        other => panic!("{name}: unknown moment type {other}"),
    };
    assert_eq!(text(case, "param_dtype"), "bf16", "{name}");
    let remainders = case["store_param_remainders"].as_bool().unwrap();
    let lrs = numbers(case, "lrs");
    for p in 0..count(case, "num_params") {
        let at = |part: &str| format!("{name}/p{p}/{part}");
        let init = golden.f32(&at("init_master"));
        let n = init.len();
        let narrow = golden.dtype(&at("grads")) == Dtype::BF16;
        assert_eq!(narrow, text(case, "grad_dtype") == "bf16", "{name}");
        let grads = if narrow { vec![] } else { golden.f32(&at("grads")) };
        let grads16 = if narrow { golden.bf16(&at("grads")) } else { vec![] };
        // Master, weight, moments after every step.
        let trace = everywhere(|threads, isa| {
            let mut master = init.clone();
            let (mut high, mut low): (Vec<bf16>, Vec<i16>) = init.iter().map(|m| split_master(*m)).unzip();
            let mut weight = vec![bf16::ZERO; n];
            let (mut m32, mut v32) = (vec![0f32; n], vec![0f32; n]);
            let (mut m16, mut v16) = (vec![bf16::ZERO; n], vec![bf16::ZERO; n]);
            let mut trace = vec![];
            for (step, lr) in lrs.iter().enumerate() {
                let part = step * n..(step + 1) * n;
                let one = UpdateSlices {
                    param: if remainders {
                        Param::Split(&mut high, &mut low)
                    } else {
                        Param::Copied(&mut master, &mut weight)
                    },
                    grad: if narrow { Grad::Bf16(&grads16[part]) } else { Grad::F32(&grads[part]) },
                    first: if bf16_moments { State::Bf16(&mut m16) } else { State::F32(&mut m32) },
                    second: if bf16_moments { State::Bf16(&mut v16) } else { State::F32(&mut v32) },
                    lr: *lr as f32,
                    weight_decay: number(case, "weight_decay") as f32,
                    fp8: None,
                };
                let factors = AdamFactors::transformer_engine(settings, step as u64 + 1);
                adam(threads, isa, factors, vec![one]).unwrap();
                if remainders {
                    master = high.iter().zip(&low).map(|(h, l)| join_master(*h, *l)).collect();
                    weight.clone_from(&high);
                } else {
                    assert!(master.iter().zip(&weight).all(|(m, w)| bf16::from_f32(*m) == *w));
                }
                let moments = |m32: &[f32], m16: &[bf16]| -> Vec<f32> {
                    if bf16_moments { m16.iter().map(|m| m.to_f32()).collect() } else { m32.to_vec() }
                };
                trace.push((master.clone(), weight.clone(), moments(&m32, &m16), moments(&v32, &v16)));
            }
            trace
        });
        assert_eq!(trace.len(), steps);
        let wanted_master = golden.f32(&at("master"));
        let wanted_weight = golden.bf16(&at(if remainders { "param_half_up" } else { "param" }));
        for (step, (master, weight, first, second)) in trace.iter().enumerate() {
            let part = step * n..(step + 1) * n;
            for (o, w) in master.iter().zip(&wanted_master[part.clone()]) {
                assert!((o - w).abs() <= 1e-6, "{name} master step {step}: {o} instead of {w}");
            }
            for (o, w) in weight.iter().zip(&wanted_weight[part.clone()]) {
                assert!(bf16_ulps(*o, *w) <= 1, "{name} param step {step}: {o} instead of {w}");
            }
            for (ours, part_name) in [(first, "exp_avg"), (second, "exp_avg_sq")] {
                if bf16_moments {
                    for (o, w) in ours.iter().zip(&golden.bf16(&at(part_name))[part.clone()]) {
                        let off = bf16_ulps(bf16::from_f32(*o), *w);
                        assert!(
                            off as usize <= step + 1,
                            "{name} {part_name} step {step}: {o} instead of {w}"
                        );
                    }
                } else {
                    let what = format!("{name}/p{p}/{part_name} step {step}");
                    close(&what, ours, &golden.f32(&at(part_name))[part.clone()], 1e-6);
                }
            }
        }
        if remainders {
            let lows = golden.i16(&at("remainder"));
            for ((m, h), l) in wanted_master.iter().zip(&wanted_weight).zip(&lows) {
                assert_eq!(split_master(*m), (*h, *l), "{name} split of {m}");
                assert_eq!(join_master(*h, *l), *m, "{name}");
            }
        }
    }
}

fn clip(golden: &Golden) {
    for case in golden.cases() {
        let name = text(case, "name");
        let kind = match (case["norm_type"].as_f64(), case["norm_type"].as_str()) {
            (Some(2.0), _) => NormType::L2,
            (Some(1.0), _) => NormType::L1,
            (_, Some("inf")) => NormType::Max,
            other => panic!("{name}: unknown norm {other:?}"),
        };
        let num = count(case, "num");
        let grads: Vec<Vec<f32>> = (0..num).map(|i| golden.f32(&format!("{name}/g{i}"))).collect();
        let views: Vec<&[f32]> = grads.iter().map(Vec::as_slice).collect();
        let norm = everywhere(|threads, isa| kind.finish(norm_total(threads, isa, kind, &views)));
        let wanted = f64::from(golden.f32(&format!("{name}/total_norm"))[0]);
        assert!((norm - wanted).abs() <= 1e-6 * wanted, "{name}: norm {norm} instead of {wanted}");
        let exact = number(case, "total_norm_f64");
        assert!((norm - exact).abs() <= 1e-6 * exact, "{name}: norm {norm} instead of {exact}");
        let factor = clip_factor(norm, number(case, "max_norm"));
        for (i, mut grad) in grads.into_iter().enumerate() {
            elementwise::scale(&Threads::new(1).unwrap(), Isa::detect(), &mut grad, factor);
            for (o, w) in grad.iter().zip(golden.f32(&format!("{name}/clipped{i}"))) {
                assert!((o - w).abs() <= 1e-6 * w.abs(), "{name} clipped: {o} instead of {w}");
            }
        }
    }
}

fn grad_scaler() {
    let path = folder("optim").join("grad_scaler.json");
    let json: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let columns = ["found_inf", "scale", "growth_tracker", "hysteresis_tracker"];
    assert!(json["columns"].as_array().unwrap().iter().map(|c| c.as_str().unwrap()).eq(columns));
    let cases = json["cases"].as_array().unwrap();
    assert!(!cases.is_empty(), "no cases");
    for case in cases {
        let mut scaler = DynamicScaler::new(ScalerConfig {
            initial: number(case, "initial") as f32,
            min: number(case, "min") as f32,
            growth: number(case, "growth") as f32,
            backoff: number(case, "backoff") as f32,
            growth_interval: count(case, "growth_interval") as u32,
            hysteresis: count(case, "hysteresis") as i32,
        });
        for row in case["rows"].as_array().unwrap() {
            scaler.update(row[0].as_u64() == Some(1));
            let ours = (
                f64::from(scaler.scale),
                i64::from(scaler.growth_tracker),
                i64::from(scaler.hysteresis_tracker),
            );
            let wanted = (row[1].as_f64().unwrap(), row[2].as_i64().unwrap(), row[3].as_i64().unwrap());
            assert_eq!(ours, wanted, "{row}");
        }
    }
}
