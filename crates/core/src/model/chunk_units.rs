//! Units of sharded weights (ZeRO-3) of a chunk, in the order in which its passes use them.

use ferrotron_engine::{StepContext, UnitGuard, UnitId};
use ferrotron_tensor::Result;
use std::ops::Range;

/// The units of a chunk.
#[derive(Clone, Debug, Default)]
pub(crate) struct ChunkUnits {
    /// Embedding (if any), layers, final norm with LM head (if any).
    pub(crate) forward: Vec<UnitId>,
    /// The same backward, without the embedding: its gradient does not need its weights.
    pub(crate) backward: Vec<UnitId>,
    /// Index of the first layer in `forward`.
    pub(crate) first_layer: usize,
    /// Its decoder layers.
    pub(crate) layers: Range<usize>,
    /// MTP layer of each depth, and its number among MTP layers.
    pub(crate) mtp: Vec<(UnitId, usize)>,
    /// Of the embedding tables that MTP layers use.
    pub(crate) mtp_tables: Vec<UnitId>,
}

impl ChunkUnits {
    /// Index of layer `i` in `forward`.
    pub(crate) fn layer(&self, i: usize) -> usize {
        self.first_layer + i
    }

    /// Index of layer `i` in `backward`.
    pub(crate) fn layer_backward(&self, i: usize) -> usize {
        self.forward.len() - 1 - self.layer(i)
    }

    /// Whether the chunk has final norm and LM head.
    pub(crate) fn has_output(&self) -> bool {
        self.forward.len() > self.layer(self.layers.len())
    }

    /// Gathers unit `at` of `order` and those after it ahead.
    pub(super) fn enter(p: &StepContext, order: &[UnitId], at: usize) -> Result<Option<UnitGuard>> {
        match order.get(at) {
            Some(unit) => p.enter_unit(*unit, &order[at + 1..]),
            None => Ok(None),
        }
    }
}
