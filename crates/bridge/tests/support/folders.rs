//! Folders of models and runs, file by file.
#![allow(dead_code)]

use super::golden;
use ferrotron_bridge::{HfCheckpoint, byte_tokenizer_json};
use ferrotron_core::checkpoint::{Item, Saver, Snapshot};
use ferrotron_core::train::{CHECKPOINTS, weights_only};
use ferrotron_tensor::DType;
use serde_json::{Value, json};
use std::path::Path;

/// A folder with these files; values that are no strings are written as JSON.
pub fn folder(files: &[(&str, Value)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), files);
    dir
}

pub fn write(dir: &Path, files: &[(&str, Value)]) {
    for (name, content) in files {
        let path = dir.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content.as_str().map_or_else(|| content.to_string(), String::from)).unwrap();
    }
}

pub fn plain() -> Value {
    json!({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]})
}

/// A template that prints its name, then the contents.
pub fn named(name: &str) -> String {
    format!("{name}:{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}")
}

/// A tokenizer of bytes and `<|end|>` (256).
pub fn tokenizer() -> Value {
    let mut file: Value = serde_json::from_str(&byte_tokenizer_json()).unwrap();
    file["added_tokens"] = json!([{"id": 256, "content": "<|end|>", "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false, "special": true}]);
    file
}

/// A run with a checkpoint of the golden Qwen2, and this configuration.
pub fn run(dir: &Path, config: &str) {
    let model = HfCheckpoint::open(&golden::fixture("qwen2")).unwrap();
    let item = |t: &ferrotron_bridge::LogicalTensor| {
        Item::whole(
            &format!("model/{}", t.name),
            DType::F32,
            t.shape.clone(),
            model.read(&t.name, DType::F32).unwrap(),
        )
    };
    let items = model.tensors().iter().map(item).collect();
    let state = weights_only(model.config().model()).unwrap();
    let mut saver = Saver::new(&dir.join(CHECKPOINTS), None).unwrap();
    saver.save(Snapshot { step: 1, state, items }).unwrap();
    saver.finish().unwrap();
    std::fs::write(dir.join("config.toml"), config).unwrap();
}
