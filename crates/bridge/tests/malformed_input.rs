//! Corrupt and malicious files give errors, never panics, and never exhaust memory.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests are tests too

mod support;

#[path = "../../../tests/support/soak.rs"]
mod soak;

use ferrotron_bridge::{
    ChatTemplate, Error, ExportOptions, HfCheckpoint, HfConfig, TensorData, Tokenizer, byte_tokenizer_json,
    export,
};
use ferrotron_tensor::DType;
use support::{SeededRng, copy_dir, covered};

#[test]
fn corrupt_configurations() {
    let mut dice = SeededRng(1);
    let (mut refused, mut total) = (0, 0);
    for dir in covered() {
        for file in ["config.json", "config_hub.json"] {
            let good = std::fs::read(dir.join(file)).unwrap();
            for _ in 0..soak::rounds(1500) {
                let bad = dice.corrupt(&good);
                total += 1;
                let Ok(text) = String::from_utf8(bad) else { continue };
                match HfConfig::parse(&text, "config.json") {
                    Ok(config) => {
                        // Whatever is accepted can be built and written again.
                        config.model().validate().unwrap();
                        let again = HfConfig::parse(config.text(), "again").unwrap();
                        assert_eq!(again.model(), config.model());
                        HfConfig::from_model(config.model(), DType::F32)
                            .map(|c| assert_eq!(c.model(), config.model()))
                            .ok();
                    }
                    Err(e) => {
                        refused += 1;
                        let e = e.to_string();
                        assert!(e.contains("config.json") && e.len() < 2000, "{e}");
                    }
                }
            }
        }
    }
    assert!(refused > total / 4, "{refused} of {total} refused");
}

/// What is read beside a `tokenizer.json` gives an error with its file's name, or a tokenizer and a template that can be used.
#[test]
fn corrupt_files_beside_a_tokenizer() {
    let dir = tempfile::tempdir().unwrap();
    let config = r#"{"eos_token": {"content": "~"}, "image_token": "!", "model_specific_special_tokens": {"eot_token": "a"},
        "added_tokens_decoder": {"256": {"content": "<a>", "rstrip": true, "special": true}, "257": {"content": "<b>"}},
        "chat_template": [{"name": "default", "template": "{{ messages[0].content }}"}, {"name": "tool_use", "template": "x"}]}"#;
    let map = r#"{"eos_token": "~", "additional_special_tokens": ["b", {"content": "c", "lstrip": true}]}"#;
    std::fs::write(dir.path().join("tokenizer.json"), byte_tokenizer_json()).unwrap();
    let (mut refused, mut total, mut dice) = (0, 0, SeededRng(7));
    for (file, good) in [("tokenizer_config.json", config), ("special_tokens_map.json", map)] {
        std::fs::write(dir.path().join("tokenizer_config.json"), "{}").unwrap();
        for _ in 0..soak::rounds(300) {
            std::fs::write(dir.path().join(file), dice.corrupt(good.as_bytes())).unwrap();
            total += 1;
            let template = ChatTemplate::from_dir(dir.path());
            match (Tokenizer::from_dir(dir.path()), template) {
                (Ok(tokenizer), Ok(template)) => {
                    let ids = tokenizer.encode("a <a> ~").unwrap();
                    assert!(ids.iter().all(|id| (*id as usize) < tokenizer.vocab_size()));
                    template.map(|t| t.render(&[], true).ok());
                }
                (Err(e), _) | (_, Err(e)) => {
                    refused += 1;
                    assert!(e.to_string().len() < 2000, "{e}");
                }
            }
        }
    }
    assert!(refused > total / 4, "{refused} of {total} refused");
}

