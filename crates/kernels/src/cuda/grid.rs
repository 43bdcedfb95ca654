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

/// Blocks of a CUDA grid at most, along x, y and z.
const MAX_GRID: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];

/// Refuses a grid that CUDA cannot launch: the driver's own error names neither the axis nor its limit.
pub(super) fn check_grid(op: &'static str, blocks: [u32; 3]) -> Result<()> {
    for ((n, most), axis) in blocks.into_iter().zip(MAX_GRID).zip(["x", "y", "z"]) {
        if n > most {
            return shape_error(
                op,
                format!("{n} blocks along {axis} exceed a CUDA grid's {most}; use smaller batches"),
            );
        }
    }
    Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grids_beyond_the_limits_of_cuda_are_refused_with_their_axis() {
        for fits in [[1, 1, 1], [i32::MAX as u32, 65_535, 65_535]] {
            check_grid("an op", fits).unwrap();
        }
        for (blocks, axis) in [([1 << 31, 1, 1], "x"), ([1, 65_536, 1], "y"), ([1, 1, 65_536], "z")] {
            let error = check_grid("an op", blocks).unwrap_err().to_string();
            assert!(error.contains("an op") && error.contains(&format!("along {axis}")), "{error}");
        }
        // 2^31 - 1 blocks of one element are the most.
        assert_eq!(blocks("an op", i32::MAX as usize, 1).unwrap(), i32::MAX as u32);
        assert_eq!(blocks("an op", 393_216 * 28_672, 8192).unwrap(), 1_376_256);
        assert!(blocks("an op", 1 << 31, 1).is_err() && blocks("an op", 1 << 43, 2048).is_err());
    }
}
