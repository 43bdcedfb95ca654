//! Launch helpers for kernels over elements.

use super::LaunchConfig;
use ferrotron_tensor::{Result, shape_error};

/// Blocks for `n` elements, `each` to a block.
pub(super) fn blocks(op: &'static str, n: usize, each: usize) -> Result<u32> {
    match u32::try_from(n.div_ceil(each)) {
        Ok(b) if b <= i32::MAX as u32 => Ok(b),
        _ => shape_error(op, format!("{n} elements exceed a CUDA grid; use smaller batches")),
    }
}

/// Whether all addresses are aligned to 16 bytes.
pub(super) fn aligned16(addresses: &[u64]) -> bool {
    addresses.iter().all(|a| a.is_multiple_of(16))
}

/// A one-dimensional grid.
pub(super) fn line(blocks: u32, threads: u32) -> LaunchConfig {
    LaunchConfig { blocks: [blocks, 1, 1], threads, shared: 0 }
}

/// Tensors of one launch, and the first block of each.
pub(super) struct LaunchList<T, const N: usize> {
    pub(super) list: [T; N],
    pub(super) start: [u32; N],
    pub(super) count: u32,
    pub(super) blocks: u32,
}

impl<T: Copy + Default, const N: usize> LaunchList<T, N> {
    pub(super) fn new() -> Self {
        LaunchList { list: [T::default(); N], start: [0; N], count: 0, blocks: 0 }
    }

    pub(super) fn push(&mut self, op: &'static str, item: T, n: usize, each: usize) -> Result<()> {
        let at = self.count as usize;
        (self.list[at], self.start[at]) = (item, self.blocks);
        self.count += 1;
        self.blocks = blocks(op, self.blocks as usize + n.div_ceil(each), 1)?;
        Ok(())
    }
}
