use super::{CpuKernels, floats};
use crate::cpu::embedding::{TokenIds, embedding, embedding_backward};
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
            let tokens = TokenIds::<i32> { ids: l.slice(0)?, shard };
            floats!(OP, y.dtype(), T => {
                let table = &l.slice::<T>(1)?[..shard.len * width];
                embedding(self.context(l), tokens, table, scale, add, l.slice_mut(2)?)
            })
        })
    }

    fn embedding_backward(&self, s: &Stream, e: &EmbeddingBackward) -> Result<()> {
        let &EmbeddingBackward { ids, dy, first, vocab, scale, accumulate, dtable } = e;
        const OP: &str = "embedding_backward";
        let [_, local, width] = check_rows(OP, ids, dtable, dy)?;
        let shard = Shard::of_places(first, local, vocab);
        s.launch(OP, &[read(ids), read(dy), write(dtable)], |l| {
            let (dtable, padding) = l.slice_mut(2)?.split_at_mut(shard.len * width);
            let tokens = TokenIds::<i32> { ids: l.slice(0)?, shard };
            floats!(OP, dy.dtype(), T => embedding_backward::<T, i32>(
                self.context(l), tokens, l.slice(1)?, scale, accumulate, dtable,
            ))?;
            if !accumulate {
                padding.fill(0.0);
            }
            Ok(())
        })
    }
}
