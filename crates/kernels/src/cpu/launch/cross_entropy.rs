use super::{CpuKernels, floats};
use crate::cpu::cross_entropy::{
    Labels, RowStats, cross_entropy, cross_entropy_backward, cross_entropy_with_gradient, row_stats,
};
use crate::cpu::vocab::{Shard, check_ids};
use crate::{
    CrossEntropy, CrossEntropyKernels, IGNORE, LabelSmoothing, VocabParallelCrossEntropy, VocabParallelLogits,
};
use ferrotron_tensor::{Result, Stream, Tensor, read, write};

fn labels(ids: &[i32], smoothing: LabelSmoothing, shard: Shard) -> Labels<'_, i32> {
    Labels { ids, ignore: i64::from(IGNORE), smoothing, shard }
}

impl CrossEntropyKernels for CpuKernels {
    fn cross_entropy(&self, s: &Stream, c: &CrossEntropy) -> Result<()> {
        const OP: &str = "cross_entropy";
        let rows = c.check(OP)?;
        let whole = Shard::whole(c.vocab);
        if !c.gradient {
            return s.launch(OP, &[read(c.logits), read(c.labels), write(c.loss)], |l| {
                let mut lse = vec![0f32; rows.count()];
                let labels = labels(l.slice(1)?, c.smoothing, whole);
                floats!(OP, c.logits.dtype(), T => cross_entropy::<T, i32>(
                    self.context(l), l.slice(0)?, rows, labels, l.slice_mut(2)?, &mut lse,
                ))
            });
        }
        s.launch(OP, &[write(c.logits), read(c.labels), read(c.weights), write(c.loss)], |l| {
            let labels = labels(l.slice(1)?, c.smoothing, whole);
            floats!(OP, c.logits.dtype(), T => cross_entropy_with_gradient::<T, i32>(
                self.context(l), l.slice_mut(0)?, rows, labels, l.slice(2)?, l.slice_mut(3)?,
            ))
        })
    }

    fn cross_entropy_stats(&self, s: &Stream, x: &VocabParallelLogits, stats: &Tensor) -> Result<()> {
        const OP: &str = "cross_entropy_stats";
        let (rows, shard) = x.check_stats(OP, stats)?;
        s.launch(OP, &[read(x.logits), read(x.labels), write(stats)], |l| {
            let mut found = vec![RowStats::EMPTY; rows.count()];
            let labels = labels(l.slice(1)?, LabelSmoothing::None, shard);
            floats!(OP, x.logits.dtype(), T => row_stats::<T, i32>(
                self.context(l), l.slice(0)?, rows, labels, &mut found,
            ))?;
            let (out, _) = l.slice_mut::<f32>(2)?.as_chunks_mut::<4>();
            out.iter_mut().zip(found).for_each(|(to, stats)| *to = stats.to_array());
            Ok(())
        })
    }

    fn vocab_parallel_cross_entropy(&self, s: &Stream, c: &VocabParallelCrossEntropy) -> Result<()> {
        let &VocabParallelCrossEntropy { x, stats: all, weights, smoothing, loss, gradient } = c;
        const OP: &str = "vocab_parallel_cross_entropy";
        let (rows, shard, _) = x.check_all(OP, all, weights, loss)?;
        let logits = if gradient { write(x.logits) } else { read(x.logits) };
        s.launch(OP, &[logits, read(x.labels), read(all), read(weights), write(loss)], |l| {
            let ids: &[i32] = l.slice(1)?;
            check_ids(l.threads(), OP, ids, shard.total, Some(i64::from(IGNORE)))?;
            let (parts, _) = l.slice::<f32>(2)?.as_chunks::<4>();
            let merged: Vec<RowStats> = (0..rows.count())
                .map(|r| {
                    let of_ranks = parts.iter().skip(r).step_by(rows.count());
                    of_ranks.fold(RowStats::EMPTY, |sum, part| sum.merge(RowStats::from_array(*part)))
                })
                .collect();
            for ((loss, stats), id) in l.slice_mut::<f32>(4)?.iter_mut().zip(&merged).zip(ids) {
                *loss = if *id == IGNORE { 0.0 } else { stats.loss(smoothing, shard.total) };
            }
            floats!(OP, x.logits.dtype(), T => match gradient {
                false => Ok(()),
                true => cross_entropy_backward::<T, i32>(
                    self.context(l), l.slice_mut(0)?, rows, labels(ids, smoothing, shard), &merged, l.slice(3)?,
                ),
            })
        })
    }
}
