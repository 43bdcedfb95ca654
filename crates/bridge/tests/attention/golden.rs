//! Against golden vectors: what configurations say, and what the definitions that all else is held against make.

use super::oracle::{Oracle, Tensors};
use super::support::cases;
use super::{parse, try_parse};
use ferrotron_core::model::config::RopeScaling;
use serde_json::{Value, json};
use std::path::PathBuf;

/// The cases of a model type: folder and configuration in both spellings.
fn of(kind: &str) -> Vec<(PathBuf, [Value; 2])> {
    let read = |dir: &PathBuf, name: &str| {
        serde_json::from_str(&std::fs::read_to_string(dir.join(name)).unwrap()).unwrap()
    };
    let found: Vec<_> = cases()
        .into_iter()
        .filter(|(_, k)| k == kind)
        .map(|(dir, _)| {
            let both = ["config.json", "config_hub.json"].map(|name| read(&dir, name));
            (dir, both)
        })
        .collect();
    assert!(!found.is_empty(), "no golden case of {kind}");
    found
}

fn close(what: &str, ours: &[f64], theirs: &[f64], room: f64) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    let most = ours.iter().zip(theirs).map(|(a, b)| (a - b).abs() / (1.0 + b.abs())).fold(0.0, f64::max);
    assert!(most <= room, "{what}: {most:.1e} apart");
}

/// The first, dense layer by its definition is that of the reference.
#[test]
fn golden_deepseek_attention() {
    for (dir, configs) in of("deepseek_v3") {
        let expected = Tensors::open(&dir.join("expected.safetensors"));
        let w = Tensors::open(&dir.join("model.safetensors"));
        for config in &configs {
            assert!(config["first_k_dense_replace"].as_u64() >= Some(1), "its first layer has experts");
            let seq = expected.0["input_ids"].0[1];
            let o = Oracle { config, w: &w, seq };
            let ids: Vec<i32> = expected.get("input_ids").iter().map(|x| *x as i32).collect();
            let x = o.embed(&ids);
            close("embedding", &x, expected.get("hidden.0"), 0.0);
            let y = o.layer(&x, 0, &|x, i| o.latent_attention(x, i), &|x, i| o.mlp(x, i));
            close(&dir.display().to_string(), &y, expected.get("hidden.1"), 1e-5);
        }
    }
}

/// All layers with their experts by their definition make the reference's logits: sinks, windows, YaRN, biases.
#[test]
fn golden_gpt_oss_attention() {
    for (dir, configs) in of("gpt_oss") {
        let expected = Tensors::open(&dir.join("expected.safetensors"));
        let w = Tensors::open(&dir.join("model.safetensors"));
        for config in &configs {
            let o = Oracle { config, w: &w, seq: expected.0["input_ids"].0[1] };
            let ids: Vec<i32> = expected.get("input_ids").iter().map(|x| *x as i32).collect();
            let layers = config["num_hidden_layers"].as_u64().unwrap() as usize;
            let mut x = o.embed(&ids);
            for i in 0..layers {
                x = o.layer(&x, i, &|x, i| o.sink_attention(x, i), &|x, i| o.experts(x, i));
                if i + 1 < layers {
                    close(&format!("layer {i}"), &x, expected.get(&format!("hidden.{}", i + 1)), 2e-5);
                }
            }
            close(&dir.display().to_string(), &o.head(&x), expected.get("logits"), 2e-5);
        }
    }
}

#[test]
fn golden_hf_config_of_latent_attention() {
    for (dir, configs) in of("deepseek_v3") {
        // With all layers dense.
        let [new, hub] = configs.map(|mut c| {
            c["first_k_dense_replace"] = c["num_hidden_layers"].clone();
            parse(&c)
        });
        assert_eq!(new.model(), hub.model(), "{}", dir.display());
        let size = |key: &str| new.get(key).unwrap().as_u64().unwrap() as usize;
        let m = new.model().mla.unwrap();
        assert_eq!(m.q_lora_rank, Some(size("q_lora_rank")));
        let sizes = ["kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"].map(size);
        assert_eq!([m.kv_lora_rank, m.nope_dim, m.rope_dim, m.v_dim], sizes);
        assert_eq!(m.norm_eps, 1e-6);
        assert_eq!(new.model().head_dim, m.nope_dim + m.rope_dim);
        assert_eq!(new.model().attn_scale, (1.0 / (new.model().head_dim as f64).sqrt()) as f32);
        let rope = new.model().rope(0).unwrap();
        assert_eq!((rope.rotary_dim, rope.interleaved), (m.rope_dim, true));
        // Through our tables and back, no key changes.
        let mut other = new.model().clone();
        (other.vocab, other.tied, other.norm.eps) = (other.vocab + 1, true, 1e-3);
        for config in [&new, &hub] {
            let back = config.with_model(&other).unwrap().with_model(config.model()).unwrap();
            let json = |text: &str| serde_json::from_str::<Value>(text).unwrap();
            assert_eq!(json(back.text()), json(config.text()));
        }
        // No layer with experts is no mixture; some are.
        assert_eq!(new.model().moe, None);
        let mut some = serde_json::from_str::<Value>(new.text()).unwrap();
        some["first_k_dense_replace"] = json!(1);
        assert!(parse(&some).model().moe_layer(1).is_some());
    }
}

#[test]
fn golden_hf_config_of_sinks() {
    for (dir, configs) in of("gpt_oss") {
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
        let RopeScaling::Yarn { truncate, attention_factor, factor, .. } = c.rope(0).unwrap().scaling else {
            panic!("{c:?}")
        };
        assert_eq!((truncate, attention_factor), (false, None));
        assert_eq!(c.rope(0).unwrap().scaling.attention_scaling(), 0.1 * factor.ln() + 1.0);
        // The stretching of positions must be there.
        let mut bare = serde_json::from_str::<Value>(hub.text()).unwrap();
        bare["rope_scaling"] = Value::Null;
        assert!(try_parse(&bare).unwrap_err().to_string().contains("rope_scaling"));
    }
}
