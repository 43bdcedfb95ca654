//! `adapter_config.json` of a PEFT folder.

use crate::error::{Error, Result};
use crate::json::{Object, parse_object, read_text};
use regex::Regex;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// Name of the configuration in a PEFT folder.
pub(crate) const ADAPTER_CONFIG: &str = "adapter_config.json";
/// Larger ranks, times the experts of a layer, need not fit into a number.
const MAX_RANK: usize = 1 << 20;

/// What a PEFT folder says about its adapters.
#[derive(Clone, Debug)]
pub struct PeftConfig {
    /// The base model: a folder, or a name on the Hugging Face hub.
    pub base: Option<String>,
    /// Rank of the adapters, unless a pattern says otherwise.
    pub rank: usize,
    /// Numerator of their scale.
    pub alpha: f64,
    /// Whether the adapters are DoRA's.
    pub dora: bool,
    /// The scale is alpha / √rank.
    rslora: bool,
    /// Ranks and alphas of modules whose names match.
    ranks: Vec<(Regex, f64)>,
    alphas: Vec<(Regex, f64)>,
}

/// Keys that must be off, and what they would mean.
const REFUSED: [(&str, &str); 10] = [
    ("modules_to_save", "whole modules beside adapters"),
    ("trainable_token_indices", "trained tokens"),
    ("lora_bias", "biases of B"),
    ("layer_replication", "replicated layers"),
    ("alora_invocation_tokens", "adapters that begin at a token"),
    ("arrow_config", "several adapters routed between"),
    ("use_qalora", "adapters on pooled inputs"),
    ("use_bdlora", "block-diagonal adapters"),
    ("kasa_config", "adapters on singular values"),
    ("monteclora_config", "adapters drawn at random"),
];

impl PeftConfig {
    /// Reads the configuration of a folder.
    pub fn from_dir(dir: &Path) -> Result<PeftConfig> {
        let path = dir.join(ADAPTER_CONFIG);
        PeftConfig::parse(&read_text(&path)?, &path.display().to_string())
    }

    /// Reads a configuration; `origin` is its file in messages.
    pub fn parse(text: &str, origin: &str) -> Result<PeftConfig> {
        let map = parse_object(text, origin)?;
        let o = Object { map: &map, origin, under: "" };
        match o.text("peft_type")? {
            Some("LORA") => {}
            Some(other) => {
                let what = format!(
                    "`peft_type` is {other}; adapters of type LORA are supported, with or without DoRA"
                );
                return Err(Error::unsupported(origin, what));
            }
            None => return Err(o.missing("peft_type")),
        }
        let off = |v: &Value| {
            matches!(v, Value::Bool(false) | Value::Null) || v.as_array().is_some_and(Vec::is_empty)
        };
        for (key, what) in REFUSED {
            if o.get(key).is_some_and(|v| !off(v)) {
                let what =
                    format!("`{key}` is set, and {what} are not supported; train the adapters without");
                return Err(Error::unsupported(origin, what));
            }
        }
        // Other initial values than these are taken out of the base model's weights, which are then no longer those of its folder.
        if let Some(start) = o.get("init_lora_weights").and_then(Value::as_str)
            && !["gaussian", "eva", "orthogonal", "mica"].contains(&start.to_lowercase().as_str())
        {
            let what = format!(
                "`init_lora_weights` is \"{start}\", which changes the weights of the base model, so that the adapters do not fit \
                 it; save them with path_initial_model_for_weight_conversion, or save the changed base model, name it by \
                 base_model_name_or_path, and set the key to true"
            );
            return Err(Error::unsupported(origin, what));
        }
        if let Some(bias) = o.text("bias")?.filter(|bias| *bias != "none") {
            let what = format!(
                "`bias` is \"{bias}\", and trained biases are not supported; train the adapters with \"none\""
            );
            return Err(Error::unsupported(origin, what));
        }
        let rank = o.size("r")?.ok_or_else(|| o.missing("r"))?;
        if !(1..=MAX_RANK).contains(&rank) {
            return Err(o.wrong("r", format_args!("must be between 1 and {MAX_RANK}")));
        }
        let patterns = |key: &str| -> Result<Vec<(Regex, f64)>> {
            let Some(map) = o.object(key)? else { return Ok(Vec::new()) };
            map.iter()
                .map(|(pattern, value)| {
                    let number =
                        value.as_f64().ok_or_else(|| o.mistyped(key, value, "an object of numbers"))?;
                    // PEFT matches a pattern with the whole name or what follows a dot in it.
                    let regex = Regex::new(&format!("^(.*\\.)?({pattern})$")).map_err(|e| {
                        o.wrong(key, format_args!("has a pattern that is no regular expression: {e}"))
                    })?;
                    Ok((regex, number))
                })
                .collect()
        };
        let ranks = patterns("rank_pattern")?;
        if ranks.iter().any(|(_, r)| r.fract() != 0.0 || !(1.0..=MAX_RANK as f64).contains(r)) {
            let what = format_args!("has a rank that is not a whole number between 1 and {MAX_RANK}");
            return Err(o.wrong("rank_pattern", what));
        }
        Ok(PeftConfig {
            base: o.text("base_model_name_or_path")?.filter(|b| !b.is_empty()).map(String::from),
            rank,
            alpha: o.real("lora_alpha")?.unwrap_or(8.0),
            dora: o.flag("use_dora")?.unwrap_or(false),
            rslora: o.flag("use_rslora")?.unwrap_or(false),
            ranks,
            alphas: patterns("alpha_pattern")?,
        })
    }

