//! Datasets, shuffles, splits, blends and samplers against golden vectors of Megatron Core (area `data`).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // clippy takes helpers of tests for production

#[path = "../../../tests/support/golden.rs"]
mod golden;

use ferrotron_core::config::DataSplit;
use ferrotron_core::data::blend::{BlendIndex, SURPLUS, member_samples};
use ferrotron_core::data::mt19937::Mt19937;
use ferrotron_core::data::sampler::{Cyclic, Sequential, full_validation};
use ferrotron_core::data::split::{normalize, split_matrix, split_range};
use ferrotron_core::data::*;
use golden::{Area, Tensors, as_count, count, flag, flag_or, list, number_or, numbers, only_keys, text};
use serde_json::Value;
use std::sync::Arc;

const FILES: [&str; 7] = [
    "indexed.json",
    "shuffle_split.json",
    "gpt.json",
    "gpt.safetensors",
    "blend.json",
    "blend.safetensors",
    "samplers.json",
];

/// The area in every set that has the file; no set with it is a failure.
fn areas(file: &str) -> Vec<Area> {
    let mut areas = Area::all("data");
    areas.retain(|area| area.has(file));
    assert!(!areas.is_empty(), "no set has data/{file}");
    areas
}

/// Shares of training, validation and test data as a run gets them from `data.split`.
fn shares_of(split: &str) -> [f64; 3] {
    let split: DataSplit = toml::Value::from(split).try_into().unwrap();
    normalize(&split.0).unwrap().try_into().unwrap()
}

fn uint(v: &Value) -> u64 {
    as_count(v).unwrap_or_else(|| panic!("{v} is not a count")) as u64
}

fn ints(v: &Value) -> Vec<i64> {
    v.as_array().unwrap_or_else(|| panic!("{v} is not a list")).iter().map(|x| x.as_i64().unwrap()).collect()
}

fn uints(case: &Value, key: &str) -> Vec<u64> {
    list(case, key).iter().map(uint).collect()
}

#[test]
fn golden_data_files() {
    for area in Area::all("data") {
        assert!(!area.present(&FILES).is_empty(), "{}/data has no cases", area.set);
        let indexed = if area.has("indexed.json") { area.json("indexed.json") } else { Value::Null };
        let pairs: Vec<&str> = list(&indexed, "cases").iter().map(|c| text(c, "name")).collect();
        area.known_files(|file| {
            let stem = file.strip_suffix(".bin").or(file.strip_suffix(".idx"));
            FILES.contains(&file) || stem.is_some_and(|stem| pairs.contains(&stem))
        });
    }
}

#[test]
fn golden_data_indexed() {
    for area in areas("indexed.json") {
        let json = area.json("indexed.json");
        only_keys("indexed.json", &json, &["producer", "cases"]);
        let mut report = area.report();
        for case in list(&json, "cases") {
            report.case(&format!("indexed {}", text(case, "name")), || indexed(&area, case));
        }
        report.finish();
    }
}

/// Reads a pair of files, and writes it again byte for byte.
fn indexed(area: &Area, case: &Value) {
    let name = text(case, "name");
    let known =
        ["name", "dtype", "dtype_code", "documents", "modes", "merged_from", "bin_bytes", "idx_bytes"];
    only_keys(name, case, &known);
    let kind = TokenType::from_code(count(case, "dtype_code") as u8).unwrap();
    assert_eq!(kind.name(), text(case, "dtype"));
    let modes = case["modes"].as_array();
    let data = IndexedDataset::open(area.dir.join(name)).unwrap();
    assert_eq!(data.token_type(), kind);
    assert_eq!(data.is_multimodal(), modes.is_some());
    let out = tempfile::tempdir().unwrap();
    let mut writer = IndexedWriter::create(out.path().join(name), kind, modes.is_some()).unwrap();
    if case["merged_from"].is_array() {
        let parts: Vec<IndexedDataset> = list(case, "merged_from")
            .iter()
            .map(|part| IndexedDataset::open(area.dir.join(part.as_str().unwrap())).unwrap())
            .collect();
        parts.iter().for_each(|p| writer.append(p).unwrap());
        let expected = parts.iter().flat_map(|p| (0..p.len()).map(|s| p.bytes(s).unwrap()));
        let found = (0..data.len()).map(|s| data.bytes(s).unwrap());
        assert!(found.eq(expected), "sequences differ");
        assert_eq!(data.documents(), parts.iter().map(IndexedDataset::documents).sum::<usize>());
    } else {
        let documents = list(case, "documents");
        assert_eq!(data.documents(), documents.len());
        for (d, document) in documents.iter().enumerate() {
            let sequences = data.document(d).unwrap();
            assert_eq!(sequences.len(), document.as_array().unwrap().len());
            for (k, s) in sequences.enumerate() {
                let mode = modes.map(|m| m[d][k].as_i64().unwrap() as i8);
                assert_eq!(data.mode(s).unwrap(), mode);
                if kind.is_float() {
                    // f32 values are written with enough digits to be those of f32.
                    let wanted: Vec<f64> =
                        document[k].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
                    let rounded = |x: &f64| if kind == TokenType::F32 { f64::from(*x as f32) } else { *x };
                    let stored: Vec<f64> = wanted.iter().map(rounded).collect();
                    assert_eq!(data.values(s).unwrap(), stored, "sequence {s}");
                    writer.push_values(&wanted, mode.unwrap_or(0)).unwrap();
                } else {
                    let wanted = ints(&document[k]);
                    assert_eq!(data.sequence(s).unwrap(), wanted, "sequence {s}");
                    writer.push(wanted, mode.unwrap_or(0)).unwrap();
                }
            }
            writer.end_document().unwrap();
        }
    }
    writer.finish().unwrap();
    for suffix in ["bin", "idx"] {
        let file = format!("{name}.{suffix}");
        let theirs = std::fs::read(area.dir.join(&file)).unwrap();
        assert_eq!(theirs.len(), count(case, &format!("{suffix}_bytes")), "{file}");
        assert!(std::fs::read(out.path().join(&file)).unwrap() == theirs, "{file} differs");
    }
}

