//! Rotary embeddings against golden vectors (area `attention`, `rope.json`). Which positions a context-parallel rank holds
//! (`context_parallel*` of the same file) is compared in the engine's tests.

use super::golden::{Area, Tensors, count, counts, flag, list, number, number_or, only_keys, text};
use super::support::everywhere;
use ferrotron_kernels::RopeStyle;
use ferrotron_kernels::cpu::rope::{Angles, Rotation, rope};
use ferrotron_kernels::cpu::rows::{Rows, RowsViewMut};
use ferrotron_kernels::rope_tables::{RopeScaling, RopeTables, inv_freq};
use ferrotron_tensor::{Float, bf16};
use serde_json::Value;

const KEYS: [&str; 28] = [
    "name",
    "kind",
    "rot_dim",
    "layout",
    "attention_scaling",
    "offset",
    "cu_seqlens",
    // megatron
    "kv_channels",
    "rotary_percent",
    "rotary_base",
    "rotary_interleaved",
    "seq_len_interpolation_factor",
    "rope_scaling",
    "rope_scaling_factor",
    "scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "correction_range_round_to_int",
    // transformers
    "rope_type",
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "truncate",
];

#[test]
fn golden_rope() {
    for area in Area::all("attention").iter().filter(|area| area.has("rope.json")) {
        let (json, t) = (area.json("rope.json"), area.tensors("rope.safetensors"));
        only_keys("rope.json", &json, &["producer", "cases", "context_parallel", "context_parallel_packed"]);
        t.only_cases(list(&json, "cases"));
        let mut report = area.report();
        for case in list(&json, "cases") {
            let name = text(case, "name");
            report.case(&format!("rope {name}"), || {
                only_keys(name, case, &KEYS);
                check(&t, case);
                t.all_read(&format!("{name}/"));
            });
        }
        report.finish();
    }
}

/// The scaling that a case states, without Megatron's division of positions.
fn scaling(case: &Value) -> RopeScaling {
    // Both systems take mscale 1 without a divisor unless both keys are given; transformers takes zero for absent.
    let megatron = case["rope_type"].is_null();
    let given = |key: &str| !case[key].is_null() && (megatron || number(case, key) != 0.0);
    let both = given("mscale") && given("mscale_all_dim");
    let yarn = |factor: f64, round: &str| RopeScaling::Yarn {
        factor,
        original_max_positions: count(case, "original_max_position_embeddings"),
        beta_fast: number_or(case, "beta_fast", 32.0),
        beta_slow: number_or(case, "beta_slow", 1.0),
        mscale: if both { number(case, "mscale") } else { 1.0 },
        mscale_all_dim: if both { number(case, "mscale_all_dim") } else { 0.0 },
        truncate: case[round].is_null() || flag(case, round),
        attention_factor: case["attention_factor"].as_f64(),
    };
    match case["rope_type"].as_str() {
        Some("default") => RopeScaling::None,
        Some("linear") => RopeScaling::Linear { factor: number(case, "factor") },
        Some("llama3") => RopeScaling::Llama3 {
            factor: number(case, "factor"),
            low_freq_factor: number(case, "low_freq_factor"),
            high_freq_factor: number(case, "high_freq_factor"),
            original_max_positions: count(case, "original_max_position_embeddings"),
        },
        Some("yarn") => yarn(number(case, "factor"), "truncate"),
        Some(other) => panic!("the format has no rope_type {other}"),
        None if flag(case, "rope_scaling") => RopeScaling::Llama3 {
            factor: number_or(case, "rope_scaling_factor", 8.0),
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_positions: 8192,
        },
        None if !case["scaling_factor"].is_null() => {
            yarn(number(case, "scaling_factor"), "correction_range_round_to_int")
        }
        None => RopeScaling::None,
    }
}

