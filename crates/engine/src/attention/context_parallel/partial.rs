//! Attention over keys that come in parts: sums kept in f32.

use super::blocks::Block;
use super::{ContextParallel, Gradients};
use crate::Rank;
use ferrotron_kernels::{AttentionBackward, AttentionForward};
use ferrotron_tensor::{DType, Result, Tensor};

/// Heads and channels of keys and values packed as rows `[tokens, g·(d_k + d_v)]`, keys first.
#[derive(Clone, Copy)]
pub(super) struct KvWidths {
    g: usize,
    d_k: usize,
    d_v: usize,
}

impl KvWidths {
    /// Of `k [tokens, g, d_k]` and `v [tokens, g, d_v]`.
    pub(super) fn of(k: &Tensor, v: &Tensor) -> KvWidths {
        KvWidths { g: k.shape()[1], d_k: k.shape()[2], d_v: v.shape()[2] }
    }

    pub(super) fn row(&self) -> usize {
        self.g * (self.d_k + self.d_v)
    }

    /// The keys and values of packed rows, by heads.
    pub(super) fn split(&self, rows: &Tensor) -> Result<(Tensor, Tensor)> {
        let (t, middle) = (rows.shape()[0], self.g * self.d_k);
        let k = rows.narrow(1, 0, middle)?.view(&[t, self.g, self.d_k])?;
        let v = rows.narrow(1, middle, self.g * self.d_v)?.view(&[t, self.g, self.d_v])?;
        Ok((k, v))
    }

    /// Keys and values as packed rows of their own.
    pub(super) fn pack(&self, rank: &Rank, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let rows = rank.activation(&[k.shape()[0], self.row()], k.dtype())?;
        let (to_k, to_v) = self.split(&rows)?;
        rank.kernels.copy(&rank.compute, k, &to_k)?;
        rank.kernels.copy(&rank.compute, v, &to_v)?;
        Ok(rows)
    }

    /// f32 sums, rounded to the type of the gradients they are.
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

/// `out` and `lse` of queries over the keys seen so far.
pub(super) struct OnlineSoftmax<'a> {
    context: &'a ContextParallel<'a>,
    q: &'a Tensor,
    /// What the first keys are joined by: it is in every query's softmax once.
    sink: Option<&'a Tensor>,
    out: &'a Tensor,
    /// f32; `out` itself where that is f32.
    sum: Tensor,
    pub(super) lse: Tensor,
    fresh: bool,
}

impl<'a> OnlineSoftmax<'a> {
    /// `q [tokens, n, d_k]` that has seen nothing; `out [tokens, n, d_v]` is contiguous.
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

    /// The queries see more keys. Every launch has all queries, those without keys among them: the first gives each its
    /// sink, which from then on is a part of what was seen.
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

    /// All keys were seen: `out` is written. The log-sum-exps.
    pub(super) fn finish(self) -> Result<Tensor> {
        if !self.sum.same_memory(self.out) {
            self.context.rank.kernels.copy(&self.context.rank.compute, &self.sum, self.out)?;
        }
        Ok(self.lse)
    }
}

/// What the backward pass of every part reads, and the sum of `dq`.
pub(super) struct PartialGrads<'a> {
    pub(super) context: &'a ContextParallel<'a>,
    pub(super) q: &'a Tensor,
    /// Of all keys, like `lse`: with both, the gradients of one part are its share of the whole.
    pub(super) out: &'a Tensor,
    pub(super) lse: &'a Tensor,
    pub(super) dout: &'a Tensor,
    /// The sink and its gradient, until a part has added to it: it takes the same global sums as all other gradients, of
    /// every query once.
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

    /// Packed gradients of some keys and values, in the type of the model; `dq` is added up inside.
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

    /// The whole gradient of the queries.
    pub(super) fn finish(self, dq: &Tensor) -> Result<()> {
        let rank = self.context.rank;
        match &self.dq {
            None => Ok(()),
            Some(sum) => rank.kernels.copy(&rank.compute, &rounded(rank, sum, dq.dtype())?, dq),
        }
    }
}

/// `sum + x` in f32, in the memory of the sum; at first `x` in f32.
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
