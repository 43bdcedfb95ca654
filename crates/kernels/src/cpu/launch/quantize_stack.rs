use super::{CpuKernels, floats};
use crate::cpu::quant::{
    Blocks, Format, Orientation, amax, formats, quantize_blocks, quantize_tensor, transpose,
};
use crate::cpu::rows::Rows;
use crate::quant::scale::ScaleRule;
use crate::quant::stack::{amax_sizes, check_transpose};
use crate::{ALIGN, BLOCK, Fp8Tensor, QuantizeStack, ScaleSource, ScalingMode};
use ferrotron_tensor::{Element, Float, Result, Stream, Tensor, read, write};

impl CpuKernels {
    pub(super) fn launch_amax_stack(&self, s: &Stream, x: &Tensor, most: &Tensor) -> Result<()> {
        const OP: &str = "amax_stack";
        let [_, n, k] = amax_sizes(OP, x, most)?;
        s.launch(OP, &[read(x), write(most)], |l| {
            floats!(OP, x.dtype(), T => {
                let (x, most) = (l.slice::<T>(0)?, l.slice_mut::<f32>(1)?);
                for (e, most) in most.iter_mut().enumerate() {
                    let one = &x[e * n * k..(e + 1) * n * k];
                    *most = most.max(amax(l.threads(), self.isa, one, Rows::dense(n, k))?);
                }
                Ok(())
            })
        })
    }

    pub(super) fn launch_quantize_stack(&self, s: &Stream, q: &QuantizeStack) -> Result<()> {
        const OP: &str = "quantize_stack";
        let (shape @ [_, _, k], scaling, format) = q.check(OP)?;
        let mut args = vec![read(q.x)];
        match q.range {
            ScaleSource::Amax { amax, .. } => args.push(read(amax)),
            ScaleSource::Given { scale, amax } => args.extend([read(scale), write(amax)]),
            ScaleSource::Blocks { .. } => {}
        }
        let mut outputs = Vec::new();
        for (how, bytes) in [(Orientation::Rows, q.rows), (Orientation::Cols, q.cols)] {
            if let Some(bytes) = bytes {
                outputs.push((how, args.len()));
                args.extend([write(&bytes.data), write(&bytes.scale_inv)]);
            }
        }
        s.launch(OP, &args, |l| {
            floats!(OP, q.x.dtype(), T => {
                let x = l.slice::<T>(0)?;
                let given = match q.range {
                    ScaleSource::Given { .. } => {
                        let most = &mut l.slice_mut::<f32>(2)?[0];
                        let rows = Rows::dense(x.len() / k.max(1), k);
                        *most = most.max(amax(l.threads(), self.isa, x, rows)?);
                        Some(l.slice::<f32>(1)?[0])
                    }
                    _ => None,
                };
                let amax = match q.range {
                    ScaleSource::Amax { .. } => l.slice::<f32>(1)?,
                    _ => &[],
                };
                let Some(format) = format else { return Ok(()) };
                formats!(OP, format, F => outputs.iter().try_for_each(|(how, at)| {
                    let (data, scales) = (l.slice_mut::<F>(*at)?, l.slice_mut::<f32>(at + 1)?);
                    let stack = Stack { threads: l.threads(), isa: self.isa, shape, x };
                    stack.output::<F>(*how, q.range, (given, amax), scaling, data, scales)
                }))
            })
        })
    }

    pub(super) fn launch_transpose_stack(
        &self,
        s: &Stream,
        count: usize,
        rows: &Fp8Tensor,
        cols: &Fp8Tensor,
    ) -> Result<()> {
        const OP: &str = "transpose_stack";
        let [n, k] = check_transpose(OP, count, rows, cols)?;
        let args = [read(&rows.data), read(&rows.scale_inv), write(&cols.data), write(&cols.scale_inv)];
        s.launch(OP, &args, |l| {
            formats!(OP, rows.data.dtype(), F => {
                let (from, to) = (l.slice::<F>(0)?, l.slice_mut::<F>(2)?);
                let each = [n * k.next_multiple_of(ALIGN), k * n.next_multiple_of(ALIGN)];
                for e in 0..count {
                    transpose::<F>(l.threads(), &from[e * each[0]..][..each[0]], &mut to[e * each[1]..][..each[1]], n, k);
                }
                Ok(())
            })?;
            let (from, to) = (l.slice::<f32>(1)?, l.slice_mut::<f32>(3)?);
            if rows.scaling == ScalingMode::PerTensor {
                to.copy_from_slice(from);
                return Ok(());
            }
            to.fill(0.0);
            let (down, across) = (n / BLOCK, k / BLOCK);
            let pitch = [across.next_multiple_of(4), down.next_multiple_of(4)];
            for (e, (i, j)) in
                (0..count).flat_map(|e| (0..down).flat_map(move |i| (0..across).map(move |j| (e, (i, j)))))
            {
                to[(e * across + j) * pitch[1] + i] = from[(e * down + i) * pitch[0] + j];
            }
            Ok(())
        })
    }
}

/// Input of a quantization.
struct Stack<'a, T> {
    threads: &'a ferrotron_tensor::Threads,
    isa: crate::cpu::Isa,
    /// E, n, k.
    shape: [usize; 3],
    x: &'a [T],
}

impl<T: Float> Stack<'_, T> {
    /// Quantizes one orientation of all matrices; `(given, amax)`: a shared scale, or the amax of each.
    fn output<F: Format + Element>(
        &self,
        how: Orientation,
        range: ScaleSource,
        (given, amax): (Option<f32>, &[f32]),
        scaling: ScalingMode,
        data: &mut [F],
        scales: &mut [f32],
    ) -> Result<()> {
        let [count, n, k] = self.shape;
        let [r, c] = if how == Orientation::Rows { [n, k] } else { [k, n] };
        let (rows, width) = (Rows::dense(n, k), c.next_multiple_of(ALIGN));
        // n and k are multiples of 128, so scale rows of different matrices do not mix.
        let each = if scaling == ScalingMode::PerTensor { 1 } else { scaling.scales(r, c).iter().product() };
        for e in 0..count {
            let x = &self.x[e * n * k..(e + 1) * n * k];
            let data = &mut data[e * r * width..(e + 1) * r * width];
            let scales = &mut scales[e * each..(e + 1) * each];
            if let ScaleSource::Blocks { pow2 } = range {
                let rule = ScaleRule::block(F::LARGEST, pow2, T::DTYPE);
                let blocks = Blocks { scaling, rule };
                quantize_blocks(self.threads, self.isa, how, x, rows, blocks, data, scales)?;
                continue;
            }
            let pow2 = matches!(range, ScaleSource::Amax { pow2: true, .. });
            let scale = given.unwrap_or_else(|| ScaleRule::tensor(F::LARGEST, pow2).scale(amax[e]));
            scales[0] = 1.0 / scale;
            quantize_tensor(self.threads, self.isa, how, x, rows, scale, data)?;
        }
        Ok(())
    }
}