#[test]
fn golden_data_shuffle_and_split() {
    for area in areas("shuffle_split.json") {
        let json = area.json("shuffle_split.json");
        only_keys("shuffle_split.json", &json, &["producer", "shuffle", "split"]);
        let mut report = area.report();
        report.case("shuffle", || {
            // One generator per seed, which goes on from list to list.
            let mut state: Option<(u64, Mt19937)> = None;
            for case in list(&json, "shuffle") {
                only_keys("shuffle", case, &["seed", "n", "result"]);
                let seed = uint(&case["seed"]);
                let fresh = Mt19937::new(u32::try_from(seed).unwrap());
                let (_, random) = state.take_if(|(s, _)| *s == seed).unwrap_or((seed, fresh));
                let random = &mut state.insert((seed, random)).1;
                let mut values: Vec<u64> = (0..uint(&case["n"])).collect();
                random.shuffle(&mut values);
                assert_eq!(values, uints(case, "result"), "seed {seed}");
            }
        });
        for case in list(&json, "split") {
            report.case(&format!("split {}", text(case, "split")), || {
                only_keys("split", case, &["split", "normalised", "matrix"]);
                let shares = shares_of(text(case, "split"));
                assert_eq!(shares.to_vec(), numbers(case, "normalised"));
                let matrix = split_matrix(&shares).map(|f| f.map(|(a, b)| vec![a, b]));
                let floats = |r: &Value| r.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
                let theirs: Vec<Option<Vec<f64>>> =
                    list(case, "matrix").iter().map(|r| r.is_array().then(|| floats(r))).collect();
                assert_eq!(matrix.to_vec(), theirs);
            });
        }
        report.finish();
    }
}

/// Requested samples of the three splits; none: one epoch.
fn requested(case: &Value) -> [Option<u64>; 3] {
    let all: Vec<Option<u64>> = list(case, "samples").iter().map(|v| as_count(v).map(|n| n as u64)).collect();
    all.try_into().unwrap_or_else(|_| panic!("samples is {}", case["samples"]))
}

/// The attention mask `[seq, seq]`: 1 where token i does not see j.
fn mask(starts: &[usize], seq: usize) -> Vec<u8> {
    let segment = |i: usize| starts.iter().filter(|&&s| s <= i).count();
    let hidden = |i, j| u8::from(j > i || segment(i) != segment(j));
    (0..seq).flat_map(|i| (0..seq).map(move |j| (i, j))).map(|(i, j)| hidden(i, j)).collect()
}

#[test]
fn golden_data_gpt() {
    for area in areas("gpt.json") {
        let (json, tensors) = (area.json("gpt.json"), area.tensors("gpt.safetensors"));
        only_keys("gpt.json", &json, &["producer", "cases"]);
        tensors.only_cases(list(&json, "cases"));
        let mut report = area.report();
        for case in list(&json, "cases") {
            let name = text(case, "name");
            report.case(&format!("gpt {name}"), || {
                gpt_dataset(&area, case, &tensors);
                tensors.all_read(&format!("{name}/"));
            });
        }
        report.finish();
    }
}

