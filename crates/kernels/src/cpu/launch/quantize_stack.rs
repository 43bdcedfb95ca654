use super::{CpuKernels, floats};
use crate::cpu::CpuContext;
use crate::cpu::quant::{
    Blocks, Format, Orientation, amax, formats, quantize_blocks, quantize_tensor, transpose,
};
use crate::cpu::rows::RowsView;
use crate::quant::scale::ScaleRule;
use crate::quant::stack::{amax_sizes, check_transpose};
use crate::{ALIGN, BLOCK, Fp8Tensor, QuantizeStack, ScaleSource, ScalingMode};
use ferrotron_tensor::{Element, Float, Result, Stream, Tensor, read, write};

impl CpuKernels {
    pub(super) fn launch_amax_stack(&self, s: &Stream, x: &Tensor, out: &Tensor) -> Result<()> {
        const OP: &str = "amax_stack";
        let [_, n, k] = amax_sizes(OP, x, out)?;
        s.launch(OP, &[read(x), write(out)], |l| {
            floats!(OP, x.dtype(), T => {
                let (x, out) = (l.slice::<T>(0)?, l.slice_mut::<f32>(1)?);
                for (e, out) in out.iter_mut().enumerate() {
                    let matrix = RowsView::dense(&x[e * n * k..(e + 1) * n * k], n, k);
                    *out = out.max(amax(self.context(l), matrix)?);
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
                        let out = &mut l.slice_mut::<f32>(2)?[0];
                        let rows = RowsView::dense(x, x.len() / k.max(1), k);
                        *out = out.max(amax(self.context(l), rows)?);
                        Some(l.slice::<f32>(1)?[0])
                    }
                    _ => None,
                };
                let amax = match q.range {
                    ScaleSource::Amax { .. } => l.slice::<f32>(1)?,
                    _ => &[],
                };
                let Some(format) = format else { return Ok(()) };
                let stack = Stack { cpu: self.context(l), shape, x, range: q.range, scaling, given, amax };
                formats!(OP, format, F => outputs.iter().try_for_each(|(how, at)| {
                    let (data, scales) = (l.slice_mut::<F>(*at)?, l.slice_mut::<f32>(at + 1)?);
                    stack.output::<F>(*how, data, scales)
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

/// Input and scaling of a stack of matrices.
struct Stack<'a, T> {
    cpu: CpuContext<'a>,
    /// E, n, k.
    shape: [usize; 3],
    x: &'a [T],
    range: ScaleSource<'a>,
    scaling: ScalingMode,
    /// The scale that all matrices share, with [`ScaleSource::Given`].
    given: Option<f32>,
    /// The amax of each matrix, with [`ScaleSource::Amax`].
    amax: &'a [f32],
}

impl<T: Float> Stack<'_, T> {
    /// Quantizes one orientation of all matrices.
    fn output<F: Format + Element>(
        &self,
        how: Orientation,
        data: &mut [F],
        scales: &mut [f32],
    ) -> Result<()> {
        let Stack { cpu, shape: [count, n, k], range, scaling, .. } = *self;
        let [r, c] = if how == Orientation::Rows { [n, k] } else { [k, n] };
        let width = c.next_multiple_of(ALIGN);
        // n and k are multiples of 128, so scale rows of different matrices do not mix.
        let each = if scaling == ScalingMode::PerTensor { 1 } else { scaling.scales(r, c).iter().product() };
        for e in 0..count {
            let x = RowsView::dense(&self.x[e * n * k..(e + 1) * n * k], n, k);
            let data = &mut data[e * r * width..(e + 1) * r * width];
            let scales = &mut scales[e * each..(e + 1) * each];
            if let ScaleSource::Blocks { pow2 } = range {
                let rule = ScaleRule::block(F::LARGEST, pow2, T::DTYPE);
                let blocks = Blocks { scaling, rule };
                quantize_blocks(cpu, how, x, blocks, data, scales)?;
                continue;
            }
            let pow2 = matches!(range, ScaleSource::Amax { pow2: true, .. });
            let scale = self.given.unwrap_or_else(|| ScaleRule::tensor(F::LARGEST, pow2).scale(self.amax[e]));
            scales[0] = 1.0 / scale;
            quantize_tensor(cpu, how, x, scale, data)?;
        }
        Ok(())
    }
}
