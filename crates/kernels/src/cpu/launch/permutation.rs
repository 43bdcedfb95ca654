use super::{CpuKernels, floats};
use crate::cpu::permutation::{
    PermuteShape, Sorted, chunk_map, gather_rows, gather_values, moe_permute_transposed, moe_unpermute,
    moe_unpermute_backward, moe_unpermute_dprobs, pad_routing_map, sort,
};
use crate::permutation::{
    Sizes, check_selections, check_values, chunk_sizes, gather_sizes, pad_sizes, permute_transposed_sizes,
    sort_sizes, unpermute_sizes, weighted_sizes,
};
use crate::{PermutationKernels, RowMap};
use ferrotron_tensor::fp8::{E4m3, E5m2};
use ferrotron_tensor::{DType, Error, Result, Stream, Tensor, bf16, read, write};

/// Dispatches the types of a tensor and its partner, which has the same type or f32.
macro_rules! or_f32 {
    ($op:expr, $value:expr, $partner:expr, $T:ident, $P:ident => $body:expr) => {
        match $partner {
            DType::F32 => floats!($op, $value, $T => {
                type $P = f32;
                $body
            }),
            _ => floats!($op, $value, $T => {
                type $P = $T;
                $body
            }),
        }
    };
}

fn shape(sizes: Sizes) -> PermuteShape {
    PermuteShape { hidden: sizes.width, topk: sizes.k }
}

impl PermutationKernels for CpuKernels {
    fn sort_by_expert(
        &self,
        s: &Stream,
        index: &Tensor,
        first: usize,
        align: usize,
        map: &RowMap,
    ) -> Result<()> {
        const OP: &str = "sort_by_expert";
        sort_sizes(OP, index, align, map)?;
        let RowMap { offsets, counts, rows, source } = map;
        s.launch(OP, &[read(index), write(offsets), write(counts), write(rows), write(source)], |l| {
            let to = Sorted {
                offsets: l.slice_mut(1)?,
                counts: l.slice_mut(2)?,
                rows: l.slice_mut(3)?,
                source: l.slice_mut(4)?,
            };
            sort(l.slice(0)?, first, align, to);
            Ok(())
        })
    }

    fn gather_rows(&self, s: &Stream, x: &Tensor, source: &Tensor, k: usize, out: &Tensor) -> Result<()> {
        const OP: &str = "gather_rows";
        let shape = shape(gather_sizes(OP, x, source, k, out)?);
        s.launch(OP, &[read(x), read(source), write(out)], |l| {
            let (t, source) = (l.threads(), l.slice(1)?);
            match x.dtype() {
                DType::F32 => gather_rows::<f32>(t, shape, l.slice(0)?, source, l.slice_mut(2)?),
                DType::BF16 => gather_rows::<bf16>(t, shape, l.slice(0)?, source, l.slice_mut(2)?),
                DType::E4M3 => gather_rows::<E4m3>(t, shape, l.slice(0)?, source, l.slice_mut(2)?),
                DType::E5M2 => gather_rows::<E5m2>(t, shape, l.slice(0)?, source, l.slice_mut(2)?),
                found => return Err(Error::DType { op: OP, found, wanted: DType::F32 }),
            }
            Ok(())
        })
    }

    fn moe_permute_transposed(&self, s: &Stream, x: &Tensor, map: &RowMap, out: &Tensor) -> Result<()> {
        const OP: &str = "moe_permute_transposed";
        let z = permute_transposed_sizes(OP, x, map, out)?;
        // E4M3 and E5M2 are moved as u8.
        let (x, out) = (x.as_bytes()?, out.as_bytes()?);
        s.launch(OP, &[read(&x), read(&map.source), write(&out)], |l| {
            moe_permute_transposed(l.threads(), shape(z), l.slice(0)?, l.slice(1)?, l.slice_mut(2)?);
            Ok(())
        })
    }

