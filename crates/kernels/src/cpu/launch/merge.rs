use super::{CpuKernels, floats};
use crate::MergeKernels;
use crate::cpu::merge::merge;
use crate::merge::check_merge;
use ferrotron_tensor::{Result, Stream, Tensor, read, write};

impl MergeKernels for CpuKernels {
    fn merge(&self, s: &Stream, out: &Tensor, lse: &Tensor, part: &Tensor, part_lse: &Tensor) -> Result<()> {
        const OP: &str = "merge";
        let [_, width] = check_merge(OP, out, lse, part, part_lse)?;
        s.launch(OP, &[write(out), write(lse), read(part), read(part_lse)], |l| {
            floats!(OP, part.dtype(), T => merge::<T>(
                l.threads(), self.isa, width, l.slice_mut(0)?, l.slice_mut(1)?, l.slice(2)?, l.slice(3)?,
            ))
        })
    }
}
