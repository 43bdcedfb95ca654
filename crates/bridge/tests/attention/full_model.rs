//! Full models with MLA or GPT-OSS attention: import, export, logits and gradients.

use super::oracle::{Oracle, Tensors};
use super::support::SeededRng;
use super::{parse, try_parse};
use ferrotron_bridge::forward::{ForwardInput, ForwardOptions, check_layout, forward};
use ferrotron_bridge::{ExportOptions, HfCheckpoint, HfConfig, TensorData, Weights, export};
use ferrotron_core::grid::RankLayout;
use ferrotron_core::model::PipelineLayout;
use ferrotron_core::ranks::on_threads;
use ferrotron_core::tensorfile::{FileDType, TensorDecl, TensorFileWriter};
use ferrotron_engine::Rank;
use ferrotron_tensor::DType;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

fn deepseek(change: impl FnOnce(&mut Value)) -> Value {
    let mut c = json!({
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "float32",
        "hidden_size": 24, "intermediate_size": 28, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": 40, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "q_lora_rank": 14, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
        "first_k_dense_replace": 2, "rope_theta": 1e4, "rope_scaling": null, "rope_interleave": true,
        "attention_bias": false, "tie_word_embeddings": false, "hidden_act": "silu"
    });
    change(&mut c);
    c
}

fn yarn(mscale: f64, mscale_all_dim: f64) -> Value {
    json!({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8, "beta_fast": 4.0,
           "beta_slow": 0.5, "mscale": mscale, "mscale_all_dim": mscale_all_dim})
}

/// Configurations of both families, DeepSeek's without MoE layers.
fn models() -> Vec<(&'static str, Value)> {
    let gpt_oss = json!({
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "torch_dtype": "float32",
        "hidden_size": 24, "intermediate_size": 28, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 40, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "attention_bias": true, "tie_word_embeddings": false, "hidden_act": "silu",
        "num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 7.0,
        "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1.5e5, "factor": 8.0,
            "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false}
    });
    vec![
        ("deepseek", deepseek(|_| ())),
        (
            "queries from the stream, halves",
            deepseek(|c| {
                (c["q_lora_rank"], c["rope_interleave"]) = (Value::Null, json!(false));
            }),
        ),
        (
            "biases, equal scales of YaRN",
            deepseek(|c| {
                (c["attention_bias"], c["rope_scaling"]) = (json!(true), yarn(1.0, 1.0));
            }),
        ),
        ("unequal scales of YaRN", deepseek(|c| c["rope_scaling"] = yarn(0.7, 1.2))),
        ("gpt-oss", gpt_oss),
    ]
}

/// A folder with the configuration and random weights of O(1) activations, gains around one.
fn folder(dir: &Path, config: &Value) {
    std::fs::create_dir_all(dir).unwrap();
    std::fs::write(dir.join("config.json"), serde_json::to_string_pretty(config).unwrap()).unwrap();
    let mut dice = SeededRng(3);
    let mut tensors = parse(config).hf_tensors().unwrap();
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    let decls: Vec<_> = tensors
        .iter()
        .map(|t| TensorDecl { name: t.name.clone(), dtype: FileDType::F32, shape: t.shape.clone() })
        .collect();
    let metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    let mut w = TensorFileWriter::create_in_order(&dir.join("model.safetensors"), &decls, &metadata).unwrap();
    for t in &decls {
        let gain = t.name.contains("norm");
        let size = 0.9 / (t.shape.get(1).copied().unwrap_or(4) as f64).sqrt();
        let values = (0..t.shape.iter().product()).map(|_| {
            let x = dice.next() as f64 / 2f64.powi(63) - 1.0;
            (if gain { 1.0 + 0.3 * x } else { 1.7 * size * x }) as f32
        });
        w.write(&t.name, &values.flat_map(f32::to_le_bytes).collect::<Vec<u8>>()).unwrap();
    }
    w.finish().unwrap();
}

const SEQ: usize = 9;

