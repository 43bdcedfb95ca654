//! Context parallelism by all-to-all (Ulysses): every rank gets all tokens of its share of the heads, so that attention
//! runs as on one rank.

use super::{ContextParallel, Gradients, Inputs};
use crate::SavedTensor;
use ferrotron_kernels::{AttentionBackward, AttentionForward};
use ferrotron_tensor::{DType, Result, Tensor};

/// Activations that backward needs: all tokens of this rank's share of the heads.
pub(super) struct AllToAllSaved {
    /// q, k and v, `[tokens, (n·d_k + g·d_k + g·d_v)/c]`
    pub(super) qkv: SavedTensor,
    /// `[tokens, n·d_v/c]`
    pub(super) out: SavedTensor,
    pub(super) lse: SavedTensor,
}

/// Head counts and channels of q, k and v.
struct HeadShards {
    /// Heads per rank and channels per head.
    parts: [(usize, usize); 3],
    ranks: usize,
}

impl HeadShards {
    fn of(qkv: [&Tensor; 3], ranks: usize) -> HeadShards {
        HeadShards { parts: qkv.map(|t| (t.shape()[1] / ranks, t.shape()[2])), ranks }
    }

    /// Column widths of q, k and v in a packed row.
    fn columns(&self) -> [(usize, usize); 3] {
        let widths = self.parts.map(|(heads, d)| heads * d);
        [(0, widths[0]), (widths[0], widths[1]), (widths[0] + widths[1], widths[2])]
    }

    fn row(&self) -> usize {
        self.columns().iter().map(|(_, width)| width).sum()
    }

    /// Views q, k and v `[tokens, heads, d]` in packed rows.
    fn split(&self, rows: &Tensor) -> Result<[Tensor; 3]> {
        let [q, k, v] = self.columns().map(|(at, width)| rows.narrow(1, at, width));
        let by_heads = |t: Tensor, i: usize| t.view(&[t.shape()[0], self.parts[i].0, self.parts[i].1]);
        Ok([by_heads(q?, 0)?, by_heads(k?, 1)?, by_heads(v?, 2)?])
    }

    /// Views `[tokens, n, d]` as `[ranks, tokens, n·d/ranks]`, one slice per destination rank, and `rows` likewise. Heads
    /// that are not contiguous keep an axis of their own in both.
    fn by_rank(&self, t: &Tensor, rows: &Tensor) -> Result<[Tensor; 2]> {
        let [tokens, n, d] = [t.shape()[0], t.shape()[1], t.shape()[2]];
        let each = n / self.ranks;
        match t.view(&[tokens, self.ranks, each * d]) {
            Ok(t) => Ok([t.transpose(0, 1)?, rows.clone()]),
            Err(_) => {
                let rows = rows.view(&[self.ranks, tokens, each, d])?;
                Ok([t.view(&[tokens, self.ranks, each, d])?.transpose(0, 1)?, rows])
            }
        }
    }
}

