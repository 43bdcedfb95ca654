//! Row maps: selections sorted by expert, chunks reordered, dense routing maps padded.

use super::args::kernel_args;
use super::grid::{blocks, line};
use super::{CudaKernels, Kernel, LaunchConfig};
use crate::RowMap;
use crate::permutation::{chunk_sizes, pad_sizes, sort_sizes};
use ferrotron_tensor::{Category, DType, Result, Stream, Tensor, read, shape_error, write};

/// As in permute_maps.cu.
const THREADS: u32 = 256;
const WARPS: usize = THREADS as usize / 32;
const TILE: usize = 1024;
const PAD_ROWS: usize = 128;

/// Experts whose counts, one for each warp, fit into a block's shared memory where it may have 144 KiB (99 KiB: 2,815). Routers
/// have 1,024 at most.
const MAX_EXPERTS: usize = 4096;

kernel_args! {
    header "args/permute_maps.cuh", includes [];

    /// Stable counting sort of selections by expert.
    struct ExpertSortArgs {
        /// i32 `[selections]`: the expert of each selection.
        index: u64,
        /// i32 `[experts + 1]` and i32 `[experts]`: first row and number of rows of each expert.
        offsets: u64,
        counts: u64,
        /// i32 `[selections]`: the row of each selection, or -1.
        rows: u64,
        /// i32 `[n]`: the selection of each row, or -1.
        source: u64,
        /// u32 `[tiles, experts]`: routed rows of each expert per tile; then their exclusive prefix sums over tiles.
        tiles: u64,
        selections: i64,
        /// Rows.
        n: i64,
        /// Number of the first expert.
        first: i64,
        experts: u32,
        tile_count: u32,
        /// First rows of experts are multiples of it.
        align: u32,
        pad: u32,
    }

    /// Row maps that put chunks of rows into another order.
    struct ChunkMapArgs {
        /// i32 `[count]`: rows of each chunk, and the chunks in their new order.
        sizes: u64,
        order: u64,
        /// i64 `[2, count + 1]`: first rows of chunks before and after.
        starts: u64,
        /// i32 `[n]`: where each new row comes from, and where each old row goes.
        source: u64,
        back: u64,
        n: i64,
        count: u32,
        pad: u32,
    }

    /// Pads a dense routing map, so that every expert's tokens are a multiple of `align`.
    struct PadMapArgs {
        /// u8 `[tokens, experts]`.
        map: u64,
        /// u32 `[tiles, experts]`: ones in a tile.
        ones: u64,
        tokens: i64,
        experts: i64,
        align: u32,
        tile_count: u32,
    }
}

fn kernel(name: &'static str) -> Kernel {
    Kernel::new("permute_maps", name)
}

/// An alignment in 32 bits. Beyond i32 any value gives the same map: every expert starts at the first row, or has no
/// row.
fn multiple(align: usize) -> u32 {
    align.min(1 << 31) as u32
}

impl CudaKernels {
    pub(super) fn sort_selections(
        &self,
        s: &Stream,
        index: &Tensor,
        first: usize,
        align: usize,
        map: &RowMap,
    ) -> Result<()> {
        const OP: &str = "sort_by_expert";
        let [selections, experts] = sort_sizes(OP, index, align, map)?;
        if experts > MAX_EXPERTS {
            return shape_error(
                OP,
                format!(
                    "{experts} experts on one GPU exceed the {MAX_EXPERTS} it can sort by; use expert parallelism"
                ),
            );
        }
        let RowMap { offsets, counts, rows, source } = map;
        let tiles = selections.div_ceil(TILE).max(1);
        let held = Tensor::empty(s, &[tiles, experts], DType::I32, Category::Workspace)?;
        let args = [read(index), write(offsets), write(counts), write(rows), write(source), write(&held)];
        s.launch(OP, &args, |l| {
            let n = source.numel();
            let a = ExpertSortArgs {
                index: l.address(0)?,
                offsets: l.address(1)?,
                counts: l.address(2)?,
                rows: l.address(3)?,
                source: l.address(4)?,
                tiles: l.address(5)?,
                selections: selections as i64,
                n: n as i64,
                first: first.min(1 << 32) as i64,
                experts: experts as u32,
                tile_count: tiles as u32,
                align: multiple(align),
                pad: 0,
            };
            let grid = |blocks: usize, threads, words: usize| LaunchConfig {
                blocks: [blocks as u32, 1, 1],
                threads,
                shared: 4 * words as u32,
            };
            if experts > 0 {
                self.launch_kernel(l, kernel("sort_count"), grid(tiles, THREADS, experts), &a)?;
                self.launch_kernel(l, kernel("sort_scan"), grid(experts.div_ceil(32), 1024, 0), &a)?;
            }
            // With few selections of many experts, many rows have no source and need to be marked.
            let markers = n.div_ceil(4096).min(64);
            let words = (WARPS + 1) * experts;
            self.launch_kernel(l, kernel("sort_place"), grid(tiles.max(markers), THREADS, words), &a)
        })
    }

    pub(super) fn map_chunks(
        &self,
        s: &Stream,
        from: [&Tensor; 2],
        [source, back]: [&Tensor; 2],
    ) -> Result<()> {
        const OP: &str = "chunk_map";
        let [count, n] = chunk_sizes(OP, from, [source, back])?;
        let Ok(count) = u32::try_from(count) else {
            return shape_error(OP, format!("{count} chunks are more than 32 bits count"));
        };
        let starts = Tensor::empty(s, &[2, count as usize + 1], DType::I64, Category::Workspace)?;
        let args = [read(from[0]), read(from[1]), write(source), write(back), write(&starts)];
        s.launch(OP, &args, |l| {
            let a = ChunkMapArgs {
                sizes: l.address(0)?,
                order: l.address(1)?,
                starts: l.address(4)?,
                source: l.address(2)?,
                back: l.address(3)?,
                n: n as i64,
                count,
                pad: 0,
            };
            self.launch_kernel(l, kernel("chunk_starts"), line(1, 1024), &a)?;
            self.launch_kernel(l, kernel("chunk_rows"), line(blocks(OP, n, THREADS as usize)?, THREADS), &a)
        })
    }

    pub(super) fn fill_map(&self, s: &Stream, align: usize, map: &Tensor) -> Result<()> {
        const OP: &str = "pad_routing_map";
        let [tokens, experts] = pad_sizes(OP, align, map)?;
        let tiles = tokens.div_ceil(PAD_ROWS);
        let across = experts.div_ceil(32);
        if across > 65535 {
            return shape_error(OP, format!("{experts} experts exceed a CUDA grid"));
        }
        let ones = Tensor::empty(s, &[tiles, experts], DType::I32, Category::Workspace)?;
        s.launch(OP, &[write(map), write(&ones)], |l| {
            let a = PadMapArgs {
                map: l.address(0)?,
                ones: l.address(1)?,
                tokens: tokens as i64,
                experts: experts as i64,
                align: multiple(align),
                tile_count: tiles as u32,
            };
            let grid = LaunchConfig { blocks: [tiles as u32, across as u32, 1], threads: THREADS, shared: 0 };
            self.launch_kernel(l, kernel("pad_count"), grid, &a)?;
            self.launch_kernel(l, kernel("pad_fill"), grid, &a)
        })
    }
}
