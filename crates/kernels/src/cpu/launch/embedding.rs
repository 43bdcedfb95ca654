use super::{CpuKernels, floats};
use crate::EmbeddingKernels;
use crate::cpu::embedding::{embedding, embedding_backward};
use crate::cpu::vocab::Shard;
use ferrotron_tensor::{Result, Stream, Tensor, read, shape_error, write};

/// Rows of the table, with everything checked against it.
fn check(op: &'static str, ids: &Tensor, table: &Tensor, y: &Tensor) -> Result<Shard> {
    match (ids.shape(), table.shape(), y.shape()) {
        ([t], [v, h], [t2, h2])
            if t == t2 && h == h2 && ids.is_contiguous() && table.is_contiguous() && y.is_contiguous() =>
        {
            Ok(Shard::whole(*v))
        }
        (i, t, y) => shape_error(op, format!("ids {i:?}, table {t:?}, rows {y:?} do not belong together")),
    }
}

impl EmbeddingKernels for CpuKernels {
    fn embedding_forward(
        &self,
        s: &Stream,
        ids: &Tensor,
        table: &Tensor,
        scale: f32,
        add: bool,
        y: &Tensor,
    ) -> Result<()> {
        const OP: &str = "embedding_forward";
        let shard = check(OP, ids, table, y)?;
        s.launch(OP, &[read(ids), read(table), write(y)], |l| {
            floats!(OP, y.dtype(), T => embedding::<T, i32>(
                l.threads(), self.isa, l.slice(0)?, l.slice(1)?, shard, scale, add, l.slice_mut(2)?,
            ))
        })
    }

    fn embedding_backward(
        &self,
        s: &Stream,
        ids: &Tensor,
        dy: &Tensor,
        scale: f32,
        accumulate: bool,
        dtable: &Tensor,
    ) -> Result<()> {
        const OP: &str = "embedding_backward";
        let shard = check(OP, ids, dtable, dy)?;
        s.launch(OP, &[read(ids), read(dy), write(dtable)], |l| {
            floats!(OP, dy.dtype(), T => embedding_backward::<T, i32>(
                l.threads(), self.isa, l.slice(0)?, l.slice(1)?, shard, scale, accumulate, l.slice_mut(2)?,
            ))
        })
    }
}
