//! What launches over groups of elements have in common.

use super::Grid;
use ferrotron_tensor::{Result, shape_error};

/// Blocks for `n` things, `each` to a block.
pub(super) fn blocks(op: &'static str, n: usize, each: usize) -> Result<u32> {
    match u32::try_from(n.div_ceil(each)) {
        Ok(b) if b <= i32::MAX as u32 => Ok(b),
        _ => shape_error(op, format!("{n} elements are more than a card can be asked for at once")),
    }
}

/// Are all addresses fit for 16-byte accesses?
pub(super) fn wide(addresses: &[u64]) -> bool {
    addresses.iter().all(|a| a.is_multiple_of(16))
}

/// A line of `blocks` blocks.
pub(super) fn line(blocks: u32, threads: u32) -> Grid {
    Grid { blocks: [blocks, 1, 1], threads, shared: 0 }
}
