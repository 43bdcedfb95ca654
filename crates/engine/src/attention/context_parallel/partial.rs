//! Attention over keys that arrive in blocks: online softmax with partial results in f32.

use super::blocks::Block;
use super::{ContextParallel, Gradients};
use crate::Rank;
use ferrotron_kernels::{AttentionBackward, AttentionForward};
use ferrotron_tensor::{DType, Result, Tensor};

/// Layout of packed keys and values, `[tokens, g·(d_k + d_v)]`, keys first.
#[derive(Clone, Copy)]
pub(super) struct KvWidths {
    g: usize,
    d_k: usize,
    d_v: usize,
}

impl KvWidths {
    /// From `k [tokens, g, d_k]` and `v [tokens, g, d_v]`.
    pub(super) fn of(k: &Tensor, v: &Tensor) -> KvWidths {
        KvWidths { g: k.shape()[1], d_k: k.shape()[2], d_v: v.shape()[2] }
    }

    pub(super) fn row(&self) -> usize {
        self.g * (self.d_k + self.d_v)
    }

    /// Views keys and values by head in packed rows.
    pub(super) fn split(&self, rows: &Tensor) -> Result<(Tensor, Tensor)> {
        let (t, middle) = (rows.shape()[0], self.g * self.d_k);
        let k = rows.narrow(1, 0, middle)?.view(&[t, self.g, self.d_k])?;
        let v = rows.narrow(1, middle, self.g * self.d_v)?.view(&[t, self.g, self.d_v])?;
        Ok((k, v))
    }

    /// Copies keys and values into a new packed buffer.
    pub(super) fn pack(&self, rank: &Rank, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let rows = rank.activation(&[k.shape()[0], self.row()], k.dtype())?;
        let (to_k, to_v) = self.split(&rows)?;
        rank.kernels.copy(&rank.compute, k, &to_k)?;
        rank.kernels.copy(&rank.compute, v, &to_v)?;
        Ok(rows)
    }

    /// Writes f32 gradient sums to dk and dv, rounded once to their dtype.
    pub(super) fn write_grads(&self, rank: &Rank, sums: &Tensor, dk: &Tensor, dv: &Tensor) -> Result<()> {
        let (k, v) = self.split(&rounded(rank, sums, dk.dtype())?)?;
        rank.kernels.copy(&rank.compute, &k, dk)?;
        rank.kernels.copy(&rank.compute, &v, dv)
    }
}

fn rounded(rank: &Rank, sums: &Tensor, dtype: DType) -> Result<Tensor> {
    if dtype == DType::F32 {
        return Ok(sums.clone());
    }
    let out = rank.activation(sums.shape(), dtype)?;
    rank.kernels.copy(&rank.compute, sums, &out)?;
    Ok(out)
}

/// Running output and log-sum-exp of queries over the key blocks so far.
pub(super) struct OnlineSoftmax<'a> {
    context: &'a ContextParallel<'a>,
    q: &'a Tensor,
    /// Joins the first block, so that it enters every query's softmax once.
    sink: Option<&'a Tensor>,
    out: &'a Tensor,
    /// f32 accumulator; `out` itself where that is f32.
    sum: Tensor,
    pub(super) lse: Tensor,
    fresh: bool,
}