/// Forward and backward in f32, with `vp` model chunks per pipeline stage.
fn options(vp: usize) -> ForwardOptions {
    let stages = PipelineLayout { vp, layout: None };
    ForwardOptions { dtype: DType::F32, stages, backward: true, ulp_seed: None }
}

fn input() -> ForwardInput {
    let mut dice = SeededRng(11);
    let ids: Vec<i32> = (0..2 * SEQ).map(|_| dice.below(40) as i32).collect();
    ForwardInput { labels: Some(ids.clone()), ids, positions: None, offsets: None, batch: 2, sequence: SEQ }
}

#[test]
fn logits_and_gradients_are_those_of_the_definition() {
    let dir = tempfile::tempdir().unwrap();
    for (name, config) in models() {
        let at = dir.path().join(name);
        folder(&at, &config);
        let plan = HfCheckpoint::with_config(&at, parse(&config)).unwrap_or_else(|e| panic!("{name}: {e}"));
        let weights = Weights::HuggingFace(Box::new(plan));
        let w = Tensors::open(&at.join("model.safetensors"));
        let oracle = |w: &Tensors| Oracle { config: &config, w, seq: SEQ }.loss(&input().ids);
        let logits = Oracle { config: &config, w: &w, seq: SEQ }.dense(&input().ids);
        for (layout, derive) in
            [("tp=1", true), ("tp=2", false), ("cp=2", false), ("tp=4,cp=2", true), ("pp=2", false)]
        {
            let layout: RankLayout = layout.parse().unwrap();
            let run = |rank| {
                let out = forward(rank, &weights, &input(), &options(layout.vp));
                out.map_err(|e| ferrotron_core::Error::Invalid(e.to_string()))
            };
            let ours = on_threads(&layout, || Ok(Rank::cpu(1, 1)?), run).unwrap().swap_remove(0);
            for (i, (a, b)) in ours.logits.iter().zip(&logits).enumerate() {
                assert!(
                    (f64::from(*a) - b).abs() <= 2e-5 * (1.0 + b.abs()),
                    "{name} {layout} [{i}]: {a} {b}"
                );
            }
            let (a, b) = (f64::from(ours.loss.unwrap()), oracle(&w));
            assert!((a - b).abs() < 1e-5, "{name} {layout}: loss {a} instead of {b}");
            assert_eq!(ours.gradients.len(), w.0.len(), "{name}");
            // Along a random direction of every tensor.
            let mut dice = SeededRng(5);
            for (tensor, _, gradient) in ours.gradients.iter().filter(|_| derive) {
                let along: Vec<f64> =
                    gradient.iter().map(|_| dice.next() as f64 / 2f64.powi(63) - 1.0).collect();
                let loss = |step: f64| {
                    let mut w = w.clone();
                    let values = &mut w.0.get_mut(tensor).unwrap().1;
                    values.iter_mut().zip(&along).for_each(|(w, a)| *w += step * a);
                    oracle(&w)
                };
                let wanted = (loss(1e-5) - loss(-1e-5)) / 2e-5;
                let got: f64 = gradient.iter().zip(&along).map(|(g, a)| f64::from(*g) * a).sum();
                let size = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
                assert!(
                    (got - wanted).abs() <= 1e-4 * size + 1e-7,
                    "{name} {layout} {tensor}: {got} {wanted}"
                );
            }
        }
    }
}

