//! Reads the family and the architecture from a `config.json`.

use super::{QUANTIZATION, moe, rope, sliding_window};
use crate::error::{Error, Result};
use crate::family::{FAMILIES, Family, Field, Key};
use crate::json::{Object, show};
use ferrotron_core::model::config::{ModelConfig, ModelSizes, NormConfig, Positions};
use serde_json::{Map, Value, json};
use std::mem::discriminant;

/// Keys that only MoE models have, whatever their class.
const EXPERT_KEYS: &[&str] = &["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"];

/// Detects the family by `architectures`, otherwise by `model_type`.
pub(super) fn detect_family(map: &Map<String, Value>, origin: &str) -> Result<&'static Family> {
    let o = Object { map, origin, under: "" };
    let class = match o.list("architectures")?.map(|l| l.as_slice()) {
        Some([first, ..]) => {
            Some(first.as_str().ok_or_else(|| o.mistyped("architectures", first, "a list of strings"))?)
        }
        _ => None,
    };
    let found = match class {
        Some(class) => FAMILIES.iter().find(|f| f.architecture == class),
        None => match o.text("model_type")? {
            Some(kind) => FAMILIES.iter().find(|f| f.model_type == kind),
            None => {
                return Err(o.wrong(
                    "architectures",
                    "and `model_type` are both missing, so the architecture is unknown",
                ));
            }
        },
    };
    let name = class.or(o.text("model_type")?).unwrap_or_default();
    let supported = FAMILIES.iter().map(|f| f.architecture).collect::<Vec<_>>().join(", ");
    let experts = EXPERT_KEYS.iter().any(|k| o.get(k).is_some_and(|v| v.as_u64() != Some(0)));
    let knows = |f: &Family| f.keys.iter().copied().flatten().any(|k| matches!(k.field, Field::Moe(_)));
    if experts && !found.is_some_and(|f| knows(f)) {
        return Err(Error::unsupported(
            origin,
            format!("MoE architecture {} is not supported; supported are: {supported}", show(&json!(name))),
        ));
    }
    found.copied().ok_or_else(|| {
        // The decoder inside of a multimodal model.
        let inner = o.get("text_config").and_then(|text| text.get("model_type")?.as_str());
        let decoder = inner.and_then(|kind| FAMILIES.iter().find(|f| f.model_type == kind));
        let hint = decoder.map_or(String::new(), |f| {
            let class = f.architecture;
            format!("; its text model is: save `model.language_model` and `lm_head` of transformers' model as a {class}")
        });
        let name = show(&json!(name));
        Error::unsupported(
            origin,
            format!("architecture {name} is not supported; supported are: {supported}{hint}"),
        )
    })
}

/// Reads the architecture from a file of a known family.
pub(super) fn read_model(family: &Family, o: &Object) -> Result<ModelConfig> {
    weight_block(o)?;
    for r in family.refused {
        let fine = match o.get(r.key) {
            None | Some(Value::Bool(false)) => true,
            Some(v) => v.as_f64().is_some_and(|x| x == 0.0 || (r.or_one && x == 1.0)),
        };
        if !fine {
            return Err(Error::unsupported(
                o.origin,
                format!("`{}` asks for {}, which is not supported", r.key, r.what),
            ));
        }
    }
    let mut c = blank();
    let keys: Vec<&Key> = family.keys.iter().copied().flatten().collect();
    for (i, key) in keys.iter().enumerate() {
        // A family's own key, with a default of its own, stands for the common one of that name.
        let same = |k: &&Key| k.names == key.names && discriminant(&k.field) == discriminant(&key.field);
        if !keys[i + 1..].iter().any(same) {
            key.read(o, &mut c)?;
        }
    }
    rope::read(&family.rope, o, &mut c)?;
    sliding_window::read(&family.windows, o, &mut c)?;
    (family.fixed)(&mut c);
    moe::normalize(o, &mut c)?;
    c.validate().map_err(|e| Error::config(o.origin, e.to_string()))?;
    Ok(c)
}

/// Block size of FP8 scales. Other quantization methods are refused.
pub(super) fn weight_block(o: &Object) -> Result<[usize; 2]> {
    const DEFAULT: [usize; 2] = [128, 128];
    let Some(map) = o.object(QUANTIZATION)? else { return Ok(DEFAULT) };
    let q = Object { map, under: "quantization_config.", ..*o };
    let unknown = || {
        let what = format!(
            "the weights are quantized ({}); block-scaled FP8 and MXFP4 are supported, otherwise use a bf16 version",
            show(&json!(map))
        );
        Error::unsupported(o.origin, what)
    };
    match (q.text("quant_method")?, q.list("weight_block_size")?.map(|l| l.as_slice())) {
        (Some("mxfp4"), _) => Ok(DEFAULT),
        (Some("fp8"), Some([a, b])) => {
            let size = |v: &Value| v.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| *n > 0);
            match (size(a), size(b)) {
                (Some(a), Some(b)) => Ok([a, b]),
                _ => Err(q.wrong("weight_block_size", "must be two numbers of at least 1")),
            }
        }
        _ => Err(unknown()),
    }
}

/// A plain decoder, for keys to fill in.
fn blank() -> ModelConfig {
    let c = ModelConfig::plain(ModelSizes::default());
    ModelConfig {
        norm: NormConfig { eps: 0.0, ..c.norm },
        positions: Positions::Learned,
        attn_scale: 1.0,
        init_std: 0.0,
        ..c
    }
}
