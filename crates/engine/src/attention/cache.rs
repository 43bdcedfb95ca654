//! Decoding with remembered keys and values.

use super::scores::blank;
use super::{Attention, Layout, Projected};
use crate::{Measured, Pass};
use ferrotron_kernels::{Align, AttentionForward, Scores, Sequences};
use ferrotron_tensor::{Category, DType, Result, Stream, Tensor, shape_error};

/// Keys and values of one layer for `batch` sequences, `[batch, capacity, g, d]` each.
pub struct KvCache {
    k: Tensor,
    v: Tensor,
    len: usize,
}

impl KvCache {
    /// An empty cache.
    pub fn new(
        stream: &Stream,
        batch: usize,
        capacity: usize,
        kv_heads: usize,
        head_dim: usize,
        dtype: DType,
    ) -> Result<KvCache> {
        let make =
            || Tensor::empty(stream, &[batch, capacity, kv_heads, head_dim], dtype, Category::Activations);
        Ok(KvCache { k: make()?, v: make()?, len: 0 })
    }

    /// Tokens remembered.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Is nothing remembered?
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Attention {
    /// Attention of new tokens `x [batch·new, hidden]` over the cache and themselves; they join the cache. Of the rows
    /// this rank holds, in and out, with its heads in the cache; `layout` is `batch` rows of `new` tokens.
    pub fn decode(
        &self,
        p: &Pass,
        x: impl Into<Measured>,
        cache: &mut KvCache,
        layout: &Layout,
        positions: &Tensor,
    ) -> Result<Tensor> {
        let c = &self.config;
        let (batch, capacity) = (cache.k.shape()[0], cache.k.shape()[1]);
        let (tokens, d) = (layout.tokens(), c.head_dim);
        let new = tokens / batch.max(1);
        if new * batch != tokens || cache.len + new > capacity {
            return shape_error(
                "decode",
                format!(
                    "{tokens} new tokens for {batch} sequences, {} of {capacity} places taken",
                    cache.len
                ),
            );
        }
        let Projected { rotated, v, .. } = self.project(p, &x.into(), positions)?;
        let (q, k) = self.q_and_k(&rotated)?;
        let rows = |t: &Tensor, n: usize| t.narrow(0, 0, tokens)?.view(&[batch, new, n, d]);
        let (k_slot, v_slot) = (cache.k.narrow(1, cache.len, new)?, cache.v.narrow(1, cache.len, new)?);
        p.rank.kernels.copy(&p.rank.compute, &rows(&k, c.kv_heads)?, &k_slot)?;
        p.rank.kernels.copy(&p.rank.compute, &rows(&v, c.kv_heads)?, &v_slot)?;
        cache.len += new;
        let heads = p.empty(&[rotated.shape()[0], c.heads * d])?;
        blank(p, layout, &heads)?;
        let lse = p.rank.activation(&[batch, c.heads, new], DType::F32)?;
        let a = AttentionForward {
            q: &rows(&q, c.heads)?,
            k: &cache.k.narrow(1, 0, cache.len)?,
            v: &cache.v.narrow(1, 0, cache.len)?,
            sink: None,
            out: &rows(&heads, c.heads)?,
            lse: &lse,
        };
        let scores = Scores { align: Align::BottomRight, ..c.scores };
        p.rank.kernels.attention_forward(&p.rank.compute, &scores, Sequences::Batch, &a)?;
        Ok(self.out.forward(p, &heads)?.0)
    }
}
