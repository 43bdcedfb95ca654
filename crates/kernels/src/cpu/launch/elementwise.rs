use super::{CpuKernels, floats, rows_of, same_contiguous};
use crate::checks::dtypes;
use crate::cpu::random::{DropoutMask, dropout, fill_normal};
use crate::cpu::rows::Rows;
use crate::cpu::{elementwise as e, reduce};
use crate::elementwise::{check_columns, check_dropout, check_iota, check_normal, check_one};
use crate::philox::RandomStream;
use crate::{Dropout, ElementwiseKernels, NormalFill};
use ferrotron_tensor::{DType, Error, Result, Stream, Tensor, bf16, f16, read, write};

impl ElementwiseKernels for CpuKernels {
    fn add(&self, s: &Stream, a: &Tensor, b: &Tensor, out: &Tensor) -> Result<()> {
        same_contiguous("add", &[a, b, out])?;
        s.launch("add", &[read(a), read(b), write(out)], |l| {
            floats!("add", a.dtype(), T => e::add::<T>(self.context(l), l.slice(0)?, l.slice(1)?, l.slice_mut(2)?))
        })
    }

    fn add_assign(&self, s: &Stream, x: &Tensor, y: &Tensor) -> Result<()> {
        same_contiguous("add_assign", &[x, y])?;
        s.launch("add_assign", &[write(x), read(y)], |l| {
            floats!("add_assign", x.dtype(), X => floats!("add_assign", y.dtype(), Y =>
                e::accumulate::<Y, X>(self.context(l), l.slice(1)?, l.slice_mut(0)?)))
        })
    }

    fn max_assign(&self, s: &Stream, x: &Tensor, y: &Tensor) -> Result<()> {
        const OP: &str = "max_assign";
        same_contiguous(OP, &[x, y])?;
        dtypes(OP, x.dtype(), &[y])?;
        s.launch(OP, &[write(x), read(y)], |l| {
            floats!(OP, x.dtype(), T => e::max_assign::<T>(self.context(l), l.slice(1)?, l.slice_mut(0)?))
        })
    }

    fn scale(&self, s: &Stream, x: &Tensor, factor: f32) -> Result<()> {
        same_contiguous("scale", &[x])?;
        s.launch("scale", &[write(x)], |l| {
            floats!("scale", x.dtype(), T => {
                e::scale::<T>(self.context(l), l.slice_mut(0)?, factor);
                Ok(())
            })
        })
    }

    fn copy(&self, s: &Stream, x: &Tensor, out: &Tensor) -> Result<()> {
        const OP: &str = "copy";
        if x.dtype() != out.dtype() {
            same_contiguous(OP, &[x, out])?;
            return s.launch(OP, &[read(x), write(out)], |l| {
                let cpu = self.context(l);
                match (x.dtype(), out.dtype()) {
                    (DType::F32, DType::BF16) => e::cast::<f32, bf16>(cpu, l.slice(0)?, l.slice_mut(1)?),
                    (DType::BF16, DType::F32) => e::cast::<bf16, f32>(cpu, l.slice(0)?, l.slice_mut(1)?),
                    (DType::F32, DType::F16) => e::cast::<f32, f16>(cpu, l.slice(0)?, l.slice_mut(1)?),
                    (DType::F16, DType::F32) => e::cast::<f16, f32>(cpu, l.slice(0)?, l.slice_mut(1)?),
                    (DType::F16, DType::BF16) => e::cast::<f16, bf16>(cpu, l.slice(0)?, l.slice_mut(1)?),
                    (DType::BF16, DType::F16) => e::cast::<bf16, f16>(cpu, l.slice(0)?, l.slice_mut(1)?),
                    (found, wanted) => Err(Error::DType { op: OP, found, wanted }),
                }
            });
        }
        let rows = rows_of(OP, [x, out]);
        let plain = |r: &Rows| r.outer_stride >= r.inner_stride || r.outer <= 1 || r.inner <= 1;
        let simple = rows.as_ref().is_ok_and(|r| r.iter().all(plain));
        if !simple && x.rank() > 2 && x.shape() == out.shape() {
            // More than two row strides, or permuted axes: one launch per entry of the first axis.
            return (0..x.shape()[0]).try_for_each(|i| self.copy(s, &x.select(0, i)?, &out.select(0, i)?));
        }
        let [from, to] = rows?;
        s.launch(OP, &[read(x), write(out)], |l| match x.dtype() {
            DType::F32 => e::copy_rows::<f32>(l.threads(), l.slice(0)?, from, l.slice_mut(1)?, to),
            DType::BF16 => e::copy_rows::<bf16>(l.threads(), l.slice(0)?, from, l.slice_mut(1)?, to),
            DType::F16 => e::copy_rows::<f16>(l.threads(), l.slice(0)?, from, l.slice_mut(1)?, to),
            DType::I32 => e::copy_rows::<i32>(l.threads(), l.slice(0)?, from, l.slice_mut(1)?, to),
            found => Err(Error::DType { op: OP, found, wanted: DType::F32 }),
        })
    }

