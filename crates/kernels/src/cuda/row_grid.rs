//! What launches over rows have in common.

use crate::cpu::rows::Rows;
use ferrotron_tensor::{DType, Result, shape_error};

/// Elements in one 16-byte access.
pub(super) fn vec_width(dtype: DType) -> usize {
    (16 / dtype.size().max(1)).max(1)
}

/// A number of blocks (along x) as the driver takes it.
pub(super) fn blocks(op: &'static str, n: usize) -> Result<u32> {
    match i32::try_from(n) {
        Ok(n) => Ok(n.unsigned_abs()),
        Err(_) => shape_error(op, format!("{n} blocks of work are more than a card takes; cut the batch")),
    }
}

/// The length of a row as kernels count its columns: 32 bits, with room to step past the end.
pub(super) fn columns(op: &'static str, n: usize) -> Result<i32> {
    match i32::try_from(n) {
        Ok(n) if n <= 1 << 30 => Ok(n),
        _ => shape_error(op, format!("rows of {n} columns are longer than kernels count")),
    }
}

/// May every one of these rows be read in 16-byte accesses from its start?
pub(super) fn rows_aligned16(dtype: DType, views: &[(u64, Rows)]) -> bool {
    let whole = |stride: usize| (stride * dtype.size()).is_multiple_of(16);
    views.iter().all(|(address, rows)| {
        address.is_multiple_of(16)
            && (rows.outer <= 1 || whole(rows.outer_stride))
            && (rows.inner <= 1 || whole(rows.inner_stride))
    })
}
