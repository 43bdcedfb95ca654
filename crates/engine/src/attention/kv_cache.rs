//! The KV cache of decoding.

use super::Layout;
use crate::StepContext;
use ferrotron_tensor::{Category, DType, Result, Stream, Tensor, shape_error};

/// Keys `[batch, capacity, g, d_k]` and values `[batch, capacity, g, d_v]` of one layer for `batch` sequences.
pub struct KvCache {
    k: Tensor,
    v: Tensor,
    len: usize,
}

impl KvCache {
    /// An empty cache for keys of `d_k` and values of `d_v` channels per head.
    pub fn new(
        stream: &Stream,
        batch: usize,
        capacity: usize,
        kv_heads: usize,
        [d_k, d_v]: [usize; 2],
        dtype: DType,
    ) -> Result<KvCache> {
        let make = |d| Tensor::empty(stream, &[batch, capacity, kv_heads, d], dtype, Category::Activations);
        Ok(KvCache { k: make(d_k)?, v: make(d_v)?, len: 0 })
    }

    /// Tokens in the cache, per sequence.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the cache is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of sequences and new tokens of each; an error where they exceed the capacity.
    pub(super) fn room(&self, layout: &Layout) -> Result<(usize, usize)> {
        let (batch, capacity, tokens) = (self.k.shape()[0], self.k.shape()[1], layout.tokens());
        let new = tokens / batch.max(1);
        if new * batch != tokens || self.len + new > capacity {
            return shape_error(
                "decode",
                format!("{tokens} new tokens for {batch} sequences, {} of {capacity} places taken", self.len),
            );
        }
        Ok((batch, new))
    }

    /// Appends keys `[batch, new, g, d_k]` and values; returns views of all cached keys and values.
    pub(super) fn put(&mut self, p: &StepContext, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        let new = k.shape()[1];
        for (from, to) in [(k, &self.k), (v, &self.v)] {
            p.rank.kernels.copy(&p.rank.compute, from, &to.narrow(1, self.len, new)?)?;
        }
        self.len += new;
        Ok((self.k.narrow(1, 0, self.len)?, self.v.narrow(1, 0, self.len)?))
    }
}