#[test]
fn folders_come_back_byte_by_byte() {
    let dir = tempfile::tempdir().unwrap();
    for (name, config) in models() {
        let (at, to) = (dir.path().join(name), dir.path().join(format!("{name} again")));
        folder(&at, &config);
        let plan = HfCheckpoint::with_config(&at, parse(&config)).unwrap();
        let source = |name: &str| Ok(TensorData { dtype: DType::F32, bytes: plan.read(name, DType::F32)? });
        let options = ExportOptions { reference: Some(&plan), ..Default::default() };
        let config =
            parse(&serde_json::from_str(&std::fs::read_to_string(at.join("config.json")).unwrap()).unwrap());
        export(&to, &config, &source, &options).unwrap();
        let weights = |dir: &Path| std::fs::read(dir.join("model.safetensors")).unwrap();
        assert!(weights(&at) == weights(&to), "{name}");
        let json = |dir: &Path| -> Value {
            serde_json::from_str(&std::fs::read_to_string(dir.join("config.json")).unwrap()).unwrap()
        };
        assert_eq!(json(&at), json(&to), "{name}");
    }
}

#[test]
fn mscale_all_dim_scales_attention_scores() {
    let with = |scaling: Value| try_parse(&deepseek(|c| c["rope_scaling"] = scaling));
    let mut lone = yarn(1.0, 1.0);
    lone.as_object_mut().unwrap().remove("mscale");
    let linear = json!({"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 1.0});
    // Without mscale, or without YaRN, transformers scales the scores and not cos and sin.
    for (scaling, factor) in [(lone, 8f64), (linear, 2f64)] {
        let c = with(scaling).unwrap();
        let m = 0.1 * factor.ln() + 1.0;
        assert_eq!(c.model().attn_scale, (m * m / 10f64.sqrt()) as f32);
        // Written from the model alone, the file says the same.
        let written = HfConfig::from_model(c.model(), DType::F32).unwrap();
        assert_eq!(written.model(), c.model());
        assert!(!written.text().contains("truncate"), "{}", written.text());
    }
    // Neither, or zero, is nothing.
    let c = with(json!({"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 0.0})).unwrap();
    assert_eq!(c.model().attn_scale, (1.0 / 10f64.sqrt()) as f32);
    let c = with(yarn(1.0, 1.0)).unwrap();
    let m = 0.1 * 8f64.ln() + 1.0;
    assert_eq!(c.model().attn_scale, (m * m / 10f64.sqrt()) as f32);
    for (key, value) in [
        ("kv_lora_rank", json!(0)),
        ("qk_rope_head_dim", json!(3)),
        ("v_head_dim", json!(4000)),
        ("num_key_value_heads", json!(2)),
        ("q_lora_rank", json!("x")),
    ] {
        assert!(try_parse(&deepseek(|c| c[key] = value.clone())).is_err(), "{key} {value}");
    }
}

/// Six experts do not divide over four ranks: refused before any rank starts, and by each rank that starts anyway.
#[test]
fn a_layout_that_does_not_divide_the_model_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = models().pop().unwrap().1;
    config["num_local_experts"] = json!(6);
    folder(dir.path(), &config);
    let checkpoint = HfCheckpoint::with_config(dir.path(), parse(&config)).unwrap();
    let weights = Weights::HuggingFace(Box::new(checkpoint));
    let check = |text: &str| check_layout(weights.model(), &text.parse().unwrap()).map_err(|e| e.to_string());
    for (layout, refusal) in [
        ("ep=4", "ep=4 does not divide the 6 experts of the model; take ep=1, 2, 3 or 6"),
        ("ep=2,etp=3", "etp=3 does not divide the 28 columns of an expert's MLP; take etp=2 or 4"),
        ("tp=3,etp=1", "tp=3 does not divide the 4 attention heads of the model; take tp=2 or 4"),
    ] {
        assert_eq!(check(layout).unwrap_err(), refusal, "{layout}");
        let result = on_threads(
            &layout.parse::<RankLayout>().unwrap(),
            || Ok(Rank::cpu(1, 1)?),
            |rank| {
                forward(rank, &weights, &input(), &options(1))
                    .map_err(|e| ferrotron_core::Error::Invalid(e.to_string()))
            },
        );
        assert_eq!(result.err().unwrap().to_string(), refusal, "{layout}");
    }
    for layout in ["ep=3", "ep=6", "tp=2,ep=2,etp=1", "tp=4"] {
        check(layout).unwrap();
    }
}
