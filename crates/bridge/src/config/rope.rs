//! RoPE in the two spellings of `config.json`: `rope_theta` beside `rope_scaling` (older), or one `rope_parameters`.
//!
//! Reading follows transformers' `modeling_rope_utils.py` key by key, including what it takes for a missing, null or
//! zero value.

use super::rope_write::mla_scale;
use super::sliding_window::check_layers;
use crate::error::{Error, Result};
use crate::family::RopeStyle;
use crate::json::{Object, show};
use ferrotron_core::model::config::{ModelConfig, Positions, RopeConfig, RopeScaling};
use serde_json::{Map, Value, json};

/// Keys this file reads.
pub(super) const KEYS: &[&str] = &[
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "rope_local_base_freq",
    ORIGINAL_POSITIONS,
    INTERLEAVE,
    PARTIAL,
    WITH_ROPE,
    WITHOUT_INTERVAL,
];

pub(super) const PARTIAL: &str = "partial_rotary_factor";
/// For each layer 1 if it has RoPE, 0 if it does not, whatever the name says.
pub(super) const WITH_ROPE: &str = "no_rope_layers";
const WITHOUT_INTERVAL: &str = "no_rope_layer_interval";
/// `original_max_position_embeddings` of a Phi-3 that does not state it.
const PHI3_POSITIONS: usize = 4096;

pub(super) const INTERLEAVE: &str = "rope_interleave";
pub(super) const ORIGINAL_POSITIONS: &str = "original_max_position_embeddings";
/// Names of nested objects in `rope_parameters`, one for each kind of layer.
const GLOBAL: &str = "full_attention";
const LOCAL: &str = "sliding_attention";

/// YaRN's ramp where the file does not describe it.
pub(super) const BETA_FAST: f64 = 32.0;
pub(super) const BETA_SLOW: f64 = 1.0;

/// Where one RoPE is described.
struct Described<'a> {
    /// The object with `rope_type` and its parameters.
    object: Object<'a>,
    /// The object that holds `truncate`: with nested objects transformers looks for it beside them.
    around: Object<'a>,
    /// Context length before scaling, where `config.json` has it outside the description, which then wins.
    original_positions: Option<usize>,
    /// Phi-3: `partial_rotary_factor` is supported, and LongRoPE has older names.
    phi3: bool,
}

/// Sets `positions` and `rope_local`, and `attn_scale` where MLA's YaRN scales it.
pub(super) fn read(style: &RopeStyle, o: &Object, c: &mut ModelConfig) -> Result<()> {
    match *style {
        RopeStyle::Learned => c.positions = Positions::Learned,
        RopeStyle::Global { theta } => c.positions = Positions::Rope(global(o, theta, c)?),
        RopeStyle::GptOss { theta } => {
            let mut rope = global(o, theta, c)?;
            // An empty `rope_parameters` describes plain RoPE.
            if description(o)?.is_none() && o.object("rope_parameters")?.is_none() {
                rope.scaling = gpt_oss_scaling(o.size(ORIGINAL_POSITIONS)?.unwrap_or(4096));
            }
            c.positions = Positions::Rope(rope);
        }
        RopeStyle::Mla { theta } => {
            // Null is false.
            let interleaved = o.flag(INTERLEAVE)?.unwrap_or(!o.map.contains_key(INTERLEAVE));
            let rope = RopeConfig { interleaved, ..global(o, theta, c)? };
            if let Some(d) = description(o)?
                && rope_type(&d)? != "default"
                && let Some(mscale) = d.real("mscale_all_dim")?.filter(|x| *x != 0.0)
            {
                let factor = d.real("factor")?.ok_or_else(|| d.missing("factor"))?;
                c.attn_scale = mla_scale(c.head_dim, factor, mscale);
            }
            c.positions = Positions::Rope(rope);
        }
        RopeStyle::GlobalAndLocal { theta, local_theta } => {
            let theta = o.real("rope_theta")?.unwrap_or(theta);
            let local_theta = o.real("rope_local_base_freq")?.unwrap_or(local_theta);
            let (mut global, mut local) = (unscaled(theta, c), unscaled(local_theta, c));
            if let Some(outer) = description(o)? {
                // The newer spelling has an object for each kind of layer, the older one describes the global layers.
                if outer.map.contains_key(GLOBAL) || outer.map.contains_key(LOCAL) {
                    let nested = |key: &str, under: &'static str| -> Result<Option<Described>> {
                        let map = outer.object(key)?;
                        let object = |map| Object { map, under, ..*o };
                        Ok(map.map(|map| Described {
                            object: object(map),
                            around: outer,
                            original_positions: None,
                            phi3: false,
                        }))
                    };
                    if let Some(d) = nested(GLOBAL, "rope_parameters.full_attention.")? {
                        global = scaled(&d, theta, c)?;
                    }
                    if let Some(d) = nested(LOCAL, "rope_parameters.sliding_attention.")? {
                        local = scaled(&d, local_theta, c)?;
                    }
                } else {
                    // transformers puts it into a nested object, without a `truncate` or a context length beside it.
                    let empty = Map::new();
                    let around = Object { map: &empty, ..*o };
                    let d = Described { object: outer, around, original_positions: None, phi3: false };
                    global = scaled(&d, theta, c)?;
                }
            }
            c.positions = Positions::Rope(global);
            c.rope_local = Some(local);
        }
        RopeStyle::Phi3 { theta } => {
            let theta = o.real("rope_theta")?.unwrap_or(theta);
            let inner = description(o)?;
            let share = match inner.map(|inner| inner.real(PARTIAL)).transpose()?.flatten() {
                Some(share) => share,
                None => o.real(PARTIAL)?.unwrap_or(1.0),
            };
            let mut rope = match inner {
                Some(inner) => {
                    let original = o.size(ORIGINAL_POSITIONS)?.unwrap_or(PHI3_POSITIONS);
                    scaled(
                        &Described { original_positions: Some(original), phi3: true, ..flat(o, inner)? },
                        theta,
                        c,
                    )?
                }
                None => unscaled(theta, c),
            };
            rope.rotary_dim = (c.head_dim as f64 * share) as usize;
            c.positions = Positions::Rope(rope);
        }
        RopeStyle::SomeLayers { theta, interval } => {
            c.positions = Positions::Rope(global(o, theta, c)?);
            c.no_rope_layers = without_rope(o, interval, c.layers)?;
        }
    }
    Ok(())
}

