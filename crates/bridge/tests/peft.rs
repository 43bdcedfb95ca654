//! Adapters of PEFT: folders that PEFT wrote, with its logits, and the same tensors written back.
//! `scripts/peft_round_trip.py --golden tests/peft` makes the folders; without `--golden` it checks both directions with the real library.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use ferrotron_bridge::forward::{self, ForwardOptions};
use ferrotron_bridge::peft::{Adapters, PeftConfig, write_peft};
use ferrotron_bridge::recipe;
use ferrotron_bridge::weights::Weights;
use ferrotron_bridge::{HfConfig, ModelSource, byte_tokenizer_json};
use ferrotron_core::config::Recipe;
use ferrotron_core::data::source;
use ferrotron_core::model::PipelineLayout;
use ferrotron_core::tensorfile::{FileDType, TensorDecl, TensorFile, TensorFileWriter};
use ferrotron_core::train::{Trainer, to_f32};
use ferrotron_engine::Rank;
use ferrotron_tensor::{DType, f16};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Every folder of tests/peft with its name.
fn cases() -> Vec<(String, PathBuf)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/peft");
    let mut all: Vec<(String, PathBuf)> = std::fs::read_dir(&root)
        .unwrap_or_else(|e| panic!("{}: {e}", root.display()))
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_dir())
        .map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), path))
        .collect();
    all.sort();
    assert!(all.len() >= 8, "{all:?}");
    all
}

