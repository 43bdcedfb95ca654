//! Launch helpers for kernels over rows.

use crate::cpu::rows::Rows;
use ferrotron_tensor::{DType, Result, shape_error};

/// Elements of a 16-byte access.
pub(super) fn vec_width(dtype: DType) -> usize {
    (16 / dtype.size().max(1)).max(1)
}

/// Blocks along x, within CUDA's limit.
pub(super) fn blocks(op: &'static str, n: usize) -> Result<u32> {
    match i32::try_from(n) {
        Ok(n) => Ok(n.unsigned_abs()),
        Err(_) => shape_error(op, format!("{n} blocks exceed a CUDA grid; use smaller batches")),
    }
}

/// Row length in 32 bits, with room to step past the end.
pub(super) fn columns(op: &'static str, n: usize) -> Result<i32> {
    match i32::try_from(n) {
        Ok(n) if n <= 1 << 30 => Ok(n),
        _ => shape_error(op, format!("rows of {n} columns are longer than 2^30")),
    }
}

/// Whether every row starts on a 16-byte boundary.
pub(super) fn rows_aligned16(dtype: DType, views: &[(u64, Rows)]) -> bool {
    let aligned = |stride: usize| (stride * dtype.size()).is_multiple_of(16);
    views.iter().all(|(address, rows)| {
        address.is_multiple_of(16)
            && (rows.outer <= 1 || aligned(rows.outer_stride))
            && (rows.inner <= 1 || aligned(rows.inner_stride))
    })
}
