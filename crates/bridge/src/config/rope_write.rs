//! Writing RoPE into a `config.json`.

use super::rope::{
    BETA_FAST, BETA_SLOW, INTERLEAVE, ORIGINAL_POSITIONS, PARTIAL, WITH_ROPE, source_description,
};
use crate::family::RopeStyle;
use ferrotron_core::model::config::{ModelConfig, Positions, RopeConfig, RopeScaling};
use ferrotron_kernels::rope_tables::yarn_mscale;
use serde_json::{Map, Value, json};

/// MLA's factor on q·k with YaRN: `mscale² / √head_dim`.
pub(super) fn mla_scale(head_dim: usize, factor: f64, mscale_all_dim: f64) -> f32 {
    let mscale = yarn_mscale(factor, mscale_all_dim);
    (mscale * mscale / (head_dim as f64).sqrt()) as f32
}

/// Writes RoPE in the spelling the file already uses; in a new file in the older one, which every version of
/// transformers reads. Parameters that have their default and were not in the file stay out of it.
pub(super) fn write(style: &RopeStyle, c: &ModelConfig, map: &mut Map<String, Value>) {
    let Positions::Rope(global) = &c.positions else { return };
    if matches!(style, RopeStyle::Mla { .. }) {
        map.insert(INTERLEAVE.into(), json!(global.interleaved));
    }
    let local = match style {
        RopeStyle::GlobalAndLocal { .. } => c.rope_local.as_ref(),
        _ => None,
    };
    let source = source_description(map).cloned();
    // An outer context length would win over the one in the description.
    map.remove(ORIGINAL_POSITIONS);
    match style {
        RopeStyle::Phi3 { .. } => write_phi3(global, c, map),
        RopeStyle::SomeLayers { .. } => {
            let with: Vec<u8> = (0..c.layers).map(|i| u8::from(c.rope(i).is_some())).collect();
            map.insert(WITH_ROPE.into(), json!(with));
        }
        _ => {}
    }
    let describe = |rope: &RopeConfig, key: &str| {
        let old = source.as_ref().and_then(|s| s.get(key).and_then(Value::as_object).or(source.as_ref()));
        let mut described = describe(&rope.scaling, old)?;
        if matches!(style, RopeStyle::Mla { .. }) {
            add_mla_mscale(c, &rope.scaling, old, &mut described);
        }
        Some(described)
    };
    if map.get("rope_parameters").is_some_and(Value::is_object) {
        let with_theta = |rope: &RopeConfig, key: &str| {
            let mut m = describe(rope, key).unwrap_or_else(|| object(json!({"rope_type": "default"})));
            m.insert("rope_theta".into(), json!(rope.theta));
            Value::Object(m)
        };
        let value = match local {
            Some(local) => json!({
                "full_attention": with_theta(global, "full_attention"),
                "sliding_attention": with_theta(local, "sliding_attention"),
            }),
            None => with_theta(global, ""),
        };
        map.insert("rope_parameters".into(), value);
        for key in ["rope_theta", "rope_scaling", "rope_local_base_freq"] {
            map.remove(key);
        }
        return;
    }
    map.insert("rope_theta".into(), json!(global.theta));
    // GPT-OSS without a description has YaRN.
    let plain = match style {
        RopeStyle::GptOss { .. } => json!({"rope_type": "default"}),
        _ => Value::Null,
    };
    map.insert("rope_scaling".into(), describe(global, "").map_or(plain, Value::Object));
    if let Some(local) = local {
        map.insert("rope_local_base_freq".into(), json!(local.theta));
    }
}

/// What Phi-3 has outside the description: the context of pretraining and the rotated share of each head.
fn write_phi3(rope: &RopeConfig, c: &ModelConfig, map: &mut Map<String, Value>) {
    if let RopeScaling::LongRope { original_max_positions, .. } = rope.scaling {
        map.insert(ORIGINAL_POSITIONS.into(), json!(original_max_positions));
    }
    if rope.rotary_dim != c.head_dim || map.contains_key(PARTIAL) {
        map.insert(PARTIAL.into(), json!(rope.rotary_dim as f64 / c.head_dim.max(1) as f64));
    }
}

fn object(v: Value) -> Map<String, Value> {
    match v {
        Value::Object(m) => m,
        _ => Map::new(),
    }
}

/// The parameters of a scaling; `old` is the description that they replace.
fn describe(scaling: &RopeScaling, old: Option<&Map<String, Value>>) -> Option<Map<String, Value>> {
    let mut m = object(match *scaling {
        RopeScaling::None => return None,
        RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor,
            "original_max_position_embeddings": original_max_positions,
        }),
        RopeScaling::Yarn {
            factor,
            original_max_positions,
            beta_fast,
            beta_slow,
            mscale,
            mscale_all_dim,
            truncate,
            attention_factor,
        } => {
            let mut m = object(json!({
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original_max_positions,
            }));
            let had = |key: &str| old.is_some_and(|old| old.contains_key(key));
            let mut optional = |key: &str, value: Value, default: bool| {
                if !default || had(key) {
                    m.insert(key.into(), value);
                }
            };
            optional("beta_fast", json!(beta_fast), beta_fast == BETA_FAST);
            optional("beta_slow", json!(beta_slow), beta_slow == BETA_SLOW);
            optional("truncate", json!(truncate), truncate);
            if (mscale, mscale_all_dim) != (1.0, 0.0) {
                m.insert("mscale".into(), json!(mscale));
                m.insert("mscale_all_dim".into(), json!(mscale_all_dim));
            }
            if let Some(x) = attention_factor {
                m.insert("attention_factor".into(), json!(x));
            }
            m
        }
        .into(),
        RopeScaling::LongRope {
            ref short_factor,
            ref long_factor,
            original_max_positions,
            factor,
            attention_factor,
        } => {
            let mut m = object(json!({
                "rope_type": "longrope",
                "short_factor": short_factor,
                "long_factor": long_factor,
                "factor": factor,
                "original_max_position_embeddings": original_max_positions,
            }));
            if let Some(x) = attention_factor {
                m.insert("attention_factor".into(), json!(x));
            }
            m
        }
        .into(),
    });
    // Published DeepSeek-V3 files say `type`.
    if old.is_some_and(|old| old.contains_key("type") && !old.contains_key("rope_type"))
        && let Some(kind) = m.remove("rope_type")
    {
        m.insert("type".into(), kind);
    }
    Some(m)
}

/// Adds the `mscale_all_dim` that MLA's factor on q·k comes from, where `mscale` beside it does not say it already.
fn add_mla_mscale(
    c: &ModelConfig,
    scaling: &RopeScaling,
    old: Option<&Map<String, Value>>,
    described: &mut Map<String, Value>,
) {
    let (RopeScaling::Yarn { factor, .. }
    | RopeScaling::Linear { factor }
    | RopeScaling::Llama3 { factor, .. }) = *scaling
    else {
        return;
    };
    let key = "mscale_all_dim";
    let says = |x: f64| mla_scale(c.head_dim, factor, x) == c.attn_scale;
    if described.contains_key(key) || says(0.0) || factor <= 1.0 {
        return;
    }
    let mscale = (f64::from(c.attn_scale) * (c.head_dim as f64).sqrt()).sqrt();
    let exact = (mscale - 1.0) / (0.1 * factor.ln());
    let before = old.and_then(|old| old.get(key)).and_then(Value::as_f64);
    let round = |digits: f64| (exact * digits).round() / digits;
    if let Some(x) = before.into_iter().chain([round(1e3), round(1e6), exact]).find(|x| says(*x)) {
        described.insert(key.into(), json!(x));
    }
}
