//! Checks of [`AttentionKernels::merge_attention`](crate::AttentionKernels::merge_attention).

use crate::checks::dtypes;
use ferrotron_tensor::{DType, Error, Result, Tensor, shape_error};

/// Checks all arguments; returns rows (tokens·heads) and channels.
pub(crate) fn check_merge(
    op: &'static str,
    out: &Tensor,
    lse: &Tensor,
    part: &Tensor,
    part_lse: &Tensor,
) -> Result<[usize; 2]> {
    dtypes(op, DType::F32, &[out, lse, part_lse])?;
    if !matches!(part.dtype(), DType::F32 | DType::BF16 | DType::F16) {
        return Err(Error::DType { op, found: part.dtype(), wanted: DType::F32 });
    }
    let alike = out.shape() == part.shape() && lse.shape() == part_lse.shape();
    let whole = [out, lse, part, part_lse].iter().all(|t| t.is_contiguous());
    match out.shape() {
        [rows @ .., d] if alike && whole && lse.shape() == rows && *d > 0 => Ok([lse.numel(), *d]),
        _ => shape_error(
            op,
            format!(
                "{out:?} with {lse:?} and {part:?} with {part_lse:?} must be contiguous [tokens, heads, d] and [tokens, heads]"
            ),
        ),
    }
}
