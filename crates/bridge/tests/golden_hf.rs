//! Configurations and weights of golden Hugging Face models, imported and exported.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests are tests too

mod support;

use ferrotron_bridge::{
    ExportOptions, HfCheckpoint, HfConfig, LogicalTensor, TensorData, assemble, export, logical_buffers,
    logical_tensors,
};
use ferrotron_core::model::config::{ModelConfig, Positions};
use ferrotron_core::model::moe_config::ScoreKind;
use ferrotron_core::tensorfile::TensorFile;
use ferrotron_tensor::DType;
use serde_json::Value;
use std::path::Path;
use support::{covered, golden};

fn config(dir: &Path, name: &str) -> HfConfig {
    HfConfig::from_file(&dir.join(name)).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn golden_hf_config_both_spellings_are_one_model() {
    for dir in covered() {
        let (new, hub) = (config(&dir, "config.json"), config(&dir, "config_hub.json"));
        assert_eq!(new.model(), hub.model(), "{}", dir.display());
        assert_eq!(new.dtype(), Some(DType::F32));
        assert_eq!(hub.dtype(), Some(DType::F32));
        assert_eq!(new.unknown_keys(), [""; 0], "{}", dir.display());
        assert_eq!(hub.unknown_keys(), [""; 0], "{}", dir.display());
    }
}

/// The value of the first of these keys that is present.
fn key<'a>(json: &'a Value, names: &[&str]) -> Option<&'a Value> {
    names.iter().map(|name| &json[*name]).find(|v| !v.is_null())
}

/// Sizes and options of the architecture are those of the configuration file.
#[test]
fn golden_hf_config_says_what_the_files_say() {
    for model in golden::HfModel::all() {
        let json = model.config("config.json");
        let c = config(&model.dir, "config.json").model().clone();
        let name = &model.name;
        let size = |names: &[&str]| key(&json, names).and_then(Value::as_u64).map(|n| n as usize);
        let sizes = [
            (c.layers, &["num_hidden_layers", "n_layer"][..]),
            (c.hidden, &["hidden_size", "n_embd"]),
            (c.heads, &["num_attention_heads", "n_head"]),
            (c.vocab, &["vocab_size"]),
        ];
        for (ours, keys) in sizes {
            assert_eq!(Some(ours), size(keys), "{name}: {keys:?}");
        }
        assert_eq!(Some(c.tied), key(&json, &["tie_word_embeddings"]).and_then(Value::as_bool), "{name}");
        if let Some(inner) = size(&["n_inner", "intermediate_size"]).filter(|_| c.moe.is_none()) {
            assert_eq!(c.ffn, inner, "{name}");
        }
        if c.mla.is_none() {
            assert_eq!(c.kv_heads, size(&["num_key_value_heads"]).unwrap_or(c.heads), "{name}");
            assert_eq!(c.head_dim, size(&["head_dim"]).unwrap_or(c.hidden / c.heads), "{name}");
        }
        if let Some(scalar) = key(&json, &["query_pre_attn_scalar"]).and_then(Value::as_f64) {
            assert_eq!(c.attn_scale, (1.0 / scalar.sqrt()) as f32, "{name}");
        }
        if model.model_type.starts_with("gemma") {
            assert_eq!(c.embed_scale, (c.hidden as f32).sqrt(), "{name}");
            assert!(c.post_norms && c.norm.zero_centred && c.qk_norm == (model.model_type == "gemma3_text"));
        }
        // Gemma 3's attention has no cap, whatever its configuration says.
        let cap = json["attn_logit_softcapping"].as_f64().filter(|_| model.model_type != "gemma3_text");
        assert_eq!(c.attn_softcap.map(f64::from), cap, "{name}");
        assert_eq!(c.final_softcap.map(f64::from), json["final_logit_softcapping"].as_f64(), "{name}");
        if let Some(types) = json["layer_types"].as_array() {
            let local: Vec<bool> = types.iter().map(|t| t == "sliding_attention").collect();
            assert_eq!((0..c.layers).map(|i| c.is_local(i)).collect::<Vec<_>>(), local, "{name}");
            let window = local.contains(&true).then(|| size(&["sliding_window"])).flatten();
            assert!(!local.contains(&true) || c.window == window, "{name}: {:?}", c.window);
        }
        if let (Positions::Rope(rope), Some(theta)) =
            (&c.positions, json["rope_parameters"]["rope_theta"].as_f64())
        {
            assert_eq!(rope.theta, theta, "{name}");
        }
        let experts = size(&["num_local_experts", "num_experts", "n_routed_experts"]);
        let Some(m) = &c.moe else {
            // DeepSeek names experts even where every layer is dense.
            assert!(experts.is_none() || size(&["first_k_dense_replace"]) >= Some(c.layers), "{name}");
            continue;
        };
        assert_eq!(Some(m.experts), experts, "{name}");
        assert_eq!(Some(m.topk), size(&["num_experts_per_tok"]), "{name}");
        assert_eq!(Some(m.ffn), size(&["moe_intermediate_size", "intermediate_size"]), "{name}");
        let deepseek = model.model_type == "deepseek_v3";
        assert_eq!(m.score, if deepseek { ScoreKind::Sigmoid } else { ScoreKind::Softmax }, "{name}");
        assert_eq!(m.expert_bias, deepseek, "{name}");
        assert_eq!(
            f64::from(m.scale),
            json["routed_scaling_factor"].as_f64().map_or(1.0, |x| f64::from(x as f32))
        );
        let limit = json["swiglu_limit"].as_f64().map(|x| x as f32);
        assert_eq!(m.clamp.map(|c| c.limit), limit, "{name}");
    }
}