fn gpt_dataset(area: &Area, case: &Value, tensors: &Tensors) {
    let known = [
        "name",
        "data",
        "seed",
        "seq",
        "split",
        "samples",
        "reset_position_ids",
        "reset_attention_mask",
        "eod_mask_loss",
        "drop_last",
        "extra",
        "eod",
        "splits",
    ];
    only_keys(text(case, "name"), case, &known);
    let seq = count(case, "seq");
    let config = GptConfig {
        eod: case["eod"].as_i64(),
        reset_position_ids: flag(case, "reset_position_ids"),
        reset_attention_mask: flag(case, "reset_attention_mask"),
        eod_mask_loss: flag(case, "eod_mask_loss"),
        drop_last_partial_validation: flag_or(case, "drop_last", true),
        extra_token: flag_or(case, "extra", true),
        ..GptConfig::new(seq, count(case, "seed") as u32, 1 << 20)
    };
    let shares = shares_of(text(case, "split"));
    let prefix = area.dir.join(text(case, "data"));
    let data = Arc::new(IndexedDataset::open(&prefix).unwrap());
    let built = GptDataset::splits(&prefix, &shares, requested(case), &config).unwrap();
    for (k, theirs) in list(case, "splits").iter().enumerate() {
        let Some(ours) = &built[k] else {
            assert!(theirs.is_null(), "split {k} is missing");
            continue;
        };
        only_keys("splits", theirs, &["name", "length", "sample_ids", "documents", "first"]);
        let name = format!("{}/{}", text(case, "name"), text(theirs, "name"));
        assert_eq!(text(theirs, "name"), Split::ALL[k].name());
        let range = split_range(split_matrix(&shares)[k].unwrap(), data.len());
        assert_eq!((range.start, range.len()), (count(theirs, "first"), count(theirs, "documents")));
        let ints = |part: &str| tensors.i64(&format!("{name}/{part}"));
        let index = ours.index();
        assert_eq!(ours.samples(), uint(&theirs["length"]), "{name}");
        let widen = |v: &[u32]| v.iter().map(|&x| i64::from(x)).collect::<Vec<_>>();
        assert_eq!(widen(&index.documents), ints("document_index"), "{name}");
        assert_eq!(widen(index.starts.as_flattened()), ints("sample_index"), "{name}");
        assert_eq!(widen(&index.shuffle), ints("shuffle_index"), "{name}");
        let ids = uints(theirs, "sample_ids");
        let items: Vec<_> = ids.iter().map(|&n| ours.item(n).unwrap()).collect();
        let join = |f: &dyn Fn(&gpt::GptItem) -> Vec<i64>| items.iter().flat_map(f).collect::<Vec<_>>();
        assert_eq!(join(&|i| i.tokens.clone()), ints("tokens"), "{name}");
        assert_eq!(join(&|i| i.labels.clone()), ints("labels"), "{name}");
        assert_eq!(join(&|i| i.position_ids.clone()), ints("position_ids"), "{name}");
        let loss: Vec<f32> = items.iter().flat_map(|i| i.loss_mask.clone()).collect();
        assert_eq!(loss, tensors.f32(&format!("{name}/loss_mask")), "{name}");
        if config.reset_attention_mask {
            let ours: Vec<u8> = items.iter().take(4).flat_map(|i| mask(&i.starts, seq)).collect();
            assert_eq!(ours, tensors.u8(&format!("{name}/attention_mask_first4")), "{name}");
        }
        check_rows(ours, &ids, &items);
    }
}

/// Batches hold the same as items.
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
    for area in areas("blend.json") {
        let (json, tensors) = (area.json("blend.json"), area.tensors("blend.safetensors"));
        only_keys("blend.json", &json, &["producer", "cases"]);
        tensors.only_cases(list(&json, "cases"));
        let mut report = area.report();
        for case in list(&json, "cases") {
            let name = text(case, "name");
            report.case(&format!("blend {name}"), || {
                blend(&area, case, &tensors);
                tensors.all_read(&format!("{name}/"));
            });
        }
        report.finish();
    }
}

fn blend(area: &Area, case: &Value, tensors: &Tensors) {
    let name = text(case, "name");
    let common = ["name", "kind", "weights", "normalised", "size", "sizes"];
    let through_builder = ["data", "samples", "split", "seq", "seed", "splits", "mid_level_dataset_surplus"];
    only_keys(name, case, &[&common[..], &through_builder].concat());
    let check = |name: &str, index: &BlendIndex| {
        let members: Vec<i64> = index.member.iter().map(|&m| i64::from(m)).collect();
        let samples: Vec<i64> = index.sample.iter().map(|&s| s as i64).collect();
        assert_eq!(members, tensors.i64(&format!("{name}/dataset_index")), "{name}");
        assert_eq!(samples, tensors.i64(&format!("{name}/dataset_sample_index")), "{name}");
    };
    match text(case, "kind") {
        "weights" => {
            let weights = normalize(&numbers(case, "weights")).unwrap();
            assert_eq!(weights, numbers(case, "normalised"));
            check(name, &BlendIndex::weighted(&weights, uint(&case["size"])).unwrap());
        }
        "exhaustive" => {
            let index = BlendIndex::exhaustive(&uints(case, "sizes")).unwrap();
            assert!(case["size"].is_null() || index.member.len() == count(case, "size"));
            check(name, &index);
        }
        "gpt_blend" => gpt_blend(area, case, tensors, &check),
        other => panic!("the format has no kind {other}"),
    }
}

