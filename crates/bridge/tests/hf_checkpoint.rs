//! Checks of Hugging Face folders: every mismatch with the configuration is reported at once.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests are tests too

mod support;

use ferrotron_bridge::{
    Error, ExportOptions, HfCheckpoint, HfConfig, Problem, TensorData, Tokenizer, byte_tokenizer_json,
    export, logical_tensors,
};
use ferrotron_core::model::config::ModelConfig;
use ferrotron_core::tensorfile::{FileDType, TensorDecl, TensorFile, TensorFileWriter};
use ferrotron_tensor::DType;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use support::covered;

type Tensors = Vec<(TensorDecl, Vec<u8>)>;

fn load(path: &Path) -> Tensors {
    let file = TensorFile::open(path).unwrap();
    let decl = |t: &ferrotron_core::tensorfile::TensorInfo| TensorDecl {
        name: t.name.clone(),
        dtype: t.dtype,
        shape: t.shape.clone(),
    };
    file.tensors().iter().map(|t| (decl(t), file.read(&t.name).unwrap())).collect()
}

fn save(path: &Path, tensors: &Tensors) {
    let decls: Vec<_> = tensors.iter().map(|(d, _)| d.clone()).collect();
    let mut w = TensorFileWriter::create_in_order(path, &decls, &BTreeMap::new()).unwrap();
    for (d, bytes) in tensors {
        w.write(&d.name, bytes).unwrap();
    }
    w.finish().unwrap();
}

fn zero(name: &str, dtype: FileDType, shape: &[usize]) -> (TensorDecl, Vec<u8>) {
    let bytes = dtype.tensor_bytes(shape).unwrap() as usize;
    (TensorDecl { name: name.into(), dtype, shape: shape.to_vec() }, vec![0; bytes])
}

fn case(name: &str) -> PathBuf {
    covered().into_iter().find(|d| d.ends_with(name)).unwrap()
}

/// A copy of a golden model with changed tensors.
fn edited(name: &str, edit: impl FnOnce(&mut Tensors)) -> tempfile::TempDir {
    let from = case(name);
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(from.join("config.json"), dir.path().join("config.json")).unwrap();
    let mut tensors = load(&from.join("model.safetensors"));
    edit(&mut tensors);
    save(&dir.path().join("model.safetensors"), &tensors);
    dir
}

fn all(plan: &HfCheckpoint) -> Vec<Vec<u8>> {
    plan.tensors().iter().map(|t| plan.read(&t.name, DType::F32).unwrap()).collect()
}

#[test]
fn every_problem_is_listed_at_once() {
    let dir = edited("qwen2", |t| {
        t.retain(|(d, _)| {
            !["model.norm.weight", "model.layers.1.self_attn.k_proj.bias"].contains(&d.name.as_str())
        });
        t.push(zero("model.layers.2.mlp.up_proj.weight", FileDType::F32, &[96, 64]));
        t.push(zero("model.layers.0.self_attn.q_norm.weight", FileDType::F32, &[16]));
        t.push(zero("model.layers.7.self_attn.rotary_emb.inv_freq", FileDType::F32, &[8]));
        for (d, bytes) in t.iter_mut() {
            if d.name.ends_with("0.mlp.down_proj.weight") {
                d.shape.reverse();
            }
            if d.name.ends_with("1.mlp.gate_proj.weight") {
                *bytes = vec![0; bytes.len() / 4];
                d.dtype = FileDType::E4M3;
            }
        }
    });
    let e = HfCheckpoint::open(dir.path()).unwrap_err();
    let text = e.to_string();
    let Error::Tensors { problems, .. } = e else { panic!("{e}") };
    assert_eq!(problems.len(), 7, "{text}");
    let kinds = [
        problems.iter().filter(|p| matches!(p, Problem::Missing(_))).count(),
        problems.iter().filter(|p| matches!(p, Problem::Unexpected(_))).count(),
        problems.iter().filter(|p| matches!(p, Problem::Wrong(..))).count(),
    ];
    assert_eq!(kinds, [2, 3, 2], "{text}");
    for part in [
        "missing: model.norm.weight [64]",
        "missing: model.layers.1.self_attn.k_proj.bias [32]",
        "unexpected: model.layers.2.mlp.up_proj.weight [96, 64]",
        "unexpected: model.layers.0.self_attn.q_norm.weight [16]",
        "unexpected: model.layers.7.self_attn.rotary_emb.inv_freq [8]",
        "model.layers.0.mlp.down_proj.weight: shape [96, 64], but the configuration needs [64, 96]",
        "model.layers.1.mlp.gate_proj.weight: is F8_E4M3, but there is no model.layers.1.mlp.gate_proj.weight_scale_inv",
        "2 missing, 3 unexpected, 2 wrong",
    ] {
        assert!(text.contains(part), "{part} not in {text}");
    }
}

