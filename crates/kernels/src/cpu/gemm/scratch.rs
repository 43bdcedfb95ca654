//! Scratch memory for packed operands, kept from call to call so that a product allocates nothing.

use std::cell::Cell;

/// A cache line: packed panels must start on one.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// One kept buffer.
pub(super) struct Slot(Cell<Vec<Line>>);

thread_local! {
    // Only capacity survives a call, never a value anyone reads. The calling thread may also run pieces, so
    // what it shares with all pieces and what one piece needs are two buffers.
    /// What all the pieces of a call share: the packed right-hand side.
    pub(super) static SHARED: Slot = const { Slot(Cell::new(Vec::new())) };
    /// What one piece of work needs.
    pub(super) static PIECE: Slot = const { Slot(Cell::new(Vec::new())) };
}

impl Slot {
    /// Calls `work` with at least `bytes` bytes, aligned to 64, whose contents are arbitrary.
    pub(super) fn with<R>(&self, bytes: usize, work: impl FnOnce(*mut u8) -> R) -> R {
        // Fp8WeightSlices out while in use, so that a nested call would get a buffer of its own.
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