    fn moe_unpermute_backward(
        &self,
        s: &Stream,
        x: &Tensor,
        source: &Tensor,
        weights: &Tensor,
        out: &Tensor,
    ) -> Result<()> {
        const OP: &str = "moe_unpermute_backward";
        let z = weighted_sizes(OP, x, source, weights, out)?;
        s.launch(OP, &[read(x), read(source), read(weights), write(out)], |l| {
            or_f32!(OP, out.dtype(), x.dtype(), T, X => {
                let (source, weights) = (l.slice(1)?, l.slice(2)?);
                let (x, out) = (l.slice::<X>(0)?, l.slice_mut::<T>(3)?);
                moe_unpermute_backward(self.context(l), shape(z), x, source, weights, out);
                Ok(())
            })
        })
    }

    fn moe_unpermute(
        &self,
        s: &Stream,
        x: &Tensor,
        rows: &Tensor,
        weights: Option<&Tensor>,
        out: &Tensor,
    ) -> Result<()> {
        const OP: &str = "moe_unpermute";
        let z = unpermute_sizes(OP, x, rows, out)?;
        weights.map_or(Ok(()), |w| check_selections(OP, z, w))?;
        // Without weights the last argument is not read.
        let args = [read(x), read(rows), write(out), read(weights.unwrap_or(rows))];
        s.launch(OP, &args, |l| {
            or_f32!(OP, x.dtype(), out.dtype(), T, O => {
                let (x, rows, out) = (l.slice::<T>(0)?, l.slice(1)?, l.slice_mut::<O>(2)?);
                let weights = weights.map(|_| l.slice(3)).transpose()?;
                moe_unpermute(self.context(l), shape(z), x, rows, weights, out);
                Ok(())
            })
        })
    }

    fn moe_unpermute_dprobs(
        &self,
        s: &Stream,
        x: &Tensor,
        rows: &Tensor,
        dy: &Tensor,
        out: &Tensor,
    ) -> Result<()> {
        const OP: &str = "moe_unpermute_dprobs";
        let z = unpermute_sizes(OP, x, rows, dy)?;
        check_selections(OP, z, out)?;
        s.launch(OP, &[read(x), read(rows), read(dy), write(out)], |l| {
            or_f32!(OP, x.dtype(), dy.dtype(), T, D => {
                let (x, rows, dy) = (l.slice::<T>(0)?, l.slice(1)?, l.slice::<D>(2)?);
                moe_unpermute_dprobs(self.context(l), shape(z), x, rows, dy, l.slice_mut(3)?);
                Ok(())
            })
        })
    }

    fn gather_values(&self, s: &Stream, x: &Tensor, source: &Tensor, out: &Tensor) -> Result<()> {
        const OP: &str = "gather_values";
        check_values(OP, x, source, out)?;
        s.launch(OP, &[read(x), read(source), write(out)], |l| {
            match x.dtype() {
                DType::I32 => gather_values::<i32>(l.slice(0)?, l.slice(1)?, l.slice_mut(2)?),
                _ => gather_values::<f32>(l.slice(0)?, l.slice(1)?, l.slice_mut(2)?),
            }
            Ok(())
        })
    }

    fn chunk_map(
        &self,
        s: &Stream,
        sizes: &Tensor,
        order: &Tensor,
        source: &Tensor,
        back: &Tensor,
    ) -> Result<()> {
        const OP: &str = "chunk_map";
        chunk_sizes(OP, [sizes, order], [source, back])?;
        s.launch(OP, &[read(sizes), read(order), write(source), write(back)], |l| {
            chunk_map(l.slice(0)?, l.slice(1)?, l.slice_mut(2)?, l.slice_mut(3)?);
            Ok(())
        })
    }

    fn pad_routing_map(&self, s: &Stream, align: usize, map: &Tensor) -> Result<()> {
        const OP: &str = "pad_routing_map";
        let [_, experts] = pad_sizes(OP, align, map)?;
        s.launch(OP, &[write(map)], |l| {
            pad_routing_map(l.slice_mut(0)?, experts, align);
            Ok(())
        })
    }
}