fn check(golden: &Tensors, case: &Value) {
    let name = text(case, "name");
    let get = |part: &str| golden.f32(&format!("{name}/{part}"));
    let style = match text(case, "kind") {
        "half" => RopeStyle::Half,
        "interleaved" => RopeStyle::Interleaved,
        "mla" => RopeStyle::PairsToHalves,
        other => panic!("the format has no kind {other}"),
    };
    assert!(
        !flag(case, "rotary_interleaved") || style == RopeStyle::Interleaved,
        "{name}: rotary_interleaved"
    );
    let theta = number_or(case, "rope_theta", number_or(case, "rotary_base", 10000.0));
    let (rot, scaling) = (count(case, "rot_dim"), scaling(case));
    if !case["kv_channels"].is_null() {
        let share = number(case, "kv_channels") * number_or(case, "rotary_percent", 1.0);
        assert_eq!(share as usize, rot, "{name}: rot_dim");
    }
    let shape = golden.shape(&format!("{name}/x"));
    let offset = number_or(case, "offset", 0.0) as i64;
    let (positions, heads): (Vec<i64>, Rows) = match (text(case, "layout"), &shape[..]) {
        ("sbhd", &[s, b, h, d]) => {
            ((0..s * b).map(|t| (t / b) as i64 + offset).collect(), Rows::heads(s * b, h * d, h, d, d))
        }
        ("thd", &[t, h, d]) => {
            let ends: Vec<i64> = counts(case, "cu_seqlens").into_iter().map(|n| n as i64).collect();
            let within = ends.windows(2).flat_map(|w| offset..w[1] - w[0] + offset).collect();
            (within, Rows::heads(t, h * d, h, d, d))
        }
        (other, shape) => panic!("the format has no layout {other} of {shape:?}"),
    };

    let frequencies = inv_freq(theta, rot, &scaling, 1).unwrap();
    let stored = get("inv_freq");
    assert_eq!(frequencies.len(), stored.len(), "{name} inv_freq");
    for (ours, wanted) in frequencies.iter().zip(stored) {
        assert!((ours - wanted).abs() <= 1e-6 * wanted, "{name} inv_freq: {ours} instead of {wanted}");
    }
    let factor = number_or(case, "attention_scaling", 1.0);
    assert!((scaling.attention_scaling() - factor).abs() <= 1e-6 * factor, "{name}: attention scaling");

    // Megatron divides positions, which is linear scaling of the frequencies; its stored frequencies are undivided.
    let last = positions.iter().max().map_or(0, |p| *p as usize + 1);
    let divisor = number_or(case, "seq_len_interpolation_factor", 1.0);
    let tables = match (&scaling, divisor) {
        (scaling, 1.0) => RopeTables::new(theta, rot, scaling, last).unwrap(),
        (RopeScaling::None, factor) => {
            RopeTables::new(theta, rot, &RopeScaling::Linear { factor }, last).unwrap()
        }
        (scaling, divisor) => {
            let divided: Vec<f32> = frequencies.iter().map(|f| (f64::from(*f) / divisor) as f32).collect();
            RopeTables::from_frequencies(&divided, scaling.attention_scaling(), last)
        }
    };
    let per_token = shape[shape.len() - 2] * shape[shape.len() - 1];
    for (input, output, inverse) in [("x", "y", false), ("dy", "dx", true)] {
        let (input, wanted) = (get(input), get(output));
        let ours = rotated(&input, heads, &tables, &positions, style, inverse);
        for (i, (o, w)) in ours.iter().zip(&wanted).enumerate() {
            let room = 1e-5 + 1e-4 * positions[i / per_token] as f32 / 1000.0;
            assert!((o - w).abs() <= room, "{name} {output}[{i}]: {o} instead of {w}");
        }
        let rounded: Vec<bf16> = input.iter().map(|x| bf16::from_f32(*x)).collect();
        let ours = rotated(&rounded, heads, &tables, &positions, style, inverse);
        let off: f32 = ours.iter().zip(&wanted).map(|(o, w)| (o.to_f32() - w).powi(2)).sum();
        let size: f32 = wanted.iter().map(|w| w * w).sum();
        assert!(off.sqrt() <= 1e-2 * size.sqrt(), "{name} {output} in bf16");
    }
}

fn rotated<T: Float>(
    x: &[T],
    heads: Rows,
    tables: &RopeTables,
    positions: &[i64],
    style: RopeStyle,
    inverse: bool,
) -> Vec<T> {
    everywhere(|cpu| {
        let mut x = x.to_vec();
        let angles = Angles { cos: &tables.cos, sin: &tables.sin, half: tables.half };
        let view = RowsViewMut { data: &mut x, rows: heads };
        rope(cpu, view, angles, positions, Rotation { style, inverse }).unwrap();
        x
    })
}
