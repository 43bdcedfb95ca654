//! Comparison of two checkpoints.

use super::{Loaded, load};
use crate::error::Result;
use crate::tensorfile::{FileDType, TensorDecl};
use ferrotron_tensor::{
    Float, bf16, f16,
    fp8::{E4m3, E5m2},
};
use serde_json::Value;
use std::path::Path;

/// The result of [`compare`]; both lists are empty if the checkpoints are equal.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Comparison {
    /// Tensors that differ, by name.
    pub tensors: Vec<Difference>,
    /// JSON pointers to state that differs (`/data/position`); `step` if the steps differ.
    pub state: Vec<String>,
}

/// A tensor that differs.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// Its name.
    pub name: String,
    /// How it differs.
    pub kind: DifferenceKind,
}

/// How a tensor differs.
#[derive(Clone, Debug, PartialEq)]
pub enum DifferenceKind {
    /// Only the first checkpoint has it.
    OnlyFirst,
    /// Only the second checkpoint has it.
    OnlySecond,
    /// Different element type or shape: first, then second.
    Form(String, String),
    /// Same element type and shape, different bits.
    Values {
        /// Number of elements whose bits differ.
        count: u64,
        /// Largest |a − b|; infinite if exactly one is NaN. 0 means that only signs of zero or bits of NaN differ.
        max_abs: f64,
        /// Index of the largest difference, in elements (row-major).
        at: u64,
    },
}

impl Comparison {
    /// True if both checkpoints are equal.
    pub fn same(&self) -> bool {
        self.tensors.is_empty() && self.state.is_empty()
    }
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = &self.name;
        match &self.kind {
            DifferenceKind::OnlyFirst => write!(f, "{name}: only in the first"),
            DifferenceKind::OnlySecond => write!(f, "{name}: only in the second"),
            DifferenceKind::Form(a, b) => write!(f, "{name}: {a} in the first, {b} in the second"),
            DifferenceKind::Values { count, max_abs, at } => {
                write!(f, "{name}: {count} elements differ, by at most {max_abs:e} (element {at})")
            }
        }
    }
}

/// Compares two checkpoint folders bit by bit. Both are fully checked first; memory use is two small buffers.
pub fn compare(a: &Path, b: &Path) -> Result<Comparison> {
    let (a, b) = (load(a)?, load(b)?);
    let mut out = Comparison::default();
    if a.step() != b.step() {
        out.state.push("step".into());
    }
    compare_json(a.state(), b.state(), "", &mut out.state);
    for ta in a.tensors() {
        let kind = match b.get(&ta.name) {
            None => Some(DifferenceKind::OnlyFirst),
            Some(tb) if (ta.dtype, &ta.shape) != (tb.dtype, &tb.shape) => {
                Some(DifferenceKind::Form(form(ta), form(tb)))
            }
            Some(_) => compare_values(&a, &b, ta)?,
        };
        out.tensors.extend(kind.map(|kind| Difference { name: ta.name.clone(), kind }));
    }
    let only_second = b.tensors().filter(|t| a.get(&t.name).is_none());
    out.tensors
        .extend(only_second.map(|t| Difference { name: t.name.clone(), kind: DifferenceKind::OnlySecond }));
    out.tensors.sort_by(|x, y| x.name.cmp(&y.name));
    Ok(out)
}

fn form(t: &TensorDecl) -> String {
    format!("{} {:?}", t.dtype, t.shape)
}

fn compare_values(a: &Loaded, b: &Loaded, info: &TensorDecl) -> Result<Option<DifferenceKind>> {
    const PIECE: u64 = 1 << 20; // a multiple of every element size
    let (mut xs, mut ys) = (vec![0u8; PIECE as usize], vec![0u8; PIECE as usize]);
    let width = usize::try_from(info.dtype.bits() / 8).unwrap_or(1).max(1);
    let (mut count, mut max_abs, mut at) = (0u64, 0f64, 0u64);
    let mut start = 0;
    while start < info.bytes() {
        let n = (info.bytes() - start).min(PIECE) as usize;
        a.read_range(&info.name, start, &mut xs[..n])?;
        b.read_range(&info.name, start, &mut ys[..n])?;
        if xs[..n] != ys[..n] {
            let pairs = xs[..n].chunks_exact(width).zip(ys[..n].chunks_exact(width));
            for (i, (x, y)) in pairs.enumerate().filter(|(_, (x, y))| x != y) {
                let diff = distance(info.dtype, x, y);
                if count == 0 || diff > max_abs {
                    (max_abs, at) = (diff, start / width as u64 + i as u64);
                }
                count += 1;
            }
        }
        start += n as u64;
    }
    Ok((count > 0).then_some(DifferenceKind::Values { count, max_abs, at }))
}

/// |x − y| of two elements given as little-endian bytes.
fn distance(dtype: FileDType, x: &[u8], y: &[u8]) -> f64 {
    if let (FileDType::I64, Ok(x), Ok(y)) = (dtype, x.try_into(), y.try_into()) {
        // In f64, large neighbouring integers would look equal.
        return (i128::from(i64::from_le_bytes(x)) - i128::from(i64::from_le_bytes(y))).unsigned_abs() as f64;
    }
    let (x, y) = (value(dtype, x), value(dtype, y));
    match (x.is_nan(), y.is_nan()) {
        (true, true) => 0.0,
        (true, false) | (false, true) => f64::INFINITY,
        _ => (x - y).abs(),
    }
}

fn value(dtype: FileDType, bytes: &[u8]) -> f64 {
    let mut word = [0u8; 8];
    word[..bytes.len().min(8)].copy_from_slice(&bytes[..bytes.len().min(8)]);
    let bits = u64::from_le_bytes(word);
    match dtype {
        FileDType::F64 => f64::from_bits(bits),
        FileDType::F32 => f64::from(f32::from_bits(bits as u32)),
        FileDType::BF16 => Float::to_f64(bf16::from_bits(bits as u16)),
        FileDType::F16 => Float::to_f64(f16::from_bits(bits as u16)),
        FileDType::E4M3 => Float::to_f64(E4m3(bits as u8)),
        FileDType::E5M2 => Float::to_f64(E5m2(bits as u8)),
        FileDType::I32 => f64::from(bits as i32),
        // Bytes and booleans; no wider unsigned type is written to checkpoints.
        _ => bits as f64,
    }
}

fn compare_json(a: &Value, b: &Value, at: &str, out: &mut Vec<String>) {
    match (a, b) {
        (Value::Object(x), Value::Object(y)) => {
            let keys: std::collections::BTreeSet<&String> = x.keys().chain(y.keys()).collect();
            for key in keys {
                let place = format!("{at}/{}", key.replace('~', "~0").replace('/', "~1"));
                match (x.get(key), y.get(key)) {
                    (Some(x), Some(y)) => compare_json(x, y, &place, out),
                    _ => out.push(place),
                }
            }
        }
        (Value::Array(x), Value::Array(y)) if x.len() == y.len() => {
            for (i, (x, y)) in x.iter().zip(y).enumerate() {
                compare_json(x, y, &format!("{at}/{i}"), out);
            }
        }
        _ if a == b => {}
        _ => out.push(if at.is_empty() { "/".into() } else { at.into() }),
    }
}
