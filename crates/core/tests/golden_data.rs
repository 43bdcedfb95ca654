//! Datasets, shuffles, blends and samplers against Megatron Core.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // clippy takes helpers of tests for production

mod common;

use std::path::PathBuf;
use std::sync::Arc;

use common::{assert_known_files, cases, flag, float, golden, json, list, text, uint};
use ferrotron_core::data::blend::{BlendIndex, SURPLUS, member_samples};
use ferrotron_core::data::mt19937::Mt19937;
use ferrotron_core::data::sampler::{Cyclic, Sequential, full_validation};
use ferrotron_core::data::split::{normalise, parse_split, split_matrix, split_range};
use ferrotron_core::data::*;
use safetensors::SafeTensors;
use serde_json::Value;

fn prefix(name: &str) -> PathBuf {
    golden("data").join(name)
}

fn int(v: &Value) -> i64 {
    v.as_i64().unwrap()
}

#[test]
fn golden_data_folder_is_known() {
    let indexed = cases(&json("data", "indexed.json"), "cases");
    let pairs: Vec<&str> = indexed.iter().map(|c| text(&c["name"])).collect();
    let others = [
        "README.md",
        "indexed.json",
        "shuffle_split.json",
        "gpt.json",
        "gpt.safetensors",
        "blend.json",
        "blend.safetensors",
        "samplers.json",
    ];
    assert_known_files("data", |f| {
        let stem = f.strip_suffix(".bin").or(f.strip_suffix(".idx"));
        others.contains(&f) || stem.is_some_and(|s| pairs.contains(&s))
    });
}

#[test]
fn golden_data_indexed() {
    let out = tempfile::tempdir().unwrap();
    for case in cases(&json("data", "indexed.json"), "cases") {
        let name = text(&case["name"]);
        let kind = TokenType::from_code(uint(&case["dtype_code"]) as u8).unwrap();
        assert_eq!(kind.name(), text(&case["dtype"]));
        let modes = case["modes"].as_array();
        let data = IndexedDataset::open(prefix(name)).unwrap();
        assert_eq!(data.token_type(), kind, "{name}");
        assert_eq!(data.is_multimodal(), modes.is_some(), "{name}");
        let mut writer = IndexedWriter::create(out.path().join(name), kind, modes.is_some()).unwrap();
        if let Some(from) = case.get("merged_from").and_then(Value::as_array) {
            let parts: Vec<IndexedDataset> =
                from.iter().map(|f| IndexedDataset::open(prefix(text(f))).unwrap()).collect();
            parts.iter().for_each(|p| writer.append(p).unwrap());
            let expected = parts.iter().flat_map(|p| (0..p.len()).map(|s| p.sequence(s).unwrap()));
            let found = (0..data.len()).map(|s| data.sequence(s).unwrap());
            assert!(found.eq(expected), "{name}");
            assert_eq!(data.documents(), parts.iter().map(IndexedDataset::documents).sum::<usize>());
        } else {
            let documents = case["documents"].as_array().unwrap();
            assert_eq!(data.documents(), documents.len(), "{name}");
            for (d, document) in documents.iter().enumerate() {
                let sequences = data.document(d).unwrap();
                assert_eq!(sequences.len(), document.as_array().unwrap().len());
                for (k, s) in sequences.enumerate() {
                    let tokens = list(&document[k], int);
                    let mode = modes.map(|m| int(&m[d][k]) as i8);
                    assert_eq!(data.sequence(s).unwrap(), tokens, "{name} sequence {s}");
                    assert_eq!(data.mode(s).unwrap(), mode);
                    writer.push(tokens, mode.unwrap_or(0)).unwrap();
                }
                writer.end_document().unwrap();
            }
        }
        writer.finish().unwrap();
        for suffix in ["bin", "idx"] {
            let file = format!("{name}.{suffix}");
            let theirs = std::fs::read(golden("data").join(&file)).unwrap();
            assert_eq!(theirs.len() as u64, uint(&case[format!("{suffix}_bytes")]));
            assert!(std::fs::read(out.path().join(&file)).unwrap() == theirs, "{file} differs");
        }
    }
}

