use super::{CpuKernels, floats};
use crate::AttentionMergeKernels;
use crate::attention_merge::check_merge;
use crate::cpu::attention_merge::merge;
use ferrotron_tensor::{Result, Stream, Tensor, read, write};

impl AttentionMergeKernels for CpuKernels {
    fn merge_attention(
        &self,
        s: &Stream,
        out: &Tensor,
        lse: &Tensor,
        part: &Tensor,
        part_lse: &Tensor,
    ) -> Result<()> {
        const OP: &str = "merge_attention";
        let [_, width] = check_merge(OP, out, lse, part, part_lse)?;
        s.launch(OP, &[write(out), write(lse), read(part), read(part_lse)], |l| {
            floats!(OP, part.dtype(), T => merge::<T>(
                l.threads(), self.isa, width, l.slice_mut(0)?, l.slice_mut(1)?, l.slice(2)?, l.slice(3)?,
            ))
        })
    }
}