#[test]
fn unused_tensors_and_tied_heads_are_kept_for_export() {
    let dir = edited("llama_tied", |t| {
        let embedding = t.iter().find(|(d, _)| d.name == "model.embed_tokens.weight").unwrap().1.clone();
        let (mut head, _) = zero("lm_head.weight", FileDType::F32, &[160, 64]);
        head.name = "lm_head.weight".into();
        t.insert(3, (head, embedding));
        t.push(zero("model.layers.1.self_attn.rotary_emb.inv_freq", FileDType::F64, &[8]));
    });
    let plan = HfCheckpoint::open(dir.path()).unwrap();
    assert_eq!(all(&plan), all(&HfCheckpoint::open(&case("llama_tied")).unwrap()));
    assert_eq!(plan.unused_tensors().collect::<Vec<_>>(), ["model.layers.1.self_attn.rotary_emb.inv_freq"]);
    let out = tempfile::tempdir().unwrap();
    let to = out.path().join("deeper/model");
    let source = |n: &str| Ok(TensorData { dtype: DType::F32, bytes: plan.read(n, DType::F32)? });
    let options = ExportOptions { reference: Some(&plan), ..Default::default() };
    export(&to, plan.config(), &source, &options).unwrap();
    let file = "model.safetensors";
    assert!(std::fs::read(dir.path().join(file)).unwrap() == std::fs::read(to.join(file)).unwrap());

    // A changed embedding is changed in both places.
    let to = out.path().join("changed");
    let changed = |n: &str| {
        let mut bytes = plan.read(n, DType::F32)?;
        if n == "embed.tokens" {
            bytes.fill(1);
        }
        Ok(TensorData { dtype: DType::F32, bytes })
    };
    export(&to, plan.config(), &changed, &options).unwrap();
    let written = TensorFile::open(&to.join(file)).unwrap();
    let ones = vec![1; 160 * 64 * 4];
    assert!(written.read("lm_head.weight").unwrap() == ones);
    assert!(written.read("model.embed_tokens.weight").unwrap() == ones);
}

