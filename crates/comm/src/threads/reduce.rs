//! Elementwise sums and maxima over ranks, in rank order.

use crate::ReduceOp;
use crate::backend::OpError;
use ferrotron_tensor::{
    Category, DType, DeviceKind, Element, Float, Result, Stream, Tensor, bf16, f16, read, shape_error, write,
};
use std::sync::Arc;

/// A GPU kernel `acc = acc ∘ x` on contiguous tensors of f32 and bf16, or of f32 and f16, in any combination. It
/// computes in f32 and rounds once to the dtype of `acc`.
pub type ReduceKernel = Arc<dyn Fn(&Stream, &Tensor, &Tensor) -> Result<()> + Send + Sync>;

/// GPU kernels for the reductions of ranks as threads, and for maxima over NCCL. Missing ones are computed on the host,
/// which is correct but slow.
#[derive(Clone, Default)]
pub struct ReduceKernels {
    /// `acc += x`.
    pub add: Option<ReduceKernel>,
    /// `acc = max(acc, x)`, NaN if either is NaN.
    pub max: Option<ReduceKernel>,
}

/// `out` = reduction of `sources` in their order, all flat and of the same size and dtype.
pub(crate) fn reduce(
    s: &Stream,
    kernels: &ReduceKernels,
    sources: &[Tensor],
    out: &Tensor,
    op: ReduceOp,
) -> Result<(), OpError> {
    if out.numel() == 0 {
        return Ok(());
    }
    let on_host = s.device().kind() == DeviceKind::Cpu;
    let kernel = match op {
        ReduceOp::Sum => &kernels.add,
        ReduceOp::Max => &kernels.max,
    };
    match (kernel, out.dtype()) {
        (Some(add), DType::F32 | DType::BF16 | DType::F16) if !on_host => on_gpu(s, add, sources, out, op)?,
        (_, DType::F32) => on_host_data::<f32>(s, sources, out, op)?,
        (_, DType::BF16) => on_host_data::<bf16>(s, sources, out, op)?,
        (_, DType::F16) => on_host_data::<f16>(s, sources, out, op)?,
        (_, DType::F64) => on_host_data::<f64>(s, sources, out, op)?,
        (_, DType::I32) => on_host_data::<i32>(s, sources, out, op)?,
        (_, DType::I64) => on_host_data::<i64>(s, sources, out, op)?,
        (_, other) => shape_error("reduce", format!("{other} cannot be reduced"))?,
    }
    Ok(())
}

/// Sums of bf16 and f16 need an f32 accumulator; f32 sums and maxima accumulate in place.
fn on_gpu(s: &Stream, add: &ReduceKernel, sources: &[Tensor], out: &Tensor, op: ReduceOp) -> Result<()> {
    if out.dtype() == DType::F32 || op == ReduceOp::Max {
        for (i, x) in sources.iter().enumerate() {
            if i == 0 { s.copy(x, out)? } else { add(s, out, x)? }
        }
        return Ok(());
    }
    let acc = s.zeros(&[out.numel()], DType::F32, Category::Communication)?;
    sources.iter().try_for_each(|x| add(s, &acc, x))?;
    s.zero(out)?;
    add(s, out, &acc)
}

fn on_host_data<T: Reducible>(s: &Stream, sources: &[Tensor], out: &Tensor, op: ReduceOp) -> Result<()> {
    if s.device().kind() != DeviceKind::Cpu {
        let values = sources.iter().map(|x| s.download::<T>(x)).collect::<Result<Vec<Vec<T>>>>()?;
        let mut result = vec![T::zeroed(); out.numel()];
        fold(&mut result, &values.iter().map(Vec::as_slice).collect::<Vec<_>>(), op);
        return s.upload_into(out, &result);
    }
    let args: Vec<_> = [write(out)].into_iter().chain(sources.iter().map(read)).collect();
    s.launch("reduce", &args, |l| {
        let values = (1..=sources.len()).map(|i| l.slice::<T>(i)).collect::<Result<Vec<&[T]>>>()?;
        fold(l.slice_mut::<T>(0)?, &values, op);
        Ok(())
    })
}

/// Elements reduced over all ranks at a time, so that the accumulators stay in the L1 cache.
const CHUNK: usize = 1024;

/// `out[i]` = reduction of `sources[r][i]` in order of r, rounded once.
pub(crate) fn fold<T: Reducible>(out: &mut [T], sources: &[&[T]], op: ReduceOp) {
    let mut acc = [T::Acc::default(); CHUNK];
    for (chunk, out) in out.chunks_mut(CHUNK).enumerate() {
        let acc = &mut acc[..out.len()];
        for (i, source) in sources.iter().enumerate() {
            let pairs = acc.iter_mut().zip(&source[chunk * CHUNK..]);
            match op {
                _ if i == 0 => pairs.for_each(|(a, x)| *a = x.to_acc()),
                ReduceOp::Sum => pairs.for_each(|(a, x)| *a = T::add(*a, x.to_acc())),
                ReduceOp::Max => pairs.for_each(|(a, x)| *a = T::max(*a, x.to_acc())),
            }
        }
        out.iter_mut().zip(acc).for_each(|(o, a)| *o = T::from_acc(*a));
    }
}

/// An element type with its accumulator type.
pub(crate) trait Reducible: Element {
    type Acc: Copy + Default;
    fn to_acc(&self) -> Self::Acc;
    fn from_acc(acc: Self::Acc) -> Self;
    fn add(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn max(a: Self::Acc, b: Self::Acc) -> Self::Acc;
}

macro_rules! float {
    ($t:ty, $acc:ty, $to_acc:expr, $from_acc:expr) => {
        impl Reducible for $t {
            type Acc = $acc;
            fn to_acc(&self) -> $acc {
                $to_acc(*self)
            }
            fn from_acc(acc: $acc) -> $t {
                $from_acc(acc)
            }
            fn add(a: $acc, b: $acc) -> $acc {
                a + b
            }
            fn max(a: $acc, b: $acc) -> $acc {
                if b > a || b.is_nan() { b } else { a }
            }
        }
    };
}
float!(f32, f32, std::convert::identity, std::convert::identity);
float!(f64, f64, std::convert::identity, std::convert::identity);
float!(bf16, f32, Float::to_f32, <bf16 as Float>::from_f32);
float!(f16, f32, Float::to_f32, <f16 as Float>::from_f32);

macro_rules! integer {
    ($t:ty) => {
        impl Reducible for $t {
            type Acc = $t;
            fn to_acc(&self) -> $t {
                *self
            }
            fn from_acc(acc: $t) -> $t {
                acc
            }
            fn add(a: $t, b: $t) -> $t {
                a.wrapping_add(b)
            }
            fn max(a: $t, b: $t) -> $t {
                Ord::max(a, b)
            }
        }
    };
}
integer!(i32);
integer!(i64);
