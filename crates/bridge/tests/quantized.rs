//! Quantized weights are dequantized according to their definition.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests are tests too

mod support;

use ferrotron_bridge::{ExportOptions, HfCheckpoint, HfConfig, TensorData, export};
use ferrotron_core::tensorfile::{FileDType, TensorDecl, TensorFileWriter};
use ferrotron_tensor::{DType, bf16};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use support::SeededRng;

type Tensors = BTreeMap<String, (FileDType, Vec<usize>, Vec<u8>)>;

fn write(dir: &Path, config: &Value, tensors: &Tensors) {
    std::fs::create_dir_all(dir).unwrap();
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let decl = |(name, (dtype, shape, _)): (&String, &(FileDType, Vec<usize>, Vec<u8>))| TensorDecl {
        name: name.clone(),
        dtype: *dtype,
        shape: shape.clone(),
    };
    let decls: Vec<TensorDecl> = tensors.iter().map(decl).collect();
    let mut w =
        TensorFileWriter::create_in_order(&dir.join("model.safetensors"), &decls, &BTreeMap::new()).unwrap();
    tensors.iter().for_each(|(name, (_, _, bytes))| w.write(name, bytes).unwrap());
    w.finish().unwrap();
}

fn plain(dice: &mut SeededRng, shape: &[usize]) -> (FileDType, Vec<usize>, Vec<u8>) {
    let value = |_| (dice.next() as f64 / 2f64.powi(63) - 1.0) as f32;
    let data = (0..shape.iter().product()).map(value).flat_map(f32::to_le_bytes).collect();
    (FileDType::F32, shape.to_vec(), data)
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// E4M3 by its definition.
fn e4m3(code: u8) -> f64 {
    let (sign, exponent, mantissa) =
        (if code & 0x80 == 0 { 1.0 } else { -1.0 }, i32::from(code >> 3 & 0xf), f64::from(code & 7));
    assert_ne!(code & 0x7f, 0x7f, "no number");
    sign * if exponent == 0 {
        mantissa / 8.0 * 2f64.powi(-6)
    } else {
        (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7)
    }
}

/// The golden DeepSeek-V3 with FP8 attention and MLP matrices, in blocks that do not divide them.
fn deepseek(dir: &Path, change: impl Fn(&mut Value, &mut Tensors)) -> Tensors {
    let (source, _) = support::cases().into_iter().find(|(_, k)| k == "deepseek_v3").unwrap();
    let text = std::fs::read_to_string(source.join("config_hub.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    config["torch_dtype"] = json!("bfloat16");
    config["quantization_config"] = json!({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [20, 16]});
    let mut dice = SeededRng(1);
    let mut tensors = Tensors::new();
    for t in HfConfig::parse(&text, "config.json").unwrap().hf_tensors().unwrap() {
        let narrow = t.name.contains("_proj") && t.shape.len() == 2;
        if !narrow {
            tensors.insert(t.name, plain(&mut dice, &t.shape));
            continue;
        }
        let codes = dice.bytes(t.shape.iter().product()).into_iter();
        let codes = codes.map(|c| if c & 0x7f == 0x7f { 0 } else { c }).collect();
        let blocks = [t.shape[0].div_ceil(20), t.shape[1].div_ceil(16)];
        tensors.insert(format!("{}_scale_inv", t.name), plain(&mut dice, &blocks));
        tensors.insert(t.name, (FileDType::E4M3, t.shape, codes));
    }
    change(&mut config, &mut tensors);
    write(dir, &config, &tensors);
    tensors
}

#[test]
fn golden_shapes_of_fp8_decode_to_their_definition() {
    let dir = tempfile::tempdir().unwrap();
    let stored = deepseek(dir.path(), |_, _| ());
    let plan = HfCheckpoint::open(dir.path()).unwrap_or_else(|e| panic!("{e}"));
    assert!(plan.is_quantized());
    let mut narrow = 0;
    for t in plan.tensors() {
        let hf = plan.hf_name(&t.name).unwrap();
        let (dtype, shape, data) = &stored[hf];
        let got = floats(&plan.read(&t.name, DType::F32).unwrap());
        if *dtype != FileDType::E4M3 {
            assert_eq!(got, floats(data), "{hf}");
            continue;
        }
        narrow += 1;
        assert_eq!(plan.dtype(&t.name).unwrap(), DType::BF16);
        let scales = floats(&stored[&format!("{hf}_scale_inv")].2);
        let (wide, cols) = (shape[1].div_ceil(16), shape[1]);
        for (i, x) in got.iter().enumerate() {
            let scale = scales[i / cols / 20 * wide + i % cols / 16];
            assert_eq!(*x, (e4m3(data[i]) * f64::from(scale)) as f32, "{hf} {i}");
        }
        // Slices that begin inside a block.
        let (a, b) = (shape[0] / 3, shape[0] - 1);
        let part = floats(&plan.read_rows(&t.name, a..b, DType::F32).unwrap());
        assert_eq!(part, got[a * cols..b * cols], "{hf}");
    }
    assert!(narrow > 50);

    // Written again they are bf16, and nothing speaks of few bits.
    let to = dir.path().join("again");
    let source = |name: &str| Ok(TensorData { dtype: DType::F32, bytes: plan.read(name, DType::F32)? });
    export(&to, plan.config(), &source, &ExportOptions { reference: Some(&plan), ..Default::default() })
        .unwrap();
    let again = HfCheckpoint::open(&to).unwrap_or_else(|e| panic!("{e}"));
    assert!(!again.is_quantized() && again.config().get("quantization_config").is_none());
    for t in plan.tensors() {
        assert_eq!(again.read(&t.name, DType::BF16).unwrap(), plan.read(&t.name, DType::BF16).unwrap());
    }
    for t in plan.buffers() {
        assert_eq!(again.dtype(&t.name).unwrap(), DType::F32, "{}", t.name);
        assert_eq!(again.read(&t.name, DType::F32).unwrap(), plan.read(&t.name, DType::F32).unwrap());
    }
}

#[test]
fn fp8_that_cannot_be_decoded_is_refused_by_name() {
    let name = "model.layers.1.mlp.experts.2.up_proj.weight";
    let with = |change: &dyn Fn(&mut Value, &mut Tensors)| {
        let dir = tempfile::tempdir().unwrap();
        deepseek(dir.path(), change);
        HfCheckpoint::open(dir.path()).unwrap_err().to_string()
    };
    let e = with(&|_, t| drop(t.remove(&format!("{name}_scale_inv"))));
    assert!(e.contains(name) && e.contains("no ") && e.contains("_scale_inv to scale it by"), "{e}");
    let e = with(&|_, t| t.get_mut(&format!("{name}_scale_inv")).unwrap().1.reverse());
    assert!(
        e.contains(&format!("{name}: has scales [3, 2], but blocks of 20×16 of 24×48 need [2, 3]")),
        "{e}"
    );
    let e = with(&|c, _| c["quantization_config"]["quant_method"] = json!("awq"));
    assert!(e.contains("quantized") && e.contains("FP8"), "{e}");
    let e = with(&|c, _| c["quantization_config"]["weight_block_size"] = json!([0, 16]));
    assert!(e.contains("quantization_config.weight_block_size"), "{e}");
}

const E: usize = 3;

fn gpt_oss(dir: &Path, change: impl Fn(&mut Tensors)) -> Tensors {
    let config = json!({
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "torch_dtype": "bfloat16",
        "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 40, "max_position_embeddings": 64,
        "num_local_experts": E, "num_experts_per_tok": 2, "sliding_window": 4,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1.5e5, "factor": 8.0,
            "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false},
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    });
    let mut dice = SeededRng(2);
    let mut tensors = Tensors::new();
    for t in HfConfig::parse(&config.to_string(), "config.json").unwrap().hf_tensors().unwrap() {
        if t.name.ends_with("_proj") {
            // Decoded they are [E, out, in].
            let (rows, groups) = (t.shape[2], t.shape[1] / 32);
            let codes = dice.bytes(E * rows * groups * 16);
            let scales = dice.bytes(E * rows * groups).iter().map(|b| 100 + b % 60).collect();
            tensors.insert(format!("{}_blocks", t.name), (FileDType::U8, vec![E, rows, groups, 16], codes));
            tensors.insert(format!("{}_scales", t.name), (FileDType::U8, vec![E, rows, groups], scales));
        } else {
            tensors.insert(t.name, plain(&mut dice, &t.shape));
        }
    }
    change(&mut tensors);
    write(dir, &config, &tensors);
    tensors
}

#[test]
fn golden_shapes_of_mxfp4_decode_to_their_definition() {
    const TABLE: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let dir = tempfile::tempdir().unwrap();
    let stored = gpt_oss(dir.path(), |_| ());
    let plan = HfCheckpoint::open(dir.path()).unwrap_or_else(|e| panic!("{e}"));
    let decoded = |hf: &str, row: usize, c: usize, cols: usize| {
        let (codes, scales) = (&stored[&format!("{hf}_blocks")].2, &stored[&format!("{hf}_scales")].2);
        let byte = codes[(row * cols + c) / 2];
        let nibble = if c.is_multiple_of(2) { byte & 0xf } else { byte >> 4 };
        let value = TABLE[usize::from(nibble & 7)] * if nibble & 8 == 0 { 1.0 } else { -1.0 };
        (value * 2f64.powi(i32::from(scales[(row * cols + c) / 32]) - 127)) as f32
    };
    for layer in 0..2 {
        let base = format!("model.layers.{layer}.mlp.experts");
        for e in 0..E {
            for (kind, rows, cols) in [("gate", 32, 64), ("up", 32, 64), ("down", 64, 32)] {
                let name = format!("layers.{layer}.moe.experts.{e}.{kind}.weight");
                let got = floats(&plan.read(&name, DType::F32).unwrap());
                assert_eq!(got.len(), rows * cols);
                for (i, x) in got.iter().enumerate() {
                    let (r, c) = (i / cols, i % cols);
                    let want = match kind {
                        "gate" => decoded(&format!("{base}.gate_up_proj"), e * 64 + 2 * r, c, cols),
                        "up" => decoded(&format!("{base}.gate_up_proj"), e * 64 + 2 * r + 1, c, cols),
                        _ => decoded(&format!("{base}.down_proj"), e * 64 + r, c, cols),
                    };
                    assert_eq!(*x, want, "{name} {r} {c}");
                }
                let part = floats(&plan.read_rows(&name, 5..9, DType::F32).unwrap());
                assert_eq!(part, got[5 * cols..9 * cols]);
            }
        }
    }
    // Written again: [E, in, out] in bf16.
    let to = dir.path().join("again");
    let source = |name: &str| Ok(TensorData { dtype: DType::F32, bytes: plan.read(name, DType::F32)? });
    export(&to, plan.config(), &source, &ExportOptions { reference: Some(&plan), ..Default::default() })
        .unwrap();
    let bytes = std::fs::read(to.join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let t = file.tensor("model.layers.1.mlp.experts.gate_up_proj").unwrap();
    assert_eq!(t.shape(), [E, 64, 64]);
    for (i, b) in t.data().as_chunks::<2>().0.iter().enumerate() {
        let (e, c, r) = (i / 4096, i / 64 % 64, i % 64);
        let want = decoded("model.layers.1.mlp.experts.gate_up_proj", e * 64 + r, c, 64);
        assert_eq!(bf16::from_le_bytes(*b).to_f32(), want);
    }
    assert!(!HfCheckpoint::open(&to).unwrap().is_quantized());
}

#[test]
fn mxfp4_that_cannot_be_decoded_is_refused_by_name() {
    let name = "model.layers.0.mlp.experts.down_proj";
    let with = |change: &dyn Fn(&mut Tensors)| {
        let dir = tempfile::tempdir().unwrap();
        gpt_oss(dir.path(), change);
        (HfCheckpoint::open(dir.path()), dir)
    };
    let refused = |change: &dyn Fn(&mut Tensors)| with(change).0.unwrap_err().to_string();
    let e = refused(&|t| drop(t.remove(&format!("{name}_scales"))));
    assert!(e.contains(&format!("{name}_blocks")) && e.contains("_scales to scale it by"), "{e}");
    let e = refused(&|t| drop(t.remove(&format!("{name}_blocks"))));
    assert!(e.contains(&format!("missing: {name} [3, 32, 64]")) && e.contains("_scales"), "{e}");
    let e = refused(&|t| t.get_mut(&format!("{name}_scales")).unwrap().1 = vec![64, E, 1]);
    assert!(e.contains(&format!("{name}_scales: shape [64, 3, 1]")), "{e}");
    // A scale that is no number is found when it is read.
    let (plan, _dir) = with(&|t| t.get_mut(&format!("{name}_scales")).unwrap().2[70] = 255);
    let e = plan.unwrap().read("layers.0.moe.experts.1.down.weight", DType::F32).unwrap_err().to_string();
    assert!(e.contains(name) && e.contains("row 6") && e.contains("no number"), "{e}");
}
