use super::{CpuKernels, floats};
use crate::cpu::loss::{Labels, cross_entropy, cross_entropy_with_gradient};
use crate::cpu::vocab::Shard;
use crate::{CrossEntropy, IGNORE, LossKernels};
use ferrotron_tensor::{Result, Stream, read, write};

impl LossKernels for CpuKernels {
    fn cross_entropy(&self, s: &Stream, c: &CrossEntropy) -> Result<()> {
        const OP: &str = "cross_entropy";
        let rows = c.check(OP)?;
        let labels = |ids| Labels::<i32> {
            ids,
            ignore: i64::from(IGNORE),
            smoothing: c.smoothing,
            shard: Shard::whole(c.vocab),
        };
        if !c.gradient {
            return s.launch(OP, &[read(c.logits), read(c.labels), write(c.loss)], |l| {
                let mut lse = vec![0f32; rows.count()];
                floats!(OP, c.logits.dtype(), T => cross_entropy::<T, i32>(
                    l.threads(), self.isa, l.slice(0)?, rows, labels(l.slice(1)?), l.slice_mut(2)?, &mut lse,
                ))
            });
        }
        s.launch(OP, &[write(c.logits), read(c.labels), read(c.weights), write(c.loss)], |l| {
            floats!(OP, c.logits.dtype(), T => cross_entropy_with_gradient::<T, i32>(
                l.threads(), self.isa, l.slice_mut(0)?, rows, labels(l.slice(1)?), l.slice(2)?, l.slice_mut(3)?,
            ))
        })
    }
}
