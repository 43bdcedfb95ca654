//! Attention over some keys joined with attention over others.

use crate::checks::dtypes;
use ferrotron_tensor::{DType, Error, Result, Stream, Tensor, shape_error};

/// Joining partial attention.
pub trait AttentionMergeKernels {
    /// Adds attention over more keys to what was found before:
    /// ```text
    /// lse' = log(e^lse + e^part_lse)
    /// out' = out·e^(lse − lse') + part·e^(part_lse − lse')
    /// ```
    /// in place, in f32. `out` f32 `[tokens, heads, d]`, `lse` f32 `[tokens, heads]`; `part` (f32 or bf16) and `part_lse`
    /// f32 of the same shapes, all contiguous. A row that saw nothing has an lse of −inf: it adds nothing, and what
    /// its `part` holds is not looked at.
    fn merge_attention(
        &self,
        s: &Stream,
        out: &Tensor,
        lse: &Tensor,
        part: &Tensor,
        part_lse: &Tensor,
    ) -> Result<()>;
}

/// Rows and channels of each.
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
            format!("{out:?} with {lse:?} and {part:?} with {part_lse:?} do not belong together, contiguous"),
        ),
    }
}