    /// The folder of the base model, if it is on this machine.
    pub fn base_folder(&self) -> Option<PathBuf> {
        self.base.as_ref().map(PathBuf::from).filter(|dir| dir.is_dir())
    }

    /// Rank and scale of the adapter of a module, by its name in the base model.
    pub(crate) fn of(&self, module: &str) -> (usize, f64) {
        let find = |list: &[(Regex, f64)]| list.iter().find(|(r, _)| r.is_match(module)).map(|(_, n)| *n);
        let rank = find(&self.ranks).map_or(self.rank, |n| n as usize);
        let alpha = find(&self.alphas).unwrap_or(self.alpha);
        let divisor = if self.rslora { (rank as f64).sqrt() } else { rank as f64 };
        (rank, alpha / divisor)
    }
}

/// The alpha of a rank and a scale. A whole one may have lost its last bits on the way.
pub(crate) fn alpha(rank: usize, scale: f64) -> f64 {
    let alpha = scale * rank as f64;
    if (alpha - alpha.round()).abs() < 1e-6 * alpha.abs() { alpha.round() } else { alpha }
}

/// What goes into the configuration of a folder that is written.
pub(super) struct Written<'a> {
    pub base: Option<&'a Path>,
    pub rank: usize,
    pub alpha: f64,
    pub dora: bool,
    /// The base model stores weights `[in, out]`.
    pub transposed: bool,
    /// Modules, and parameters of modules that are no linear layers.
    pub modules: Vec<String>,
    pub parameters: Vec<String>,
    /// Patterns of modules with another rank and alpha.
    pub patterns: Vec<(String, usize, f64)>,
}

