//! Reading golden vectors: `FERROTRON_GOLDEN`, or `tests/golden` of the repository.

use ferrotron_tensor::bf16;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::path::PathBuf;

pub fn folder(area: &str) -> PathBuf {
    let root = std::env::var_os("FERROTRON_GOLDEN").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden")),
        PathBuf::from,
    );
    root.join(area)
}

/// One JSON file and its tensors.
pub struct Golden {
    pub json: Value,
    bytes: Vec<u8>,
}

impl Golden {
    pub fn open(area: &str, name: &str) -> Golden {
        let at = folder(area).join(name);
        let read = |ext: &str| {
            let path = at.with_extension(ext);
            std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
        };
        let json: Value = serde_json::from_slice(&read("json")).unwrap();
        Golden { json, bytes: read("safetensors") }
    }

    pub fn cases(&self) -> &Vec<Value> {
        let cases = self.json["cases"].as_array().expect("cases");
        assert!(!cases.is_empty(), "no cases");
        cases
    }

    fn data(&self, name: &str, dtype: Dtype) -> Vec<u8> {
        let tensors = SafeTensors::deserialize(&self.bytes).unwrap();
        let tensor = tensors.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(tensor.dtype(), dtype, "{name}");
        tensor.data().to_vec()
    }

    pub fn dtype(&self, name: &str) -> Dtype {
        SafeTensors::deserialize(&self.bytes)
            .unwrap()
            .tensor(name)
            .unwrap_or_else(|e| panic!("{name}: {e}"))
            .dtype()
    }

    pub fn shape(&self, name: &str) -> Vec<usize> {
        SafeTensors::deserialize(&self.bytes).unwrap().tensor(name).unwrap().shape().to_vec()
    }

    pub fn f32(&self, name: &str) -> Vec<f32> {
        let data = self.data(name, Dtype::F32);
        data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }

    pub fn f64(&self, name: &str) -> Vec<f64> {
        let data = self.data(name, Dtype::F64);
        data.as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b)).collect()
    }

    pub fn u8(&self, name: &str) -> Vec<u8> {
        self.data(name, Dtype::U8)
    }

    pub fn bf16(&self, name: &str) -> Vec<bf16> {
        let data = self.data(name, Dtype::BF16);
        data.as_chunks::<2>().0.iter().map(|b| bf16::from_bits(u16::from_le_bytes(*b))).collect()
    }

    pub fn i16(&self, name: &str) -> Vec<i16> {
        let data = self.data(name, Dtype::I16);
        data.as_chunks::<2>().0.iter().map(|b| i16::from_le_bytes(*b)).collect()
    }

    pub fn i64(&self, name: &str) -> Vec<i64> {
        let data = self.data(name, Dtype::I64);
        data.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect()
    }
}

pub fn text<'a>(case: &'a Value, key: &str) -> &'a str {
    case[key].as_str().unwrap_or_else(|| panic!("{key} of {case}"))
}

pub fn number(case: &Value, key: &str) -> f64 {
    case[key].as_f64().unwrap_or_else(|| panic!("{key} of {case}"))
}

pub fn count(case: &Value, key: &str) -> usize {
    case[key].as_u64().unwrap_or_else(|| panic!("{key} of {case}")) as usize
}

/// Units in the last place of bf16 between two values of one sign.
pub fn bf16_ulps(a: bf16, b: bf16) -> u32 {
    let order = |x: bf16| {
        let bits = i32::from(x.to_bits());
        if bits & 0x8000 != 0 { -(bits & 0x7fff) } else { bits }
    };
    order(a).abs_diff(order(b))
}
