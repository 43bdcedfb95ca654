//! Scratch space of the backward kernels that add up dq in fixed point: dq_accum, what is known of every query, bounds of
//! the keys.

use super::hopper::HopperArgs;
use super::problem::AttentionProblem;

/// Rows of a block of the per-query kernels, and granularity of scratch space.
pub(super) const ROWS: usize = 128;

/// Rows of a head in scratch space: every packed sequence starts on a tile of its own.
pub(super) fn padded_rows(problem: &AttentionProblem) -> usize {
    let tokens = problem.tokens[0];
    if problem.packed {
        (tokens / ROWS + problem.spans.len() + 1) * ROWS
    } else {
        tokens.next_multiple_of(ROWS)
    }
}

/// Chunks of keys that have bounds.
pub(super) fn key_chunks(problem: &AttentionProblem) -> usize {
    (problem.inside[1][1] - problem.inside[1][0]).div_ceil(ROWS)
}

/// Offsets of the parts of scratch space, and its size, in 4-byte words.
pub(super) struct Scratch {
    rows: usize,
    bounds: usize,
    next: usize,
    padded: i32,
    chunks: i32,
}

impl Scratch {
    /// Scratch space whose dq_accum has so many words.
    pub(super) fn new(problem: &AttentionProblem, sums: usize) -> Scratch {
        let (padded, chunks) = (padded_rows(problem), key_chunks(problem));
        let bounds = sums + problem.pairs(problem.shape.heads) * padded * 3;
        let next = bounds + (problem.pairs(problem.shape.kv_heads) * chunks * 2).next_multiple_of(4);
        Scratch { rows: sums, bounds, next, padded: padded as i32, chunks: chunks as i32 }
    }

    /// Its size in words.
    pub(super) fn words(&self) -> usize {
        self.next + 4
    }

    /// Arguments with the parts of the scratch space at an address.
    pub(super) fn set(&self, mut m: HopperArgs, start: u64) -> HopperArgs {
        let at = |n: usize| start + n as u64 * 4;
        (m.dq_accum, m.a.lse_log2, m.bounds, m.next_tile) =
            (start, at(self.rows), at(self.bounds), at(self.next));
        (m.padded, m.chunks) = (self.padded, self.chunks);
        m
    }
}