impl Written<'_> {
    /// The text of the file.
    pub fn text(&self) -> String {
        let pattern = |value: &dyn Fn(usize, f64) -> Value| -> Map<String, Value> {
            self.patterns.iter().map(|(name, rank, alpha)| (name.clone(), value(*rank, *alpha))).collect()
        };
        let mut map = json!({
            "alpha_pattern": pattern(&|_, alpha| json!(alpha)),
            "base_model_name_or_path": self.base,
            "bias": "none",
            "fan_in_fan_out": self.transposed,
            "inference_mode": true,
            "init_lora_weights": true,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "modules_to_save": null,
            "peft_type": "LORA",
            "r": self.rank,
            "rank_pattern": pattern(&|rank, _| json!(rank)),
            "target_modules": self.modules,
            "task_type": "CAUSAL_LM",
            "use_dora": self.dora,
            "use_rslora": false,
        });
        if !self.parameters.is_empty() {
            map["target_parameters"] = json!(self.parameters);
        }
        format!("{map:#}\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<PeftConfig> {
        PeftConfig::parse(text, "a.json")
    }

    #[test]
    fn ranks_and_scales_follow_patterns() {
        let c = parse(
            r#"{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "rank_pattern": {".*\\.gate_up_proj": 8, "q_proj": 16},
                "alpha_pattern": {".*\\.gate_up_proj": 16}, "base_model_name_or_path": "b"}"#,
        )
        .unwrap();
        assert_eq!(c.of("model.layers.0.self_attn.k_proj"), (4, 2.0));
        assert_eq!(c.of("model.layers.0.self_attn.q_proj"), (16, 0.5));
        assert_eq!(c.of("model.layers.0.self_attn.not_q_proj"), (4, 2.0));
        assert_eq!(c.of("model.layers.0.mlp.experts.gate_up_proj"), (8, 2.0));
        let c = parse(r#"{"peft_type": "LORA", "r": 16, "lora_alpha": 8, "use_rslora": true}"#).unwrap();
        assert_eq!(c.of("x"), (16, 2.0));
        for start in ["true", "false", "null", r#""gaussian""#, r#""eva""#, r#""orthogonal""#, r#""mica""#] {
            let text = format!(r#"{{"peft_type": "LORA", "r": 4, "init_lora_weights": {start}}}"#);
            assert!(parse(&text).is_ok(), "{start}");
        }
    }

    #[test]
    fn what_cannot_be_loaded_is_named() {
        for (text, part) in [
            (r#"{"peft_type": "IA3", "r": 4}"#, "IA3"),
            (r#"{"r": 4}"#, "`peft_type` is missing"),
            (r#"{"peft_type": "LORA"}"#, "`r` is missing"),
            (r#"{"peft_type": "LORA", "r": 0}"#, "between 1 and"),
            (r#"{"peft_type": "LORA", "r": 18446744073709551615}"#, "between 1 and"),
            (
                r#"{"peft_type": "LORA", "r": 4, "rank_pattern": {"q_proj": 1e300}}"#,
                "whole number between 1 and",
            ),
            (
                r#"{"peft_type": "LORA", "r": 4, "rank_pattern": {"q_proj": 2.5}}"#,
                "whole number between 1 and",
            ),
            (r#"{"peft_type": "LORA", "r": 4, "bias": "all"}"#, "trained biases"),
            (r#"{"peft_type": "LORA", "r": 4, "modules_to_save": ["lm_head"]}"#, "modules_to_save"),
            (
                r#"{"peft_type": "LORA", "r": 4, "init_lora_weights": "pissa"}"#,
                "path_initial_model_for_weight",
            ),
            (r#"{"peft_type": "LORA", "r": 4, "init_lora_weights": "pissa_niter_4"}"#, "pissa_niter_4"),
            (r#"{"peft_type": "LORA", "r": 4, "init_lora_weights": "OLoRA"}"#, "OLoRA"),
            (r#"{"peft_type": "LORA", "r": 4, "init_lora_weights": "loftq"}"#, "base model"),
            (r#"{"peft_type": "LORA", "r": 4, "init_lora_weights": "corda"}"#, "base model"),
            (r#"{"peft_type": "LORA", "r": 4, "init_lora_weights": "lora_ga"}"#, "base model"),
            (r#"{"peft_type": "LORA", "r": 4, "rank_pattern": {"(": 3}}"#, "regular expression"),
            (r#"{"peft_type": "LORA", "r": 4, "rank_pattern": {"a": "b"}}"#, "numbers"),
        ] {
            let e = parse(text).unwrap_err().to_string();
            assert!(e.contains(part) && e.starts_with("a.json: "), "{e}");
        }
    }
}
