use super::{CpuKernels, floats};
use crate::cpu::rope::{Angles, Rotation, rope};
use crate::cpu::rows::RowsViewMut;
use crate::{Rope, RopeKernels};
use ferrotron_tensor::{Result, Stream, read, write};

impl RopeKernels for CpuKernels {
    fn rope(&self, s: &Stream, r: &Rope) -> Result<()> {
        const OP: &str = "rope";
        let (rows, half) = r.check(OP)?;
        s.launch(OP, &[write(r.x), read(r.cos), read(r.sin), read(r.positions)], |l| {
            let angles = Angles { cos: l.slice(1)?, sin: l.slice(2)?, half };
            let rotation = Rotation { style: r.style, inverse: r.inverse };
            floats!(OP, r.x.dtype(), T => {
                let x = RowsViewMut::<T> { data: l.slice_mut(0)?, rows };
                rope::<T, i32>(self.context(l), x, angles, l.slice(3)?, rotation)
            })
        })
    }
}
