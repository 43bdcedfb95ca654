//! The files of golden vectors, and what counts as equal to them.

use ferrotron_tensor::DType;
use ferrotron_tensor::fp8::{E4m3, E5m2};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::PathBuf;

fn file(name: &str) -> Vec<u8> {
    let root = std::env::var_os("FERROTRON_GOLDEN").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden")),
        PathBuf::from,
    );
    let path = root.join("fp8").join(name);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

pub fn json(name: &str) -> Value {
    serde_json::from_slice(&file(name)).unwrap()
}

/// Tensors of a file; what no test has asked for in the end is a failure.
pub struct Tensors {
    bytes: Vec<u8>,
    open: std::cell::RefCell<BTreeSet<String>>,
}

impl Tensors {
    pub fn read(name: &str) -> Tensors {
        let bytes = file(name);
        let names: BTreeSet<String> =
            SafeTensors::deserialize(&bytes).unwrap().names().iter().map(|s| s.to_string()).collect();
        assert!(!names.is_empty(), "{name} is empty");
        Tensors { bytes, open: names.into() }
    }

    pub fn get(&self, name: &str) -> Option<(Dtype, Vec<usize>, Vec<u8>)> {
        let all = SafeTensors::deserialize(&self.bytes).unwrap();
        let t = all.tensor(name).ok()?;
        self.open.borrow_mut().remove(name);
        Some((t.dtype(), t.shape().to_vec(), t.data().to_vec()))
    }

    pub fn u8(&self, name: &str) -> Option<Vec<u8>> {
        let (dtype, _, data) = self.get(name)?;
        assert_eq!(dtype, Dtype::U8, "{name}");
        Some(data)
    }

    pub fn f32(&self, name: &str) -> Option<Vec<f32>> {
        let (dtype, _, data) = self.get(name)?;
        assert_eq!(dtype, Dtype::F32, "{name}");
        Some(data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
    }

    /// Tensor names that no one has asked for, under a folder.
    pub fn left(&self, under: &str) -> Vec<String> {
        self.open.borrow().iter().filter(|n| n.starts_with(under)).cloned().collect()
    }

    pub fn all_known(&self) {
        assert_eq!(self.left(""), Vec::<String>::new(), "unknown tensors");
    }
}

pub fn format_of(name: &str) -> DType {
    match name {
        "e4m3" => DType::E4M3,
        "e5m2" => DType::E5M2,
        other => panic!("unknown format {other}"),
    }
}

fn nan(format: DType, code: u8) -> bool {
    if format == DType::E4M3 { E4m3(code).decode().is_nan() } else { E5m2(code).decode().is_nan() }
}

pub fn same_codes(what: &str, format: DType, ours: &[u8], wanted: &[u8]) {
    assert_eq!(ours.len(), wanted.len(), "{what}");
    for (i, (o, w)) in ours.iter().zip(wanted).enumerate() {
        assert!(o == w || (nan(format, *o) && nan(format, *w)), "{what}[{i}]: {o:#x} instead of {w:#x}");
    }
}

/// Equal bits, or within `ulps`; NaN is NaN.
pub fn same(what: &str, ours: &[f32], wanted: &[f32], ulps: u32) {
    assert_eq!(ours.len(), wanted.len(), "{what}");
    for (i, (o, w)) in ours.iter().zip(wanted).enumerate() {
        let near = o.to_bits().abs_diff(w.to_bits()) <= ulps || (o.is_nan() && w.is_nan());
        assert!(near, "{what}[{i}]: {o:e} instead of {w:e}");
    }
}
