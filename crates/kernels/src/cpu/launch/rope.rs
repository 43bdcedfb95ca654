use super::{CpuKernels, floats};
use crate::{Rope, RopeKernels};
use ferrotron_tensor::{Result, Stream, read, write};

impl RopeKernels for CpuKernels {
    fn rope(&self, s: &Stream, r: &Rope) -> Result<()> {
        const OP: &str = "rope";
        let (rows, half) = r.check(OP)?;
        s.launch(OP, &[write(r.x), read(r.cos), read(r.sin), read(r.positions)], |l| {
            floats!(OP, r.x.dtype(), T => crate::cpu::rope::rope::<T, i32>(
                l.threads(), self.isa, l.slice_mut(0)?, rows, l.slice(1)?, l.slice(2)?, half, l.slice(3)?,
                r.style, r.inverse,
            ))
        })
    }
}
