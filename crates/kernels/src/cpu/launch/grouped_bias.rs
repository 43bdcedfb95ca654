use super::{CpuKernels, floats};
use crate::GroupedBias;
use crate::cpu::grouped_bias::{Segments, add_bias, bias_gradient, weight_gradient};
use crate::grouped_gemm::bias::{gradient_sizes, sizes};
use ferrotron_tensor::{Result, Stream, Tensor, read, write};

impl CpuKernels {
    pub(super) fn launch_grouped_bias(&self, s: &Stream, b: &GroupedBias, y: &Tensor) -> Result<()> {
        const OP: &str = "grouped_bias";
        let [_, n, _] = sizes(OP, b, y)?;
        let args =
            [read(b.segments.offsets), read(b.segments.counts), read(b.bias), read(b.weights), write(y)];
        s.launch(OP, &args, |l| {
            let segments = Segments { offsets: l.slice(0)?, counts: l.slice(1)? };
            floats!(OP, y.dtype(), T => {
                let (bias, weights, y) = (l.slice::<T>(2)?, l.slice(3)?, l.slice_mut(4)?);
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
        let args = [
            read(b.segments.offsets),
            read(b.segments.counts),
            read(b.bias),
            read(b.weights),
            read(dy),
            write(dbias),
            write(dweights.unwrap_or(dbias)),
        ];
        s.launch(OP, &args[..if dweights.is_some() { 7 } else { 6 }], |l| {
            let segments = Segments { offsets: l.slice(0)?, counts: l.slice(1)? };
            let cpu = self.context(l);
            floats!(OP, dy.dtype(), T => {
                let (bias, weights, dy) = (l.slice::<T>(2)?, l.slice(3)?, l.slice::<T>(4)?);
                bias_gradient(cpu, segments, n, weights, dy, (l.slice_mut(5)?, accumulate));
                if dweights.is_some() {
                    weight_gradient(cpu, segments, n, bias, dy, l.slice_mut(6)?);
                }
                Ok(())
            })
        })
    }
}