impl ContextParallel<'_> {
    /// All-to-all from rows `[c, local, width]` (one slice per destination rank) to `[tokens, width]` in natural order.
    fn to_heads(&self, rows: &Tensor, label: &'static str) -> Result<Tensor> {
        let all = self.rank.activation(rows.shape(), rows.dtype())?;
        self.rank.cp.all_to_all(&self.rank.compute, rows, &all, label)?;
        let [c, local, width] = [rows.shape()[0], rows.shape()[1], rows.shape()[2]];
        self.reordered(&all.view(&[c * local, width])?, &self.plan.to_natural()?)
    }

    /// The inverse all-to-all.
    fn to_tokens(&self, rows: &Tensor, label: &'static str) -> Result<Tensor> {
        let (c, width) = (self.place.size, rows.shape()[1]);
        let by_rank = self.reordered(rows, &self.plan.to_ranks()?)?;
        let mine = self.rank.activation(&[c, rows.shape()[0] / c, width], rows.dtype())?;
        self.rank.cp.all_to_all(&self.rank.compute, &by_rank, &mine, label)?;
        Ok(mine)
    }

    /// This rank's slice of a per-head vector.
    fn own_heads(&self, t: Option<&Tensor>) -> Result<Option<Tensor>> {
        let share = |t: &Tensor| {
            let n = t.shape()[0] / self.place.size;
            t.narrow(0, self.place.rank * n, n)
        };
        t.map(share).transpose()
    }

    pub(super) fn all_to_all_forward(&self, x: &Inputs, out: &Tensor) -> Result<AllToAllSaved> {
        let (rank, c, s) = (self.rank, self.place.size, &self.rank.compute);
        let shares = HeadShards::of([x.q, x.k, x.v], c);
        let sent = rank.activation(&[c, x.q.shape()[0], shares.row()], x.q.dtype())?;
        for (t, (at, width)) in [x.q, x.k, x.v].into_iter().zip(shares.columns()) {
            let [from, to] = shares.by_rank(t, &sent.narrow(2, at, width)?)?;
            rank.kernels.copy(s, &from, &to)?;
        }
        let qkv = self.to_heads(&sent, "q, k, v to heads")?;
        drop(sent);
        let [q, k, v] = shares.split(&qkv)?;
        let (n, d) = (q.shape()[1], v.shape()[2]);
        let all = rank.activation(&[qkv.shape()[0], n * d], out.dtype())?;
        let lse = rank.activation(&self.layout.lse_shape(n), DType::F32)?;
        let sink = self.own_heads(x.sink)?;
        let a = AttentionForward {
            q: &self.layout.shaped(&q)?,
            k: &self.layout.shaped(&k)?,
            v: &self.layout.shaped(&v)?,
            sink: sink.as_ref(),
            out: &self.layout.shaped(&all.view(&[qkv.shape()[0], n, d])?)?,
            lse: &lse,
        };
        rank.kernels.attention_forward(s, self.scores, self.layout.sequences(None), &a)?;
        let [to, from] = shares.by_rank(out, &self.to_tokens(&all, "attention outputs to tokens")?)?;
        rank.kernels.copy(s, &from, &to)?;
        let keep = SavedTensor::activation;
        Ok(AllToAllSaved { qkv: keep(&qkv), out: keep(&all), lse: keep(&lse) })
    }

    pub(super) fn all_to_all_backward(&self, saved: &AllToAllSaved, y: &Gradients) -> Result<()> {
        let (rank, c, s) = (self.rank, self.place.size, &self.rank.compute);
        let shares = HeadShards::of([y.dq, y.dk, y.dv], c);
        let [q, k, v] = shares.split(&saved.qkv)?;
        let (tokens, n, d) = (saved.qkv.shape()[0], q.shape()[1], v.shape()[2]);
        let sent = rank.activation(&[c, y.dout.shape()[0], n * d], y.dout.dtype())?;
        let [from, to] = shares.by_rank(y.dout, &sent)?;
        rank.kernels.copy(s, &from, &to)?;
        let dout = self.to_heads(&sent, "gradients of attention outputs to heads")?;
        let dqkv = rank.activation(&[tokens, shares.row()], y.dout.dtype())?;
        let [dq, dk, dv] = shares.split(&dqkv)?;
        let (sink, dsink) = (self.own_heads(y.sink)?, self.own_heads(y.dsink)?);
        let shaped = |t: &Tensor| self.layout.shaped(t);
        let by_heads = |t: &Tensor| shaped(&t.view(&[tokens, n, d])?);
        let a = AttentionBackward {
            forward: AttentionForward {
                q: &shaped(&q)?,
                k: &shaped(&k)?,
                v: &shaped(&v)?,
                sink: sink.as_ref(),
                out: &by_heads(&saved.out)?,
                lse: &saved.lse,
            },
            dout: &by_heads(&dout)?,
            dq: &shaped(&dq)?,
            dk: &shaped(&dk)?,
            dv: &shaped(&dv)?,
            dsink: dsink.as_ref(),
        };
        rank.kernels.attention_backward(s, self.scores, self.layout.sequences(None), &a)?;
        let mine = self.to_tokens(&dqkv, "gradients of q, k, v to tokens")?;
        for (t, (at, width)) in [y.dq, y.dk, y.dv].into_iter().zip(shares.columns()) {
            let [to, from] = shares.by_rank(t, &mine.narrow(2, at, width)?)?;
            rank.kernels.copy(s, &from, &to)?;
        }
        Ok(())
    }
}