    fn iota(&self, s: &Stream, out: &Tensor) -> Result<()> {
        check_iota(out)?;
        s.launch("iota", &[write(out)], |l| {
            l.slice_mut::<i32>(0)?.iter_mut().zip(0..).for_each(|(x, i)| *x = i);
            Ok(())
        })
    }

    fn column_sum(&self, s: &Stream, x: &Tensor, accumulate: bool, sums: &Tensor) -> Result<()> {
        const OP: &str = "column_sum";
        check_columns(x, sums)?;
        let [rows] = rows_of(OP, [x])?;
        s.launch(OP, &[read(x), write(sums)], |l| {
            floats!(OP, x.dtype(), T =>
                reduce::column_sum::<T>(self.context(l), l.slice(0)?, rows, l.slice_mut(1)?, accumulate))
        })
    }

    fn dot(&self, s: &Stream, a: &Tensor, b: &Tensor, out: &Tensor) -> Result<()> {
        same_contiguous("dot", &[a, b])?;
        check_one(out)?;
        s.launch("dot", &[read(a), read(b), write(out)], |l| {
            let (a, b) = (l.slice::<f32>(0)?, l.slice::<f32>(1)?);
            // f64 in index order.
            let sum: f64 = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            l.slice_mut::<f32>(2)?[..1].fill(sum as f32);
            Ok(())
        })
    }

    fn softcap_forward(&self, s: &Stream, cap: f32, x: &Tensor) -> Result<()> {
        same_contiguous("softcap_forward", &[x])?;
        s.launch("softcap_forward", &[write(x)], |l| {
            floats!("softcap_forward", x.dtype(), T => {
                e::softcap::<T>(self.context(l), cap, l.slice_mut(0)?);
                Ok(())
            })
        })
    }

    fn softcap_backward(&self, s: &Stream, cap: f32, y: &Tensor, dy: &Tensor) -> Result<()> {
        same_contiguous("softcap_backward", &[y, dy])?;
        s.launch("softcap_backward", &[read(y), write(dy)], |l| {
            floats!("softcap_backward", y.dtype(), T =>
                e::softcap_backward::<T>(self.context(l), cap, l.slice(0)?, l.slice_mut(1)?))
        })
    }

    fn dropout(&self, s: &Stream, d: &Dropout) -> Result<()> {
        let &Dropout { p, key, rows, x, y } = d;
        same_contiguous("dropout", &[x, y])?;
        let width = check_dropout(p, rows, x)?;
        key.check("dropout")?;
        let args: Vec<_> = [read(x), write(y), read(rows)].into_iter().chain(key.step.map(read)).collect();
        s.launch("dropout", &args, |l| {
            let stream = RandomStream::dropout(key.at(key.step.map(|_| l.slice(3)).transpose()?));
            let mask = DropoutMask { p, stream, rows: l.slice(2)?, width };
            floats!("dropout", x.dtype(), T =>
                dropout::<T>(self.context(l), mask, l.slice(0)?, l.slice_mut(1)?))
        })
    }

    fn normal(&self, s: &Stream, runs: NormalFill, out: &Tensor) -> Result<()> {
        let [_, width] = check_normal(out)?;
        s.launch("normal", &[write(out)], |l| {
            let out = l.slice_mut::<f32>(0)?;
            fill_normal(self.context(l), runs, width, out);
            Ok(())
        })
    }
}
