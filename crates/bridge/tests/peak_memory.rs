//! Reading and writing hold one tensor in memory, not the model. In a test executable of its own, because the peak is
//! the process's.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests are tests too
#![cfg(target_os = "linux")]

use ferrotron_bridge::{ExportOptions, HfCheckpoint, HfConfig, TensorData, export};
use ferrotron_core::model::config::ModelConfig;
use ferrotron_tensor::DType;

/// Peak resident memory so far, in bytes.
fn peak() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
}

#[test]
fn peak_is_one_tensor() {
    let mut model = ModelConfig::preset("tiny").unwrap();
    (model.hidden, model.ffn, model.vocab, model.tied) = (512, 8192, 32_768, false);
    let largest = model.vocab * model.hidden * 4;
    let config = HfConfig::from_model(&model, DType::F32).unwrap();
    let shapes: std::collections::HashMap<_, _> =
        ferrotron_bridge::logical_tensors(&model).into_iter().map(|t| (t.name, t.shape)).collect();
    let out = tempfile::tempdir().unwrap();
    let before = peak();
    let zeros = |n: &str| {
        let bytes = vec![1; shapes[n].iter().product::<usize>() * 4];
        Ok(TensorData { dtype: DType::F32, bytes })
    };
    let to = out.path().join("a");
    let options = ExportOptions { max_shard_bytes: 100_000_000, ..Default::default() };
    let done = export(&to, &config, &zeros, &options).unwrap();
    assert!(done.files.len() > 1 && done.tensor_bytes > 4 * largest as u64);
    let plan = HfCheckpoint::open(&to).unwrap();
    for t in plan.tensors() {
        assert_eq!(
            plan.read(&t.name, DType::BF16).unwrap().len() * 2,
            shapes[&t.name].iter().product::<usize>() * 4
        );
    }
    let source = |n: &str| Ok(TensorData { dtype: DType::F32, bytes: plan.read(n, DType::F32)? });
    let options = ExportOptions { reference: Some(&plan), dtype: Some(DType::BF16), ..Default::default() };
    export(&out.path().join("b"), &config, &source, &options).unwrap();
    let grown = peak() - before;
    assert!(grown < largest + (24 << 20), "{grown} bytes for a largest tensor of {largest}");
}
