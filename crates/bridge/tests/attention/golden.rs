//! Golden models of DeepSeek-V3 and GPT-OSS: what their configurations mean, and the reference implementation of these
//! tests against the vectors, so that it can be trusted elsewhere.

use super::oracle::{Oracle, Tensors};
use super::support::golden::HfModel;
use super::{parse, try_parse};
use ferrotron_core::model::config::RopeScaling;
use serde_json::{Value, json};
use std::path::PathBuf;

/// The golden models of a type: folder, and the configuration in both spellings.
fn models(kind: &str) -> Vec<(PathBuf, [Value; 2])> {
    let found: Vec<_> = HfModel::all()
        .into_iter()
        .filter(|m| m.model_type == kind)
        .map(|m| (m.dir.clone(), ["config.json", "config_hub.json"].map(|file| m.config(file))))
        .collect();
    if found.is_empty() {
        println!("skipped: no set has a model of type {kind}");
    }
    found
}

fn close(what: &str, ours: &[f64], theirs: &[f64], room: f64) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    let most = ours.iter().zip(theirs).map(|(a, b)| (a - b).abs() / (1.0 + b.abs())).fold(0.0, f64::max);
    assert!(most <= room, "{what}: {most:.1e} apart");
}

/// The reference's embedding and first layer, where the set stores hidden states and that layer is dense.
#[test]
fn golden_deepseek_attention() {
    for (dir, configs) in models("deepseek_v3") {
        let expected = Tensors::open(&dir.join("expected.safetensors"));
        let w = Tensors::open(&dir.join("model.safetensors"));
        for config in &configs {
            if config["first_k_dense_replace"].as_u64() == Some(0) || !expected.0.contains_key("hidden.1") {
                println!("skipped: {}: no hidden states behind a dense layer", dir.display());
                continue;
            }
            let seq = expected.0["input_ids"].0[1];
            let o = Oracle { config, w: &w, seq };
            let ids: Vec<i32> = expected.get("input_ids").iter().map(|x| *x as i32).collect();
            let x = o.embed(&ids);
            close("embedding", &x, expected.get("hidden.0"), 0.0);
            let y = o.layer(&x, 0, &|x, i| o.latent_attention(x, i), &|x, i| o.mlp(x, i));
            // With a single layer the stored state is that after the final norm.
            if config["num_hidden_layers"].as_u64() > Some(1) {
                close(&dir.display().to_string(), &y, expected.get("hidden.1"), 1e-5);
            }
        }
    }
}

/// The reference's logits of whole GPT-OSS models, and its hidden states where the set stores them.
#[test]
fn golden_gpt_oss_attention() {
    for (dir, configs) in models("gpt_oss") {
        let expected = Tensors::open(&dir.join("expected.safetensors"));
        let w = Tensors::open(&dir.join("model.safetensors"));
        for config in &configs {
            let o = Oracle { config, w: &w, seq: expected.0["input_ids"].0[1] };
            let ids: Vec<i32> = expected.get("input_ids").iter().map(|x| *x as i32).collect();
            let layers = config["num_hidden_layers"].as_u64().unwrap() as usize;
            let mut x = o.embed(&ids);
            for i in 0..layers {
                x = o.layer(&x, i, &|x, i| o.sink_attention(x, i), &|x, i| o.experts(x, i));
                let name = format!("hidden.{}", i + 1);
                if i + 1 < layers && expected.0.contains_key(&name) {
                    close(&format!("layer {i}"), &x, expected.get(&name), 2e-5);
                }
            }
            close(&dir.display().to_string(), &o.head(&x), expected.get("logits"), 2e-5);
        }
    }
}