/// The scaling that `GptOssConfig` has where the file describes none.
fn gpt_oss_scaling(original_max_positions: usize) -> RopeScaling {
    RopeScaling::Yarn {
        factor: 32.0,
        original_max_positions,
        beta_fast: BETA_FAST,
        beta_slow: BETA_SLOW,
        mscale: 1.0,
        mscale_all_dim: 0.0,
        truncate: false,
        attention_factor: None,
    }
}

fn global(o: &Object, theta: f64, c: &ModelConfig) -> Result<RopeConfig> {
    let theta = o.real("rope_theta")?.unwrap_or(theta);
    match description(o)? {
        Some(inner) => scaled(&flat(o, inner)?, theta, c),
        None => Ok(unscaled(theta, c)),
    }
}

/// The object that describes RoPE. Where both spellings are there, transformers takes `rope_scaling`.
fn description<'a>(o: &Object<'a>) -> Result<Option<Object<'a>>> {
    for (key, under) in [("rope_scaling", "rope_scaling."), ("rope_parameters", "rope_parameters.")] {
        if let Some(map) = o.object(key)?.filter(|map| !map.is_empty()) {
            return Ok(Some(Object { map, under, ..*o }));
        }
    }
    Ok(None)
}

/// Which layers have no RoPE; empty if all have it.
fn without_rope(o: &Object, interval: usize, layers: usize) -> Result<Vec<bool>> {
    check_layers(o, layers)?;
    let without: Vec<bool> = match o.list(WITH_ROPE)? {
        Some(list) if list.len() < layers => {
            return Err(o.wrong(WITH_ROPE, format_args!("has {} entries for {layers} layers", list.len())));
        }
        Some(list) => list[..layers]
            .iter()
            .map(|v| match v.as_u64() {
                Some(n) => Ok(n == 0),
                None => {
                    v.as_bool().map(|on| !on).ok_or_else(|| o.mistyped(WITH_ROPE, v, "a list of 0 and 1"))
                }
            })
            .collect::<Result<_>>()?,
        None => match o.size(WITHOUT_INTERVAL)?.unwrap_or(interval) {
            0 => return Err(o.wrong(WITHOUT_INTERVAL, "must be at least 1")),
            n => (1..=layers).map(|i| i % n == 0).collect(),
        },
    };
    Ok(if without.contains(&true) { without } else { Vec::new() })
}

fn flat<'a>(o: &Object, object: Object<'a>) -> Result<Described<'a>> {
    Ok(Described { object, around: object, original_positions: o.size(ORIGINAL_POSITIONS)?, phi3: false })
}

fn unscaled(theta: f64, c: &ModelConfig) -> RopeConfig {
    let rotary_dim = c.mla.map_or(c.head_dim, |m| m.rope_dim);
    RopeConfig { theta, rotary_dim, interleaved: false, scaling: RopeScaling::None }
}

