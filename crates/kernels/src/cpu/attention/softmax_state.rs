//! What a block of queries carries along, one value a lane.

use super::QUERIES;
use super::mask::Mask;
use std::ops::Range;

/// First and last key each query of a block sees; none when the first is greater.
#[derive(Clone)]
#[repr(align(64))]
pub(super) struct VisibleRange {
    /// First visible key.
    pub lo: [i32; QUERIES],
    /// Last visible key.
    pub hi: [i32; QUERIES],
}

impl VisibleRange {
    /// What `queries` see.
    pub fn new(mask: &Mask, queries: &Range<usize>) -> VisibleRange {
        let mut visible = VisibleRange { lo: [1; QUERIES], hi: [0; QUERIES] };
        mask.lanes(queries, &mut visible.lo, &mut visible.hi);
        visible
    }

    /// Does the query in this lane see no key at all?
    pub fn is_masked(&self, lane: usize) -> bool {
        self.lo[lane] > self.hi[lane]
    }
}

/// The running softmax of a block of queries.
#[derive(Clone)]
#[repr(align(64))]
pub(super) struct OnlineSoftmax {
    /// Largest score so far, times log2 e.
    pub max: [f32; QUERIES],
    /// Σ exp(score) / exp(largest score) so far.
    pub sum: [f32; QUERIES],
    /// Factor that brings sums made before the last block to its maximum.
    pub rescale: [f32; QUERIES],
}

impl OnlineSoftmax {
    /// Before any block.
    pub fn new() -> OnlineSoftmax {
        OnlineSoftmax { max: [f32::NEG_INFINITY; QUERIES], sum: [0.0; QUERIES], rescale: [1.0; QUERIES] }
    }

    /// Must earlier sums be rescaled after the last block?
    pub fn needs_rescale(&self) -> bool {
        self.rescale.iter().any(|s| *s != 1.0)
    }
}

/// What the backward pass needs of a block of queries.
#[repr(align(64))]
pub(super) struct SavedQueries {
    /// Log-sum-exp, times log2 e.
    pub lse: [f32; QUERIES],
    /// `delta = Σ dout·out`.
    pub delta: [f32; QUERIES],
}