impl<'a> OnlineSoftmax<'a> {
    /// Starts for `q [tokens, n, d_k]`; `out [tokens, n, d_v]` is contiguous.
    pub(super) fn new(
        context: &'a ContextParallel<'a>,
        q: &'a Tensor,
        sink: Option<&'a Tensor>,
        out: &'a Tensor,
    ) -> Result<OnlineSoftmax<'a>> {
        let rank = context.rank;
        let sum = match out.dtype() {
            DType::F32 => out.clone(),
            _ => rank.activation(out.shape(), DType::F32)?,
        };
        let lse = rank.activation(&q.shape()[..2], DType::F32)?;
        Ok(OnlineSoftmax { context, q, sink, out, sum, lse, fresh: true })
    }

    /// Adds one block of keys and values. Every launch covers all queries, also those without keys in this block: the
    /// first block gives each query its sink, which is then part of the running softmax.
    pub(super) fn attend(&mut self, block: &Block, k: &Tensor, v: &Tensor) -> Result<()> {
        let rank = self.context.rank;
        let (kernels, s) = (&rank.kernels, &rank.compute);
        let fresh = std::mem::replace(&mut self.fresh, false);
        let sink = self.sink.filter(|_| fresh);
        let run = |out: &Tensor, lse: &Tensor| {
            let a = AttentionForward { q: self.q, k, v, sink, out, lse };
            kernels.attention_forward(s, &block.scores, block.sequences(), &a)
        };
        if fresh {
            run(self.out, &self.lse)?;
            return if self.sum.same_memory(self.out) {
                Ok(())
            } else {
                kernels.copy(s, self.out, &self.sum)
            };
        }
        let part = rank.activation(self.out.shape(), self.out.dtype())?;
        let lse = rank.activation(self.lse.shape(), DType::F32)?;
        run(&part, &lse)?;
        kernels.merge_attention(s, &self.sum, &self.lse, &part, &lse)
    }

    /// Writes `out` and returns the log-sum-exp.
    pub(super) fn finish(self) -> Result<Tensor> {
        if !self.sum.same_memory(self.out) {
            self.context.rank.kernels.copy(&self.context.rank.compute, &self.sum, self.out)?;
        }
        Ok(self.lse)
    }
}

/// Inputs of backward that all key blocks share, and the running sum of `dq`.
pub(super) struct PartialGrads<'a> {
    pub(super) context: &'a ContextParallel<'a>,
    pub(super) q: &'a Tensor,
    /// Output over all keys, like `lse`: with both, one block's gradients are its exact contribution.
    pub(super) out: &'a Tensor,
    pub(super) lse: &'a Tensor,
    pub(super) dout: &'a Tensor,
    /// The sink and its gradient, taken by the first block: dsink depends on the global lse only, so each query adds to
    /// it once.
    sink: Option<(&'a Tensor, &'a Tensor)>,
    dq: Option<Tensor>,
}

impl<'a> PartialGrads<'a> {
    pub(super) fn new(
        context: &'a ContextParallel<'a>,
        q: &'a Tensor,
        lse: &'a Tensor,
        y: &Gradients<'a>,
    ) -> PartialGrads<'a> {
        let sink = y.sink.zip(y.dsink);
        PartialGrads { context, q, out: y.out, lse, dout: y.dout, sink, dq: None }
    }

    /// Packed gradients of one block's keys and values, in the model's dtype; `dq` is accumulated here.
    pub(super) fn of(&mut self, block: &Block, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let rank = self.context.rank;
        let dq = rank.activation(self.q.shape(), self.q.dtype())?;
        let widths = KvWidths::of(k, v);
        let dkv = rank.activation(&[k.shape()[0], widths.row()], k.dtype())?;
        let (dk, dv) = widths.split(&dkv)?;
        let (sink, dsink) = self.sink.take().unzip();
        let a = AttentionBackward {
            forward: AttentionForward { q: self.q, k, v, sink, out: self.out, lse: self.lse },
            dout: self.dout,
            dq: &dq,
            dk: &dk,
            dv: &dv,
            dsink,
        };
        rank.kernels.attention_backward(&rank.compute, &block.scores, block.sequences(), &a)?;
        self.dq = Some(add(rank, self.dq.take(), dq)?);
        Ok(dkv)
    }

    /// Writes the complete dq.
    pub(super) fn finish(self, dq: &Tensor) -> Result<()> {
        let rank = self.context.rank;
        match &self.dq {
            None => Ok(()),
            Some(sum) => rank.kernels.copy(&rank.compute, &rounded(rank, sum, dq.dtype())?, dq),
        }
    }
}

/// Accumulates x into an f32 sum; without a sum yet, returns x in f32.
pub(super) fn add(rank: &Rank, sum: Option<Tensor>, x: Tensor) -> Result<Tensor> {
    let (kernels, s) = (&rank.kernels, &rank.compute);
    match sum {
        Some(sum) => {
            kernels.add_assign(s, &sum, &x)?;
            Ok(sum)
        }
        None if x.dtype() == DType::F32 => Ok(x),
        None => {
            let sum = rank.activation(x.shape(), DType::F32)?;
            kernels.copy(s, &x, &sum)?;
            Ok(sum)
        }
    }
}
