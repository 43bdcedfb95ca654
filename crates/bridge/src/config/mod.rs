//! `config.json` ↔ [`ModelConfig`].

mod field;
mod moe;
mod read;
mod rope;
mod sliding_window;
mod write;

pub(crate) use moe::moe_config;

use crate::error::Result;
use crate::expected::{HfTensor, hf_tensors};
use crate::family::Family;
use crate::json::{Object, parse_object, read_text};
use ferrotron_core::model::config::ModelConfig;
use ferrotron_tensor::DType;
use read::{detect_family, read_model, weight_block};
use serde_json::{Map, Value};
use std::path::Path;

/// A `config.json`: the family, the architecture, and the file itself so that export writes back what was
/// read, including keys that mean nothing to us.
#[derive(Clone, Debug)]
pub struct HfConfig {
    family: &'static Family,
    model: ModelConfig,
    text: String,
    map: Map<String, Value>,
    origin: String,
}

impl HfConfig {
    /// Reads `config.json` in a folder.
    pub fn from_dir(dir: &Path) -> Result<HfConfig> {
        HfConfig::from_file(&dir.join("config.json"))
    }

    /// Reads a file in the format of `config.json`.
    pub fn from_file(path: &Path) -> Result<HfConfig> {
        HfConfig::parse(&read_text(path)?, &path.display().to_string())
    }

    /// Reads the text of a `config.json`; `origin` names it in errors.
    pub fn parse(text: &str, origin: &str) -> Result<HfConfig> {
        let family = detect_family(&parse_object(text, origin)?, origin)?;
        HfConfig::parse_as(family, text, origin)
    }

    /// The same of a family that is known, whatever the text says of its class.
    pub fn parse_as(family: &'static Family, text: &str, origin: &str) -> Result<HfConfig> {
        let map = parse_object(text, origin)?;
        let model = read_model(family, &Object { map: &map, origin, under: "" })?;
        Ok(HfConfig { family, model, text: text.into(), map, origin: origin.into() })
    }

    /// The family.
    pub fn family(&self) -> &'static Family {
        self.family
    }

    /// The architecture.
    pub fn model(&self) -> &ModelConfig {
        &self.model
    }

    /// The file's text, as read or as it is to be written.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The file it came from.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// Element type of the weights, if the file says one we know.
    pub fn dtype(&self) -> Option<DType> {
        let word = ["dtype", "torch_dtype"].into_iter().find_map(|k| self.map.get(k)?.as_str())?;
        match word.strip_prefix("torch.").unwrap_or(word) {
            "float32" => Some(DType::F32),
            "bfloat16" => Some(DType::BF16),
            "float16" => Some(DType::F16),
            _ => None,
        }
    }

    /// The blocks that FP8 weights have a scale each for: rows, columns.
    pub(crate) fn weight_block(&self) -> [usize; 2] {
        weight_block(&Object { map: &self.map, origin: &self.origin, under: "" }).unwrap_or([128, 128])
    }

    /// Layers after the last, which predict further tokens: kept for export, otherwise passed over.
    pub(crate) fn mtp_layers(&self) -> usize {
        let layers = self.map.get(MTP_LAYERS).and_then(Value::as_u64);
        layers.map_or(0, |n| n.min(64) as usize)
    }

    /// The tensors this model has in Hugging Face's files, in the model's order.
    pub fn hf_tensors(&self) -> Result<Vec<HfTensor>> {
        hf_tensors(self.family, &self.model, self.family.prefix)
    }

    /// The value of a key as the file has it.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key)
    }

    /// Keys that mean nothing to us and are not known to be harmless. They are kept for export.
    pub fn unknown_keys(&self) -> Vec<&str> {
        let known = |k: &str| {
            HARMLESS.contains(&k)
                || rope::KEYS.contains(&k)
                || sliding_window::KEYS.contains(&k)
                || self.family.refused.iter().any(|r| r.key == k)
                || self.family.keys.iter().copied().flatten().any(|key| key.names.contains(&k))
        };
        self.map.keys().map(String::as_str).filter(|k| !known(k)).collect()
    }
}

const QUANTIZATION: &str = "quantization_config";
const MTP_LAYERS: &str = "num_nextn_predict_layers";

/// Keys that change nothing of what the model computes in training without dropout.
const HARMLESS: &[&str] = &[
    "_attn_implementation_autoset",
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "attn_pdrop",
    "auto_map",
    "aux_loss_alpha",
    "bos_token_id",
    "cache_implementation",
    "dtype",
    "embd_pdrop",
    "ep_size",
    "eos_token_id",
    "gradient_checkpointing",
    "initial_context_length",
    "model_type",
    "n_ctx",
    "output_past",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    QUANTIZATION,
    MTP_LAYERS,
    "reorder_and_upcast_attn",
    "resid_pdrop",
    "router_aux_loss_coef",
    "seq_aux",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "task_specific_params",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "hidden_act",
];
