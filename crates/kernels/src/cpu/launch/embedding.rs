use super::{CpuKernels, floats};
use crate::cpu::embedding::{embedding, embedding_backward};
use crate::cpu::vocab::Shard;
use crate::embedding::check_rows;
use crate::{EmbeddingBackward, EmbeddingForward, EmbeddingKernels};
use ferrotron_tensor::{Result, Stream, read, write};

impl EmbeddingKernels for CpuKernels {
    fn embedding_forward(&self, s: &Stream, e: &EmbeddingForward) -> Result<()> {
        let &EmbeddingForward { ids, table, first, vocab, scale, add, y } = e;
        const OP: &str = "embedding_forward";
        let [_, local, width] = check_rows(OP, ids, table, y)?;
        let shard = Shard::of_places(first, local, vocab);
        s.launch(OP, &[read(ids), read(table), write(y)], |l| {
            floats!(OP, y.dtype(), T => embedding::<T, i32>(
                l.threads(), self.isa, l.slice(0)?, &l.slice(1)?[..shard.len * width], shard, scale, add, l.slice_mut(2)?,
            ))
        })
    }

    fn embedding_backward(&self, s: &Stream, e: &EmbeddingBackward) -> Result<()> {
        let &EmbeddingBackward { ids, dy, first, vocab, scale, accumulate, dtable } = e;
        const OP: &str = "embedding_backward";
        let [_, local, width] = check_rows(OP, ids, dtable, dy)?;
        let shard = Shard::of_places(first, local, vocab);
        s.launch(OP, &[read(ids), read(dy), write(dtable)], |l| {
            let (dtable, padding) = l.slice_mut(2)?.split_at_mut(shard.len * width);
            floats!(OP, dy.dtype(), T => embedding_backward::<T, i32>(
                l.threads(), self.isa, l.slice(0)?, l.slice(1)?, shard, scale, accumulate, dtable,
            ))?;
            if !accumulate {
                padding.fill(0.0);
            }
            Ok(())
        })
    }
}