fn rope_type<'a>(o: &Object<'a>) -> Result<&'a str> {
    match o.text("rope_type")? {
        Some(kind) => Ok(kind),
        None => Ok(o.text("type")?.unwrap_or("default")),
    }
}

fn scaled(d: &Described, theta: f64, c: &ModelConfig) -> Result<RopeConfig> {
    let o = &d.object;
    let theta = o.real("rope_theta")?.unwrap_or(theta);
    if !d.phi3 && o.real(PARTIAL)?.is_some_and(|x| x != 1.0) {
        let what = format!("`{}partial_rotary_factor` other than 1 is not supported", o.under);
        return Err(Error::unsupported(o.origin, what));
    }
    let number = |key: &str| o.real(key)?.ok_or_else(|| o.missing(key));
    let original = || -> Result<usize> {
        let own = o.size(ORIGINAL_POSITIONS)?;
        Ok(d.original_positions.or(own).unwrap_or(c.max_positions))
    };
    let scaling = match rope_type(o)? {
        "default" => RopeScaling::None,
        "linear" if !d.phi3 => RopeScaling::Linear { factor: number("factor")? },
        "llama3" if !d.phi3 => RopeScaling::Llama3 {
            factor: number("factor")?,
            low_freq_factor: number("low_freq_factor")?,
            high_freq_factor: number("high_freq_factor")?,
            original_max_positions: original()?,
        },
        "longrope" => long_rope(d, original()?, c)?,
        "su" | "yarn" if d.phi3 => long_rope(d, original()?, c)?,
        other if d.phi3 => {
            let what = format!(
                "RoPE type {} is not supported (Phi-3 has default and longrope)",
                show(&json!(other))
            );
            return Err(Error::unsupported(o.origin, what));
        }
        "yarn" => yarn(d, original()?, c)?,
        other => {
            let what = format!(
                "RoPE type {} is not supported (default, linear, llama3, yarn and longrope are)",
                show(&json!(other))
            );
            return Err(Error::unsupported(o.origin, what));
        }
    };
    Ok(RopeConfig { scaling, ..unscaled(theta, c) })
}

fn long_rope(d: &Described, original_max_positions: usize, c: &ModelConfig) -> Result<RopeScaling> {
    let o = &d.object;
    let factors = |key: &str| -> Result<Vec<f64>> {
        let list = o.list(key)?.ok_or_else(|| o.missing(key))?;
        list.iter().map(|v| v.as_f64().ok_or_else(|| o.mistyped(key, v, "a list of numbers"))).collect()
    };
    Ok(RopeScaling::LongRope {
        short_factor: factors("short_factor")?,
        long_factor: factors("long_factor")?,
        original_max_positions,
        factor: match o.real("factor")? {
            Some(factor) => factor,
            None => c.max_positions as f64 / original_max_positions.max(1) as f64,
        },
        attention_factor: o.real("attention_factor")?,
    })
}

fn yarn(d: &Described, original_max_positions: usize, c: &ModelConfig) -> Result<RopeScaling> {
    let o = &d.object;
    let factor = match (o.map.get("factor"), o.real("factor")?) {
        (_, Some(factor)) => factor,
        // A null factor is the one that stretches the old context to the new.
        (Some(Value::Null), None) => c.max_positions as f64 / original_max_positions.max(1) as f64,
        _ => return Err(o.missing("factor")),
    };
    // Both scales count only together; 0 counts as missing, here and for the betas.
    let (mscale, mscale_all_dim) = match [o.real("mscale")?, o.real("mscale_all_dim")?] {
        [Some(a), Some(b)] if a != 0.0 && b != 0.0 => (a, b),
        _ => (1.0, 0.0),
    };
    let beta = |key: &str, default: f64| -> Result<f64> {
        Ok(o.real(key)?.filter(|x| *x != 0.0).unwrap_or(default))
    };
    let truncate = match d.around.map.get("truncate") {
        None => true,
        Some(Value::Null) => false,
        Some(_) => d.around.flag("truncate")?.unwrap_or_default(),
    };
    Ok(RopeScaling::Yarn {
        factor,
        original_max_positions,
        beta_fast: beta("beta_fast", BETA_FAST)?,
        beta_slow: beta("beta_slow", BETA_SLOW)?,
        mscale,
        mscale_all_dim,
        truncate,
        attention_factor: o.real("attention_factor")?,
    })
}

/// The object that describes RoPE in a file that is being rewritten.
pub(super) fn source_description(map: &Map<String, Value>) -> Option<&Map<String, Value>> {
    ["rope_scaling", "rope_parameters"]
        .into_iter()
        .find_map(|k| map.get(k)?.as_object())
        .filter(|m| !m.is_empty())
}
