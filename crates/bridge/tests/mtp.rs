//! DeepSeek-V3 checkpoints with MTP modules: imported as parameters, exported byte for byte.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use ferrotron_bridge::conversion::{ConvertOptions, convert};
use ferrotron_bridge::{ExportOptions, HfCheckpoint, TensorData, export};
use ferrotron_core::tensorfile::{FileDType, TensorDecl, TensorFile, TensorFileWriter};
use ferrotron_tensor::DType;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use support::SeededRng;

/// Shape and bytes of f32 tensors by name.
type Tensors = BTreeMap<String, (Vec<usize>, Vec<u8>)>;

/// A model of three layers, the last of them an MoE layer.
fn golden() -> PathBuf {
    support::golden::fixture("deepseek_v3")
}

fn read(path: &Path) -> Tensors {
    let file = TensorFile::open(path).unwrap();
    file.tensors().iter().map(|t| (t.name.clone(), (t.shape.clone(), file.read(&t.name).unwrap()))).collect()
}

fn random(rng: &mut SeededRng, shape: &[usize]) -> (Vec<usize>, Vec<u8>) {
    let n: usize = shape.iter().product();
    let value = |rng: &mut SeededRng| (rng.next() as f64 / u64::MAX as f64 - 0.5) as f32;
    (shape.to_vec(), (0..n).flat_map(|_| value(rng).to_le_bytes()).collect())
}

/// Writes the golden model with one MTP module, as DeepSeek publishes it: `model.layers.3.*`.
fn with_mtp(dir: &Path, change: impl FnOnce(&mut Value, &mut Tensors)) -> Tensors {
    let mut config: Value =
        serde_json::from_str(&std::fs::read_to_string(golden().join("config.json")).unwrap()).unwrap();
    let mut tensors = read(&golden().join("model.safetensors"));
    let (layers, hidden) = (config["num_hidden_layers"].as_u64().unwrap(), tensors["model.norm.weight"].0[0]);
    assert_eq!(layers, 3);
    let mut rng = SeededRng(17);
    let last: Vec<(String, Vec<usize>)> = tensors
        .iter()
        .filter_map(|(n, t)| n.strip_prefix("model.layers.2.").map(|n| (n.to_string(), t.0.clone())))
        .collect();
    for (name, shape) in last {
        tensors.insert(format!("model.layers.3.{name}"), random(&mut rng, &shape));
    }
    for (name, shape) in [
        ("enorm.weight", vec![hidden]),
        ("hnorm.weight", vec![hidden]),
        ("eh_proj.weight", vec![hidden, 2 * hidden]),
        ("shared_head.norm.weight", vec![hidden]),
    ] {
        tensors.insert(format!("model.layers.3.{name}"), random(&mut rng, &shape));
    }
    let copies =
        [("embed_tokens.weight", "model.embed_tokens.weight"), ("shared_head.head.weight", "lm_head.weight")];
    for (name, of) in copies {
        tensors.insert(format!("model.layers.3.{name}"), tensors[of].clone());
    }
    config["num_nextn_predict_layers"] = json!(1);
    change(&mut config, &mut tensors);
    std::fs::create_dir_all(dir).unwrap();
    std::fs::write(dir.join("config.json"), serde_json::to_string_pretty(&config).unwrap()).unwrap();
    let decl = |(n, t): (&String, &(Vec<usize>, Vec<u8>))| TensorDecl {
        name: n.clone(),
        dtype: FileDType::from(DType::F32),
        shape: t.0.clone(),
    };
    let decls: Vec<TensorDecl> = tensors.iter().map(decl).collect();
    let path = dir.join("model.safetensors");
    let mut writer = TensorFileWriter::create_in_order(&path, &decls, &BTreeMap::new()).unwrap();
    tensors.iter().for_each(|(n, t)| writer.write(n, &t.1).unwrap());
    writer.finish().unwrap();
    tensors
}

fn open(dir: &Path) -> HfCheckpoint {
    HfCheckpoint::open(dir).unwrap_or_else(|e| panic!("{e}"))
}

fn export_like(checkpoint: &HfCheckpoint, to: &Path) {
    let source = |name: &str| Ok(TensorData { dtype: DType::F32, bytes: checkpoint.read(name, DType::F32)? });
    let options = ExportOptions { reference: Some(checkpoint), ..Default::default() };
    export(to, checkpoint.config(), &source, &options).unwrap();
}

fn same_files(a: &Path, b: &Path) {
    for name in ["config.json", "model.safetensors"] {
        assert!(std::fs::read(a.join(name)).unwrap() == std::fs::read(b.join(name)).unwrap(), "{name}");
    }
}

