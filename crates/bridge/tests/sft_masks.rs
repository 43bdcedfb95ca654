//! Tokens and loss masks of conversations, compared with those of transformers (`scripts/sft_masks.py`).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests are tests too

use ferrotron_bridge::Tokenizer;
use ferrotron_bridge::chat_encoder::ChatEncoder;
use ferrotron_core::data::{Encode, Span};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/sft_masks")
}

/// FNV-1a over ids as little-endian bytes.
fn fnv(ids: impl Iterator<Item = u32>) -> String {
    let hash = |h: u64, byte: u8| (h ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    format!("{:016x}", ids.flat_map(u32::to_le_bytes).fold(0xcbf2_9ce4_8422_2325, hash))
}

/// Lengths of spans, the first without a loss.
fn runs(spans: &[Span]) -> Vec<u64> {
    let first = spans.first().is_some_and(|s| s.loss).then_some(0);
    first.into_iter().chain(spans.iter().map(|s| s.tokens.len() as u64)).collect()
}

/// Encodes every conversation with the templates, after `change` has seen them; returns how many there were and which differ.
fn differing(change: impl Fn(&str) -> String) -> (usize, Vec<(String, String)>) {
    let scratch = tempfile::tempdir().unwrap();
    let mut tokenizers = BTreeMap::new();
    for kind in ["bytes", "pieces"] {
        tokenizers.insert(kind.to_string(), Tokenizer::from_dir(&folder().join(kind)).unwrap());
    }
    let mut encoders = BTreeMap::new();
    let lines = std::fs::read_to_string(folder().join("conversations.jsonl")).unwrap();
    let mut wrong = Vec::new();
    for line in lines.lines() {
        let record: Value = serde_json::from_str(line).unwrap();
        let want = &record["want"];
        let text = |key: &str| want[key].as_str().unwrap().to_string();
        let (name, kind) = (text("template"), text("tokenizer"));
        let encoder = encoders.entry(name.clone()).or_insert_with(|| {
            let file = format!("{name}.jinja");
            let source = std::fs::read_to_string(folder().join("templates").join(&file)).unwrap();
            let path = scratch.path().join(&file);
            std::fs::write(&path, change(&source)).unwrap();
            let dir = folder().join(&kind);
            ChatEncoder::new(&tokenizers[&kind], Some(&dir), path.to_str()).unwrap()
        });
        let mask: Vec<u64> = serde_json::from_value(want["mask"].clone()).unwrap();
        match encoder.conversation(line) {
            Err(e) => wrong.push((name, e)),
            Ok(spans) => {
                let ids = fnv(spans.iter().flat_map(|s| s.tokens.iter().copied()));
                let mut got = runs(&spans);
                // Both may or may not spell out an empty last run.
                got.retain(|n| *n > 0 || got_is_first(n, &spans));
                if ids != text("fnv") {
                    wrong.push((name, format!("other ids: {line}")));
                } else if got != mask {
                    wrong.push((name, format!("{got:?} instead of {mask:?}: {line}")));
                }
            }
        }
    }
    (lines.lines().count(), wrong)
}

fn got_is_first(n: &u64, spans: &[Span]) -> bool {
    *n == 0 && spans.first().is_some_and(|s| s.loss)
}

fn report(wrong: &[(String, String)]) -> String {
    let mut by_template: BTreeMap<&str, usize> = BTreeMap::new();
    wrong.iter().for_each(|(name, _)| *by_template.entry(name).or_default() += 1);
    format!("{by_template:?}; first: {:?}", wrong.first())
}

#[test]
fn masks_by_generation_blocks_equal_those_of_transformers() {
    let (count, wrong) = differing(str::to_string);
    println!("{} of {count} conversations have the ids and masks of transformers", count - wrong.len());
    assert!(count == 500 && wrong.is_empty(), "{}", report(&wrong));
}

/// Without its `{% generation %}` tags a template gives the same masks, by rendering the beginnings of the conversation.
#[test]
fn masks_by_prefixes_equal_those_by_generation_blocks() {
    let (count, wrong) = differing(|source| {
        let plain = source.replace("endgeneration", "endif").replace("generation %}", "if true %}");
        let plain = plain.replace("generation -%}", "if true -%}");
        assert!(!plain.replace("add_generation_prompt", "").contains("generation"));
        plain
    });
    println!("{} of {count} conversations have the same masks by prefixes", count - wrong.len());
    assert!(count == 500 && wrong.is_empty(), "{}", report(&wrong));
}
