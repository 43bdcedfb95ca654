//! Working memory: aligned buffers, and a pool that hands one set of them to each thread of a launch.

use ferrotron_tensor::Element;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, PoisonError};

/// One cache line, which is also one vector of the widest level and one row of a matrix tile.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct Line([u32; 16]);

/// A buffer of `E` that begins on a cache line, zeroed when made.
pub(super) struct Buffer<E> {
    lines: Vec<Line>,
    len: usize,
    element: PhantomData<E>,
}

impl<E: Element> Buffer<E> {
    /// Allocates `len` elements.
    pub fn new(len: usize) -> Buffer<E> {
        let lines = (len * size_of::<E>()).div_ceil(size_of::<Line>());
        Buffer { lines: vec![Line([0; 16]); lines], len, element: PhantomData }
    }
}

impl<E: Element> Deref for Buffer<E> {
    type Target = [E];
    fn deref(&self) -> &[E] {
        &bytemuck::cast_slice(&self.lines)[..self.len]
    }
}

impl<E: Element> DerefMut for Buffer<E> {
    fn deref_mut(&mut self) -> &mut [E] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.len]
    }
}

/// Sets of scratch buffers, made when first needed and reused from piece to piece: as many as threads that worked
/// at the same time. What a set holds never reaches a result.
pub(super) struct Pool<S, M> {
    free: Mutex<Vec<S>>,
    make: M,
}

impl<S, M: Fn() -> S> Pool<S, M> {
    /// An empty pool.
    pub fn new(make: M) -> Pool<S, M> {
        Pool { free: Mutex::new(Vec::new()), make }
    }

    /// Run `work` with a set nobody else is using.
    pub fn with(&self, work: impl FnOnce(&mut S)) {
        let taken = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut set = taken.unwrap_or_else(&self.make);
        work(&mut set);
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push(set);
    }
}
