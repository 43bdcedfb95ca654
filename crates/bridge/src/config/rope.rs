//! RoPE in its two spellings: `rope_theta` beside `rope_scaling`, or one `rope_parameters`.

use crate::error::{Error, Result};
use crate::family::RopeStyle;
use crate::json::{Object, show};
use ferrotron_core::model::config::{ModelConfig, Positions, RopeConfig, RopeScaling};
use ferrotron_kernels::rope_tables;
use serde_json::{Map, Value, json};

/// Keys this file reads.
pub(super) const KEYS: &[&str] =
    &["rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq", INTERLEAVE];

const INTERLEAVE: &str = "rope_interleave";

/// Sets `positions` and `rope_local`.
pub(super) fn read(style: &RopeStyle, o: &Object, c: &mut ModelConfig) -> Result<()> {
    match *style {
        RopeStyle::Learned => c.positions = Positions::Learned,
        RopeStyle::Global { theta } => c.positions = Positions::Rope(global(o, theta, c)?),
        RopeStyle::RequiredScaling { theta } => {
            if described(o)?.is_none() {
                return Err(o.missing("rope_scaling"));
            }
            c.positions = Positions::Rope(global(o, theta, c)?);
        }
        RopeStyle::Mla { theta } => {
            let interleaved = o.flag(INTERLEAVE)?.unwrap_or(true);
            let rope = RopeConfig { interleaved, ..global(o, theta, c)? };
            let given = match described(o)? {
                Some((map, under)) => Object { map, under, ..*o }.real("mscale_all_dim")?.unwrap_or(0.0),
                None => 0.0,
            };
            match rope.scaling {
                RopeScaling::Yarn { factor, mscale_all_dim, .. } if given == mscale_all_dim => {
                    let scale = rope_tables::yarn_mscale(factor, mscale_all_dim);
                    c.attn_scale = (scale * scale / (c.head_dim as f64).sqrt()) as f32;
                }
                _ if given == 0.0 => {}
                // It would scale the scores and not the positions.
                _ => {
                    let what =
                        "`mscale_all_dim` without `mscale` beside it in a RoPE of type yarn is not supported";
                    return Err(Error::unsupported(o.origin, what));
                }
            }
            c.positions = Positions::Rope(rope);
        }
        RopeStyle::GlobalAndLocal { theta, local_theta } => {
            let theta = o.real("rope_theta")?.unwrap_or(theta);
            let local_theta = o.real("rope_local_base_freq")?.unwrap_or(local_theta);
            let (mut global, mut local) = (plain(theta, c), plain(local_theta, c));
            if let Some((map, under)) = described(o)? {
                let outer = Object { map, under, ..*o };
                // The newer spelling has an object per kind of layer, the older one is about global layers.
                if map.contains_key("full_attention") || map.contains_key("sliding_attention") {
                    if let Some(map) = outer.object("full_attention")? {
                        let under = "rope_parameters.full_attention.";
                        global = one(&Object { map, under, ..*o }, theta, c)?;
                    }
                    if let Some(map) = outer.object("sliding_attention")? {
                        let under = "rope_parameters.sliding_attention.";
                        local = one(&Object { map, under, ..*o }, local_theta, c)?;
                    }
                } else {
                    global = one(&outer, theta, c)?;
                }
            }
            c.positions = Positions::Rope(global);
            c.rope_local = Some(local);
        }
    }
    Ok(())
}

fn global(o: &Object, theta: f64, c: &ModelConfig) -> Result<RopeConfig> {
    let theta = o.real("rope_theta")?.unwrap_or(theta);
    match described(o)? {
        Some((map, under)) => one(&Object { map, under, ..*o }, theta, c),
        None => Ok(plain(theta, c)),
    }
}

/// The object that describes RoPE, and how to name keys in it.
fn described<'a>(o: &Object<'a>) -> Result<Option<(&'a Map<String, Value>, &'static str)>> {
    if let Some(map) = o.object("rope_parameters")? {
        return Ok(Some((map, "rope_parameters.")));
    }
    Ok(o.object("rope_scaling")?.map(|map| (map, "rope_scaling.")))
}

fn plain(theta: f64, c: &ModelConfig) -> RopeConfig {
    let rotary_dim = c.mla.map_or(c.head_dim, |m| m.rope_dim);
    RopeConfig { theta, rotary_dim, interleaved: false, scaling: RopeScaling::None }
}