/// Import and export keep every key that describes the architecture, with and without the original file.
/// Equal values; of objects (rope_scaling), every key that both have. Keys at their default need not be written.
fn agrees(ours: &Value, theirs: &Value) -> bool {
    match (ours.as_object(), theirs.as_object()) {
        (Some(ours), Some(theirs)) => ours.iter().all(|(k, v)| theirs.get(k).is_none_or(|w| agrees(v, w))),
        _ => ours == theirs,
    }
}

#[test]
fn golden_hf_config_roundtrip_keeps_known_keys() {
    for dir in covered() {
        for file in ["config.json", "config_hub.json"] {
            let original = config(&dir, file);
            let json: Value = serde_json::from_str(original.text()).unwrap();
            // Change the model and change it back, so that every key is written at least once.
            let mut other = original.model().clone();
            other.vocab += 1;
            other.norm.eps *= 2.0;
            other.tied = !other.tied;
            let changed = original.with_model(&other).unwrap();
            assert_eq!(changed.model(), &other);
            let back = changed.with_model(original.model()).unwrap();
            let again: Value = serde_json::from_str(back.text()).unwrap();
            assert_eq!(json, again, "{} {file}", dir.display());

            // Written from the model alone: a key that the original has too must have the same value.
            let native = HfConfig::from_model(original.model(), DType::F32).unwrap();
            assert_eq!(native.model(), original.model());
            assert_eq!(native.family(), original.family());
            let native: Value = serde_json::from_str(native.text()).unwrap();
            for (k, v) in native.as_object().unwrap() {
                // Dense layers have two spellings with one meaning; the models are compared above.
                let ours_only = [
                    "bos_token_id",
                    "eos_token_id",
                    "max_window_layers",
                    "decoder_sparse_step",
                    "mlp_only_layers",
                ];
                // Where the original has null, the derived value is written.
                if json.get(k).is_some_and(|w| !w.is_null()) && !ours_only.contains(&k.as_str()) {
                    assert!(agrees(v, &json[k]), "{} {file}: {k}: {v} instead of {}", dir.display(), json[k]);
                }
            }
        }
    }
}

#[test]
fn golden_hf_presets_roundtrip() {
    for name in ferrotron_core::model::preset::PRESETS {
        let model = ModelConfig::preset(name).unwrap();
        let config = HfConfig::from_model(&model, DType::BF16).unwrap_or_else(|e| panic!("{name}: {e}"));
        let read = HfConfig::parse(config.text(), "config.json").unwrap();
        assert_eq!(read.model(), &model, "{name}");
        assert_eq!(read.dtype(), Some(DType::BF16));
        let family = read.family().name.to_lowercase().replace([' ', '-'], "");
        let start = match *name {
            "tiny" => "llama",
            "kimi-k2" => "deepseek",
            _ => name.split(['-', '.']).next().unwrap(),
        };
        assert!(family.starts_with(start), "{name} became {family}");
    }
}

#[test]
fn golden_hf_roundtrip_is_byte_equal() {
    for dir in covered() {
        let plan = HfCheckpoint::open(&dir).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(plan.tensors(), logical_tensors(plan.config().model()));
        assert_eq!(plan.buffers(), logical_buffers(plan.config().model()));
        let out = tempfile::tempdir().unwrap();
        let to = out.path().join("model");
        let source = |name: &str| Ok(TensorData { dtype: DType::F32, bytes: plan.read(name, DType::F32)? });
        let options = ExportOptions { reference: Some(&plan), ..Default::default() };
        let done = export(&to, plan.config(), &source, &options).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(done.files, ["model.safetensors"]);
        for file in ["model.safetensors", "config.json"] {
            let same = std::fs::read(dir.join(file)).unwrap() == std::fs::read(to.join(file)).unwrap();
            assert!(same, "{}: {file} differs", dir.display());
        }
        // These files are written by the official library, so an export without reference is byte-identical too.
        let to = out.path().join("fresh");
        export(&to, plan.config(), &source, &ExportOptions::default()).unwrap();
        let file = "model.safetensors";
        let same = std::fs::read(dir.join(file)).unwrap() == std::fs::read(to.join(file)).unwrap();
        assert!(same, "{}: fresh {file} differs", dir.display());
    }
}