#[test]
fn golden_hf_config_of_latent_attention() {
    for (dir, configs) in models("deepseek_v3") {
        // With all layers dense.
        let [new, hub] = configs.map(|mut c| {
            c["first_k_dense_replace"] = c["num_hidden_layers"].clone();
            parse(&c)
        });
        assert_eq!(new.model(), hub.model(), "{}", dir.display());
        let size = |key: &str| new.get(key).unwrap().as_u64().unwrap() as usize;
        let m = new.model().mla.unwrap();
        assert_eq!(m.q_lora_rank.map(|n| n as u64), new.get("q_lora_rank").and_then(|v| v.as_u64()));
        let sizes = ["kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"].map(size);
        assert_eq!([m.kv_lora_rank, m.nope_dim, m.rope_dim, m.v_dim], sizes);
        assert_eq!(m.norm_eps, 1e-6);
        assert_eq!(new.model().head_dim, m.nope_dim + m.rope_dim);
        // YaRN multiplies the scores by the square of `0.1·mscale_all_dim·ln(factor) + 1`.
        let scaling = new.get("rope_parameters").cloned().unwrap_or_default();
        let (factor, all_dim) = (scaling["factor"].as_f64(), scaling["mscale_all_dim"].as_f64());
        let stretch = match (factor, all_dim) {
            (Some(factor), Some(m)) if factor > 1.0 && m != 0.0 => 0.1 * m * factor.ln() + 1.0,
            _ => 1.0,
        };
        let scale = stretch * stretch / (new.model().head_dim as f64).sqrt();
        assert_eq!(new.model().attn_scale, scale as f32, "{}", dir.display());
        let rope = new.model().rope(0).unwrap();
        let pairs = new.get("rope_interleave").and_then(|v| v.as_bool()).unwrap_or(true);
        assert_eq!((rope.rotary_dim, rope.interleaved), (m.rope_dim, pairs));
        // Changing the model and changing it back changes no key.
        let mut other = new.model().clone();
        (other.vocab, other.tied, other.norm.eps) = (other.vocab + 1, true, 1e-3);
        for config in [&new, &hub] {
            let back = config.with_model(&other).unwrap().with_model(config.model()).unwrap();
            let json = |text: &str| serde_json::from_str::<Value>(text).unwrap();
            assert_eq!(json(back.text()), json(config.text()));
        }
        // Without MoE layers the model is dense; with one fewer dense layer, the last layer is MoE.
        assert_eq!(new.model().moe, None);
        let mut some = serde_json::from_str::<Value>(new.text()).unwrap();
        let last = size("num_hidden_layers") - 1;
        some["first_k_dense_replace"] = json!(last);
        assert!(parse(&some).model().moe_layer(last).is_some());
    }
}

#[test]
fn golden_hf_config_of_sinks() {
    for (dir, configs) in models("gpt_oss") {
        let [new, hub] = configs.map(|c| parse(&c));
        assert_eq!(new.model(), hub.model(), "{}", dir.display());
        let c = new.model();
        assert!(c.attn_sink && c.qkv_bias && c.proj_bias && c.mla.is_none());
        let local: Vec<bool> = new
            .get("layer_types")
            .unwrap()
            .as_array()
            .unwrap()
            .iter()
            .map(|t| t == "sliding_attention")
            .collect();
        assert_eq!(
            (&c.local_layers, c.window.map(|w| w as u64)),
            (&local, new.get("sliding_window").unwrap().as_u64())
        );
        let stated = new.get("rope_parameters").cloned().unwrap_or_default();
        let RopeScaling::Yarn { truncate, attention_factor, factor, .. } = c.rope(0).unwrap().scaling else {
            panic!("{c:?}")
        };
        assert_eq!(truncate, stated["truncate"].as_bool().unwrap_or(true));
        assert_eq!(attention_factor, stated["attention_factor"].as_f64());
        if attention_factor.is_none() && stated["mscale"].is_null() {
            assert_eq!(c.rope(0).unwrap().scaling.attention_scaling(), 0.1 * factor.ln() + 1.0);
        }
        // Without rope_scaling GptOssConfig has a YaRN of its own.
        let mut bare = serde_json::from_str::<Value>(hub.text()).unwrap();
        bare["rope_scaling"] = Value::Null;
        let bare = try_parse(&bare).unwrap();
        let RopeScaling::Yarn { factor, truncate, original_max_positions, .. } =
            bare.model().rope(0).unwrap().scaling
        else {
            panic!("{:?}", bare.model())
        };
        assert_eq!((factor, truncate, original_max_positions), (32.0, false, 4096));
    }
}
