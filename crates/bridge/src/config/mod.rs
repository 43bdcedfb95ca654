//! `config.json` ↔ [`ModelConfig`].

mod field;
mod moe;
mod read;
mod rope;
mod rope_write;
mod sliding_window;
mod write;

pub(crate) use moe::moe_config;

use crate::error::Result;
use crate::expected::{HfTensor, hf_tensors};
use crate::family::Family;
use crate::json::{Object, parse_object, read_text};
use ferrotron_core::model::MtpConfig;
use ferrotron_core::model::config::ModelConfig;
use ferrotron_tensor::DType;
use read::{detect_family, read_model, weight_block};
use serde_json::{Map, Value};
use std::path::Path;

/// A `config.json`: its family, its architecture, and the file itself, so that export writes back what was read,
/// unknown keys included.
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

    /// Reads the text as a `config.json` of the given family, whatever class it names.
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

    /// The text of the file, as read or as to be written.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The file it came from.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// Dtype of the weights, if the file names one that we support.
    pub fn dtype(&self) -> Option<DType> {
        let word = ["dtype", "torch_dtype"].into_iter().find_map(|k| self.map.get(k)?.as_str())?;
        match word.strip_prefix("torch.").unwrap_or(word) {
            "float32" => Some(DType::F32),
            "bfloat16" => Some(DType::BF16),
            "float16" => Some(DType::F16),
            _ => None,
        }
    }

    /// Block size of FP8 scales: rows, columns.
    pub(crate) fn weight_block(&self) -> [usize; 2] {
        weight_block(&Object { map: &self.map, origin: &self.origin, under: "" }).unwrap_or([128, 128])
    }

    /// MTP modules that the file states, if it does. Whether a checkpoint has them is for its files to say:
    /// transformers drops them when it saves a model, and leaves the key.
    pub(crate) fn mtp_layers(&self) -> Option<usize> {
        let layers = MTP_LAYERS.iter().find_map(|k| self.map.get(*k)?.as_u64());
        layers.map(|n| n.min(64) as usize)
    }

    /// The same file of a checkpoint that has so many MTP modules.
    pub(crate) fn with_mtp_layers(mut self, layers: usize) -> HfConfig {
        self.model.mtp = (layers > 0).then_some(MtpConfig { layers, shared_layer: false });
        self
    }

    /// The tensors this model has in Hugging Face's files, in the model's order.
    pub fn hf_tensors(&self) -> Result<Vec<HfTensor>> {
        hf_tensors(self.family, &self.model, self.family.prefix)
    }

    /// The value of a key as the file has it.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key)
    }

    /// Keys that are neither read nor known to have no effect. They are kept for export.
    pub fn unknown_keys(&self) -> Vec<&str> {
        let known = |k: &str| {
            NO_EFFECT.contains(&k)
                || rope::KEYS.contains(&k)
                || sliding_window::KEYS.contains(&k)
                || self.family.refused.iter().any(|r| r.key == k)
                || self.family.keys.iter().copied().flatten().any(|key| key.names.contains(&k))
        };
        self.map.keys().map(String::as_str).filter(|k| !known(k)).collect()
    }
}

const QUANTIZATION: &str = "quantization_config";
/// The key of published files, and the one of transformers.
const MTP_LAYERS: [&str; 2] = ["num_nextn_predict_layers", "num_mtp_layers"];

/// Keys without effect on what the model computes in training without dropout.
const NO_EFFECT: &[&str] = &[
    "_attn_implementation_autoset",
    "_name_or_path",
    "architectures",
    "attention_dropout",
    // Of Gemma 3 and others; Gemma 2 reads it.
    "attn_logit_softcapping",
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
    MTP_LAYERS[0],
    MTP_LAYERS[1],
    "reorder_and_upcast_attn",
    "add_cross_attention",
    "router_jitter_noise",
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
