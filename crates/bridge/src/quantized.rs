//! Quantized weights: FP8 with a scale per block (DeepSeek-V3), MXFP4 with a power-of-two scale per 32 values
//! (GPT-OSS).

use crate::cast::{cast, is_castable};
use crate::error::{Error, Result};
use crate::expected::HfTensor;
use crate::read_tensor::{BUFFER, ShardTensor, StorageFormat, TensorLocation, file};
use crate::shards::Shards;
use ferrotron_core::tensorfile::{FileDType, TensorInfo};
use ferrotron_tensor::DType;
use ferrotron_tensor::fp8::{E2m1, E4m3, E8m0};
use std::ops::Range;

/// Suffix of the scales of an FP8 tensor.
pub(crate) const SCALE_INV: &str = "_scale_inv";
/// Suffixes of the values and scales of an MXFP4 tensor.
pub(crate) const BLOCKS: &str = "_blocks";
pub(crate) const SCALES: &str = "_scales";
/// Values per MXFP4 scale.
const GROUP: usize = 32;

/// The format of an FP8 tensor with its scales, or what is wrong with them.
pub(crate) fn fp8(
    t: &HfTensor,
    scales: Option<(usize, &TensorInfo)>,
    block: [usize; 2],
) -> std::result::Result<StorageFormat, String> {
    let Some((shard, scales)) = scales else {
        return Err(format!("is F8_E4M3, but there is no {}{SCALE_INV} to scale it by", t.name));
    };
    let (&[rows, cols], 1) = (&t.shape[..], t.parts.len()) else {
        return Err("is F8_E4M3, which is supported for unfused matrices only".into());
    };
    if t.layout.transposed {
        return Err("is F8_E4M3 and stored [in, out], which is not supported".into());
    }
    let wanted = [rows.div_ceil(block[0]), cols.div_ceil(block[1])];
    if scales.shape != wanted {
        return Err(format!(
            "has scales {:?}, but blocks of {}×{} of {rows}×{cols} need {wanted:?}",
            scales.shape, block[0], block[1]
        ));
    }
    match scales.dtype.native().filter(|d| is_castable(*d)) {
        Some(dtype) => {
            Ok(StorageFormat::Fp8 { scales: ShardTensor { shard, name: scales.name.clone() }, dtype, block })
        }
        None => Err(format!("has scales of type {}, which must be F32, BF16 or F16", scales.dtype)),
    }
}

/// The format of an MXFP4 tensor that dequantizes to `t`, or which tensor is wrong and how.
pub(crate) fn mxfp4(
    t: &HfTensor,
    blocks: &TensorInfo,
    scales: Option<(usize, &TensorInfo)>,
) -> std::result::Result<StorageFormat, (String, String)> {
    let Some((shard, scales)) = scales else {
        let what = format!("has no {}{SCALES} to scale it by", t.name);
        return Err((blocks.name.clone(), what));
    };
    let cols = t.shape.last().copied().unwrap_or(0);
    if t.shape.len() < 2 || !cols.is_multiple_of(GROUP) {
        let what = format!("is MXFP4, but {cols} columns are no multiple of {GROUP}");
        return Err((blocks.name.clone(), what));
    }
    let mut wanted = t.shape.clone();
    wanted.pop();
    wanted.push(cols / GROUP);
    let of_scales = wanted.clone();
    wanted.push(GROUP / 2);
    for (found, wanted) in [(blocks, wanted), (scales, of_scales)] {
        if found.shape != wanted {
            let what = format!("shape {:?}, but the configuration needs {wanted:?}", found.shape);
            return Err((found.name.clone(), what));
        }
        if found.dtype != FileDType::U8 {
            let what = format!("dtype {}, but MXFP4 is stored as U8", found.dtype);
            return Err((found.name.clone(), what));
        }
    }
    Ok(StorageFormat::Mxfp4 { scales: ShardTensor { shard, name: scales.name.clone() } })
}

/// Dequantizes FP8: `value · scale of its block`.
pub(crate) fn read_fp8(
    files: &Shards,
    p: &TensorLocation,
    rows: Range<usize>,
    (scales, of_scales, block): (&ShardTensor, DType, [usize; 2]),
    dtype: DType,
    out: &mut [u8],
) -> Result<()> {
    let (values, scale_file) = (file(files, &p.values)?, file(files, scales)?);
    let wide = p.cols.div_ceil(block[1]);
    let first = rows.start / block[0];
    let lines = rows.end.div_ceil(block[0]) - first;
    let mut raw = vec![0u8; lines * wide * of_scales.size()];
    scale_file.read_range(&scales.name, (first * wide * of_scales.size()) as u64, &mut raw)?;
    let scale = as_f32(&raw, of_scales);
    let at_once = (BUFFER / p.cols).max(1);
    let mut bytes = Vec::new();
    let mut decoded = Vec::new();
    for (i, chunk) in out.chunks_mut(at_once * p.cols * dtype.size()).enumerate() {
        bytes.resize(chunk.len() / dtype.size(), 0);
        let start = rows.start + i * at_once;
        values.read_range(&p.values.name, p.view.at(start, 0) as u64, &mut bytes)?;
        decoded.clear();
        for (r, row) in bytes.chunks(p.cols).enumerate() {
            let scales = &scale[((start + r) / block[0] - first) * wide..][..wide];
            for (part, scale) in row.chunks(block[1]).zip(scales) {
                decoded.extend(part.iter().flat_map(|b| (E4m3(*b).decode() * scale).to_le_bytes()));
            }
        }
        cast(&decoded, DType::F32, chunk, dtype);
    }
    Ok(())
}

/// Dequantizes MXFP4: `value · 2^(scale − 127)`.
pub(crate) fn read_mxfp4(
    files: &Shards,
    p: &TensorLocation,
    rows: Range<usize>,
    scales: &ShardTensor,
    dtype: DType,
    out: &mut [u8],
) -> Result<()> {
    let (values, scale_file) = (file(files, &p.values)?, file(files, scales)?);
    let (mut nibbles, mut powers) = (vec![0u8; p.cols / 2], vec![0u8; p.cols / GROUP]);
    let mut decoded = Vec::with_capacity(4 * p.cols);
    for (r, row) in rows.zip(out.chunks_mut(p.cols * dtype.size())) {
        let at = p.view.at(r, 0);
        values.read_range(&p.values.name, (at / 2) as u64, &mut nibbles)?;
        scale_file.read_range(&scales.name, (at / GROUP) as u64, &mut powers)?;
        decoded.clear();
        for (group, power) in nibbles.chunks(GROUP / 2).zip(&powers) {
            if *power == u8::MAX {
                let what = format!("row {r} of {:?} has a scale that is no number", scales.name);
                return Err(Error::tensor(&p.hf, what));
            }
            let scale = E8m0(*power).decode();
            let both = group.iter().flat_map(|b| [b & 0xf, b >> 4]);
            decoded.extend(both.flat_map(|n| (E2m1(n).decode() * scale).to_le_bytes()));
        }
        cast(&decoded, DType::F32, row, dtype);
    }
    Ok(())
}

fn as_f32(bytes: &[u8], dtype: DType) -> Vec<f32> {
    let mut wide = vec![0u8; bytes.len() / dtype.size() * 4];
    cast(bytes, dtype, &mut wide, DType::F32);
    wide.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}
