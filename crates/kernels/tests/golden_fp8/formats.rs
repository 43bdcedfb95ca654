//! The formats by themselves: casts, values of codes, and scales from magnitudes of one step or several.

use super::files::{Tensors, format_of, json, same, same_codes};
use super::host::Host;
use ferrotron_kernels::quant::scale::{ScaleRule, largest, power_of_two};
use ferrotron_kernels::{DelayedScaling, QuantKernels};
use ferrotron_tensor::fp8::{E2m1, E4m3, E5m2, E8m0};
use ferrotron_tensor::{DType, bf16, f16};
use serde_json::Value;

#[test]
fn golden_casts() {
    let t = Tensors::read("cast.safetensors");
    let inputs = t.f32("f32_in").expect("f32_in");
    for name in t.left("") {
        let encode = |format: &str| -> fn(f32) -> u8 {
            match format {
                "e4m3" => |x| E4m3::encode(x).0,
                "e5m2" => |x| E5m2::encode(x).0,
                "e2m1" => |x| E2m1::encode(x).0,
                other => panic!("{name}: unknown format {other}"),
            }
        };
        let check = |format: &str, inputs: &[f32]| {
            let ours: Vec<u8> = inputs.iter().map(|x| encode(format)(*x)).collect();
            let wanted = t.u8(&name).unwrap();
            match format {
                "e2m1" => assert_eq!(ours, wanted, "{name}"),
                _ => same_codes(&name, format_of(format), &ours, &wanted),
            }
        };
        if let Some(format) = name.strip_prefix("bf16_to_") {
            check(format, &(0..=u16::MAX).map(|b| bf16::from_bits(b).to_f32()).collect::<Vec<_>>());
        } else if let Some(format) = name.strip_prefix("fp16_to_") {
            check(format, &(0..=u16::MAX).map(|b| f16::from_bits(b).to_f32()).collect::<Vec<_>>());
        } else if let Some(format) = name.strip_prefix("f32_") {
            check(format, &inputs);
        } else if let Some(format) = name.strip_prefix("decode_") {
            let wanted = t.f32(&name).unwrap();
            let value = |c: u8| match format {
                "e4m3" => E4m3(c).decode(),
                "e5m2" => E5m2(c).decode(),
                "e2m1" => E2m1(c).decode(),
                "e8m0" => E8m0(c).decode(),
                other => panic!("{name}: unknown format {other}"),
            };
            let ours: Vec<f32> = (0..wanted.len()).map(|c| value(c as u8)).collect();
            same(&name, &ours, &wanted, 0);
        }
    }
    t.all_known();
}

#[test]
fn golden_scales() {
    let j = json("scales.json");
    let columns =
        ["amax_bits", "format", "pow2", "eps", "input_dtype_for_inf", "scale_bits", "scale_inv_bits"];
    assert_eq!(j["columns"], serde_json::json!(columns));
    let bits = |v: &Value| f32::from_bits(v.as_u64().unwrap() as u32);
    let rows = j["rows"].as_array().expect("rows");
    assert!(!rows.is_empty());
    for row in rows {
        let input = match row[4].as_str().unwrap() {
            "f32" => DType::F32,
            "bf16" => DType::BF16,
            "f16" | "fp16" => DType::F16,
            other => panic!("unknown input {other}"),
        };
        let top = largest("test", format_of(row[1].as_str().unwrap())).unwrap();
        let pow2 = row[2].as_u64().unwrap() != 0;
        let rule = ScaleRule { eps: row[3].as_f64().unwrap() as f32, ..ScaleRule::block(top, pow2, input) };
        let scale = rule.scale(bits(&row[0]));
        assert_eq!(scale.to_bits(), bits(&row[5]).to_bits(), "{row}");
        same(&row.to_string(), &[1.0 / scale], &[bits(&row[6])], u32::from(!pow2));
        if input == DType::F32 && rule.eps == 0.0 {
            assert_eq!(rule, ScaleRule::tensor(top, pow2));
        }
    }
    assert_eq!(j["mx_columns"], serde_json::json!(["amax_bits", "format", "e8m0_byte", "multiplier_bits"]));
    let rows = j["mx_rows"].as_array().expect("mx_rows");
    assert!(!rows.is_empty());
    for row in rows {
        let top = largest("test", format_of(row[1].as_str().unwrap())).unwrap();
        let scale = power_of_two(bits(&row[0]), top);
        assert_eq!(u64::from(scale.0), row[2].as_u64().unwrap(), "{row}");
        same(&row.to_string(), &[scale.reciprocal()], &[bits(&row[3])], 0);
    }
}

#[test]
fn golden_delayed() {
    let (j, t) = (json("delayed.json"), Tensors::read("delayed.safetensors"));
    let cases = j["cases"].as_array().expect("cases");
    assert!(!cases.is_empty());
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let count = |key: &str| case[key].as_u64().unwrap() as usize;
        let (len, n, steps) = (count("length"), count("num_scales"), count("steps"));
        let margin = case["margin"].as_f64().unwrap();
        assert_eq!(margin, margin.round(), "{name}: margins are whole numbers");
        let most_recent = match case["algo"].as_str().unwrap() {
            "max" => false,
            "most_recent" => true,
            other => panic!("{name}: unknown algo {other}"),
        };
        let how = DelayedScaling { margin: margin as i32, most_recent };
        let together = case["with_reduction"].as_bool().unwrap();
        let top = largest("test", format_of(case["format"].as_str().unwrap())).unwrap();
        let get = |what: &str| t.f32(&format!("{name}/{what}")).unwrap_or_else(|| panic!("{name}/{what}"));
        let (amax, reduced, history, scale) = (get("amax"), get("reduced"), get("history"), get("scale"));
        for h in Host::all() {
            let state = h.up(&vec![0f32; len * n], &[len, n]);
            let (ours, tops) = (h.up(&vec![1f32; n], &[n]), h.up(&vec![top; n], &[n]));
            for step in 0..steps {
                let row = state.select(0, 0).unwrap();
                for i in 0..n {
                    let x = h.up(&[amax[step * n + i]], &[1, 1]);
                    h.k.amax(&h.s, &x, &row.narrow(0, i, 1).unwrap()).unwrap();
                }
                let agreed = if together { h.up(&reduced[step * n..][..n], &[n]) } else { row };
                h.k.delayed_update(&h.s, how, &state, &agreed, &tops, &ours).unwrap();
                let what = format!("{name} step {step}");
                same(&what, &h.f32(&state), &history[step * len * n..][..len * n], 0);
                same(&what, &h.f32(&ours), &scale[step * n..][..n], 0);
            }
        }
    }
    t.all_known();
}
