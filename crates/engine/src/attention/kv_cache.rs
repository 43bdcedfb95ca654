//! Keys and values that decoding remembers.

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
    /// An empty cache for heads with so many channels of keys and of values.
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

    /// Tokens remembered.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Is nothing remembered?
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Sequences, and new tokens of each; an error where there is no place for them.
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

    /// Adds keys `[batch, new, g, d_k]` and values; all there are now.
    pub(super) fn put(&mut self, p: &StepContext, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        let new = k.shape()[1];
        for (from, to) in [(k, &self.k), (v, &self.v)] {
            p.rank.kernels.copy(&p.rank.compute, from, &to.narrow(1, self.len, new)?)?;
        }
        self.len += new;
        Ok((self.k.narrow(1, 0, self.len)?, self.v.narrow(1, 0, self.len)?))
    }
}
