use super::{CpuKernels, floats, rows_of};
use crate::cpu::loss::{Labels, cross_entropy, cross_entropy_with_gradient};
use crate::cpu::vocab::Shard;
use crate::{CrossEntropy, IGNORE, LossKernels};
use ferrotron_tensor::{Result, Stream, read, shape_error, write};

impl LossKernels for CpuKernels {
    fn cross_entropy(&self, s: &Stream, c: &CrossEntropy) -> Result<()> {
        const OP: &str = "cross_entropy";
        let &[n, width] = c.logits.shape() else {
            return shape_error(OP, format!("logits {:?} are not [rows, vocabulary]", c.logits.shape()));
        };
        let vectors = [c.labels, c.weights, c.loss];
        if vectors.iter().any(|t| t.shape() != [n] || !t.is_contiguous()) || c.vocab > width {
            return shape_error(
                OP,
                format!("labels, weights and loss must be [{n}], vocabulary at most {width}"),
            );
        }
        let [rows] = rows_of(OP, [c.logits])?;
        let labels = |ids| Labels::<i32> {
            ids,
            ignore: i64::from(IGNORE),
            smoothing: c.smoothing,
            shard: Shard::whole(c.vocab),
        };
        if !c.gradient {
            return s.launch(OP, &[read(c.logits), read(c.labels), write(c.loss)], |l| {
                let mut lse = vec![0f32; n];
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