/// transformers does not tie a head that differs from the embedding, so that neither must be dropped.
#[test]
fn a_head_of_its_own_in_a_tied_model_is_refused() {
    let dir = edited("llama_tied", |t| {
        let mut own = t.iter().find(|(d, _)| d.name == "model.embed_tokens.weight").unwrap().1.clone();
        *own.last_mut().unwrap() ^= 1;
        t.push((zero("lm_head.weight", FileDType::F32, &[160, 64]).0, own));
    });
    let e = HfCheckpoint::open(dir.path()).unwrap_err().to_string();
    assert!(e.contains("lm_head.weight: ") && e.contains("set tie_word_embeddings to false"), "{e}");
    // The way out.
    let config = dir.path().join("config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    let untied = text.replace("\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false");
    assert_ne!(text, untied);
    std::fs::write(&config, untied).unwrap();
    let plan = HfCheckpoint::open(dir.path()).unwrap();
    let [head, embedding] = ["head.weight", "embed.tokens"].map(|n| plan.read(n, DType::F32).unwrap());
    assert!(head != embedding && head.len() == embedding.len());
}

#[test]
fn the_bare_decoder_of_gpt2_has_no_prefix() {
    let dir = edited("gpt2", |t| {
        for (d, _) in t.iter_mut() {
            d.name = d.name.strip_prefix("transformer.").unwrap().to_string();
        }
        t.push(zero("h.1.attn.bias", FileDType::U8, &[1, 1, 64, 64]));
        t.push(zero("h.0.attn.masked_bias", FileDType::F32, &[]));
    });
    let plan = HfCheckpoint::open(dir.path()).unwrap();
    assert_eq!(all(&plan), all(&HfCheckpoint::open(&case("gpt2")).unwrap()));
    assert_eq!(plan.unused_tensors().count(), 2);
    let out = tempfile::tempdir().unwrap();
    let to = out.path().join("model");
    let source = |n: &str| Ok(TensorData { dtype: DType::F32, bytes: plan.read(n, DType::F32)? });
    export(&to, plan.config(), &source, &ExportOptions { reference: Some(&plan), ..Default::default() })
        .unwrap();
    let file = "model.safetensors";
    assert!(std::fs::read(dir.path().join(file)).unwrap() == std::fs::read(to.join(file)).unwrap());
}

/// Sharded files: read, exported again byte for byte, and every disagreement with the index reported.
#[test]
fn shards() {
    for name in ["gpt2", "gemma3"] {
        let plan = HfCheckpoint::open(&case(name)).unwrap();
        let out = tempfile::tempdir().unwrap();
        let cut = out.path().join("cut");
        let source = |n: &str| Ok(TensorData { dtype: DType::F32, bytes: plan.read(n, DType::F32)? });
        let options = ExportOptions { max_shard_bytes: 60_000, ..Default::default() };
        let done = export(&cut, plan.config(), &source, &options).unwrap();
        assert!(done.files.len() > 3, "{:?}", done.files);
        assert_eq!(done.tensor_bytes, 4 * plan.config().model().parameters() as u64);
        for f in &done.files {
            assert!(std::fs::metadata(cut.join(f)).unwrap().len() < 64_000);
        }
        let sharded = HfCheckpoint::open(&cut).unwrap();
        assert_eq!(all(&sharded), all(&plan));

        let again = out.path().join("again");
        let source = |n: &str| Ok(TensorData { dtype: DType::F32, bytes: sharded.read(n, DType::F32)? });
        let options = ExportOptions { reference: Some(&sharded), ..Default::default() };
        export(&again, sharded.config(), &source, &options).unwrap();
        for entry in std::fs::read_dir(&cut).unwrap() {
            let file = entry.unwrap().file_name();
            let same = std::fs::read(cut.join(&file)).unwrap() == std::fs::read(again.join(&file)).unwrap();
            assert!(same, "{file:?}");
        }

        let index = cut.join("model.safetensors.index.json");
        let text = std::fs::read_to_string(&index).unwrap();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(json["metadata"]["total_size"].as_u64(), Some(done.tensor_bytes));
        let (first, second) = (&done.files[0], &done.files[1]);
        let moved = text.replacen(&format!("{first}\""), &format!("{second}\""), 1);
        std::fs::write(&index, moved).unwrap();
        let e = HfCheckpoint::open(&cut).unwrap_err().to_string();
        assert!(e.contains("the index says it is in") && e.contains("the index does not say so"), "{e}");
        for bad in ["../model.safetensors", "/etc/passwd", "x.bin", ".safetensors", "a/b.safetensors"] {
            std::fs::write(&index, text.replacen(first.as_str(), bad, 1)).unwrap();
            let e = HfCheckpoint::open(&cut).unwrap_err().to_string();
            assert!(e.contains("is not the name of a weight file"), "{e}");
        }
        std::fs::write(&index, text.replacen(first.as_str(), "gone.safetensors", 1)).unwrap();
        assert!(HfCheckpoint::open(&cut).unwrap_err().to_string().contains("gone.safetensors"));
        std::fs::write(&index, "{\"metadata\": {}}").unwrap();
        assert!(HfCheckpoint::open(&cut).unwrap_err().to_string().contains("`weight_map` is missing"));
        std::fs::remove_file(&index).unwrap();
        assert!(HfCheckpoint::open(&cut).unwrap_err().to_string().contains("neither model.safetensors nor"));
    }
}

/// bf16 and f16 files are read as f32 and written back to the same bytes; f32 is rounded once.
#[test]
fn other_element_types() {
    for name in ["gpt2", "qwen3"] {
        let plan = HfCheckpoint::open(&case(name)).unwrap();
        let out = tempfile::tempdir().unwrap();
        let source = |n: &str| Ok(TensorData { dtype: DType::F32, bytes: plan.read(n, DType::F32)? });
        for dtype in [DType::BF16, DType::F16] {
            let to = out.path().join(dtype.name());
            let options = ExportOptions { dtype: Some(dtype), reference: Some(&plan), ..Default::default() };
            export(&to, plan.config(), &source, &options).unwrap();
            let half = HfCheckpoint::open(&to).unwrap();
            assert_eq!(half.config().dtype(), Some(dtype));
            assert_eq!(half.config().model(), plan.config().model());
            for t in half.tensors() {
                assert_eq!(half.dtype(&t.name).unwrap(), dtype);
                let full = plan.read(&t.name, DType::F32).unwrap();
                let narrow = half.read(&t.name, dtype).unwrap();
                let wide = half.read(&t.name, DType::F32).unwrap();
                assert_eq!(plan.read(&t.name, dtype).unwrap(), narrow, "{}", t.name);
                for ((f, n), w) in
                    full.as_chunks::<4>().0.iter().zip(narrow.as_chunks::<2>().0).zip(wide.as_chunks::<4>().0)
                {
                    let (f, w) = (f32::from_le_bytes(*f), f32::from_le_bytes(*w));
                    let want = match dtype {
                        DType::BF16 => ferrotron_tensor::bf16::from_f32(f).to_f32(),
                        _ => ferrotron_tensor::f16::from_f32(f).to_f32(),
                    };
                    assert_eq!(w.to_bits(), want.to_bits());
                    assert_eq!(
                        w,
                        match dtype {
                            DType::BF16 => ferrotron_tensor::bf16::from_le_bytes(*n).to_f32(),
                            _ => ferrotron_tensor::f16::from_le_bytes(*n).to_f32(),
                        }
                    );
                }
            }
            // Through f32 and back.
            let back = out.path().join(format!("{dtype}-back"));
            let source = |n: &str| Ok(TensorData { dtype: DType::F32, bytes: half.read(n, DType::F32)? });
            let options = ExportOptions { reference: Some(&half), ..Default::default() };
            export(&back, half.config(), &source, &options).unwrap();
            let file = "model.safetensors";
            assert!(std::fs::read(to.join(file)).unwrap() == std::fs::read(back.join(file)).unwrap());
        }
    }
}

#[test]
fn an_export_that_cannot_be_finished_leaves_nothing() {
    let plan = HfCheckpoint::open(&case("llama_tied")).unwrap();
    let out = tempfile::tempdir().unwrap();
    let to = out.path().join("model");
    let count = |dir: &Path| std::fs::read_dir(dir).unwrap().count();
    let good = |n: &str| Ok(TensorData { dtype: DType::F32, bytes: plan.read(n, DType::F32)? });
    let short = |n: &str| {
        let mut bytes = plan.read(n, DType::F32)?;
        if n == "layers.1.mlp.down.weight" {
            bytes.pop();
        }
        Ok(TensorData { dtype: DType::F32, bytes })
    };
    for reference in [None, Some(&plan)] {
        let options = ExportOptions { reference, ..Default::default() };
        let e = export(&to, plan.config(), &short, &options).unwrap_err().to_string();
        assert!(e.contains("layers.1.mlp.down.weight") && e.contains("bytes were given"), "{e}");
        let e = export(&to, plan.config(), &|n| Err(Error::Chat(n.into())), &options).unwrap_err();
        assert!(matches!(e, Error::Chat(_)));
        assert_eq!(count(out.path()), 0, "something was left behind");
    }
    let other = HfConfig::from_model(&ModelConfig::preset("tiny").unwrap(), DType::F32).unwrap();
    let options = ExportOptions { reference: Some(&plan), ..Default::default() };
    let e = export(&to, &other, &good, &options).unwrap_err().to_string();
    assert!(e.contains("not of the shape"), "{e}");
    let options = ExportOptions { dtype: Some(DType::E4M3), ..Default::default() };
    assert!(export(&to, plan.config(), &good, &options).is_err());
    assert_eq!(count(out.path()), 0);

    std::fs::create_dir(&to).unwrap();
    let options = ExportOptions::default();
    export(&to, plan.config(), &good, &options).unwrap();
    let e = export(&to, plan.config(), &good, &options).unwrap_err().to_string();
    assert!(e.contains("not empty"), "{e}");
    let file = out.path().join("file");
    std::fs::write(&file, "x").unwrap();
    assert!(export(&file, plan.config(), &good, &options).unwrap_err().to_string().contains("not a folder"));
}

#[test]
fn a_folder_of_pickles_says_what_to_do() {
    for name in ["pytorch_model.bin", "pytorch_model.bin.index.json"] {
        let dir = edited("llama_tied", |_| {});
        std::fs::rename(dir.path().join("model.safetensors"), dir.path().join(name)).unwrap();
        let e = HfCheckpoint::open(dir.path()).unwrap_err().to_string();
        assert!(e.contains("a pickle") && e.contains("safe_serialization=True"), "{e}");
    }
}

#[test]
fn tokenizer_files_are_copied() {
    let dir = edited("llama_tied", |_| {});
    let files =
        ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "merges.txt", "LICENSE"];
    for f in files {
        std::fs::write(dir.path().join(f), f).unwrap();
    }
    std::fs::write(dir.path().join("pytorch_model.bin"), "no").unwrap();
    std::fs::create_dir(dir.path().join("tokenizer_folder")).unwrap();
    let plan = HfCheckpoint::open(dir.path()).unwrap();
    let to = dir.path().join("out/model");
    let source = |n: &str| Ok(TensorData { dtype: DType::F32, bytes: plan.read(n, DType::F32)? });
    export(&to, plan.config(), &source, &ExportOptions { reference: Some(&plan), ..Default::default() })
        .unwrap();
    for f in files {
        assert_eq!(std::fs::read_to_string(to.join(f)).unwrap(), f);
    }
    assert_eq!(std::fs::read_dir(&to).unwrap().count(), files.len() + 2);
}