fn gpt_blend(area: &Area, case: &Value, tensors: &Tensors, check: &dyn Fn(&str, &BlendIndex)) {
    let surplus = number_or(case, "mid_level_dataset_surplus", SURPLUS);
    let prefixes: Vec<_> = list(case, "data").iter().map(|d| area.dir.join(d.as_str().unwrap())).collect();
    let weights = case["weights"].is_array().then(|| numbers(case, "weights"));
    let shares = shares_of(text(case, "split"));
    let samples = requested(case);
    let config = GptConfig::new(count(case, "seq"), count(case, "seed") as u32, 1 << 20);
    let built = Blend::gpt(&prefixes, weights.as_deref(), &shares, samples, surplus, &config).unwrap();
    for (k, theirs) in list(case, "splits").iter().enumerate() {
        let Some(blend) = &built[k] else {
            assert!(theirs.is_null(), "split {k} is missing");
            continue;
        };
        only_keys("splits", theirs, &["name", "length", "member_lengths", "member_num_samples"]);
        let name = format!("{}/{}", text(case, "name"), text(theirs, "name"));
        assert_eq!(blend.samples(), uint(&theirs["length"]), "{name}");
        let lengths: Vec<u64> = blend.members().iter().map(|m| m.samples()).collect();
        assert_eq!(lengths, uints(theirs, "member_lengths"), "{name}");
        if let (Some(w), Some(target)) = (&weights, samples[k]) {
            let asked = member_samples(&normalize(w).unwrap(), target, surplus);
            assert_eq!(asked, uints(theirs, "member_num_samples"), "{name}");
        }
        check(&name, blend.index());
        let first = blend.batch(0, blend.samples().min(16) as usize).unwrap();
        let tokens: Vec<i64> = first.tokens.iter().map(|&t| i64::from(t)).collect();
        assert_eq!(tokens, tensors.i64(&format!("{name}/tokens")), "{name}");
    }
}

#[test]
fn golden_data_samplers() {
    for area in areas("samplers.json") {
        let json = area.json("samplers.json");
        only_keys("samplers.json", &json, &["producer", "cases"]);
        let mut report = area.report();
        for (i, case) in list(&json, "cases").iter().enumerate() {
            report.case(&format!("samplers {i}"), || samplers(case));
        }
        report.finish();
    }
}

/// The micro-batches of every data-parallel rank.
fn samplers(case: &Value) {
    let known =
        ["name", "kind", "total", "consumed", "micro_batch", "dp", "drop_last", "data_sharding", "ranks"];
    only_keys("samplers", case, &known);
    let (total, ranks) = (uint(&case["total"]), uint(&case["dp"]));
    let consumed = number_or(case, "consumed", 0.0) as u64;
    assert_eq!(list(case, "ranks").len() as u64, ranks);
    for rank in 0..ranks {
        let ours: Vec<Vec<u64>> = match text(case, "kind") {
            "single" => {
                let micro_batch = uint(&case["micro_batch"]);
                let sampler =
                    Sequential { total, micro_batch, ranks, drop_last: flag_or(case, "drop_last", true) };
                let starts = (consumed..).step_by((micro_batch * ranks) as usize);
                starts.map_while(|n| sampler.micro_batch(n, rank)).map(Vec::from_iter).collect()
            }
            "cyclic" => {
                let micro_batch = uint(&case["micro_batch"]);
                let sampler =
                    Cyclic { total, micro_batch, ranks, sharded: flag_or(case, "data_sharding", true) };
                sampler.rest_of_epoch(consumed, rank).unwrap()
            }
            "full_validation" => full_validation(total, ranks, rank).map(|n| vec![n]).collect(),
            other => panic!("the format has no kind {other}"),
        };
        let list_of = |b: &Value| b.as_array().unwrap().iter().map(uint).collect::<Vec<u64>>();
        let theirs: Vec<Vec<u64>> =
            case["ranks"][rank as usize].as_array().unwrap().iter().map(list_of).collect();
        assert_eq!(ours, theirs, "rank {rank}");
    }
}
