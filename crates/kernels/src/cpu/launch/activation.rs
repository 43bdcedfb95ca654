use super::{CpuKernels, floats, same_contiguous};
use crate::activation::width;
use crate::cpu::activation::{activation, activation_backward, gated as gated_forward, gated_backward};
use crate::{Act, ActivationKernels};
use ferrotron_tensor::{Result, Stream, Tensor, read, write};

impl ActivationKernels for CpuKernels {
    fn act_forward(&self, s: &Stream, act: Act, gated: bool, x: &Tensor, y: &Tensor) -> Result<()> {
        const OP: &str = "act_forward";
        let f = width(OP, act, gated, x, y)?;
        s.launch(OP, &[read(x), write(y)], |l| {
            floats!(OP, x.dtype(), T => {
                let (x, y) = (l.slice::<T>(0)?, l.slice_mut::<T>(1)?);
                match gated {
                    true => gated_forward(l.threads(), self.isa, act, f, x, y),
                    false => activation(l.threads(), self.isa, act, x, y),
                }
            })
        })
    }

    fn act_backward(
        &self,
        s: &Stream,
        act: Act,
        gated: bool,
        x: &Tensor,
        dy: &Tensor,
        dx: &Tensor,
    ) -> Result<()> {
        const OP: &str = "act_backward";
        let f = width(OP, act, gated, x, dy)?;
        same_contiguous(OP, &[x, dx])?;
        s.launch(OP, &[read(x), read(dy), write(dx)], |l| {
            floats!(OP, x.dtype(), T => {
                let (x, dy, dx) = (l.slice::<T>(0)?, l.slice::<T>(1)?, l.slice_mut::<T>(2)?);
                match gated {
                    true => gated_backward(l.threads(), self.isa, act, f, x, dy, dx),
                    false => activation_backward(l.threads(), self.isa, act, x, dy, dx),
                }
            })
        })
    }
}
