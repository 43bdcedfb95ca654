//! The number formats: casts, decoded values, scales from amax, and delayed scaling over several steps.

use super::areas;
use super::compare::{format_of, same, same_codes};
use super::golden::{Tensors, count, flag, list, number, only_keys, text};
use super::host::Host;
use ferrotron_kernels::quant::scale::{ScaleRule, largest, power_of_two};
use ferrotron_kernels::{DelayedScaling, DelayedUpdate, QuantKernels};
use ferrotron_tensor::fp8::{E2m1, E4m3, E5m2, E8m0};
use ferrotron_tensor::{DType, bf16, f16};
use serde_json::Value;

#[test]
fn golden_casts() {
    for area in areas("cast.safetensors") {
        let t = area.tensors("cast.safetensors");
        let mut report = area.report();
        for name in t.names().iter().filter(|name| *name != "f32_in") {
            report.case(name, || cast(&t, name));
        }
        report.finish();
    }
}

/// One tensor of `cast.safetensors`; its name says what it is.
fn cast(t: &Tensors, name: &str) {
    let check = |format: &str, inputs: &[f32]| {
        let encode: fn(f32) -> u8 = match format {
            "e4m3" => |x| E4m3::encode(x).0,
            "e5m2" => |x| E5m2::encode(x).0,
            "e2m1" => |x| E2m1::encode(x).0,
            other => panic!("{name}: the format has no number format {other}"),
        };
        let ours: Vec<u8> = inputs.iter().map(|x| encode(*x)).collect();
        let wanted = t.u8(name);
        match format {
            "e2m1" => assert_eq!(ours, wanted, "{name}"),
            _ => same_codes(name, format_of(format), &ours, &wanted),
        }
    };
    if let Some(format) = name.strip_prefix("bf16_to_") {
        check(format, &(0..=u16::MAX).map(|b| bf16::from_bits(b).to_f32()).collect::<Vec<_>>());
    } else if let Some(format) = name.strip_prefix("fp16_to_") {
        check(format, &(0..=u16::MAX).map(|b| f16::from_bits(b).to_f32()).collect::<Vec<_>>());
    } else if let Some(format) = name.strip_prefix("f32_") {
        check(format, &t.f32("f32_in"));
    } else if let Some(format) = name.strip_prefix("decode_") {
        let wanted = t.f32(name);
        let value = |c: u8| match format {
            "e4m3" => E4m3(c).decode(),
            "e5m2" => E5m2(c).decode(),
            "e2m1" => E2m1(c).decode(),
            "e8m0" => E8m0(c).decode(),
            other => panic!("{name}: the format has no number format {other}"),
        };
        let ours: Vec<f32> = (0..wanted.len()).map(|c| value(c as u8)).collect();
        same(name, &ours, &wanted, 0);
    } else {
        panic!("the format has no tensor {name}");
    }
}

#[test]
fn golden_scales() {
    for area in areas("scales.json") {
        let json = area.json("scales.json");
        only_keys("scales.json", &json, &["producer", "columns", "rows", "mx_columns", "mx_rows"]);
        let mut report = area.report();
        // A set need not have both.
        let has = |key: &str| json.get(key).is_some();
        if has("rows") {
            report.case("rows", || scales(&json));
        }
        if has("mx_rows") {
            report.case("mx_rows", || mx_scales(&json));
        }
        report.finish();
    }
}

fn bits(v: &Value) -> f32 {
    f32::from_bits(v.as_u64().unwrap() as u32)
}

