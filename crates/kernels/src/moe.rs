//! Small steps of a mixture of experts between its larger kernels.

use crate::RngKey;
use ferrotron_tensor::{DType, Error, Result, Stream, Tensor, shape_error};

/// Small kernels of mixtures. All tensors are contiguous.
pub trait MoeKernels {
    /// Rows whose segment (i32 `[T]`) is negative choose nobody: `index` i32 `[T, k]` becomes -1, `probs` f32 `[T, k]` 0.
    fn mask_padding(&self, s: &Stream, segments: &Tensor, index: &Tensor, probs: &Tensor) -> Result<()>;

    /// One slot for each of `copies` ranks that share an expert: choice e of `own` experts a rank becomes
    /// `(e / own·copies + a)·own + e mod own` in slot `j·copies + a`; -1 stays. `index` i32 `[T, k]`, `wide` i32 `[T, k·copies]`.
    fn expand_topk(&self, s: &Stream, index: &Tensor, own: usize, copies: usize, wide: &Tensor)
    -> Result<()>;

    /// `y = x·u`, u uniform from 1 - eps to 1 + eps, drawn by (key, number of the row, column); `x`, `y` `[T, h]`, `rows` i32 `[T]`.
    fn jitter(&self, s: &Stream, eps: f32, key: RngKey, rows: &Tensor, x: &Tensor, y: &Tensor) -> Result<()>;

    /// f32 `x [T, n]` as the sum of two bf16 numbers, side by side: `out [T, 2n]`, the rounded ones first, then what they lack.
    fn split_bf16x2(&self, s: &Stream, x: &Tensor, out: &Tensor) -> Result<()>;

    /// `x[t] += bias` for every row; `x` f32 `[T, n]`, `bias` f32 or bf16 `[n]`.
    fn add_router_bias(&self, s: &Stream, bias: &Tensor, x: &Tensor) -> Result<()>;

    /// `total += counts` (i64, equal shapes), `steps` f32 `[1] += 1`.
    fn accumulate_counts(&self, s: &Stream, counts: &Tensor, total: &Tensor, steps: &Tensor) -> Result<()>;

    /// `total += x`, f64.
    fn accumulate_f64(&self, s: &Stream, x: &Tensor, total: &Tensor) -> Result<()>;

    /// `beta = keep·beta + (1 - keep)·mean·found`, then its mean over experts subtracted; f32 `[E]`.
    fn update_quantiles(&self, s: &Stream, keep: f32, mean: f32, found: &Tensor, beta: &Tensor)
    -> Result<()>;
}

/// Equal numbers of elements in each, contiguous, of these types.
pub(crate) fn check(op: &'static str, wanted: &[(&Tensor, DType, usize)]) -> Result<()> {
    for (t, dtype, n) in wanted {
        if t.dtype() != *dtype {
            return Err(Error::DType { op, found: t.dtype(), wanted: *dtype });
        }
        if t.numel() != *n || !t.is_contiguous() {
            return shape_error(op, format!("{t:?} must be {n} elements without gaps"));
        }
    }
    Ok(())
}

/// Rows and columns of a matrix.
pub(crate) fn matrix(op: &'static str, t: &Tensor) -> Result<[usize; 2]> {
    match t.shape() {
        [rows, columns] if t.is_contiguous() => Ok([*rows, *columns]),
        other => shape_error(op, format!("{other:?} must be a matrix without gaps")),
    }
}
