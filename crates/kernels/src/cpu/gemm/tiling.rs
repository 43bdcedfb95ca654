//! How a GEMM is split. Results do not depend on it: every element is one sum along k, whose order is fixed by `k_block`, which
//! depends on k alone.

use super::GemmShape;
use super::driver::TILE;

/// Tile sizes of a GEMM.
pub(super) struct Tiling {
    /// k padded to the unit.
    pub(super) k: usize,
    /// k of one block GEMM.
    pub(super) k_block: usize,
    /// Whether B is packed once for all tasks.
    pub(super) share: bool,
    /// Panels per pass, which bounds the memory for shared panels.
    pub(super) slab: usize,
    /// k of one packing task of shared panels.
    pub(super) pack: usize,
    /// Rows of a task.
    pub(super) rows: usize,
    /// Panels of a task.
    pub(super) panels: usize,
}

impl Tiling {
    /// `size`: bytes of a packed element; `threads`: number of threads.
    pub(super) fn new(
        shape: &GemmShape,
        k_unit: usize,
        k_block: usize,
        size: usize,
        threads: usize,
    ) -> Tiling {
        // Shared panels are packed ahead; when they are many, they go through memory.
        const SHARE_BYTES: usize = 1 << 20;
        const SLAB_BYTES: usize = 8 << 20;
        const PACK_BYTES: usize = 64 << 10;
        let GemmShape { m, n, trans_b, .. } = *shape;
        let k = shape.k.next_multiple_of(k_unit);
        let k_block = k.div_ceil(k.div_ceil(k_block).max(1)).max(1).next_multiple_of(k_unit);
        let all = n.div_ceil(TILE).max(1);
        let panel_bytes = (k * TILE * size).max(1);
        let share = trans_b || all * panel_bytes <= SHARE_BYTES;
        let slab = if share { (SLAB_BYTES / panel_bytes).clamp(16.min(all), all) } else { all };
        let pack = (PACK_BYTES / (slab * TILE * size)).max(1).next_multiple_of(TILE);

        // The largest tasks whose sums and panels stay in L2.
        let (most_rows, most_panels) = if share { (256, 32) } else { (384, 16) };
        let even = |len: usize, most: usize| len.div_ceil(len.div_ceil(most).max(1));
        let (mut rows, mut panels) = (even(m.div_ceil(TILE), most_rows / TILE), even(slab, most_panels));
        // Then enough of them for all threads, as long as each is large enough to amortize its packing.
        loop {
            let pieces = m.div_ceil(rows * TILE) * slab.div_ceil(panels);
            let big = rows * panels > 64;
            if pieces >= threads * if big { 2 } else { 1 } || rows * panels <= 8 {
                break;
            }
            if rows >= panels { rows = rows.div_ceil(2) } else { panels = panels.div_ceil(2) }
        }
        Tiling { k, k_block, share, slab, pack, rows: rows * TILE, panels }
    }
}
