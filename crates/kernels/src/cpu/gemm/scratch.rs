//! Scratch memory for packed operands, reused from call to call so that a GEMM does not allocate.

use std::cell::Cell;

/// A cache line: packed panels must start on one.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// A reusable buffer.
pub(super) struct Slot(Cell<Vec<Line>>);

thread_local! {
    // Only capacity survives a call, never a value that is read. The calling thread may also run tasks, so the buffer shared by
    // all tasks and the buffer of one task are separate.
    /// Shared by all tasks of a call: packed B.
    pub(super) static SHARED: Slot = const { Slot(Cell::new(Vec::new())) };
    /// Scratch of one task.
    pub(super) static PIECE: Slot = const { Slot(Cell::new(Vec::new())) };
}

impl Slot {
    /// Calls `work` with at least `bytes` bytes, 64-byte aligned and uninitialized.
    pub(super) fn with<R>(&self, bytes: usize, work: impl FnOnce(*mut u8) -> R) -> R {
        // Taken out while in use, so that a nested call gets its own buffer.
        let mut lines = self.0.take();
        let need = bytes.div_ceil(64);
        if lines.len() < need {
            lines.clear();
            lines.resize(need, Line([0; 64]));
        }
        let result = work(lines.as_mut_ptr().cast());
        self.0.set(lines);
        result
    }
}