/// Gradients are stored by checkpoint names: split into logical tensors and assembled again, they are unchanged.
#[test]
fn golden_hf_gradients_can_be_put_together() {
    for dir in covered() {
        let plan = HfCheckpoint::open(&dir).unwrap();
        let expected = TensorFile::open(&dir.join("expected.safetensors")).unwrap();
        let mut tensors = plan.hf_tensors().unwrap();
        tensors.retain(|t| !t.is_buffer());
        let given = expected.tensors().iter().filter(|t| t.name.starts_with("grad.")).count();
        assert_eq!(given, tensors.len(), "{}", dir.display());
        for t in tensors {
            let name = format!("grad.{}", t.name);
            assert_eq!(expected.get(&name).unwrap().shape, t.shape);
            let whole = floats(&expected.read(&name).unwrap());
            let source = |logical: &str| {
                let part = t.parts.iter().find(|p| p.tensor.name == logical).unwrap();
                let all = elements(&part.tensor).map(|(r, c)| defined(&t.name, &t.shape, &part.tensor, r, c));
                let bytes = all.flat_map(|i| whole[i].to_le_bytes()).collect();
                Ok(TensorData { dtype: DType::F32, bytes })
            };
            assert_eq!(floats(&assemble(&t, DType::F32, &source).unwrap()), whole, "{name}");
        }
    }
}

/// Every element of every logical tensor is read from its place in the file, by the definition of each family.
#[test]
fn golden_hf_logical_tensors_are_where_they_should_be() {
    for dir in covered() {
        let plan = HfCheckpoint::open(&dir).unwrap();
        let bytes = std::fs::read(dir.join("model.safetensors")).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        for t in plan.tensors().iter().chain(plan.buffers()) {
            let hf = plan.hf_name(&t.name).unwrap();
            let whole = file.tensor(hf).unwrap();
            let number = |i: usize| f32::from_le_bytes(whole.data()[4 * i..4 * i + 4].try_into().unwrap());
            let ours: Vec<f32> = floats(&plan.read(&t.name, DType::F32).unwrap());
            let (rows, cols) = (t.shape[0], t.shape.get(1).copied().unwrap_or(1));
            assert_eq!(ours.len(), rows * cols);
            for (r, c) in elements(t) {
                let want = number(defined(hf, whole.shape(), t, r, c));
                assert_eq!(ours[r * cols + c].to_bits(), want.to_bits(), "{hf} {r} {c}");
            }
            // Reading a range of rows gives these rows.
            let (a, b) = (rows / 3, rows - rows / 4);
            let part = floats(&plan.read_rows(&t.name, a..b, DType::F32).unwrap());
            assert_eq!(part, ours[a * cols..b * cols], "{hf}");
        }
    }
}

fn elements(t: &LogicalTensor) -> impl Iterator<Item = (usize, usize)> {
    let (rows, cols) = (t.shape[0], t.shape.get(1).copied().unwrap_or(1));
    (0..rows).flat_map(move |r| (0..cols).map(move |c| (r, c)))
}

/// Index in the file's tensor of element `(r, c)` of the logical tensor, by the definition of each family.
fn defined(hf: &str, shape: &[usize], t: &LogicalTensor, r: usize, c: usize) -> usize {
    let (rows, cols) = (t.shape[0], t.shape.get(1).copied().unwrap_or(1));
    // GPT-OSS: [experts, in, out], gate on even and up on odd columns.
    if let Some((_, kind)) = hf.split_once("mlp.experts.").filter(|(_, k)| !k.ends_with(".weight")) {
        let expert = t.name.split_once(".experts.").unwrap().1.split('.').next().unwrap();
        let (e, odd) = (expert.parse::<usize>().unwrap(), usize::from(t.name.contains(".up.")));
        return match kind {
            "gate_up_proj" => (e * shape[1] + c) * shape[2] + 2 * r + odd,
            "gate_up_proj_bias" => e * shape[1] + 2 * r + odd,
            "down_proj" => (e * shape[1] + c) * shape[2] + r,
            "down_proj_bias" => e * shape[1] + r,
            other => panic!("{other}"),
        };
    }
    // GPT-2: Conv1D is [in, out], c_attn is q, k, v side by side.
    let conv = hf.contains(".c_") && hf.ends_with(".weight");
    let third = [".attn.q.", ".attn.k.", ".attn.v."].iter().position(|p| t.name.contains(p));
    let skip = if hf.contains("c_attn") { third.unwrap() * rows } else { 0 };
    let wide = shape.last().copied().unwrap();
    if conv { c * wide + skip + r } else { (skip + r) * cols + c }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}
