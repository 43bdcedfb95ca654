//! Reads one parameter from the files.

use crate::cast::cast;
use crate::error::{Error, Result};
use crate::shards::Shards;
use crate::view::{View, copy};
use ferrotron_core::tensorfile::TensorFile;
use ferrotron_tensor::DType;
use std::ops::Range;

/// The location of a parameter in the files.
#[derive(Debug)]
pub(crate) struct TensorLocation {
    /// Name of the Hugging Face tensor.
    pub hf: String,
    /// The tensor in the files that has the values.
    pub values: ShardTensor,
    pub format: StorageFormat,
    pub view: View,
    pub rows: usize,
    /// Elements of one row (1 for vectors).
    pub cols: usize,
}

/// A tensor and the index of its file.
#[derive(Clone, Debug)]
pub(crate) struct ShardTensor {
    pub shard: usize,
    pub name: String,
}

/// How values are stored.
#[derive(Clone, Debug)]
pub(crate) enum StorageFormat {
    Plain(DType),
    /// E4M3 with a scale per block: `[⌈rows/block⌉, ⌈cols/block⌉]` scales of dtype `dtype`.
    Fp8 {
        scales: ShardTensor,
        dtype: DType,
        block: [usize; 2],
    },
    /// Two E2M1 values per byte, the first in the low half, with a power-of-two scale per 32 values of a row.
    Mxfp4 {
        scales: ShardTensor,
    },
}

impl StorageFormat {
    /// The dtype the parameter is read as by default.
    pub fn dtype(&self) -> DType {
        match self {
            StorageFormat::Plain(dtype) => *dtype,
            StorageFormat::Fp8 { .. } | StorageFormat::Mxfp4 { .. } => DType::BF16,
        }
    }
}

/// Buffer size for tensors that are cast or gathered while they are read.
pub(crate) const BUFFER: usize = 4 << 20;

/// Reads some rows of a parameter into `out` as `dtype`.
pub(crate) fn read(
    files: &Shards,
    p: &TensorLocation,
    rows: Range<usize>,
    dtype: DType,
    out: &mut [u8],
) -> Result<()> {
    if rows.is_empty() || p.cols == 0 {
        return Ok(());
    }
    match &p.format {
        StorageFormat::Plain(from) if p.view.is_contiguous(p.cols) => {
            read_contiguous(files, p, rows, (*from, dtype), out)
        }
        StorageFormat::Plain(from) => read_strided(files, p, rows, (*from, dtype), out),
        StorageFormat::Fp8 { scales, dtype: of_scales, block } => {
            crate::quantized::read_fp8(files, p, rows, (scales, *of_scales, *block), dtype, out)
        }
        StorageFormat::Mxfp4 { scales } => crate::quantized::read_mxfp4(files, p, rows, scales, dtype, out),
    }
}

/// The file a tensor is in.
pub(crate) fn file<'a>(files: &'a Shards, spot: &ShardTensor) -> Result<&'a TensorFile> {
    match files.files.get(spot.shard) {
        Some(shard) => Ok(&shard.file),
        None => Err(Error::tensor(&spot.name, "its file is gone")),
    }
}

/// Reads rows that are contiguous in the file.
fn read_contiguous(
    files: &Shards,
    p: &TensorLocation,
    rows: Range<usize>,
    (from, to): (DType, DType),
    out: &mut [u8],
) -> Result<()> {
    let file = file(files, &p.values)?;
    let start = (p.view.at(rows.start, 0) * from.size()) as u64;
    if from == to {
        return Ok(file.read_range(&p.values.name, start, out)?);
    }
    let mut buffer = vec![0u8; BUFFER.min(rows.len() * p.cols * from.size())];
    for (i, chunk) in out.chunks_mut(BUFFER / from.size() * to.size()).enumerate() {
        let raw = &mut buffer[..chunk.len() / to.size() * from.size()];
        file.read_range(&p.values.name, start + (i * BUFFER) as u64, raw)?;
        cast(raw, from, chunk, to);
    }
    Ok(())
}

/// Reads rows of a transposed, interleaved or fused tensor.
fn read_strided(
    files: &Shards,
    p: &TensorLocation,
    rows: Range<usize>,
    (from, to): (DType, DType),
    out: &mut [u8],
) -> Result<()> {
    let file = file(files, &p.values)?;
    let (n, view) = (rows.len(), View { offset: p.view.at(rows.start, 0), ..p.view });
    // A line runs along the short stride.
    let by_rows = view.row >= view.col;
    let (lines, long, length, short) =
        if by_rows { (n, view.row, p.cols, view.col) } else { (p.cols, view.col, n, view.row) };
    let line = (length - 1) * short + 1;
    // Lines that are close together are read along with the gaps between them.
    let close = 2 * line >= long;
    let pitch = if close { long } else { line };
    let at_once = (BUFFER / (pitch * from.size())).clamp(1, lines);
    let (mut raw, mut converted) = (Vec::new(), Vec::new());
    for first in (0..lines).step_by(at_once) {
        let count = at_once.min(lines - first);
        let elements = (count - 1) * pitch + line;
        raw.resize(elements * from.size(), 0);
        let start = |i: usize| ((view.offset + (first + i) * long) * from.size()) as u64;
        if close {
            file.read_range(&p.values.name, start(0), &mut raw)?;
        } else {
            for (i, line) in raw.chunks_exact_mut(line * from.size()).enumerate() {
                file.read_range(&p.values.name, start(i), line)?;
            }
        }
        converted.resize(elements * to.size(), 0);
        cast(&raw, from, &mut converted, to);
        let (row, col, rows, cols, at) = match by_rows {
            true => (pitch, short, count, p.cols, first * p.cols),
            false => (short, pitch, n, count, first),
        };
        let there = View { offset: at, row: p.cols, col: 1 };
        copy((&converted, View { offset: 0, row, col }), (out, there), rows, cols, to.size());
    }
    Ok(())
}
