use super::golden::{Golden, count, number, text};
use super::support::everywhere;
use ferrotron_kernels::RopeStyle;
use ferrotron_kernels::cpu::{rope::rope, rows::Rows};
use ferrotron_kernels::rope_tables::{RopeScaling, RopeTables, inv_freq};
use ferrotron_tensor::{Float, bf16};
use serde_json::Value;

// Not here: `context_parallel` and `context_parallel_packed`, which say who holds which tokens.
#[test]
fn golden_rope() {
    let golden = Golden::open("attention", "rope");
    for case in golden.cases() {
        check(&golden, case);
    }
}

fn or(case: &Value, key: &str, otherwise: f64) -> f64 {
    if case[key].is_null() { otherwise } else { number(case, key) }
}

fn scaling(case: &Value) -> RopeScaling {
    let yarn = |factor: f64| RopeScaling::Yarn {
        factor,
        original_max_positions: count(case, "original_max_position_embeddings"),
        beta_fast: or(case, "beta_fast", 32.0),
        beta_slow: or(case, "beta_slow", 1.0),
        mscale: or(case, "mscale", 1.0),
        mscale_all_dim: or(case, "mscale_all_dim", 0.0),
        truncate: case["truncate"].as_bool().unwrap_or(true),
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
        Some("yarn") => yarn(number(case, "factor")),
        Some(other) => panic!("unknown rope_type {other}"),
        None if case["rope_scaling"].as_bool() == Some(true) => RopeScaling::Llama3 {
            factor: number(case, "rope_scaling_factor"),
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_positions: 8192,
        },
        None if !case["scaling_factor"].is_null() => yarn(number(case, "scaling_factor")),
        None if !case["seq_len_interpolation_factor"].is_null() => {
            RopeScaling::Linear { factor: number(case, "seq_len_interpolation_factor") }
        }
        None => RopeScaling::None,
    }
}

fn check(golden: &Golden, case: &Value) {
    let name = text(case, "name");
    let get = |part: &str| golden.f32(&format!("{name}/{part}"));
    let style = match text(case, "kind") {
        "half" => RopeStyle::Half,
        "interleaved" => RopeStyle::Interleaved,
        "mla" => RopeStyle::PairsToHalves,
        other => panic!("{name}: unknown kind {other}"),
    };
    let theta = or(case, "rope_theta", or(case, "rotary_base", 10000.0));
    let (rot, scaling) = (count(case, "rot_dim"), scaling(case));
    let shape = golden.shape(&format!("{name}/x"));
    let (positions, heads): (Vec<i64>, Rows) = match (text(case, "layout"), &shape[..]) {
        ("sbhd", &[s, b, h, d]) => {
            let offset = or(case, "offset", 0.0) as i64;
            ((0..s * b).map(|t| (t / b) as i64 + offset).collect(), Rows::heads(s * b, h * d, h, d, d))
        }
        ("thd", &[t, h, d]) => {
            let ends: Vec<i64> =
                case["cu_seqlens"].as_array().unwrap().iter().map(|v| v.as_i64().unwrap()).collect();
            let within = ends.windows(2).flat_map(|w| 0..w[1] - w[0]).collect();
            (within, Rows::heads(t, h * d, h, d, d))
        }
        other => panic!("{name}: unknown layout {other:?}"),
    };

    // Megatron divides positions, not frequencies, so its frequencies are the plain ones.
    let stored = if case["seq_len_interpolation_factor"].is_null() { &scaling } else { &RopeScaling::None };
    for (ours, wanted) in inv_freq(theta, rot, stored).unwrap().iter().zip(get("inv_freq")) {
        assert!((ours - wanted).abs() <= 1e-6 * wanted, "{name} inv_freq: {ours} instead of {wanted}");
    }
    let factor = number(case, "attention_scaling");
    assert!((scaling.attention_scaling() - factor).abs() <= 1e-6 * factor, "{name}: attention scaling");

    let last = positions.iter().max().map_or(0, |p| *p as usize + 1);
    let tables = RopeTables::new(theta, rot, &scaling, last).unwrap();
    let per_token = shape[shape.len() - 2] * shape[shape.len() - 1];
    for (input, output, inverse) in [("x", "y", false), ("dy", "dx", true)] {
        let (input, wanted) = (get(input), get(output));
        let ours = rotated(&input, heads, &tables, &positions, style, inverse);
        for (i, (o, w)) in ours.iter().zip(&wanted).enumerate() {
            let room = 1e-5 + 1e-4 * positions[i / per_token] as f32 / 1000.0;
            assert!((o - w).abs() <= room, "{name} {output}[{i}]: {o} instead of {w}");
        }
        let narrow: Vec<bf16> = input.iter().map(|x| bf16::from_f32(*x)).collect();
        let ours = rotated(&narrow, heads, &tables, &positions, style, inverse);
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
    everywhere(|threads, isa| {
        let mut x = x.to_vec();
        rope(threads, isa, &mut x, heads, &tables.cos, &tables.sin, tables.half, positions, style, inverse)
            .unwrap();
        x
    })
}
