use super::{CpuKernels, floats};
use crate::EmbeddingKernels;
use crate::cpu::embedding::{embedding, embedding_backward};
use crate::cpu::vocab::Shard;
use crate::embedding::check_rows;
use ferrotron_tensor::{Result, Stream, Tensor, read, write};

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
        let [_, vocab, _] = check_rows(OP, ids, table, y)?;
        let shard = Shard::whole(vocab);
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
        let [_, vocab, _] = check_rows(OP, ids, dtable, dy)?;
        let shard = Shard::whole(vocab);
        s.launch(OP, &[read(ids), read(dy), write(dtable)], |l| {
            floats!(OP, dy.dtype(), T => embedding_backward::<T, i32>(
                l.threads(), self.isa, l.slice(0)?, l.slice(1)?, shard, scale, accumulate, l.slice_mut(2)?,
            ))
        })
    }
}
