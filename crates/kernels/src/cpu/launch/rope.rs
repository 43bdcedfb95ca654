use super::{CpuKernels, floats};
use crate::cpu::rows::Rows;
use crate::{Rope, RopeKernels};
use ferrotron_tensor::{Result, Stream, read, shape_error, write};

impl RopeKernels for CpuKernels {
    fn rope(&self, s: &Stream, r: &Rope) -> Result<()> {
        const OP: &str = "rope";
        let (&[tokens, heads, dim], &[token, head, channel]) = (r.x.shape(), r.x.strides()) else {
            return shape_error(OP, format!("{:?} is not [tokens, heads, channels]", r.x.shape()));
        };
        let &[_, half] = r.cos.shape() else {
            return shape_error(OP, format!("tables {:?} are not [positions, pairs]", r.cos.shape()));
        };
        let contiguous = r.cos.is_contiguous() && r.sin.is_contiguous() && r.positions.is_contiguous();
        if r.cos.shape() != r.sin.shape() || !contiguous || (channel != 1 && dim > 1) {
            return shape_error(OP, "tables must be alike, and channels contiguous");
        }
        let rows = Rows::heads(tokens, token, heads, head, dim);
        s.launch(OP, &[write(r.x), read(r.cos), read(r.sin), read(r.positions)], |l| {
            floats!(OP, r.x.dtype(), T => crate::cpu::rope::rope::<T, i32>(
                l.threads(), self.isa, l.slice_mut(0)?, rows, l.slice(1)?, l.slice(2)?, half, l.slice(3)?,
                r.style, r.inverse,
            ))
        })
    }
}
