//! Embedding look-up and its gradient.
//!
//! A table `[local, h]` holds rows `first..first + local` of a vocabulary of `vocab` ids (all of them where `first` is 0 and
//! `local` is `vocab`); rows at or beyond `vocab` are padding. An id outside the vocabulary is an error.

use ferrotron_tensor::{Result, Stream, Tensor, shape_error};

/// `y[t] = scale·table[ids[t] − first]`, zero for ids of other ranks, so that the sum over ranks is the look-up.
#[derive(Clone, Copy)]
pub struct EmbeddingForward<'a> {
    /// i32 `[tokens]`
    pub ids: &'a Tensor,
    /// `[local, h]`
    pub table: &'a Tensor,
    /// Id of the table's first row.
    pub first: usize,
    /// Size of the whole vocabulary.
    pub vocab: usize,
    /// Factor on the rows.
    pub scale: f32,
    /// Add to what `y` holds.
    pub add: bool,
    /// `[tokens, h]`
    pub y: &'a Tensor,
}

/// `dtable[v − first] (+)= scale·Σ_{t: ids[t] = v} dy[t]` over the ids that the table holds, summed in f32 in the order of t.
#[derive(Clone, Copy)]
pub struct EmbeddingBackward<'a> {
    /// i32 `[tokens]`
    pub ids: &'a Tensor,
    /// `[tokens, h]`
    pub dy: &'a Tensor,
    /// Id of the table's first row.
    pub first: usize,
    /// Size of the whole vocabulary.
    pub vocab: usize,
    /// Factor on the rows.
    pub scale: f32,
    /// Add to what `dtable` holds.
    pub accumulate: bool,
    /// f32 `[local, h]`
    pub dtable: &'a Tensor,
}

/// Embedding kernels.
pub trait EmbeddingKernels {
    /// See [`EmbeddingForward`].
    fn embedding_forward(&self, s: &Stream, e: &EmbeddingForward) -> Result<()>;

    /// See [`EmbeddingBackward`].
    fn embedding_backward(&self, s: &Stream, e: &EmbeddingBackward) -> Result<()>;
}

/// Checks `ids [tokens]`, `table [local, h]` and `y [tokens, h]`; returns tokens, local and h.
pub(crate) fn check_rows(op: &'static str, ids: &Tensor, table: &Tensor, y: &Tensor) -> Result<[usize; 3]> {
    match (ids.shape(), table.shape(), y.shape()) {
        ([t], [v, h], [t2, h2])
            if t == t2 && h == h2 && ids.is_contiguous() && table.is_contiguous() && y.is_contiguous() =>
        {
            Ok([*t, *v, *h])
        }
        (i, t, y) => shape_error(
            op,
            format!(
                "ids {i:?}, table {t:?}, rows {y:?} must be contiguous [tokens], [local, h], [tokens, h]"
            ),
        ),
    }
}
