use super::{CpuKernels, floats};
use crate::checks::same_contiguous;
use crate::cpu::weighted_activation::{weighted, weighted_backward};
use crate::weighted_activation::sizes;
use crate::{Act, WeightedActivationKernels};
use ferrotron_tensor::{Result, Stream, Tensor, read, write};

impl WeightedActivationKernels for CpuKernels {
    fn weighted_act(
        &self,
        s: &Stream,
        act: Act,
        gated: bool,
        x: &Tensor,
        p: &Tensor,
        y: &Tensor,
    ) -> Result<()> {
        const OP: &str = "weighted_act";
        let [_, f] = sizes(OP, (act, gated), x, &[p], y)?;
        s.launch(OP, &[read(x), read(p), write(y)], |l| {
            floats!(OP, x.dtype(), T => {
                let (x, p, y) = (l.slice::<T>(0)?, l.slice(1)?, l.slice_mut(2)?);
                weighted(l.threads(), self.isa, (act, gated), f, x, p, y);
                Ok(())
            })
        })
    }

    fn weighted_act_backward(
        &self,
        s: &Stream,
        act: Act,
        gated: bool,
        x: &Tensor,
        p: &Tensor,
        live: &Tensor,
        dy: &Tensor,
        dx: &Tensor,
        dp: &Tensor,
    ) -> Result<()> {
        const OP: &str = "weighted_act_backward";
        let [_, f] = sizes(OP, (act, gated), x, &[p, live, dp], dy)?;
        same_contiguous(OP, &[x, dx])?;
        let args = [read(x), read(p), read(live), read(dy), write(dx), write(dp)];
        s.launch(OP, &args, |l| {
            floats!(OP, x.dtype(), T => {
                let (rows, p, live) = ([l.slice::<T>(0)?, l.slice(3)?], l.slice(1)?, l.slice(2)?);
                let (dx, dp) = (l.slice_mut(4)?, l.slice_mut(5)?);
                weighted_backward(l.threads(), self.isa, (act, gated), f, rows, p, live, dx, dp);
                Ok(())
            })
        })
    }
}