/// `trust_remote_code` finds the code that `auto_map` names in the export, too, which can be replaced.
#[test]
fn custom_code_is_copied() {
    let dir = edited("llama_tied", |_| {});
    let config = dir.path().join("config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    let named = text.replacen('{', "{\"auto_map\": {\"AutoModelForCausalLM\": \"modeling_x.X\"}, ", 1);
    std::fs::write(&config, named).unwrap();
    for file in ["modeling_x.py", "setup.py"] {
        std::fs::write(dir.path().join(file), "import torch\n").unwrap();
    }
    let plan = HfCheckpoint::open(dir.path()).unwrap();
    let to = dir.path().join("out/model");
    let source = |n: &str| Ok(TensorData { dtype: DType::F32, bytes: plan.read(n, DType::F32)? });
    for overwrite in [false, true] {
        let options = ExportOptions { reference: Some(&plan), overwrite, ..Default::default() };
        export(&to, plan.config(), &source, &options).unwrap();
        assert_eq!(std::fs::read_to_string(to.join("modeling_x.py")).unwrap(), "import torch\n");
        assert_eq!(std::fs::read_dir(&to).unwrap().count(), 3);
    }
    std::fs::write(to.join("setup.py"), "").unwrap();
    let options = ExportOptions { reference: Some(&plan), overwrite: true, ..Default::default() };
    assert!(export(&to, plan.config(), &source, &options).is_err());
}

/// A natively trained byte-level model is exported with configuration, weights and tokenizer.
#[test]
fn a_native_model_is_exported_with_its_tokenizer() {
    let model = ModelConfig::preset("tiny").unwrap();
    let config = HfConfig::from_model(&model, DType::BF16).unwrap();
    let shapes = logical_tensors(&model);
    let source = |n: &str| {
        let t = shapes.iter().find(|t| t.name == n).unwrap();
        Ok(TensorData { dtype: DType::F32, bytes: vec![0; 4 * t.shape.iter().product::<usize>()] })
    };
    let out = tempfile::tempdir().unwrap();
    let to = out.path().join("model");
    let tokenizer = byte_tokenizer_json();
    let options = ExportOptions { more: &[("tokenizer.json", &tokenizer)], ..Default::default() };
    export(&to, &config, &source, &options).unwrap();
    let plan = HfCheckpoint::open(&to).unwrap();
    assert_eq!(plan.config().model(), &model);
    assert_eq!(plan.dtype("layers.3.mlp.gate.weight").unwrap(), DType::BF16);
    let t = Tokenizer::from_dir(&to).unwrap();
    assert_eq!((t.vocab_size(), t.encode("é").unwrap()), (256, vec![0xc3, 0xa9]));
}

#[test]
fn unknown_tensors_rows_and_dtypes_are_refused() {
    let plan = HfCheckpoint::open(&case("llama_tied")).unwrap();
    assert!(plan.read("layers.9.attn.q.weight", DType::F32).is_err());
    assert!(plan.read("embed.tokens", DType::E4M3).is_err());
    assert!(plan.read_rows("embed.tokens", 100..161, DType::F32).is_err());
    assert!(plan.read_rows("embed.tokens", 5..5, DType::F32).unwrap().is_empty());
    let e = HfCheckpoint::open(Path::new("/nowhere/at/all")).unwrap_err().to_string();
    assert!(e.contains("/nowhere/at/all"), "{e}");
}
