use super::{CpuKernels, floats, same_contiguous};
use crate::activation::{check_act, check_weighted};
use crate::cpu::activation::{activation, activation_backward, gated as gated_forward, gated_backward};
use crate::cpu::weighted_activation::{WeightedGrad, weighted, weighted_backward};
use crate::{ActBackward, ActForward, ActivationKernels, WeightedAct, WeightedActBackward};
use ferrotron_tensor::{Result, Stream, read, write};

impl ActivationKernels for CpuKernels {
    fn act_forward(&self, s: &Stream, a: &ActForward) -> Result<()> {
        let &ActForward { act, gated, x, y } = a;
        const OP: &str = "act_forward";
        let f = check_act(OP, act, gated, x, y)?;
        s.launch(OP, &[read(x), write(y)], |l| {
            floats!(OP, x.dtype(), T => {
                let (x, y) = (l.slice::<T>(0)?, l.slice_mut::<T>(1)?);
                match gated {
                    true => gated_forward(self.context(l), act, f, x, y),
                    false => activation(self.context(l), act, x, y),
                }
            })
        })
    }

    fn act_backward(&self, s: &Stream, a: &ActBackward) -> Result<()> {
        let &ActBackward { act, gated, x, dy, dx } = a;
        const OP: &str = "act_backward";
        let f = check_act(OP, act, gated, x, dy)?;
        same_contiguous(OP, &[x, dx])?;
        s.launch(OP, &[read(x), read(dy), write(dx)], |l| {
            floats!(OP, x.dtype(), T => {
                let (x, dy, dx) = (l.slice::<T>(0)?, l.slice::<T>(1)?, l.slice_mut::<T>(2)?);
                match gated {
                    true => gated_backward(self.context(l), act, f, x, dy, dx),
                    false => activation_backward(self.context(l), act, x, dy, dx),
                }
            })
        })
    }

    fn weighted_act(&self, s: &Stream, a: &WeightedAct) -> Result<()> {
        let &WeightedAct { act, gated, x, probs: p, y } = a;
        const OP: &str = "weighted_act";
        let [_, f] = check_weighted(OP, (act, gated), x, &[p], y)?;
        s.launch(OP, &[read(x), read(p), write(y)], |l| {
            floats!(OP, x.dtype(), T => {
                let (x, p, y) = (l.slice::<T>(0)?, l.slice(1)?, l.slice_mut(2)?);
                weighted(self.context(l), (act, gated), f, x, p, y);
                Ok(())
            })
        })
    }

    fn weighted_act_backward(&self, s: &Stream, a: &WeightedActBackward) -> Result<()> {
        let &WeightedActBackward { act, gated, x, probs, source, dy, dx, dprobs } = a;
        const OP: &str = "weighted_act_backward";
        let [_, f] = check_weighted(OP, (act, gated), x, &[probs, source, dprobs], dy)?;
        same_contiguous(OP, &[x, dx])?;
        let args = [read(x), read(probs), read(source), read(dy), write(dx), write(dprobs)];
        s.launch(OP, &args, |l| {
            floats!(OP, x.dtype(), T => {
                let grad = WeightedGrad::<T> {
                    x: l.slice(0)?,
                    dy: l.slice(3)?,
                    probs: l.slice(1)?,
                    source: l.slice(2)?,
                    dx: l.slice_mut(4)?,
                    dprobs: l.slice_mut(5)?,
                };
                weighted_backward(self.context(l), (act, gated), f, grad);
                Ok(())
            })
        })
    }
}
