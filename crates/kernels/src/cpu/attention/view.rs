//! Strided views of `[batch, tokens, heads, channels]` tensors: one description for every layout there is.

use std::marker::PhantomData;

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
    /// The elements from `(b, t, h, 0)` on.
    pub(super) fn from(&self, b: usize, t: usize, h: usize) -> &'a [T] {
        &self.data[b * self.batch + t * self.token + h * self.head..]
    }
}

/// The same to write. A raw pointer because the gradients of q, k and v may interleave in one buffer.
#[derive(Debug)]
pub struct HeadsMut<'a, T> {
    ptr: *mut T,
    pub(super) len: usize,
    pub(super) batch: usize,
    pub(super) token: usize,
    pub(super) head: usize,
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

    /// The `channels` elements of `(b, t, h)`.
    ///
    /// # Safety
    /// The row lies within `len`, and no other reference to it is alive.
    #[allow(clippy::mut_from_ref)] // rows are handed out to threads; the caller keeps them apart
    pub(super) unsafe fn row(&self, b: usize, t: usize, h: usize, channels: usize) -> &mut [T] {
        let at = b * self.batch + t * self.token + h * self.head;
        debug_assert!(at + channels <= self.len);
        // SAFETY: inside `len` and unshared, by the caller's promise and by that of `new`.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(at), channels) }
    }
}
