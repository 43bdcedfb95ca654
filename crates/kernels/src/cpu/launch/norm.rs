use super::{CpuKernels, floats, rows_of};
use crate::cpu::norm::{AddNorm, Affine, InOut, add_layer_norm, add_rms_norm, layer_norm, rms_norm};
use crate::cpu::norm_backward::{NormGrad, norm_backward};
use crate::{Norm, NormBackward, NormForward, NormKernels, ResidualAdd};
use ferrotron_tensor::{DType, Launch, Result, Stream, read, write};

impl NormKernels for CpuKernels {
    fn norm_forward(&self, s: &Stream, norm: Norm, n: &NormForward) -> Result<()> {
        const OP: &str = "norm_forward";
        let [x_rows, y_rows] = rows_of(OP, [n.x, n.y])?;
        n.check(OP, norm, x_rows.count(), x_rows.width)?;
        let base = [read(n.x), write(n.y), read(n.gamma), write(n.rstd)];
        let mut args = base.to_vec();
        args.extend(n.beta.map(read));
        args.extend(n.mean.map(write));
        s.launch(OP, &args, |l| {
            floats!(OP, n.x.dtype(), T => {
                let io = InOut::<T> { x: l.slice(0)?, x_rows, y: l.slice_mut(1)?, y_rows };
                let affine = affine::<T>(l, norm, 2, n.beta.map(|_| 4))?;
                if norm.subtract_mean {
                    layer_norm(self.context(l), io, affine, l.slice_mut(5)?, l.slice_mut(3)?)
                } else {
                    rms_norm(self.context(l), io, affine, l.slice_mut(3)?)
                }
            })
        })
    }

    fn add_norm_forward(&self, s: &Stream, norm: Norm, add: &ResidualAdd, n: &NormForward) -> Result<()> {
        let &ResidualAdd { residual, sum } = add;
        const OP: &str = "add_norm_forward";
        super::same_contiguous(OP, &[n.x, residual, sum, n.y])?;
        n.check(OP, norm, n.rstd.numel(), n.gamma.numel())?;
        let mut args = vec![read(n.x), read(residual), write(sum), write(n.y), read(n.gamma), write(n.rstd)];
        args.extend(n.beta.map(read));
        args.extend(n.mean.map(write));
        s.launch(OP, &args, |l| {
            floats!(OP, n.x.dtype(), T => {
                let io = AddNorm::<T> {
                    x: l.slice(0)?,
                    residual: l.slice(1)?,
                    sum: l.slice_mut(2)?,
                    y: l.slice_mut(3)?,
                };
                let affine = affine::<T>(l, norm, 4, n.beta.map(|_| 6))?;
                if norm.subtract_mean {
                    add_layer_norm(self.context(l), io, affine, l.slice_mut(7)?, l.slice_mut(5)?)
                } else {
                    add_rms_norm(self.context(l), io, affine, l.slice_mut(5)?)
                }
            })
        })
    }

    fn norm_partials(&self, _dtype: DType, _rows: usize, _width: usize) -> usize {
        1
    }

    fn norm_backward(&self, s: &Stream, norm: Norm, n: &NormBackward) -> Result<()> {
        const OP: &str = "norm_backward";
        let [x_rows, dy_rows, dx_rows] = n.check(OP, norm, |_, _| 1)?;
        let mut args = vec![read(n.x), read(n.gamma), read(n.rstd), read(n.dy), write(n.dx), write(n.dgamma)];
        let mut add = |arg| {
            args.push(arg);
            args.len() - 1
        };
        let mean = n.mean.map(|t| add(read(t)));
        let dbeta = n.dbeta.map(|t| add(write(t)));
        let residual = n.residual.map(|t| add(read(t)));
        s.launch(OP, &args, |l| {
            floats!(OP, n.x.dtype(), T => {
                let grad = NormGrad::<T, T> {
                    x: l.slice(0)?,
                    x_rows,
                    mean: mean.map(|i| l.slice(i)).transpose()?,
                    rstd: l.slice(2)?,
                    gamma: l.slice(1)?,
                    zero_centred: norm.zero_centred,
                    dy: Some((l.slice(3)?, dy_rows)),
                    residual: residual.map(|i| l.slice(i)).transpose()?,
                    dx: l.slice_mut(4)?,
                    dx_rows,
                    dgamma: Some(l.slice_mut(5)?),
                    dbeta: dbeta.map(|i| l.slice_mut(i)).transpose()?,
                    accumulate: false,
                };
                norm_backward(self.context(l), grad)
            })
        })
    }
}

fn affine<'a, T: ferrotron_tensor::Element>(
    l: &Launch<'a>,
    norm: Norm,
    gamma: usize,
    beta: Option<usize>,
) -> Result<Affine<'a, T>> {
    let beta = beta.map(|i| l.slice(i)).transpose()?;
    Ok(Affine { gamma: l.slice(gamma)?, beta, eps: norm.eps, zero_centred: norm.zero_centred })
}
