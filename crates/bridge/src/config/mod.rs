//! `config.json` ↔ [`ModelConfig`].

mod experts;
mod field;
mod layers;
mod rope;

pub(crate) use experts::mixture;

use crate::error::{Error, Result};
use crate::expected::{HfTensor, hf_tensors};
use crate::family::{FAMILIES, Family, Field};
use crate::json::{Object, parse_object, read_text, show};
use ferrotron_core::model::config::{Activation, ModelConfig, NormConfig, NormKind, Positions};
use ferrotron_tensor::DType;
use serde_json::{Map, Value, json};
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
        let family = recognise(&parse_object(text, origin)?, origin)?;
        HfConfig::parse_as(family, text, origin)
    }

    /// The same of a family that is known, whatever the text says of its class.
    pub fn parse_as(family: &'static Family, text: &str, origin: &str) -> Result<HfConfig> {
        let map = parse_object(text, origin)?;
        let model = read_model(family, &Object { map: &map, origin, under: "" })?;
        Ok(HfConfig { family, model, text: text.into(), map, origin: origin.into() })
    }

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
            layers::write(&family.windows, model, &mut map);
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
            layers::write(&self.family.windows, model, &mut map);
        }
        from_map(self.family, map, model, &self.origin).map_err(|differences| {
            Error::CannotExpress(format!(
                "the family {} cannot say {}; export without the reference folder",
                self.family.name,
                differences.join(", ")
            ))
        })
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

    /// The same file saying that the weights are of this type; untouched if it says so already.
    pub fn with_dtype(&self, dtype: DType) -> HfConfig {
        let mut config = self.clone();
        if self.dtype() != Some(dtype) {
            let key = if self.map.contains_key("dtype") { "dtype" } else { "torch_dtype" };
            config.map.insert(key.into(), json!(dtype_word(dtype)));
            // A map of strings to JSON always has a text.
            config.text = serde_json::to_string_pretty(&config.map).unwrap_or_default() + "\n";
        }
        config
    }

    /// The blocks that FP8 weights have a scale each for: rows, columns.
    pub(crate) fn weight_block(&self) -> [usize; 2] {
        weight_block(&Object { map: &self.map, origin: &self.origin, under: "" }).unwrap_or([128, 128])
    }

    /// The same file for weights as they are written: no longer in few bits and, unless tensors are copied from where
    /// they were, without further layers. Untouched if it says so already.
    pub(crate) fn as_written(&self, copied: bool) -> HfConfig {
        let mut config = self.clone();
        let mut changed = config.map.remove(QUANTISATION).is_some();
        if !copied && self.further_layers() > 0 {
            config.map.insert(FURTHER.into(), json!(0));
            changed = true;
        }
        if changed {
            config.text = serde_json::to_string_pretty(&config.map).unwrap_or_default() + "\n";
        }
        config
    }

    /// Layers after the last, which predict further tokens: kept for export, otherwise passed over.
    pub(crate) fn further_layers(&self) -> usize {
        let layers = self.map.get(FURTHER).and_then(Value::as_u64);
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
                || layers::KEYS.contains(&k)
                || self.family.refused.iter().any(|r| r.key == k)
                || self.family.keys.iter().copied().flatten().any(|key| key.names.contains(&k))
        };
        self.map.keys().map(String::as_str).filter(|k| !known(k)).collect()
    }
}

const QUANTISATION: &str = "quantization_config";
const FURTHER: &str = "num_nextn_predict_layers";

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
    QUANTISATION,
    FURTHER,
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

/// Keys by which models with experts are known, whatever their class.
const EXPERT_KEYS: &[&str] = &["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"];

fn recognise(map: &Map<String, Value>, origin: &str) -> Result<&'static Family> {
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
                return Err(
                    o.wrong("architectures", "and `model_type` are both missing: which model is this?")
                );
            }
        },
    };
    let name = class.or(o.text("model_type")?).unwrap_or_default();
    let supported = FAMILIES.iter().map(|f| f.architecture).collect::<Vec<_>>().join(", ");
    let experts = EXPERT_KEYS.iter().any(|k| o.get(k).is_some_and(|v| v.as_u64() != Some(0)));
    let knows = |f: &Family| f.keys.iter().copied().flatten().any(|k| matches!(k.field, Field::Mixture(_)));
    if experts && !found.is_some_and(|f| knows(f)) {
        return Err(Error::unsupported(
            origin,
            format!(
                "{} is a mixture of experts of a kind that is not supported; these are: {supported}",
                show(&json!(name))
            ),
        ));
    }
    found.copied().ok_or_else(|| {
        Error::unsupported(
            origin,
            format!("architecture {} is not supported; these are: {supported}", show(&json!(name))),
        )
    })
}

fn read_model(family: &Family, o: &Object) -> Result<ModelConfig> {
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
    for key in family.keys.iter().copied().flatten() {
        key.read(o, &mut c)?;
    }
    rope::read(&family.rope, o, &mut c)?;
    layers::read(&family.windows, o, &mut c)?;
    (family.facts)(&mut c);
    experts::settle(o, &mut c)?;
    c.validate().map_err(|e| Error::config(o.origin, e.to_string()))?;
    Ok(c)
}

/// The blocks that FP8 weights have a scale each for. Other ways to store weights in few bits are refused.
fn weight_block(o: &Object) -> Result<[usize; 2]> {
    const DEFAULT: [usize; 2] = [128, 128];
    let Some(map) = o.object(QUANTISATION)? else { return Ok(DEFAULT) };
    let q = Object { map, under: "quantization_config.", ..*o };
    let unknown = || {
        let what = format!(
            "the weights are quantised ({}); FP8 with scales of blocks and MXFP4 can be read, for others convert a bf16 version",
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
    let text = serde_json::to_string_pretty(&map).map_err(|e| vec![e.to_string()])? + "\n";
    Ok(HfConfig { family, model: read, text, map, origin: origin.into() })
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

/// A decoder with nothing special, to be filled in.
fn blank() -> ModelConfig {
    ModelConfig {
        layers: 0,
        hidden: 0,
        ffn: 0,
        heads: 0,
        kv_heads: 0,
        head_dim: 0,
        vocab: 0,
        max_positions: 0,
        norm: NormConfig { kind: NormKind::RmsNorm, eps: 0.0, zero_centred: false },
        activation: Activation::Silu,
        gated: true,
        qkv_bias: false,
        proj_bias: false,
        mlp_bias: false,
        qk_norm: false,
        post_norms: false,
        positions: Positions::Learned,
        rope_local: None,
        window: None,
        local_layers: Vec::new(),
        attn_scale: 1.0,
        attn_softcap: None,
        attn_sink: false,
        mla: None,
        final_softcap: None,
        embed_scale: 1.0,
        tied: false,
        init_std: 0.0,
        moe: None,
        mtp: None,
    }
}
