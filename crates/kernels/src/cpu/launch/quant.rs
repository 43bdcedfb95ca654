use super::{CpuKernels, floats};
use crate::cpu::CpuContext;
use crate::cpu::quant::{
    Blocks, Orientation, amax, delayed_update, dequantize, emulate, quantize_blocks, quantize_tensor,
};
use crate::cpu::quant::{Format, formats, transpose};
use crate::cpu::reduce::column_sum;
use crate::cpu::rows::{RowsView, RowsViewMut};
use crate::quant::check::{check_delayed, check_transpose, matrix, one};
use crate::quant::microscaling::{self, EmulatedFormat};
use crate::quant::scale::ScaleRule;
use crate::{
    DelayedUpdate, Fp8Tensor, MicroscalingKernels, QuantKernels, Quantize, QuantizeStack, ScaleSource,
};
use ferrotron_tensor::{Element, Float, Launch, Result, Stream, Tensor, read, write};

impl MicroscalingKernels for CpuKernels {
    fn takes_microscaled(&self) -> bool {
        self.takes_microscaled
    }
}

impl QuantKernels for CpuKernels {
    fn amax(&self, s: &Stream, x: &Tensor, out: &Tensor) -> Result<()> {
        const OP: &str = "amax";
        let rows = matrix(OP, x)?;
        one(OP, out)?;
        s.launch(OP, &[read(x), write(out)], |l| {
            let found = floats!(OP, x.dtype(), T =>
                amax::<T>(self.context(l), RowsView { data: l.slice(0)?, rows }))?;
            let out = &mut l.slice_mut::<f32>(1)?[0];
            *out = out.max(found);
            Ok(())
        })
    }

    fn quantize(&self, s: &Stream, q: &Quantize) -> Result<()> {
        const OP: &str = "quantize";
        let (rows, format) = q.check(OP)?;
        let mut args = vec![read(q.x)];
        let mut add = |arg| {
            args.push(arg);
            args.len() - 1
        };
        let range = match q.range {
            ScaleSource::Amax { amax, pow2 } => From::Amax { amax: add(read(amax)), pow2 },
            ScaleSource::Given { scale, amax } => {
                From::Given { scale: add(read(scale)), amax: add(write(amax)) }
            }
            ScaleSource::Blocks { pow2 } => From::Blocks { pow2 },
        };
        let sums = q.sums.map(|(sums, accumulate)| (add(write(sums)), accumulate));
        let mut outputs = Vec::new();
        for (how, bytes) in [(Orientation::Rows, q.rows), (Orientation::Cols, q.cols)] {
            if let Some(bytes) = bytes {
                outputs.push((how, bytes, add(write(&bytes.data)), add(write(&bytes.scale_inv))));
            }
        }
        s.launch(OP, &args, |l| {
            floats!(OP, q.x.dtype(), T => {
                let cpu = self.context(l);
                let job = Job::<T> { cpu, x: RowsView { data: l.slice(0)?, rows }, range };
                if let Some((at, accumulate)) = sums {
                    column_sum(cpu, job.x.data, rows, l.slice_mut(at)?, accumulate)?;
                }
                if let From::Given { amax: at, .. } = range {
                    let found = amax(cpu, job.x)?;
                    let out = &mut l.slice_mut::<f32>(at)?[0];
                    *out = out.max(found);
                }
                let Some(format) = format else { return Ok(()) };
                formats!(OP, format, F => outputs.iter().try_for_each(|(how, bytes, data, scale_inv)|
                    job.output::<F>(l, *how, bytes, *data, *scale_inv)))
            })
        })
    }

    fn dequantize(&self, s: &Stream, q: &Fp8Tensor, out: &Tensor) -> Result<()> {
        const OP: &str = "dequantize";
        let rows = matrix(OP, out)?;
        q.check(OP, [rows.outer, rows.width])?;
        s.launch(OP, &[read(&q.data), read(&q.scale_inv), write(out)], |l| {
            formats!(OP, q.data.dtype(), F => floats!(OP, out.dtype(), T => {
                let (data, scales) = (l.slice::<F>(0)?, l.slice(1)?);
                let out = RowsViewMut { data: l.slice_mut(2)?, rows };
                dequantize::<F, T>(self.context(l), data, scales, q.scaling, out)
            }))
        })
    }