#[test]
fn invalid_values_are_refused() {
    let dir = covered().into_iter().find(|d| d.ends_with("llama_gqa_llama3rope")).unwrap();
    let text = std::fs::read_to_string(dir.join("config_hub.json")).unwrap();
    let edits = [
        ("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 0", "layers is 0"),
        (
            "\"num_hidden_layers\": 2",
            "\"num_hidden_layers\": -2",
            "`num_hidden_layers` must be a whole number",
        ),
        (
            "\"num_hidden_layers\": 2",
            "\"num_hidden_layers\": 2.5",
            "`num_hidden_layers` must be a whole number",
        ),
        ("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1e30", "`num_hidden_layers` must be"),
        ("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 999999999999", "layers is 999999999999"),
        ("\"num_hidden_layers\": 2,", "", "`num_hidden_layers` is missing"),
        (
            "\"hidden_size\": 64",
            "\"hidden_size\": \"64\"",
            "`hidden_size` must be a whole number, not \"64\"",
        ),
        ("\"num_key_value_heads\": 2", "\"num_key_value_heads\": 3", "not a multiple of kv_heads"),
        ("\"num_key_value_heads\": 2", "\"num_key_value_heads\": 0", "kv_heads is 0"),
        ("\"num_attention_heads\": 4", "\"num_attention_heads\": 0", "heads is 0"),
        ("\"head_dim\": 16", "\"head_dim\": 512", "head_dim is 512"),
        ("\"head_dim\": 16", "\"head_dim\": 15", "rotary_dim is 15"),
        ("\"rms_norm_eps\": 1e-05", "\"rms_norm_eps\": -1", "norm.eps is -1"),
        ("\"rms_norm_eps\": 1e-05", "\"rms_norm_eps\": 1e-60", "norm.eps is 0"),
        (
            "\"hidden_act\": \"silu\"",
            "\"hidden_act\": \"relu\"",
            "`hidden_act` is \"relu\", which is not supported",
        ),
        ("\"rope_theta\": 10000.0", "\"rope_theta\": 0", "rope.theta is 0"),
        ("\"rope_theta\": 10000.0", "\"rope_theta\": 1e999", "not valid JSON"),
        (
            "\"llama3\"",
            "\"dynamic\"",
            "RoPE type \"dynamic\" is not supported (default, linear, llama3, yarn and longrope are",
        ),
        ("\"llama3\"", "\"longrope\"", "`rope_scaling.short_factor` is missing"),
        ("\"factor\": 8.0,", "", "`rope_scaling.factor` is missing"),
        ("\"tie_word_embeddings\": false", "\"tie_word_embeddings\": 0", "must be true or false"),
        (
            "LlamaForCausalLM",
            "PhiForCausalLM",
            "\"PhiForCausalLM\" is not supported; supported are: LlamaForCausalLM",
        ),
        ("\"mlp_bias\"", "\"quantization_config\": {\"bits\": 4}, \"mlp_bias\"", "quantized"),
        ("\"mlp_bias\"", "\"num_local_experts\": 8, \"mlp_bias\"", "MoE architecture"),
        ("\"mlp_bias\"", "\"partial_rotary_factor\": 0.5, \"mlp_bias\"", "`partial_rotary_factor` asks for"),
    ];
    for (from, to, want) in edits {
        let bad = text.replacen(from, to, 1);
        assert_ne!(bad, text, "{from} is not in the file");
        let e = HfConfig::parse(&bad, "config.json").unwrap_err().to_string();
        assert!(e.contains(want), "{to}: {e}");
    }
    for (text, want) in [
        ("", "not valid JSON"),
        ("[]", "must be a JSON object, not a list"),
        ("{}", "`architectures` and `model_type` are both missing"),
        ("{\"architectures\": [3]}", "`architectures` must be a list of strings"),
        ("{\"architectures\": \"LlamaForCausalLM\"}", "`architectures` must be a list"),
        ("{\"model_type\": \"llama\"}", "`num_hidden_layers` is missing"),
        (
            "{\"architectures\": [\"Gemma3ForConditionalGeneration\"], \"text_config\": {\"model_type\": \"gemma3_text\"}}",
            "`lm_head` of transformers' model as a Gemma3ForCausalLM",
        ),
    ] {
        let e = HfConfig::parse(text, "config.json").unwrap_err().to_string();
        assert!(e.contains(want), "{text}: {e}");
    }
    let deep = "[".repeat(100_000);
    assert!(HfConfig::parse(&deep, "config.json").is_err());
    let many = text.replacen("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 60000", 1);
    assert!(HfConfig::parse(&many, "config.json").is_err());
}

