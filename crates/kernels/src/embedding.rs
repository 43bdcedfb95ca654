//! Table look-up and its gradient.

use ferrotron_tensor::{Result, Stream, Tensor, shape_error};

/// Embedding tables. A table `[local, h]` holds rows `first..first + local` of a vocabulary of `vocab` (all of it
/// where `first` is 0 and `vocab` is `local`); rows at or beyond `vocab` are padding. An id outside `vocab` is an
/// error.
pub trait EmbeddingKernels {
    /// `y[t] = scale·table[ids[t] − first] (+ y[t] if add)`; `ids` i32 `[tokens]`, `y [tokens, h]`. Ids that the
    /// table does not hold give rows of zeros, so that the sum over ranks is the look-up.
    fn embedding_forward(
        &self,
        s: &Stream,
        ids: &Tensor,
        table: &Tensor,
        first: usize,
        vocab: usize,
        scale: f32,
        add: bool,
        y: &Tensor,
    ) -> Result<()>;

    /// `dtable[v − first] (+)= scale·Σ_{t: ids[t]=v} dy[t]` in f32 and in the order of t, over the ids that the
    /// table holds.
    fn embedding_backward(
        &self,
        s: &Stream,
        ids: &Tensor,
        dy: &Tensor,
        first: usize,
        vocab: usize,
        scale: f32,
        accumulate: bool,
        dtable: &Tensor,
    ) -> Result<()>;
}

/// Tokens, rows of the table and their width, of `ids [tokens]`, `table [local, h]`, `y [tokens, h]`.
pub(crate) fn check_rows(op: &'static str, ids: &Tensor, table: &Tensor, y: &Tensor) -> Result<[usize; 3]> {
    match (ids.shape(), table.shape(), y.shape()) {
        ([t], [v, h], [t2, h2])
            if t == t2 && h == h2 && ids.is_contiguous() && table.is_contiguous() && y.is_contiguous() =>
        {
            Ok([*t, *v, *h])
        }
        (i, t, y) => shape_error(op, format!("ids {i:?}, table {t:?}, rows {y:?} do not belong together")),
    }
}