#[test]
fn golden_data_shuffle_and_split() {
    let all = json("data", "shuffle_split.json");
    let mut state: Option<(u64, Mt19937)> = None;
    for case in cases(&all, "shuffle") {
        let seed = uint(&case["seed"]);
        let fresh = Mt19937::new(u32::try_from(seed).unwrap());
        let (_, random) = state.take_if(|(s, _)| *s == seed).map_or((seed, fresh), |kept| kept);
        let random = &mut state.insert((seed, random)).1;
        let mut values: Vec<u64> = (0..uint(&case["n"])).collect();
        random.shuffle(&mut values);
        assert_eq!(values, list(&case["result"], uint), "seed {seed}");
    }
    for case in cases(&all, "split") {
        let shares = parse_split(text(&case["split"])).unwrap();
        assert_eq!(shares.to_vec(), list(&case["normalised"], float));
        let matrix = split_matrix(&shares).map(|f| f.map(|(a, b)| vec![a, b]));
        let theirs = list(&case["matrix"], |r| r.is_array().then(|| list(r, float)));
        assert_eq!(matrix.to_vec(), theirs);
    }
}

/// Tensors of a safetensors file, widened.
struct Tensors(Vec<u8>);

impl Tensors {
    fn open(file: &str) -> Self {
        Self(std::fs::read(golden("data").join(file)).unwrap())
    }

    fn raw<const N: usize>(&self, name: &str) -> Vec<[u8; N]> {
        let all = SafeTensors::deserialize(&self.0).unwrap();
        let data = all.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}")).data().to_vec();
        data.as_chunks::<N>().0.to_vec()
    }

    fn ints(&self, name: &str) -> Vec<i64> {
        self.raw(name).into_iter().map(i64::from_le_bytes).collect()
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        self.raw(name).into_iter().map(f32::from_le_bytes).collect()
    }

    fn names(&self) -> Vec<String> {
        SafeTensors::deserialize(&self.0).unwrap().names().into_iter().map(str::to_owned).collect()
    }
}

fn optional_counts(v: &Value) -> [Option<u64>; 3] {
    list(v, Value::as_u64).try_into().unwrap()
}

/// 1 where token i does not see j.
fn mask(starts: &[usize], seq: usize) -> Vec<u8> {
    let segment = |i: usize| starts.iter().filter(|&&s| s <= i).count();
    let hidden = |i, j| u8::from(j > i || segment(i) != segment(j));
    (0..seq).flat_map(|i| (0..seq).map(move |j| (i, j))).map(|(i, j)| hidden(i, j)).collect()
}