/// What transformers takes for keys that are missing or null.
#[test]
fn missing_and_null_keys_have_the_defaults_of_their_class() {
    let read = |name: &str, edit: &dyn Fn(&mut serde_json::Value)| {
        let dir = covered().into_iter().find(|d| d.ends_with(name)).unwrap();
        let text = std::fs::read_to_string(dir.join("config.json")).unwrap();
        let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
        edit(&mut json);
        HfConfig::parse(&json.to_string(), "config.json").unwrap().model().clone()
    };
    let null = read("mixtral", &|json| json["num_key_value_heads"] = serde_json::Value::Null);
    assert_eq!(null.kv_heads, null.heads);
    let absent = read("mixtral", &|json| {
        json.as_object_mut().unwrap().remove("num_key_value_heads");
        (json["num_attention_heads"], json["head_dim"]) = (16.into(), 4.into());
    });
    assert_eq!(absent.kv_heads, 8);
    for (name, heads) in [
        ("gemma2", 4),
        ("gemma3", 4),
        ("qwen2", 32),
        ("qwen3", 32),
        ("qwen3_moe", 4),
        ("gpt_oss", 8),
        ("llama_tied", 64),
    ] {
        let absent = read(name, &|json| {
            json.as_object_mut().unwrap().remove("num_key_value_heads");
            (json["num_attention_heads"], json["head_dim"]) = (64.into(), 4.into());
        });
        assert_eq!(absent.kv_heads, heads, "{name}");
    }
    let window = read("qwen3_moe", &|json| {
        json.as_object_mut().unwrap().remove("sliding_window");
        json["use_sliding_window"] = true.into();
    });
    assert_eq!((window.window, window.is_local(0)), (Some(4096), true));
}

/// Unknown keys are accepted and kept.
#[test]
fn unknown_keys_are_kept() {
    let dir = covered().into_iter().find(|d| d.ends_with("llama_tied")).unwrap();
    let text = std::fs::read_to_string(dir.join("config.json")).unwrap();
    let more = text.replacen('{', "{\"my_note\": [1, 2], \"head_dim\": null, ", 1).replacen(
        "\"head_dim\": 16,",
        "",
        1,
    );
    let config = HfConfig::parse(&more, "config.json").unwrap();
    assert_eq!(config.unknown_keys(), ["my_note"]);
    let mut model = config.model().clone();
    model.vocab = 200;
    let written = config.with_model(&model).unwrap();
    assert!(written.text().contains("my_note"));
    assert_eq!(HfConfig::parse(written.text(), "again").unwrap().model(), &model);
    let mut model = config.model().clone();
    model.qk_norm = true;
    let e = config.with_model(&model).unwrap_err().to_string();
    assert!(e.contains("Llama cannot express qk_norm = true"), "{e}");
    model.final_softcap = Some(30.0);
    let e = HfConfig::from_model(&model, DType::F32).unwrap_err().to_string();
    assert!(e.contains("no Hugging Face family") && e.contains("final_softcap"), "{e}");
}

#[test]
fn corrupt_weights_and_indices() {
    let mut dice = SeededRng(2);
    for name in ["gpt2", "llama_tied"] {
        let from = covered().into_iter().find(|d| d.ends_with(name)).unwrap();
        let plan = HfCheckpoint::open(&from).unwrap();
        let out = tempfile::tempdir().unwrap();
        let source = |n: &str| Ok(TensorData { dtype: DType::F32, bytes: plan.read(n, DType::F32)? });
        let cut = out.path().join("cut");
        let options = ExportOptions { max_shard_bytes: 100_000, ..Default::default() };
        let files = export(&cut, plan.config(), &source, &options).unwrap().files;
        let one = out.path().join("one");
        copy_dir(&from, &one);
        for (dir, file, rounds) in [
            (&one, "model.safetensors", 1000),
            (&cut, files[1].as_str(), 500),
            (&cut, "model.safetensors.index.json", 1500),
            (&one, "config.json", 500),
        ] {
            let good = std::fs::read(dir.join(file)).unwrap();
            let mut refused = 0;
            // Most of a weight file is numbers, in which nothing can be wrong: corrupt its header.
            let header = match file.ends_with("safetensors") {
                true => 8 + u64::from_le_bytes(good[..8].try_into().unwrap()) as usize,
                false => good.len(),
            };
            for _ in 0..rounds {
                let mut bad = dice.corrupt(&good[..header]);
                bad.extend_from_slice(&good[header..]);
                std::fs::write(dir.join(file), &bad).unwrap();
                match HfCheckpoint::open(dir) {
                    Ok(plan) => {
                        for t in plan.tensors() {
                            plan.read(&t.name, DType::BF16).unwrap();
                        }
                    }
                    Err(e) => {
                        refused += 1;
                        assert!(!e.to_string().is_empty());
                        assert!(!matches!(e, Error::Chat(_)));
                    }
                }
            }
            std::fs::write(dir.join(file), &good).unwrap();
            HfCheckpoint::open(dir).unwrap();
            assert!(refused > rounds / 4, "{file}: {refused} of {rounds} refused");
        }
    }
}