fn one(o: &Object, theta: f64, c: &ModelConfig) -> Result<RopeConfig> {
    let theta = o.real("rope_theta")?.unwrap_or(theta);
    if o.real("partial_rotary_factor")?.is_some_and(|x| x != 1.0) {
        let what = format!("`{}partial_rotary_factor` other than 1 is not supported", o.under);
        return Err(Error::unsupported(o.origin, what));
    }
    let kind = match o.text("rope_type")? {
        Some(kind) => kind,
        None => o.text("type")?.unwrap_or("default"),
    };
    let number = |key: &str| o.real(key)?.ok_or_else(|| o.missing(key));
    let scaling = match kind {
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: number("factor")? },
        "llama3" => RopeScaling::Llama3 {
            factor: number("factor")?,
            low_freq_factor: number("low_freq_factor")?,
            high_freq_factor: number("high_freq_factor")?,
            original_max_positions: o
                .size("original_max_position_embeddings")?
                .ok_or_else(|| o.missing("original_max_position_embeddings"))?,
        },
        "yarn" => {
            // The reference uses the two scales only when both are there and not zero.
            let scales = [o.real("mscale")?, o.real("mscale_all_dim")?];
            let (mscale, mscale_all_dim) = match scales {
                [Some(a), Some(b)] if a != 0.0 && b != 0.0 => (a, b),
                _ => (1.0, 0.0),
            };
            RopeScaling::Yarn {
                factor: number("factor")?,
                original_max_positions: o
                    .size("original_max_position_embeddings")?
                    .unwrap_or(c.max_positions),
                beta_fast: o.real("beta_fast")?.unwrap_or(32.0),
                beta_slow: o.real("beta_slow")?.unwrap_or(1.0),
                mscale,
                mscale_all_dim,
                truncate: o.flag("truncate")?.unwrap_or(true),
                attention_factor: o.real("attention_factor")?,
            }
        }
        other => {
            let what = format!(
                "RoPE type {} is not supported (default, linear, llama3 and yarn are)",
                show(&json!(other))
            );
            return Err(Error::unsupported(o.origin, what));
        }
    };
    Ok(RopeConfig { scaling, ..plain(theta, c) })
}

/// Writes RoPE in the spelling the object already uses; without one, in the older spelling, which every
/// version of the reference reads.
pub(super) fn write(style: &RopeStyle, c: &ModelConfig, map: &mut Map<String, Value>) {
    let Positions::Rope(global) = &c.positions else { return };
    if matches!(style, RopeStyle::Mla { .. }) {
        map.insert(INTERLEAVE.into(), json!(global.interleaved));
    }
    let newer = map.get("rope_parameters").is_some_and(Value::is_object);
    let local = match style {
        RopeStyle::GlobalAndLocal { .. } => c.rope_local.as_ref(),
        _ => None,
    };
    if newer {
        let with_theta = |rope: &RopeConfig| {
            let mut m = describe(&rope.scaling).unwrap_or_else(|| object(json!({"rope_type": "default"})));
            m.insert("rope_theta".into(), json!(rope.theta));
            Value::Object(m)
        };
        let value = match local {
            Some(local) => {
                json!({"full_attention": with_theta(global), "sliding_attention": with_theta(local)})
            }
            None => with_theta(global),
        };
        map.insert("rope_parameters".into(), value);
        for key in ["rope_theta", "rope_scaling", "rope_local_base_freq"] {
            map.remove(key);
        }
        return;
    }
    map.insert("rope_theta".into(), json!(global.theta));
    map.insert("rope_scaling".into(), describe(&global.scaling).map_or(Value::Null, Value::Object));
    if let Some(local) = local {
        map.insert("rope_local_base_freq".into(), json!(local.theta));
    }
}

fn object(v: Value) -> Map<String, Value> {
    match v {
        Value::Object(m) => m,
        _ => Map::new(),
    }
}

fn describe(scaling: &RopeScaling) -> Option<Map<String, Value>> {
    Some(object(match *scaling {
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
                "beta_fast": beta_fast,
                "beta_slow": beta_slow,
                "truncate": truncate,
            }));
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
    }))
}
