//! Rows of tokens sorted by expert, and back.
//!
//! A plan sorts the choices `index` i32 `[T, k]` by expert, by row within an expert. Each expert's rows start at a multiple of
//! an alignment; rows between, and behind the last expert's, are nobody's.

use ferrotron_tensor::{Result, Stream, Tensor};

/// Where choices go. All memory is the caller's and written by [`PermuteKernels::sort`].
#[derive(Clone, Debug)]
pub struct RowMap {
    /// i32 `[E + 1]`: first row of each expert; the last is the end of all. Expert e has `counts[e]` rows from `offsets[e]`.
    pub offsets: Tensor,
    /// i32 `[E]`: rows of each expert, without those between experts.
    pub counts: Tensor,
    /// i32 `[T, k]`: row of each choice, -1 where there is none.
    pub rows: Tensor,
    /// i32 `[N]`: choice (token·k + slot) of each row, -1 for nobody's. N ≥ all that can come: T·k + E·(align - 1).
    pub source: Tensor,
}

/// Kernels that move rows. Values f32, bf16 (or bytes, E4M3 and E5M2, for the pure moves), contiguous rows.
pub trait PermuteKernels {
    /// Fills `map` for `index` whose experts are `first..first + E` (others count as no choice).
    fn sort(&self, s: &Stream, index: &Tensor, first: usize, align: usize, map: &RowMap) -> Result<()>;

    /// `out[r] = x[source[r] / k]`, zeros where `source[r]` is -1. `x [T, h]`, `source` i32 `[N]`, `out [N, h]`.
    fn gather_rows(&self, s: &Stream, x: &Tensor, source: &Tensor, k: usize, out: &Tensor) -> Result<()>;

    /// `out[t] = Σ_j x[rows[t, j]]·(weights[t, j])`, sums in f32 in the order of j; -1 adds nothing. `x [N, h]`,
    /// `rows` i32 `[T, k]`, `weights` f32 `[T, k]`, `out [T, h]` of x's type or f32.
    fn sum_rows(
        &self,
        s: &Stream,
        x: &Tensor,
        rows: &Tensor,
        weights: Option<&Tensor>,
        out: &Tensor,
    ) -> Result<()>;

    /// `out[t, j] = <x[rows[t, j]], dy[t]>` f32, 0 where the row is -1: the gradient of `weights` in
    /// [`PermuteKernels::sum_rows`].
    fn row_products(&self, s: &Stream, x: &Tensor, rows: &Tensor, dy: &Tensor, out: &Tensor) -> Result<()>;

    /// `out[i] = x[source[i]]`, 0 where -1; f32 or i32, any shapes.
    fn gather_values(&self, s: &Stream, x: &Tensor, source: &Tensor, out: &Tensor) -> Result<()>;

    /// Rows in chunks of `sizes` i32 `[n]` (on the device), put in the order `order` i32 `[n]`: `source[r]` i32 `[N]` = the row
    /// that comes to r, and `back` its inverse. Rows behind all chunks stay.
    fn chunk_map(
        &self,
        s: &Stream,
        sizes: &Tensor,
        order: &Tensor,
        source: &Tensor,
        back: &Tensor,
    ) -> Result<()>;

    /// Of the first choices that are none (probability 0), as many become `expert`'s as make each expert's count a multiple of
    /// `align`, in the order of rows: as upstream's routing-map padding, on a dense map u8 `[T, E]`.
    fn pad_map(&self, s: &Stream, align: usize, map: &Tensor) -> Result<()>;
}