#[test]
fn golden_data_gpt() {
    let tensors = Tensors::open("gpt.safetensors");
    let mut used = Vec::new();
    for case in cases(&json("data", "gpt.json"), "cases") {
        let seq = uint(&case["seq"]) as usize;
        let config = GptConfig {
            eod: case["eod"].as_i64(),
            reset_position_ids: flag(&case["reset_position_ids"]),
            reset_attention_mask: flag(&case["reset_attention_mask"]),
            eod_mask_loss: flag(&case["eod_mask_loss"]),
            drop_last_partial_validation: flag(&case["drop_last"]),
            extra_token: flag(&case["extra"]),
            ..GptConfig::new(seq, uint(&case["seed"]) as u32, 1 << 20)
        };
        let shares = parse_split(text(&case["split"])).unwrap();
        let data = Arc::new(IndexedDataset::open(prefix(text(&case["data"]))).unwrap());
        let samples = optional_counts(&case["samples"]);
        let built = GptDataset::splits(prefix(text(&case["data"])), &shares, samples, &config).unwrap();
        for (k, theirs) in case["splits"].as_array().unwrap().iter().enumerate() {
            let Some(ours) = &built[k] else {
                assert!(theirs.is_null());
                continue;
            };
            let name = format!("{}/{}", text(&case["name"]), text(&theirs["name"]));
            assert_eq!(text(&theirs["name"]), Split::ALL[k].name());
            let range = split_range(split_matrix(&shares)[k].unwrap(), data.len());
            assert_eq!((range.start, range.len()), {
                (uint(&theirs["first"]) as usize, uint(&theirs["documents"]) as usize)
            });
            let mut ints = |part: &str| {
                used.push(format!("{name}/{part}"));
                tensors.ints(&format!("{name}/{part}"))
            };
            let index = ours.index();
            assert_eq!(ours.samples(), uint(&theirs["length"]), "{name}");
            let widen = |v: &[u32]| v.iter().map(|&x| i64::from(x)).collect::<Vec<_>>();
            assert_eq!(widen(&index.documents), ints("document_index"), "{name}");
            assert_eq!(widen(index.starts.as_flattened()), ints("sample_index"), "{name}");
            assert_eq!(widen(&index.shuffle), ints("shuffle_index"), "{name}");
            let ids = list(&theirs["sample_ids"], uint);
            let items: Vec<_> = ids.iter().map(|&n| ours.item(n).unwrap()).collect();
            let join = |f: &dyn Fn(&gpt::GptItem) -> Vec<i64>| items.iter().flat_map(f).collect::<Vec<_>>();
            assert_eq!(join(&|i| i.tokens.clone()), ints("tokens"), "{name}");
            assert_eq!(join(&|i| i.labels.clone()), ints("labels"), "{name}");
            assert_eq!(join(&|i| i.position_ids.clone()), ints("position_ids"), "{name}");
            let loss: Vec<f32> = items.iter().flat_map(|i| i.loss_mask.clone()).collect();
            used.push(format!("{name}/loss_mask"));
            assert_eq!(loss, tensors.floats(&format!("{name}/loss_mask")), "{name}");
            if config.reset_attention_mask {
                let ours: Vec<u8> = items.iter().take(4).flat_map(|i| mask(&i.starts, seq)).collect();
                used.push(format!("{name}/attention_mask_first4"));
                assert_eq!(ours, tensors.raw::<1>(used.last().unwrap()).concat(), "{name}");
            }
            check_rows(ours, &ids, &items);
        }
    }
    let forgotten: Vec<String> = tensors.names().into_iter().filter(|n| !used.contains(n)).collect();
    assert!(forgotten.is_empty(), "never compared: {forgotten:?}");
}

/// Batches say the same as items.
fn check_rows(source: &GptDataset, ids: &[u64], items: &[gpt::GptItem]) {
    for (&n, item) in ids.iter().zip(items) {
        let batch = source.batch(n, 1).unwrap();
        for i in 0..source.seq() {
            assert_eq!(i64::from(batch.tokens[i]), item.tokens[i]);
            assert_eq!(i64::from(batch.positions[i]), item.position_ids[i]);
            let label = if item.loss_mask[i] == 0.0 { i64::from(IGNORE) } else { item.labels[i] };
            assert_eq!(i64::from(batch.labels[i]), label);
        }
        match batch.cu_seqlens {
            Some(cu) => {
                let starts: Vec<i32> = item.starts.iter().map(|&s| s as i32).collect();
                assert_eq!(cu, [&starts[..], &[source.seq() as i32]].concat());
            }
            None => assert_eq!(item.starts, [0]),
        }
    }
}

