//! Table look-up and its gradient.

use ferrotron_tensor::{Result, Stream, Tensor, shape_error};

/// Embedding tables.
pub trait EmbeddingKernels {
    /// `y[t] = scale·table[ids[t]] (+ y[t] if add)`; `ids` i32 `[tokens]`, `table [V, h]`, `y [tokens, h]`.
    /// An id outside the table is an error.
    fn embedding_forward(
        &self,
        s: &Stream,
        ids: &Tensor,
        table: &Tensor,
        scale: f32,
        add: bool,
        y: &Tensor,
    ) -> Result<()>;

    /// `dtable[v] (+)= scale·Σ_{t: ids[t]=v} dy[t]` in f32 and in the order of t.
    fn embedding_backward(
        &self,
        s: &Stream,
        ids: &Tensor,
        dy: &Tensor,
        scale: f32,
        accumulate: bool,
        dtable: &Tensor,
    ) -> Result<()>;
}

/// Tokens, rows of the table and their width, of `ids [tokens]`, `table [V, h]`, `y [tokens, h]`.
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