/// The tensors of a file, but token ids.
fn tensors(path: &Path) -> Vec<(String, Vec<usize>, Vec<f32>)> {
    let file = TensorFile::open(path).unwrap();
    let read = |t: &ferrotron_core::tensorfile::TensorInfo| {
        let values = to_f32(t.dtype.native().unwrap(), &file.read(&t.name).unwrap()).unwrap();
        (t.name.clone(), t.shape.clone(), values)
    };
    let mut all: Vec<_> = file.tensors().iter().filter(|t| t.name != "input_ids").map(read).collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

/// W + s·B·A of the golden tensors in f64, straight from their names, for query projections that are not fused; DoRA scales
/// its rows to the norms that are stored.
#[test]
fn merged_weights_are_those_of_the_definition() {
    let mut checked = 0;
    for (name, dir) in cases() {
        let base = HfConfig::from_dir(&dir.join("base")).unwrap();
        let adapters = Adapters::from_peft(&dir.join("adapter"), &base).unwrap();
        let file = std::fs::read_to_string(dir.join("adapter/adapter_config.json")).unwrap();
        let file: Value = serde_json::from_str(&file).unwrap();
        let [rslora, dora] = ["use_rslora", "use_dora"].map(|key| file[key].as_bool().unwrap());
        let stored = tensors(&dir.join("adapter/adapter_model.safetensors"));
        let weights = Weights::open(&dir.join("base")).unwrap();
        let config = PeftConfig::from_dir(&dir.join("adapter")).unwrap();
        for (key, shape, b) in stored.iter().filter(|t| t.0.contains("q_proj.lora_B")) {
            let (_, _, a) = stored.iter().find(|t| t.0 == key.replace("lora_B", "lora_A")).unwrap();
            let layer = key.split('.').nth(4).unwrap();
            let logical = format!("layers.{layer}.attn.q");
            let rank = shape[1];
            let scale = config.alpha / if rslora { (rank as f64).sqrt() } else { rank as f64 };
            let mut merged =
                to_f32(DType::F32, &weights.read(&format!("{logical}.weight"), DType::F32).unwrap()).unwrap();
            let inputs = a.len() / rank;
            let mut exact: Vec<f64> = (0..merged.len())
                .map(|i| {
                    let update: f64 = (0..rank)
                        .map(|r| f64::from(b[i / inputs * rank + r]) * f64::from(a[r * inputs + i % inputs]))
                        .sum();
                    f64::from(merged[i]) + scale * update
                })
                .collect();
            if dora {
                let magnitude = key.replace("lora_B.weight", "lora_magnitude_vector");
                let (_, _, norms) = stored.iter().find(|t| t.0 == magnitude).unwrap();
                for (row, m) in exact.chunks_exact_mut(inputs).zip(norms) {
                    let norm = row.iter().map(|w| w * w).sum::<f64>().sqrt();
                    row.iter_mut().for_each(|w| *w *= f64::from(*m) / norm);
                }
            }
            adapters.get(&logical).unwrap().merge(&mut merged);
            for (got, want) in merged.iter().zip(&exact) {
                assert!(
                    (f64::from(*got) - want).abs() <= 1e-5 * want.abs().max(1.0),
                    "{name} {logical}: {got} {want}"
                );
            }
            checked += 1;
        }
    }
    assert!(checked >= 11, "{checked}");
}

/// The model with its adapters merged computes what PEFT does.
#[test]
fn logits_are_those_of_peft() {
    let work = tempfile::tempdir().unwrap();
    for (name, dir) in cases() {
        let base = HfConfig::from_dir(&dir.join("base")).unwrap();
        let adapter = work.path().join(&name);
        let adapters = Adapters::from_peft(&dir.join("adapter"), &base).unwrap();
        write_peft(&adapter, &adapters, (&base, Some(&dir.join("base"))), (None, &[]), (DType::F32, false))
            .unwrap();
        let weights = Weights::open(&adapter).unwrap();
        let golden = dir.join("logits.safetensors");
        let input = forward::read_input(&golden).unwrap();
        let options = ForwardOptions {
            dtype: DType::F32,
            stages: PipelineLayout::default(),
            backward: false,
            ulp_seed: None,
        };
        let rank = Rank::cpu(1, 1).unwrap();
        let got = forward::forward(rank, &weights, &input, &options).unwrap();
        let all = tensors(&golden);
        let (_, _, want) = all.iter().find(|t| t.0 == "logits").unwrap();
        let apart = got.logits.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(got.logits.len() == want.len() && apart <= 1e-5, "{name}: {apart:e}");
    }
}

#[test]
fn what_peft_wrote_is_written_back() {
    let out = tempfile::tempdir().unwrap();
    for (name, dir) in cases() {
        let base = HfConfig::from_dir(&dir.join("base")).unwrap();
        let adapters = Adapters::from_peft(&dir.join("adapter"), &base).unwrap();
        assert!(!adapters.is_empty(), "{name}");
        let written = out.path().join(&name);
        write_peft(&written, &adapters, (&base, None), (None, &[]), (DType::F32, false)).unwrap();
        let file = "adapter_model.safetensors";
        assert!(
            tensors(&written.join(file)) == tensors(&dir.join("adapter").join(file)),
            "{name}: tensors differ"
        );
        // The configuration that was written means the same.
        let again = Adapters::from_peft(&written, &base).unwrap();
        assert_eq!(again.len(), adapters.len(), "{name}");
        for ((module, a), (other, b)) in again.iter().zip(adapters.iter()) {
            let same = (&a.a, &a.b, &a.magnitude, a.rank) == (&b.a, &b.b, &b.magnitude, b.rank);
            assert!(module == other && same && a.scale as f32 == b.scale as f32, "{name}: {module}");
        }
        // An earlier export is replaced only when that is wanted.
        let again =
            |overwrite| write_peft(&written, &adapters, (&base, None), (None, &[]), (DType::F32, overwrite));
        assert!(again(false).is_err());
        again(true).unwrap();
    }
}

#[test]
fn folders_that_do_not_fit_are_refused_by_name() {
    let (_, dir) = cases().into_iter().find(|(name, _)| name == "llama").unwrap();
    let (_, other) = cases().into_iter().find(|(name, _)| name == "gpt2").unwrap();
    let wrong = HfConfig::from_dir(&other.join("base")).unwrap();
    let e = Adapters::from_peft(&dir.join("adapter"), &wrong).unwrap_err().to_string();
    assert!(e.contains("unexpected") && e.contains("q_proj.lora_A"), "{e}");
    // No base model is named in the golden files.
    let e = Weights::open(&dir.join("adapter")).unwrap_err().to_string();
    assert!(e.contains("base_model_name_or_path"), "{e}");
    // Another rank than the tensors have.
    let base = HfConfig::from_dir(&dir.join("base")).unwrap();
    let copy = tempfile::tempdir().unwrap();
    for file in ["adapter_config.json", "adapter_model.safetensors"] {
        std::fs::copy(dir.join("adapter").join(file), copy.path().join(file)).unwrap();
    }
    let config = copy.path().join("adapter_config.json");
    let text = std::fs::read_to_string(&config).unwrap().replace("\"r\": 4", "\"r\": 5");
    std::fs::write(&config, text).unwrap();
    let e = Adapters::from_peft(copy.path(), &base).unwrap_err().to_string();
    assert!(e.contains("[4, 16]") && e.contains("[5, 16]"), "{e}");
}

/// A copy of the adapters of the golden Llama whose tensors have another dtype, made by `f` from f32.
fn with_dtype(dtype: FileDType, f: impl Fn(f32) -> Vec<u8>) -> tempfile::TempDir {
    let (_, dir) = cases().into_iter().find(|(name, _)| name == "llama").unwrap();
    let copy = tempfile::tempdir().unwrap();
    let config = "adapter_config.json";
    std::fs::copy(dir.join("adapter").join(config), copy.path().join(config)).unwrap();
    let file = "adapter_model.safetensors";
    let all = tensors(&dir.join("adapter").join(file));
    let decl = |(name, shape, _): &(String, Vec<usize>, _)| TensorDecl {
        name: name.clone(),
        dtype,
        shape: shape.clone(),
    };
    let decls: Vec<_> = all.iter().map(decl).collect();
    let mut w =
        TensorFileWriter::create_in_order(&copy.path().join(file), &decls, &Default::default()).unwrap();
    for (name, _, values) in &all {
        w.write(name, &values.iter().flat_map(|x| f(*x)).collect::<Vec<u8>>()).unwrap();
    }
    w.finish().unwrap();
    copy
}

/// As Hugging Face folders, in f32, bf16 and f16; other dtypes are refused by name.
#[test]
fn adapters_may_be_stored_in_half_precision() {
    let (_, dir) = cases().into_iter().find(|(name, _)| name == "llama").unwrap();
    let base = HfConfig::from_dir(&dir.join("base")).unwrap();
    let exact = Adapters::from_peft(&dir.join("adapter"), &base).unwrap();
    let half = with_dtype(FileDType::F16, |x| f16::from_f32(x).to_le_bytes().to_vec());
    let half = Adapters::from_peft(half.path(), &base).unwrap();
    assert_eq!(half.len(), exact.len());
    for ((module, got), (_, want)) in half.iter().zip(exact.iter()) {
        let rounded: Vec<f32> = want.b.iter().map(|x| f16::from_f32(*x).to_f32()).collect();
        assert_eq!(got.b, rounded, "{module}");
    }
    let whole = with_dtype(FileDType::I32, |x| (x as i32).to_le_bytes().to_vec());
    let e = Adapters::from_peft(whole.path(), &base).unwrap_err().to_string();
    assert!(
        ["lora_A.weight", "I32", "adapter_model.safetensors", "F16"].iter().all(|p| e.contains(p)),
        "{e}"
    );
}

/// PEFT saves a tokenizer beside the adapters, but not the base model's files that say where it stops.
#[test]
fn an_adapter_with_its_own_tokenizer_stops_where_its_base_does() {
    let (_, dir) = cases().into_iter().find(|(name, _)| name == "llama").unwrap();
    let work = tempfile::tempdir().unwrap();
    let [base, adapter] = ["base", "adapter"].map(|n| work.path().join(n));
    let copy = |from: &Path, to: &Path| {
        std::fs::create_dir(to).unwrap();
        for entry in std::fs::read_dir(from).unwrap().map(|e| e.unwrap()) {
            std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    };
    copy(&dir.join("base"), &base);
    let config = HfConfig::from_dir(&base).unwrap();
    let adapters = Adapters::from_peft(&dir.join("adapter"), &config).unwrap();
    write_peft(&adapter, &adapters, (&config, Some(&base)), (None, &[]), (DType::F32, false)).unwrap();
    let ends =
        |folder: &Path, text: &str| std::fs::write(folder.join("generation_config.json"), text).unwrap();
    ends(&base, r#"{"bos_token_id": 1, "eos_token_id": [3, 5]}"#);
    std::fs::remove_file(adapter.join("generation_config.json")).unwrap();
    std::fs::write(adapter.join("tokenizer.json"), byte_tokenizer_json()).unwrap();
    let text = || ModelSource::open(&adapter).unwrap().text(None).unwrap();
    assert_eq!((text().start, text().stop), (Some(1), vec![3, 5]));
    // What the adapter says itself counts.
    ends(&adapter, r#"{"eos_token_id": 7}"#);
    assert_eq!((text().start, text().stop), (Some(7), vec![7]));
}

/// DoRA's adapters that are trained further compute what PEFT's do, and are written as they were read.
#[test]
fn dora_is_trained_further() {
    let (_, dir) = cases().into_iter().find(|(name, _)| name == "llama-dora").unwrap();
    let keys = |adapter: bool| {
        let mut keys = vec![
            format!("model.hf={}", dir.join("base").display()),
            "precision.dtype=f32".into(),
            "data.seq_len=16".into(),
            "train.steps=4".into(),
            "train.global_batch=2".into(),
            "optimizer.lr=1e-2".into(),
        ];
        if adapter {
            keys.push(format!("lora.adapter={}", dir.join("adapter").display()));
        }
        keys
    };
    let trainer = |keys: Vec<String>, own: Option<Weights>| {
        let mut recipe = Recipe::default();
        keys.iter().for_each(|k| recipe.set(k).unwrap());
        let (resolved, weights) = recipe::resolve(&mut recipe).unwrap();
        let t = Trainer::new(Rank::cpu(1, 1).unwrap(), &resolved).unwrap();
        own.or(weights).unwrap().fill(&t).unwrap();
        (t, resolved)
    };
    let (mut adapted, resolved) = trainer(keys(true), None);
    assert!(resolved.config.lora.dora && resolved.config.lora.rank == 4);
    let merged = tempfile::tempdir().unwrap();
    let base = HfConfig::from_dir(&dir.join("base")).unwrap();
    let adapters = Adapters::from_peft(&dir.join("adapter"), &base).unwrap();
    let folder = merged.path().join("adapter");
    write_peft(&folder, &adapters, (&base, Some(&dir.join("base"))), (None, &[]), (DType::F32, false))
        .unwrap();
    let (plain, _) = trainer(keys(false), Some(Weights::open(&folder).unwrap()));
    let data = source::open(&resolved).unwrap();
    let [a, b] = [&adapted, &plain].map(|t| t.evaluate(&*data.train, 4).unwrap());
    assert!((a / b - 1.0).abs() < 1e-6, "{a} and {b}");
    let m = |t: &Trainer| {
        let all = t.weights().unwrap();
        all.into_iter().find(|w| w.name == "layers.0.mlp.down.lora_m.weight").unwrap().values
    };
    let before = m(&adapted);
    assert_eq!(before, adapters.tensor("layers.0.mlp.down.lora_m.weight").unwrap());
    adapted.train_step(&*data.train).unwrap();
    assert!(m(&adapted).iter().zip(&before).all(|(a, b)| a != b));
    // The folder decides about rank, scale, linears and kind, whatever a recipe of this program says.
    let start = |mut recipe: Recipe, more: &[&str]| {
        keys(true)
            .iter()
            .map(String::as_str)
            .chain(more.iter().copied())
            .for_each(|k| recipe.set(k).unwrap());
        recipe::resolve(&mut recipe).map(|(resolved, _)| resolved.config.lora).map_err(|e| e.to_string())
    };
    let lora = start(Recipe::named("lora").unwrap(), &["data.packing=none", "data.path=embedded"]).unwrap();
    assert_eq!(lora, resolved.config.lora);
    let given = ["lora.rank=4", &format!("lora.alpha={}", lora.alpha.unwrap()), "lora.targets=all-linear"];
    assert_eq!(start(Recipe::default(), &given).unwrap().rank, 4);
    // So it does beside what a run has stored, all of whose keys are there.
    let stored = tempfile::tempdir().unwrap();
    let config = stored.path().join("config.toml");
    std::fs::write(&config, "[lora]\ndora = false\nfused = true\nrank = 8\n").unwrap();
    let lora = start(Recipe::read_stored(&config).unwrap(), &[]).unwrap();
    assert_eq!((lora.dora, lora.fused, lora.rank), (true, false, 4));
    for (key, want) in [
        ("lora.fused=true", "leave out lora.fused"),
        ("lora.dora=false", "leave out lora.dora"),
        ("lora.rank=8", "has adapters of rank 4; leave out lora.rank"),
        ("lora.alpha=1", "leave out lora.alpha"),
        ("lora.targets=q_proj", "has an adapter for layers.0."),
        (
            "lora.exclude=v_proj",
            "has an adapter for layers.0.attn.v; leave out lora.targets, which it gives, and lora.exclude",
        ),
    ] {
        let e = start(Recipe::default(), &[key]).unwrap_err();
        assert!(e.contains(want), "{key}: {e}");
    }
}

/// `use_dora` and the tensors of a folder say the same.
#[test]
fn dora_without_its_magnitudes_is_refused() {
    let (_, dir) = cases().into_iter().find(|(name, _)| name == "llama-dora").unwrap();
    let base = HfConfig::from_dir(&dir.join("base")).unwrap();
    let copy = tempfile::tempdir().unwrap();
    let (weights, config) = ("adapter_model.safetensors", "adapter_config.json");
    let stored = TensorFile::open(&dir.join("adapter").join(weights)).unwrap();
    let config_text = std::fs::read_to_string(dir.join("adapter").join(config)).unwrap();
    let read = |dora: bool, magnitudes: bool| {
        let text = config_text.replace("\"use_dora\": true", &format!("\"use_dora\": {dora}"));
        assert_eq!(text == config_text, dora);
        std::fs::write(copy.path().join(config), text).unwrap();
        let kept = stored.tensors().iter().filter(|t| magnitudes || !t.name.contains("magnitude"));
        let declared: Vec<TensorDecl> = kept
            .map(|t| TensorDecl { name: t.name.clone(), dtype: t.dtype, shape: t.shape.clone() })
            .collect();
        let path = copy.path().join(weights);
        let mut to = TensorFileWriter::create_in_order(&path, &declared, &Default::default()).unwrap();
        declared.iter().for_each(|t| to.write(&t.name, &stored.read(&t.name).unwrap()).unwrap());
        to.finish().unwrap();
        Adapters::from_peft(copy.path(), &base).map_err(|e| e.to_string())
    };
    assert!(read(true, true).is_ok());
    let e = read(true, false).unwrap_err();
    assert!(e.contains("lora_magnitude_vector") && e.contains("is missing"), "{e}");
    let e = read(false, true).unwrap_err();
    assert!(e.contains("`use_dora` in adapter_config.json is false"), "{e}");
}