#[test]
fn golden_data_blend() {
    let tensors = Tensors::open("blend.safetensors");
    let check = |name: &str, index: &BlendIndex| {
        let members: Vec<i64> = index.member.iter().map(|&m| i64::from(m)).collect();
        let samples: Vec<i64> = index.sample.iter().map(|&s| s as i64).collect();
        assert_eq!(members, tensors.ints(&format!("{name}/dataset_index")), "{name}");
        assert_eq!(samples, tensors.ints(&format!("{name}/dataset_sample_index")), "{name}");
    };
    for case in cases(&json("data", "blend.json"), "cases") {
        let name = text(&case["name"]);
        match text(&case["kind"]) {
            "weights" => {
                let weights = normalise(&list(&case["weights"], float)).unwrap();
                assert_eq!(weights, list(&case["normalised"], float));
                check(name, &BlendIndex::weighted(&weights, uint(&case["size"])).unwrap());
            }
            "exhaustive" => {
                let index = BlendIndex::exhaustive(&list(&case["sizes"], uint)).unwrap();
                assert_eq!(index.member.len() as u64, uint(&case["size"]));
                check(name, &index);
            }
            "gpt_blend" => {
                assert_eq!(float(&case["mid_level_dataset_surplus"]), SURPLUS);
                let prefixes = list(&case["data"], |d| prefix(text(d)));
                let weights = case["weights"].is_array().then(|| list(&case["weights"], float));
                let shares = parse_split(text(&case["split"])).unwrap();
                let samples = optional_counts(&case["samples"]);
                let config = GptConfig::new(uint(&case["seq"]) as usize, uint(&case["seed"]) as u32, 1 << 20);
                let built = Blend::gpt(&prefixes, weights.as_deref(), &shares, samples, &config).unwrap();
                for (k, theirs) in case["splits"].as_array().unwrap().iter().enumerate() {
                    let Some(blend) = &built[k] else {
                        assert!(theirs.is_null());
                        continue;
                    };
                    let name = format!("{name}/{}", text(&theirs["name"]));
                    assert_eq!(blend.samples(), uint(&theirs["length"]), "{name}");
                    let lengths: Vec<u64> = blend.members().iter().map(|m| m.samples()).collect();
                    assert_eq!(lengths, list(&theirs["member_lengths"], uint), "{name}");
                    if let (Some(w), Some(target)) = (&weights, samples[k]) {
                        let asked = member_samples(&normalise(w).unwrap(), target, SURPLUS);
                        assert_eq!(asked, list(&theirs["member_num_samples"], uint), "{name}");
                    }
                    check(&name, blend.index());
                    let first = blend.batch(0, blend.samples().min(16) as usize).unwrap();
                    let tokens: Vec<i64> = first.tokens.iter().map(|&t| i64::from(t)).collect();
                    assert_eq!(tokens, tensors.ints(&format!("{name}/tokens")), "{name}");
                }
            }
            other => panic!("unknown kind {other}"),
        }
    }
}

#[test]
fn golden_data_samplers() {
    for case in cases(&json("data", "samplers.json"), "cases") {
        let (total, ranks) = (uint(&case["total"]), uint(&case["dp"]));
        assert_eq!(case["ranks"].as_array().unwrap().len() as u64, ranks);
        for rank in 0..ranks {
            let ours: Vec<Vec<u64>> = match text(&case["kind"]) {
                "single" => {
                    let micro_batch = uint(&case["micro_batch"]);
                    let drop_last = flag(&case["drop_last"]);
                    let sampler = Sequential { total, micro_batch, ranks, drop_last };
                    let starts = (uint(&case["consumed"])..).step_by((micro_batch * ranks) as usize);
                    starts.map_while(|n| sampler.micro_batch(n, rank)).map(Vec::from_iter).collect()
                }
                "cyclic" => {
                    let micro_batch = uint(&case["micro_batch"]);
                    let sampler = Cyclic { total, micro_batch, ranks, sharded: flag(&case["data_sharding"]) };
                    sampler.rest_of_epoch(uint(&case["consumed"]), rank).unwrap()
                }
                "full_validation" => full_validation(total, ranks, rank).map(|n| vec![n]).collect(),
                other => panic!("unknown kind {other}"),
            };
            let theirs = list(&case["ranks"][rank as usize], |b| list(b, uint));
            assert_eq!(ours, theirs, "{} rank {rank}", case["kind"]);
        }
    }
}