fn scales(json: &Value) {
    let columns =
        ["amax_bits", "format", "pow2", "eps", "input_dtype_for_inf", "scale_bits", "scale_inv_bits"];
    assert_eq!(json["columns"], serde_json::json!(columns));
    assert!(!list(json, "rows").is_empty());
    for row in list(json, "rows") {
        let input = match row[4].as_str().unwrap() {
            "f32" => DType::F32,
            "bf16" => DType::BF16,
            "f16" | "fp16" => DType::F16,
            other => panic!("the format has no input type {other}"),
        };
        let top = largest("test", format_of(row[1].as_str().unwrap())).unwrap();
        let pow2 = row[2].as_bool().unwrap_or_else(|| row[2].as_u64().unwrap() != 0);
        let rule = ScaleRule { eps: row[3].as_f64().unwrap() as f32, ..ScaleRule::block(top, pow2, input) };
        let scale = rule.scale(bits(&row[0]));
        assert_eq!(scale.to_bits(), bits(&row[5]).to_bits(), "{row}");
        same(&row.to_string(), &[1.0 / scale], &[bits(&row[6])], u32::from(!pow2));
        if input == DType::F32 && rule.eps == 0.0 {
            assert_eq!(rule, ScaleRule::tensor(top, pow2));
        }
    }
}

fn mx_scales(json: &Value) {
    assert_eq!(
        json["mx_columns"],
        serde_json::json!(["amax_bits", "format", "e8m0_byte", "multiplier_bits"])
    );
    assert!(!list(json, "mx_rows").is_empty());
    for row in list(json, "mx_rows") {
        let top = largest("test", format_of(row[1].as_str().unwrap())).unwrap();
        let scale = power_of_two(bits(&row[0]), top);
        assert_eq!(u64::from(scale.0), row[2].as_u64().unwrap(), "{row}");
        same(&row.to_string(), &[scale.reciprocal()], &[bits(&row[3])], 0);
    }
}

const DELAYED_KEYS: [&str; 8] =
    ["name", "length", "num_scales", "algo", "format", "margin", "steps", "with_reduction"];

#[test]
fn golden_delayed() {
    let hosts = Host::all();
    for area in areas("delayed.json") {
        let (json, t) = (area.json("delayed.json"), area.tensors("delayed.safetensors"));
        only_keys("delayed.json", &json, &["producer", "cases"]);
        t.only_cases(list(&json, "cases"));
        let mut report = area.report();
        for case in list(&json, "cases") {
            report.case(text(case, "name"), || {
                only_keys(text(case, "name"), case, &DELAYED_KEYS);
                hosts.iter().for_each(|h| delayed(h, case, &t));
                t.all_read(&format!("{}/", text(case, "name")));
            });
        }
        report.finish();
    }
}

/// Amax history and scale after every step.
fn delayed(h: &Host, case: &Value, t: &Tensors) {
    let name = text(case, "name");
    let (len, n, steps) = (count(case, "length"), count(case, "num_scales"), count(case, "steps"));
    let margin = number(case, "margin");
    assert_eq!(margin, margin.round(), "{name}: margins are whole numbers");
    let most_recent = match text(case, "algo") {
        "max" => false,
        "most_recent" => true,
        other => panic!("{name}: the format has no algo {other}"),
    };
    let how = DelayedScaling { margin: margin as i32, most_recent };
    let together = flag(case, "with_reduction");
    let top = largest("test", format_of(text(case, "format"))).unwrap();
    let get = |what: &str| t.f32(&format!("{name}/{what}"));
    let (amax, history, scale) = (get("amax"), get("history"), get("scale"));
    let reduced = if t.has(&format!("{name}/reduced")) { get("reduced") } else { Vec::new() };
    let state = h.up(&vec![0f32; len * n], &[len, n]);
    let (ours, tops) = (h.up(&vec![1f32; n], &[n]), h.up(&vec![top; n], &[n]));
    for step in 0..steps {
        let row = state.select(0, 0).unwrap();
        for i in 0..n {
            let x = h.up(&[amax[step * n + i]], &[1, 1]);
            h.k.amax(&h.s, &x, &row.narrow(0, i, 1).unwrap()).unwrap();
        }
        let agreed = if together { h.up(&reduced[step * n..][..n], &[n]) } else { row };
        h.k.delayed_update(
            &h.s,
            &DelayedUpdate { scaling: how, history: &state, reduced: &agreed, largest: &tops, scale: &ours },
        )
        .unwrap();
        let what = format!("{name} step {step}");
        same(&what, &h.f32(&state), &history[step * len * n..][..len * n], 0);
        same(&what, &h.f32(&ours), &scale[step * n..][..n], 0);
    }
}
