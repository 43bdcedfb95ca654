//! Writes the `config.json` of a model: a new one, or the one that was read with the changed keys.

use super::read::read_model;
use super::{HfConfig, MTP_LAYERS, QUANTIZATION, rope_write, sliding_window};
use crate::error::{Error, Result};
use crate::family::{FAMILIES, Family, RopeStyle};
use crate::json::{Object, show};
use ferrotron_core::model::config::ModelConfig;
use ferrotron_tensor::DType;
use serde_json::{Map, Value, json};

impl HfConfig {
    /// The `config.json` of a natively trained model, of the first family that can express it.
    pub fn from_model(model: &ModelConfig, dtype: DType) -> Result<HfConfig> {
        model.validate().map_err(|e| Error::CannotExpress(e.to_string()))?;
        let mut closest: Option<(&Family, Vec<String>)> = None;
        for &family in FAMILIES {
            let mut map = Map::new();
            map.insert("architectures".into(), json!([family.architecture]));
            map.insert("model_type".into(), json!(family.model_type));
            map.insert("bos_token_id".into(), Value::Null);
            map.insert("eos_token_id".into(), Value::Null);
            // The default of some configuration classes is beyond a smaller vocabulary, which torch refuses.
            map.insert("pad_token_id".into(), Value::Null);
            map.insert("torch_dtype".into(), json!(dtype_word(dtype)));
            for key in family.keys.iter().copied().flatten() {
                key.write(model, &mut map);
            }
            rope_write::write(&family.rope, model, &mut map);
            sliding_window::write(&family.windows, model, &mut map);
            if let Some(mtp) = model.mtp {
                map.insert(MTP_LAYERS[0].into(), json!(mtp.layers));
            }
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
            "no Hugging Face family can express this model; the closest is {}, which cannot express {}",
            family.name,
            differences.join(", ")
        )))
    }

    /// The same file for `model`: only keys whose value changes are touched.
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
        let rope = |c: &ModelConfig| {
            let listed = matches!(self.family.rope, RopeStyle::SomeLayers { .. }).then_some(c.layers);
            (c.positions.clone(), c.rope_local.clone(), c.no_rope_layers.clone(), listed)
        };
        if rope(model) != rope(&self.model) {
            rope_write::write(&self.family.rope, model, &mut map);
        }
        let layout = |c: &ModelConfig| (c.layers, c.window, c.local_layers.clone());
        if layout(model) != layout(&self.model) {
            sliding_window::write(&self.family.windows, model, &mut map);
        }
        if model.mtp != self.model.mtp {
            set_mtp_layers(&mut map, model);
        }
        from_map(self.family, map, model, &self.origin).map_err(|differences| {
            Error::CannotExpress(format!(
                "the family {} cannot express {}; export without the reference folder",
                self.family.name,
                differences.join(", ")
            ))
        })
    }

    /// The same file with the weights' dtype; unchanged if it names it already.
    pub fn with_dtype(&self, dtype: DType) -> HfConfig {
        let mut config = self.clone();
        if self.dtype() != Some(dtype) {
            let key = if self.map.contains_key("dtype") { "dtype" } else { "torch_dtype" };
            config.map.insert(key.into(), json!(dtype_word(dtype)));
            config.text = pretty(&config.map);
        }
        config
    }

    /// The same file for weights as they are written: not quantized and, unless every tensor is written to where it
    /// was in the source (`like_source`), with the number of MTP modules that are written. Unchanged if it says so
    /// already.
    pub(crate) fn as_written(&self, like_source: bool) -> HfConfig {
        let mut config = self.clone();
        let mut changed = config.map.remove(QUANTIZATION).is_some();
        let mtp = self.model.mtp.map_or(0, |m| m.layers);
        if !like_source && self.mtp_layers().unwrap_or(0) != mtp {
            set_mtp_layers(&mut config.map, &self.model);
            changed = true;
        }
        if changed {
            config.text = pretty(&config.map);
        }
        config
    }
}

/// States the model's MTP modules under the key that is there already, or the one of published files.
fn set_mtp_layers(map: &mut Map<String, Value>, model: &ModelConfig) {
    let key = MTP_LAYERS.into_iter().find(|k| map.contains_key(*k)).unwrap_or(MTP_LAYERS[0]);
    map.insert(key.into(), json!(model.mtp.map_or(0, |m| m.layers)));
}

/// The configuration of `map` if it describes exactly `model`; otherwise the fields that it cannot express.
fn from_map(
    family: &'static Family,
    map: Map<String, Value>,
    model: &ModelConfig,
    origin: &str,
) -> Result<HfConfig, Vec<String>> {
    let mut read =
        read_model(family, &Object { map: &map, origin, under: "" }).map_err(|e| vec![e.to_string()])?;
    // Which MTP modules there are is for the weights to say.
    if !family.mtp.is_empty() && model.mtp.is_none_or(|m| m.modules() == m.layers) {
        read.mtp = model.mtp;
    }
    if read != *model {
        return Err(differences(model, &read));
    }
    Ok(HfConfig { family, model: read, text: pretty(&map), map, origin: origin.into() })
}

/// Fields in which `wanted` differs from `got`, as `name = value`.
fn differences(wanted: &ModelConfig, got: &ModelConfig) -> Vec<String> {
    match (serde_json::to_value(wanted), serde_json::to_value(got)) {
        (Ok(Value::Object(wanted)), Ok(Value::Object(got))) => wanted
            .iter()
            .filter(|(k, v)| got.get(*k) != Some(v))
            .map(|(k, v)| format!("{k} = {}", show(v)))
            .collect(),
        _ => vec!["some of its fields".into()],
    }
}

fn dtype_word(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => "bfloat16",
        DType::F16 => "float16",
        _ => "float32",
    }
}

/// The map as indented JSON.
fn pretty(map: &Map<String, Value>) -> String {
    serde_json::to_string_pretty(map).unwrap_or_default() + "\n"
}
