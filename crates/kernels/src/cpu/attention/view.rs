//! Strided views of `[batch, tokens, heads, channels]` tensors: one description for every layout there is.

use std::marker::PhantomData;

/// One head of one token.
#[derive(Clone, Copy)]
pub(super) struct TokenHead {
    /// Batch entry.
    pub batch: usize,
    /// Token of the batch entry.
    pub token: usize,
    /// Head of the token.
    pub head: usize,
}

/// Length and strides of a view.
pub(super) struct HeadsLayout {
    /// Elements of the buffer.
    pub len: usize,
    /// Stride between batch entries.
    pub batch: usize,
    /// Stride between tokens.
    pub token: usize,
    /// Stride between heads.
    pub head: usize,
}

/// Queries, keys, values or outputs to read: element `(b, t, h, c)` is `data[b*batch + t*token + h*head + c]`.
///
/// Covers bshd, sbhd, packed (thd) and parts of interleaved qkv or kv buffers.
#[derive(Clone, Copy, Debug)]
pub struct Heads<'a, T> {
    /// The elements, beginning with element `(0, 0, 0, 0)`.
    pub data: &'a [T],
    /// Stride between batch entries.
    pub batch: usize,
    /// Stride between tokens.
    pub token: usize,
    /// Stride between heads.
    pub head: usize,
}

impl<'a, T> Heads<'a, T> {
    /// The elements from channel 0 of `at` on.
    pub(super) fn from(&self, at: TokenHead) -> &'a [T] {
        &self.data[at.batch * self.batch + at.token * self.token + at.head * self.head..]
    }

    pub(super) fn layout(&self) -> HeadsLayout {
        HeadsLayout { len: self.data.len(), batch: self.batch, token: self.token, head: self.head }
    }
}

/// The same to write. A raw pointer because the gradients of q, k and v may interleave in one buffer.
#[derive(Debug)]
pub struct HeadsMut<'a, T> {
    ptr: *mut T,
    len: usize,
    batch: usize,
    token: usize,
    head: usize,
    memory: PhantomData<&'a mut T>,
}

// SAFETY: `new` promises that nothing else touches the rows written through this view, and kernels write each
// row from one thread only.
unsafe impl<T: Send> Send for HeadsMut<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for HeadsMut<'_, T> {}

impl<'a, T> HeadsMut<'a, T> {
    /// Element `(b, t, h, c)` is `ptr[b*batch + t*token + h*head + c]`.
    ///
    /// # Safety
    /// For as long as the view lives, `ptr` is good for writes of `len` elements, the elements it describes are
    /// touched by nothing else (other views may own other elements of the same buffer), and the strides keep the
    /// channels of different `(b, t, h)` apart.
    pub unsafe fn new(ptr: *mut T, len: usize, batch: usize, token: usize, head: usize) -> HeadsMut<'a, T> {
        HeadsMut { ptr, len, batch, token, head, memory: PhantomData }
    }

    /// A view that owns the whole of `data`.
    ///
    /// # Safety
    /// The strides keep the channels of different `(b, t, h)` apart.
    pub unsafe fn of(data: &'a mut [T], batch: usize, token: usize, head: usize) -> HeadsMut<'a, T> {
        HeadsMut { ptr: data.as_mut_ptr(), len: data.len(), batch, token, head, memory: PhantomData }
    }

    pub(super) fn layout(&self) -> HeadsLayout {
        HeadsLayout { len: self.len, batch: self.batch, token: self.token, head: self.head }
    }

    /// The `channels` elements of `at`.
    ///
    /// # Safety
    /// The row lies within `len`, and no other reference to it is alive.
    #[allow(clippy::mut_from_ref)] // rows are handed out to threads; the caller keeps them apart
    pub(super) unsafe fn row(&self, at: TokenHead, channels: usize) -> &mut [T] {
        let at = at.batch * self.batch + at.token * self.token + at.head * self.head;
        debug_assert!(at + channels <= self.len);
        // SAFETY: inside `len` and unshared, by the caller's promise and by that of `new`.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(at), channels) }
    }
}

/// Inputs of attention.
#[derive(Clone, Copy, Debug)]
pub struct AttentionInputs<'a, T> {
    /// Queries.
    pub q: Heads<'a, T>,
    /// Keys.
    pub k: Heads<'a, T>,
    /// Values.
    pub v: Heads<'a, T>,
    /// Attention sink: one logit per head.
    pub sink: Option<&'a [f32]>,
}

/// Outputs of the forward pass and the gradient of the output.
#[derive(Clone, Copy, Debug)]
pub struct AttentionOutputs<'a, T> {
    /// Output.
    pub out: Heads<'a, T>,
    /// Gradient of the output.
    pub dout: Heads<'a, T>,
    /// Log-sum-exp of every query and head.
    pub lse: &'a [f32],
}

/// Gradients that the backward pass writes.
#[derive(Debug)]
pub struct AttentionGradients<'a, T> {
    /// Gradient of the queries, overwritten.
    pub dq: &'a HeadsMut<'a, T>,
    /// Gradient of the keys, overwritten.
    pub dk: &'a HeadsMut<'a, T>,
    /// Gradient of the values, overwritten.
    pub dv: &'a HeadsMut<'a, T>,
    /// Gradient of the sink, added to.
    pub dsink: Option<&'a mut [f32]>,
}
