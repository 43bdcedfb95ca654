//! A `config.json` for a model: a new one, or the one that was read with what has changed.

use super::read::read_model;
use super::{HfConfig, MTP_LAYERS, QUANTIZATION, rope, sliding_window};
use crate::error::{Error, Result};
use crate::family::{FAMILIES, Family};
use crate::json::{Object, show};
use ferrotron_core::model::config::ModelConfig;
use ferrotron_tensor::DType;
use serde_json::{Map, Value, json};

impl HfConfig {
    /// The configuration of a natively trained model: of the first family that has all its switches.
    pub fn from_model(model: &ModelConfig, dtype: DType) -> Result<HfConfig> {
        model.validate().map_err(|e| Error::CannotExpress(e.to_string()))?;
        let mut closest: Option<(&Family, Vec<String>)> = None;
        for &family in FAMILIES {
            let mut map = Map::new();
            map.insert("architectures".into(), json!([family.architecture]));
            map.insert("model_type".into(), json!(family.model_type));
            map.insert("bos_token_id".into(), Value::Null);
            map.insert("eos_token_id".into(), Value::Null);
            map.insert("torch_dtype".into(), json!(dtype_word(dtype)));
            for key in family.keys.iter().copied().flatten() {
                key.write(model, &mut map);
            }
            rope::write(&family.rope, model, &mut map);
            sliding_window::write(&family.windows, model, &mut map);
            match from_map(family, map, model, "config.json") {
                Ok(config) => return Ok(config),
                Err(differences) => {
                    if closest.as_ref().is_none_or(|(_, d)| differences.len() < d.len()) {
                        closest = Some((family, differences));
                    }
                }
            }
        }
        let (family, differences) = closest.ok_or_else(|| Error::CannotExpress("no families".into()))?;
        Err(Error::CannotExpress(format!(
            "no Hugging Face family can express this model; the closest is {}, which cannot say {}",
            family.name,
            differences.join(", ")
        )))
    }

    /// The same file with the switches of `model`: only keys that say something else are touched.
    pub fn with_model(&self, model: &ModelConfig) -> Result<HfConfig> {
        if *model == self.model {
            return Ok(self.clone());
        }
        let mut map = self.map.clone();
        for key in self.family.keys.iter().copied().flatten() {
            if key.value(model) != key.value(&self.model) {
                key.write(model, &mut map);
            }
        }
        if (&model.positions, &model.rope_local) != (&self.model.positions, &self.model.rope_local) {
            rope::write(&self.family.rope, model, &mut map);
        }
        let layout = |c: &ModelConfig| (c.layers, c.window, c.local_layers.clone());
        if layout(model) != layout(&self.model) {
            sliding_window::write(&self.family.windows, model, &mut map);
        }
        from_map(self.family, map, model, &self.origin).map_err(|differences| {
            Error::CannotExpress(format!(
                "the family {} cannot say {}; export without the reference folder",
                self.family.name,
                differences.join(", ")
            ))
        })
    }

    /// The same file saying that the weights are of this type; untouched if it says so already.
    pub fn with_dtype(&self, dtype: DType) -> HfConfig {
        let mut config = self.clone();
        if self.dtype() != Some(dtype) {
            let key = if self.map.contains_key("dtype") { "dtype" } else { "torch_dtype" };
            config.map.insert(key.into(), json!(dtype_word(dtype)));
            config.text = pretty(&config.map);
        }
        config
    }

    /// The same file for weights as they are written: no longer in few bits and, unless tensors are copied from where
    /// they were, without further layers. Untouched if it says so already.
    pub(crate) fn as_written(&self, copied: bool) -> HfConfig {
        let mut config = self.clone();
        let mut changed = config.map.remove(QUANTIZATION).is_some();
        if !copied && self.mtp_layers() > 0 {
            config.map.insert(MTP_LAYERS.into(), json!(0));
            changed = true;
        }
        if changed {
            config.text = pretty(&config.map);
        }
        config
    }
}

/// The configuration of `map`, if it says exactly `model`; otherwise the switches it cannot say.
fn from_map(
    family: &'static Family,
    map: Map<String, Value>,
    model: &ModelConfig,
    origin: &str,
) -> Result<HfConfig, Vec<String>> {
    let read =
        read_model(family, &Object { map: &map, origin, under: "" }).map_err(|e| vec![e.to_string()])?;
    if read != *model {
        return Err(differences(model, &read));
    }
    Ok(HfConfig { family, model: read, text: pretty(&map), map, origin: origin.into() })
}

/// Switches of `wanted` that `got` has otherwise, as `name = value`.
fn differences(wanted: &ModelConfig, got: &ModelConfig) -> Vec<String> {
    match (serde_json::to_value(wanted), serde_json::to_value(got)) {
        (Ok(Value::Object(wanted)), Ok(Value::Object(got))) => wanted
            .iter()
            .filter(|(k, v)| got.get(*k) != Some(v))
            .map(|(k, v)| format!("{k} = {}", show(v)))
            .collect(),
        _ => vec!["some of its switches".into()],
    }
}

fn dtype_word(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => "bfloat16",
        DType::F16 => "float16",
        _ => "float32",
    }
}

/// The text of a file. A map of strings to JSON always has one.
fn pretty(map: &Map<String, Value>) -> String {
    serde_json::to_string_pretty(map).unwrap_or_default() + "\n"
}
