//! Table look-up and its gradient.

use ferrotron_tensor::{Result, Stream, Tensor};

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