#[test]
fn mtp_modules_are_parameters() {
    let dir = tempfile::tempdir().unwrap();
    let tensors = with_mtp(dir.path(), |_, _| {});
    let checkpoint = open(dir.path());
    assert_eq!(checkpoint.config().model().mtp.map(|m| m.layers), Some(1));
    assert_eq!(checkpoint.unused_tensors().count(), 0);
    for (logical, hf) in [
        ("mtp.0.enorm.weight", "model.layers.3.enorm.weight"),
        ("mtp.0.hnorm.weight", "model.layers.3.hnorm.weight"),
        ("mtp.0.eh.weight", "model.layers.3.eh_proj.weight"),
        ("mtp.0.norm.weight", "model.layers.3.shared_head.norm.weight"),
        ("mtp.0.layer.attn.kv_b.weight", "model.layers.3.self_attn.kv_b_proj.weight"),
        ("mtp.0.layer.moe.experts.5.up.weight", "model.layers.3.mlp.experts.5.up_proj.weight"),
        ("mtp.0.layer.moe.expert_bias", "model.layers.3.mlp.gate.e_score_correction_bias"),
    ] {
        assert!(checkpoint.read(logical, DType::F32).unwrap() == tensors[hf].1, "{logical}");
        assert_eq!(checkpoint.hf_name(logical).unwrap(), hf);
    }
}

#[test]
fn mtp_modules_are_exported_byte_for_byte() {
    let dir = tempfile::tempdir().unwrap();
    let [from, again] = ["from", "again"].map(|n| dir.path().join(n));
    with_mtp(&from, |_, _| {});
    export_like(&open(&from), &again);
    same_files(&from, &again);
}

/// Through a native checkpoint, without the folder they came from: the embedding and head are not written a second
/// time.
#[test]
fn mtp_modules_survive_a_native_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let [from, native, again] = ["from", "native", "again"].map(|n| dir.path().join(n));
    let mut tensors = with_mtp(&from, |_, _| {});
    let options = ConvertOptions {
        dtype: None,
        like: None,
        merge: false,
        upcycle: None,
        overwrite: false,
        allow_non_finite: false,
        progress: &|_, _| {},
    };
    convert(&from, &native, &options).unwrap();
    std::fs::remove_dir_all(&from).unwrap();
    convert(&native, &again, &options).unwrap();
    tensors.retain(|n, _| {
        !n.starts_with("model.layers.3.embed") && !n.starts_with("model.layers.3.shared_head.head")
    });
    assert!(read(&again.join("model.safetensors")) == tensors);
    assert_eq!(open(&again).config().get("num_nextn_predict_layers"), Some(&json!(1)));
}

/// transformers leaves MTP modules out when it saves a model, and the key in.
#[test]
fn a_stated_module_without_tensors_is_none() {
    let dir = tempfile::tempdir().unwrap();
    let [from, again] = ["from", "again"].map(|n| dir.path().join(n));
    with_mtp(&from, |_, t| t.retain(|n, _| !n.starts_with("model.layers.3.")));
    let checkpoint = open(&from);
    assert_eq!(checkpoint.config().model().mtp, None);
    export_like(&checkpoint, &again);
    same_files(&from, &again);
    // Without the key, the tensors say it.
    let silent = dir.path().join("silent");
    with_mtp(&silent, |c, _| drop(c.as_object_mut().unwrap().remove("num_nextn_predict_layers")));
    assert_eq!(open(&silent).config().model().mtp.map(|m| m.layers), Some(1));
}

/// transformers takes the model's own embedding and head, whatever the module's file has; ours goes back as it came.
#[test]
fn a_second_embedding_that_differs_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let [from, again] = ["from", "again"].map(|n| dir.path().join(n));
    let other = "model.layers.3.embed_tokens.weight";
    with_mtp(&from, |_, t| t.get_mut(other).unwrap().1[5] ^= 1);
    let checkpoint = open(&from);
    assert_eq!(checkpoint.unused_tensors().collect::<Vec<_>>(), [other]);
    export_like(&checkpoint, &again);
    same_files(&from, &again);
}

#[test]
fn an_incomplete_module_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    with_mtp(dir.path(), |_, t| drop(t.remove("model.layers.3.hnorm.weight")));
    let e = HfCheckpoint::open(dir.path()).unwrap_err().to_string();
    assert!(e.contains("missing: model.layers.3.hnorm.weight"), "{e}");
    let none = tempfile::tempdir().unwrap();
    with_mtp(none.path(), |c, _| c["num_nextn_predict_layers"] = json!(0));
    let e = HfCheckpoint::open(none.path()).unwrap_err().to_string();
    assert!(e.contains("unexpected: model.layers.3.enorm.weight"), "{e}");
}
