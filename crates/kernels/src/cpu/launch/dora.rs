use super::{CpuKernels, floats};
use crate::cpu::dora::{factor, row_squares, scale_columns, scale_columns_backward, update_squares};
use crate::cpu::grouped_bias::Segments;
use crate::dora::{check_columns, check_squares};
use crate::{DoraFactor, DoraKernels, DoraUpdate, ScaleColumns, ScaleColumnsBackward};
use ferrotron_tensor::{Arg, Launch, Result, Stream, Tensor, read, write};

/// Segments from arguments `first` and `first + 1` of a launch, where there are any.
fn segments<'a>(l: &Launch<'a>, some: bool, first: usize) -> Result<Option<Segments<'a>>> {
    Ok(if some { Some(Segments { offsets: l.slice(first)?, counts: l.slice(first + 1)? }) } else { None })
}

fn with_segments<'a>(mut args: Vec<Arg<'a>>, segments: Option<crate::Segments<'a>>) -> Vec<Arg<'a>> {
    args.extend(segments.into_iter().flat_map(|s| [read(s.offsets), read(s.counts)]));
    args
}

impl DoraKernels for CpuKernels {
    fn row_squares(&self, s: &Stream, x: &Tensor, out: &Tensor) -> Result<()> {
        const OP: &str = "row_squares";
        let [_, k] = check_squares(x, out)?;
        s.launch(OP, &[read(x), write(out)], |l| {
            floats!(OP, x.dtype(), T => {
                row_squares::<T>(self.context(l), k, l.slice(0)?, l.slice_mut(1)?);
                Ok(())
            })
        })
    }

    fn dora_update(&self, s: &Stream, d: &DoraUpdate) -> Result<()> {
        const OP: &str = "dora_update";
        let [_, n, r, stride] = d.sizes()?;
        s.launch(OP, &[read(d.u), read(d.b), read(d.gram), write(d.out)], |l| {
            floats!(OP, d.b.dtype(), T => {
                let operands = (l.slice(0)?, l.slice::<T>(1)?, l.slice(2)?);
                update_squares(self.context(l), ([n, r], stride), operands, d.scale, l.slice_mut(3)?);
                Ok(())
            })
        })
    }

    fn dora_factor(&self, s: &Stream, d: &DoraFactor) -> Result<()> {
        const OP: &str = "dora_factor";
        let ([groups, n], at) = d.sizes()?;
        let args = [read(d.base), read(d.update), read(d.m), write(d.factor), write(d.inv_norm)];
        s.launch(OP, &args, |l| {
            floats!(OP, d.m.dtype(), T => {
                let (base, update, m) = (l.slice::<f32>(0)?, l.slice::<f32>(1)?, l.slice::<T>(2)?);
                let (factors, inv_norms) = (l.slice_mut::<f32>(3)?, l.slice_mut::<f32>(4)?);
                for (g, o) in (0..groups).flat_map(|g| (0..n).map(move |o| (g, o))) {
                    let [i, j, k, f, v] = at.map(|stride| g * stride + o);
                    (factors[f], inv_norms[v]) = factor(base[i], update[j], m[k]);
                }
                Ok(())
            })
        })
    }

    fn scale_columns(&self, s: &Stream, c: &ScaleColumns) -> Result<()> {
        const OP: &str = "scale_columns";
        let [_, n, _] = check_columns(OP, &[c.x, c.y], &[c.factor], c.segments, c.bias)?;
        let mut args = with_segments(vec![read(c.x), read(c.factor), write(c.y)], c.segments);
        args.extend(c.bias.map(read));
        s.launch(OP, &args, |l| {
            floats!(OP, c.x.dtype(), T => {
                let by = (n, segments(l, c.segments.is_some(), 3)?);
                let bias = if c.bias.is_some() { Some(l.slice::<T>(3)?) } else { None };
                scale_columns(self.context(l), by, (l.slice::<T>(0)?, l.slice(1)?, bias), l.slice_mut(2)?);
                Ok(())
            })
        })
    }

    fn scale_columns_backward(&self, s: &Stream, c: &ScaleColumnsBackward) -> Result<()> {
        const OP: &str = "scale_columns_backward";
        let rows = [c.dy, c.x, c.dx, c.products];
        let [_, n, _] = check_columns(OP, &rows, &[c.factor, c.inv_norm], c.segments, None)?;
        let args = [read(c.dy), read(c.x), read(c.factor), read(c.inv_norm), write(c.dx), write(c.products)];
        s.launch(OP, &with_segments(args.to_vec(), c.segments), |l| {
            floats!(OP, c.x.dtype(), T => {
                let by = (n, segments(l, c.segments.is_some(), 6)?);
                let (rows, factors) = ((l.slice::<T>(0)?, l.slice::<T>(1)?), (l.slice(2)?, l.slice(3)?));
                scale_columns_backward(self.context(l), by, rows, factors, (l.slice_mut(4)?, l.slice_mut(5)?));
                Ok(())
            })
        })
    }
}