    fn fp8_transpose(&self, s: &Stream, q: &Fp8Tensor, out: &Fp8Tensor) -> Result<()> {
        const OP: &str = "fp8_transpose";
        let [r, c] = check_transpose(OP, q, out)?;
        let args = [read(&q.data), read(&q.scale_inv), write(&out.data), write(&out.scale_inv)];
        s.launch(OP, &args, |l| {
            formats!(OP, q.data.dtype(), F => {
                transpose::<F>(l.threads(), l.slice(0)?, l.slice_mut(2)?, r, c);
                Ok(())
            })?;
            l.slice_mut::<f32>(3)?.copy_from_slice(l.slice::<f32>(1)?);
            Ok(())
        })
    }

    fn delayed_update(&self, s: &Stream, d: &DelayedUpdate) -> Result<()> {
        let &DelayedUpdate { scaling: how, history, reduced, largest, scale } = d;
        const OP: &str = "delayed_update";
        check_delayed(OP, history, reduced, largest, scale)?;
        let own = reduced.same_memory(&history.select(0, 0)?);
        let mut args = vec![write(history), read(largest), write(scale)];
        args.extend((!own).then_some(read(reduced)));
        s.launch(OP, &args, |l| {
            let reduced = if own { None } else { Some(l.slice(3)?) };
            delayed_update(how, l.slice_mut(0)?, reduced, l.slice(1)?, l.slice_mut(2)?)
        })
    }

    fn emulate(&self, s: &Stream, how: EmulatedFormat, x: &Tensor, out: &Tensor) -> Result<()> {
        const OP: &str = "emulate";
        let rows = microscaling::check(OP, how, x, out)?;
        s.launch(OP, &[read(x), write(out)], |l| {
            floats!(OP, x.dtype(), T =>
                emulate::<T>(self.context(l), how, RowsView { data: l.slice(0)?, rows }, l.slice_mut(1)?))
        })
    }

    fn amax_stack(&self, s: &Stream, x: &Tensor, out: &Tensor) -> Result<()> {
        self.launch_amax_stack(s, x, out)
    }

    fn quantize_stack(&self, s: &Stream, q: &QuantizeStack) -> Result<()> {
        self.launch_quantize_stack(s, q)
    }

    fn transpose_stack(&self, s: &Stream, count: usize, rows: &Fp8Tensor, cols: &Fp8Tensor) -> Result<()> {
        self.launch_transpose_stack(s, count, rows, cols)
    }
}

/// [`ScaleSource`] with launch argument indices instead of tensors.
#[derive(Clone, Copy)]
enum From {
    Amax { amax: usize, pow2: bool },
    Given { scale: usize, amax: usize },
    Blocks { pow2: bool },
}

/// Input of a quantization.
struct Job<'a, T> {
    cpu: CpuContext<'a>,
    x: RowsView<'a, T>,
    range: From,
}

impl<T: Float> Job<'_, T> {
    /// Quantizes one output, whose FP8 data and scales are these arguments.
    fn output<F: Format + Element>(
        &self,
        l: &Launch,
        how: Orientation,
        bytes: &Fp8Tensor,
        data: usize,
        scale_inv: usize,
    ) -> Result<()> {
        let (data, scale_inv) = (l.slice_mut::<F>(data)?, l.slice_mut::<f32>(scale_inv)?);
        let scale = match self.range {
            From::Amax { amax, pow2 } => ScaleRule::tensor(F::LARGEST, pow2).scale(l.slice::<f32>(amax)?[0]),
            From::Given { scale, .. } => l.slice::<f32>(scale)?[0],
            From::Blocks { pow2 } => {
                let rule = ScaleRule::block(F::LARGEST, pow2, T::DTYPE);
                let blocks = Blocks { scaling: bytes.scaling, rule };
                return quantize_blocks(self.cpu, how, self.x, blocks, data, scale_inv);
            }
        };
        scale_inv.fill(1.0 / scale);
        quantize_tensor(self.cpu, how, self.x, scale, data)
    }
}
