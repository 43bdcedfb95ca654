use super::{CpuKernels, floats};
use crate::GroupedBias;
use crate::cpu::grouped_bias::{Segments, add_bias, bias_gradient, weight_gradient};
use crate::grouped_gemm::bias::{gradient_sizes, sizes};
use ferrotron_tensor::{Result, Stream, Tensor, read, write};

impl CpuKernels {
    pub(super) fn launch_grouped_bias(&self, s: &Stream, b: &GroupedBias, y: &Tensor) -> Result<()> {
        const OP: &str = "grouped_bias";
        let [_, n, _] = sizes(OP, b, y)?;
        let args = [read(b.segments.offsets), read(b.segments.counts), read(b.bias), write(y)];
        let args: Vec<_> = args.into_iter().chain(b.weights.map(read)).collect();
        s.launch(OP, &args, |l| {
            let weights = b.weights.map(|_| l.slice(4)).transpose()?;
            let segments = Segments { offsets: l.slice(0)?, counts: l.slice(1)? };
            floats!(OP, y.dtype(), T => {
                let (bias, y) = (l.slice::<T>(2)?, l.slice_mut(3)?);
                add_bias(self.context(l), segments, n, bias, weights, y);
                Ok(())
            })
        })
    }

    pub(super) fn launch_grouped_bias_backward(
        &self,
        s: &Stream,
        b: &GroupedBias,
        dy: &Tensor,
        (dbias, accumulate): (&Tensor, bool),
        dweights: Option<&Tensor>,
    ) -> Result<()> {
        const OP: &str = "grouped_bias_backward";
        let [_, n, _] = gradient_sizes(OP, b, dy, dbias, dweights)?;
        let mut args =
            vec![read(b.segments.offsets), read(b.segments.counts), read(b.bias), read(dy), write(dbias)];
        args.extend(dweights.map(write));
        args.extend(b.weights.map(read));
        let last = args.len() - 1;
        s.launch(OP, &args, |l| {
            let weights = b.weights.map(|_| l.slice(last)).transpose()?;
            let segments = Segments { offsets: l.slice(0)?, counts: l.slice(1)? };
            let cpu = self.context(l);
            floats!(OP, dy.dtype(), T => {
                let (bias, dy) = (l.slice::<T>(2)?, l.slice::<T>(3)?);
                bias_gradient(cpu, segments, n, weights, dy, (l.slice_mut(4)?, accumulate));
                if dweights.is_some() {
                    weight_gradient(cpu, segments, n, bias, dy, l.slice_mut(5)?);
                }
                Ok(())
            })
        })
    }
}
