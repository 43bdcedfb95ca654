//! Keys of `config.json` as transformers reads and writes them: null, absent and empty ones, and those of exported models.
#![allow(clippy::unwrap_used)] // helpers of tests are tests too

use ferrotron_bridge::HfConfig;
use ferrotron_core::model::ModelConfig;
use ferrotron_core::model::config::{Positions, RopeScaling};
use ferrotron_tensor::DType;
use serde_json::{Map, Value, json};
use std::path::Path;

/// The configuration of a model of the repository.
fn config(folder: &str) -> Map<String, Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests").join(folder).join("config.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// The same with some keys changed; null removes `-key`.
fn with(mut config: Map<String, Value>, changes: Value) -> Map<String, Value> {
    for (key, value) in changes.as_object().unwrap() {
        match key.strip_prefix('-') {
            Some(key) => drop(config.remove(key)),
            None => drop(config.insert(key.clone(), value.clone())),
        }
    }
    config
}

fn model(config: Map<String, Value>) -> ModelConfig {
    HfConfig::parse(&Value::Object(config).to_string(), "config.json").unwrap().model().clone()
}

/// The configuration that an export of a model has, which reads back as the same model.
fn exported(model: &ModelConfig) -> Map<String, Value> {
    let written = HfConfig::from_model(model, DType::F32).unwrap();
    let again = HfConfig::parse(written.text(), "exported").unwrap();
    assert_eq!(again.model(), model);
    serde_json::from_str(written.text()).unwrap()
}

#[test]
fn a_flag_that_is_null_is_off() {
    let v3 = config("golden/hf/deepseek_v3");
    let normalized = |changes: Value| model(with(v3.clone(), changes)).moe.unwrap().routing().normalize;
    assert!(normalized(json!({"norm_topk_prob": true})) && normalized(json!({"-norm_topk_prob": 0})));
    assert!(!normalized(json!({"norm_topk_prob": null})));
    let interleaved = |changes: Value| match model(with(v3.clone(), changes)).positions {
        Positions::Rope(rope) => rope.interleaved,
        other => panic!("{other:?}"),
    };
    assert!(interleaved(json!({"-rope_interleave": 0})) && !interleaved(json!({"rope_interleave": null})));
    let tied =
        |value: Value| model(with(config("golden/hf/gemma2"), json!({"tie_word_embeddings": value}))).tied;
    assert!(tied(json!(true)) && !tied(Value::Null));
}

#[test]
fn layers_that_are_listed_as_sliding_are_without_the_flag() {
    let listed = config("hf_variants/smollm3_listed_layers_window");
    let before = model(listed.clone());
    assert!(before.window.is_some());
    assert_eq!(model(with(listed.clone(), json!({"use_sliding_window": false}))), before);
    assert_eq!(model(with(listed.clone(), json!({"-use_sliding_window": 0}))), before);
    assert_eq!(model(with(listed, json!({"-use_sliding_window": 0, "-layer_types": 0}))).window, None);
}

#[test]
fn gpt_oss_without_a_description_of_rope_has_yarn() {
    let plain = with(config("golden/hf/gpt_oss"), json!({"-rope_scaling": 0, "-rope_parameters": 0}));
    let scaling = |changes: Value| match model(with(plain.clone(), changes)).positions {
        Positions::Rope(rope) => rope.scaling,
        other => panic!("{other:?}"),
    };
    let original = |changes: Value| match scaling(changes) {
        RopeScaling::Yarn { original_max_positions, .. } => original_max_positions,
        other => panic!("{other:?}"),
    };
    assert_eq!(original(json!({"-original_max_position_embeddings": 0})), 4096);
    assert_eq!(original(json!({"original_max_position_embeddings": 24})), 24);
    assert_eq!(scaling(json!({"rope_parameters": {}})), RopeScaling::None);
    // As plain RoPE it is exported with a description.
    let exported = exported(&model(config("hf_variants/gpt_oss_top1_plain_rope")));
    assert_eq!(exported["rope_scaling"], json!({"rope_type": "default"}));
}

#[test]
fn qwen3_moe_has_a_dense_width_of_its_own() {
    let given = config("golden/hf/qwen3_moe");
    assert_eq!(model(with(given, json!({"-intermediate_size": 0}))).ffn, 6144);
}

/// transformers loads and runs what is exported.
#[test]
fn exported_configurations_have_what_their_classes_need() {
    for folder in ["hf_variants/phi3_default_rope_window", "hf_variants/smollm3_listed_layers_window"] {
        assert_eq!(exported(&model(config(folder))).get("pad_token_id"), Some(&Value::Null), "{folder}");
    }
    for folder in ["golden/hf/gemma2", "golden/hf/gemma3", "golden/hf/gpt_oss"] {
        let mut global = model(config(folder));
        (global.window, global.local_layers) = (None, Vec::new());
        let window = exported(&global)["sliding_window"].clone();
        assert!(window.as_u64().is_some_and(|w| w > 0), "{folder}: {window}");
    }
    let dense = exported(&model(config("hf_variants/deepseek_v3_all_layers_dense")));
    assert!(dense["routed_scaling_factor"].is_f64(), "{}", dense["routed_scaling_factor"]);
}
