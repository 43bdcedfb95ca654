//! Cuts a product into pieces for the threads and each piece into 32x32 blocks.
//!
//! The right-hand side is packed once, into panels of 32 columns that all pieces share. A piece is a range of
//! rows by a range of panels; for each block of k it packs 32 rows of the left-hand side, which then stay in
//! the first-level cache while the panels stream by from the second.

use super::GemmShape;
use super::scratch::{PIECE, SHARED};
use super::store::{Epilogue, Sums};
use ferrotron_tensor::{Float, Threads};
use std::marker::PhantomData;
use std::ops::Range;

/// Rows and columns of a block.
pub(super) const TILE: usize = 32;
/// Left-hand blocks are packed in slices of k of this length.
const SLICE: usize = 32;

/// A block product in f32 and the packing it needs. Left-hand blocks are 32 rows, k contiguous; right-hand
/// panels are 32 columns, and the part of a panel for k in `p..q` (multiples of `K_UNIT`) is its elements
/// `32p..32q`.
pub(super) trait Block<T>: Sync {
    /// Element type of packed operands; any bits are a valid value.
    type Packed: Copy + Send + Sync;
    /// What a thread holds while it multiplies.
    type Guard;
    /// k is padded with zeros to a multiple of this.
    const K_UNIT: usize;
    /// Longest k of one block product.
    const K_BLOCK: usize;

    /// Prepares this thread for `multiply`.
    fn guard(&self) -> Self::Guard;
    /// Packs `m <= 32` rows by `k` of op(A), whose first element is `a`, into 32 rows of `ldo` elements; rows
    /// from `m` and columns from `k` to the next unit become zero.
    ///
    /// # Safety
    /// Those elements are valid to read, and `out` to write.
    unsafe fn left(
        &self,
        a: *const T,
        lda: usize,
        trans: bool,
        m: usize,
        k: usize,
        out: *mut Self::Packed,
        ldo: usize,
    );
    /// Packs `k` by `n <= 32` of op(B), whose first element is `b`, into a panel, zero outside.
    ///
    /// # Safety
    /// As for `left`.
    unsafe fn right(&self, b: *const T, ldb: usize, trans: bool, k: usize, n: usize, out: *mut Self::Packed);
    /// `tile[32][32] = a·b`, or `+=`; `k` is a multiple of the unit.
    ///
    /// # Safety
    /// `a` has 32 rows of `k` elements `lda` apart, `b` is `32·k` elements, `tile` 1024; all 64-byte aligned.
    unsafe fn multiply(
        &self,
        guard: &Self::Guard,
        a: *const Self::Packed,
        lda: usize,
        b: *const Self::Packed,
        k: usize,
        tile: *mut f32,
        accumulate: bool,
    );
}

/// A checked product: the slices hold what the shape says.
pub(super) struct Job<'a, T, C> {
    shape: GemmShape,
    a: *const T,
    b: *const T,
    bias: Option<&'a [T]>,
    accumulate: bool,
    c: *mut C,
    borrows: PhantomData<(&'a [T], &'a mut [C])>,
}

// SAFETY: pointers to borrowed slices of plain numbers; threads write disjoint parts of C.
unsafe impl<T: Sync, C: Send> Sync for Job<'_, T, C> {}

impl<'a, T, C> Job<'a, T, C> {
    /// A product whose lengths `GemmShape::check` has accepted.
    pub(super) fn new(
        shape: GemmShape,
        a: &'a [T],
        b: &'a [T],
        bias: Option<&'a [T]>,
        accumulate: bool,
        c: &'a mut [C],
    ) -> Self {
        Job { shape, a: a.as_ptr(), b: b.as_ptr(), bias, accumulate, c: c.as_mut_ptr(), borrows: PhantomData }
    }

    /// Packs rows `row..row + m` (`m <= 32`) of op(A), `at..at + len` of padded k.
    ///
    /// # Safety
    /// Rows and `at` are inside op(A); `out` takes 32 rows, `ldo` apart, of `len` elements.
    unsafe fn left<K: Block<T>>(
        &self,
        block: &K,
        at: usize,
        len: usize,
        row: usize,
        m: usize,
        out: *mut K::Packed,
        ldo: usize,
    ) {
        let GemmShape { k, trans_a, lda, .. } = self.shape;
        // SAFETY: the first element is inside A; k beyond its end is padding.
        unsafe {
            let a = self.a.add(if trans_a { at * lda + row } else { row * lda + at });
            block.left(a, lda, trans_a, m, len.min(k - at), out, ldo);
        }
    }

    /// Packs panel `panel` of op(B).
    ///
    /// # Safety
    /// The panel starts inside B; `out` takes 32 columns of padded k.
    unsafe fn right<K: Block<T>>(&self, block: &K, panel: usize, out: *mut K::Packed) {
        let GemmShape { n, k, trans_b, ldb, .. } = self.shape;
        let col = panel * TILE;
        if k > 0 {
            // SAFETY: the panel's columns, to `n` at most, are inside B.
            unsafe {
                let b = self.b.add(if trans_b { col * ldb } else { col });
                block.right(b, ldb, trans_b, k, (n - col).min(TILE), out);
            }
        }
    }

    /// Writes finished sums to `m` rows of C from `row, col`.
    ///
    /// # Safety
    /// The rows and the first column are inside C, and no other thread writes this block.
    unsafe fn store(&self, epilogue: Epilogue, sums: &Sums, row: usize, m: usize, col: usize)
    where
        T: Float,
        C: Float,
    {
        let GemmShape { n, ldc, .. } = self.shape;
        let n = (n - col).min(TILE);
        let bias = self.bias.map(|b| &b[col..col + n]);
        // SAFETY: `m` by `n` elements inside C.
        unsafe { epilogue.store(sums, m, n, bias, self.accumulate, self.c.add(row * ldc + col), ldc) };
    }
}

/// How a product is cut, from its shape alone.
struct Plan {
    /// k padded to the unit.
    k: usize,
    /// k of one block product.
    k_block: usize,
    /// Panels packed at a time, which bounds the scratch memory.
    slab: usize,
    /// Rows of a piece.
    rows: usize,
    /// Panels of a piece.
    panels: usize,
}

impl Plan {
    fn new(shape: &GemmShape, k_unit: usize, k_block: usize, packed_size: usize) -> Plan {
        const SLAB_BYTES: usize = 8 << 20;
        const PIECES: usize = 8;
        let k = shape.k.next_multiple_of(k_unit);
        let k_block = k.div_ceil(k.div_ceil(k_block).max(1)).max(1).next_multiple_of(k_unit);
        let all = shape.n.div_ceil(TILE);
        let slab = (SLAB_BYTES / (k * TILE * packed_size).max(1)).max(16).min(all.max(1));
        let (mut rows, mut panels) = (256, 16);
        // Enough pieces to share out, as long as they stay big enough to pay for packing their rows.
        while shape.m.div_ceil(rows) * slab.div_ceil(panels) < PIECES && rows.max(panels * TILE) > 128 {
            if rows >= panels * TILE { rows /= 2 } else { panels /= 2 }
        }
        Plan { k, k_block, slab, rows, panels }
    }
}

/// Computes the product with `block`.
pub(super) fn run<T: Float, C: Float, K: Block<T>>(
    threads: &Threads,
    block: &K,
    epilogue: Epilogue,
    job: Job<'_, T, C>,
) {
    let shape = job.shape;
    if shape.m == 0 || shape.n == 0 {
        return;
    }
    let size = size_of::<K::Packed>();
    let plan = Plan::new(&shape, K::K_UNIT, K::K_BLOCK, size);
    let all = shape.n.div_ceil(TILE);
    for first in (0..all).step_by(plan.slab) {
        let count = plan.slab.min(all - first);
        SHARED.with(|s| {
            s.with(count * plan.k * TILE * size, |packed| {
                let packed = Panels { at: packed.cast::<K::Packed>(), first, k: plan.k };
                let grain = (1 << 15) / (plan.k * TILE).max(1);
                threads.ranges(count, grain, &|r| {
                    for j in r {
                        // SAFETY: a panel of this slab; this thread alone writes it.
                        unsafe { job.right(block, first + j, packed.panel(first + j)) };
                    }
                });
                let across = count.div_ceil(plan.panels);
                threads.each(shape.m.div_ceil(plan.rows) * across, &|p| {
                    let (row, col) = (p / across * plan.rows, first + p % across * plan.panels);
                    let rows = row..(row + plan.rows).min(shape.m);
                    let cols = col..(col + plan.panels).min(first + count);
                    piece(block, epilogue, &job, &plan, &packed, rows, cols);
                });
            });
        });
    }
}

/// The packed panels `first..` of the right-hand side, each `k * TILE` elements.
struct Panels<P> {
    at: *mut P,
    first: usize,
    k: usize,
}

// SAFETY: threads write disjoint panels while packing, and only read afterwards.
unsafe impl<P: Send + Sync> Sync for Panels<P> {}

impl<P> Panels<P> {
    fn panel(&self, j: usize) -> *mut P {
        self.at.wrapping_add((j - self.first) * self.k * TILE)
    }
}

/// One piece: these rows by these panels.
fn piece<T: Float, C: Float, K: Block<T>>(
    block: &K,
    epilogue: Epilogue,
    job: &Job<'_, T, C>,
    plan: &Plan,
    packed: &Panels<K::Packed>,
    rows: Range<usize>,
    panels: Range<usize>,
) {
    let guard = block.guard();
    let strips = rows.len().div_ceil(TILE);
    let chunks = plan.k.div_ceil(plan.k_block).max(1);
    // From one block of k to the next the sums wait here. With one block only two blocks of sums are needed,
    // the one being computed and the one being stored.
    let blocks = if chunks == 1 { 2 } else { strips * panels.len() };
    let left_len = TILE * plan.k_block;
    let sums_bytes = blocks * size_of::<Sums>();
    PIECE.with(|s| {
        s.with(sums_bytes + 2 * left_len * size_of::<K::Packed>(), |scratch| {
            let sums: *mut Sums = scratch.cast();
            let left: *mut K::Packed = scratch.wrapping_add(sums_bytes).cast();
            let left = |step: usize| left.wrapping_add(step % 2 * left_len);
            let extent = |step: usize| {
                let (at, row) = (step / strips * plan.k_block, rows.start + step % strips * TILE);
                (at, plan.k_block.min(plan.k - at), row, (rows.end - row).min(TILE))
            };
            // Packs the part `part` of `parts` of a step's left-hand side.
            let pack = |step: usize, part: usize, parts: usize| {
                let (at, len, row, m) = extent(step);
                let units = len.div_ceil(SLICE);
                let (from, to) =
                    (units * part / parts * SLICE, (units * (part + 1) / parts * SLICE).min(len));
                if from < to {
                    // SAFETY: these rows and this part of k are inside A; the buffer holds a block of k.
                    unsafe {
                        job.left(block, at + from, to - from, row, m, left(step).add(from), plan.k_block)
                    };
                }
            };
            let store = |(tile, row, m, panel): (*mut Sums, usize, usize, usize)| {
                // SAFETY: the block is inside C and only this piece writes it; the sums are finished.
                unsafe { job.store(epilogue, &*tile, row, m, panel * TILE) };
            };
            let mut finished = None;
            pack(0, 0, 1);
            for step in 0..chunks * strips {
                let (at, len, row, m) = extent(step);
                let (chunk, strip) = (step / strips, step % strips);
                for (j, panel) in panels.clone().enumerate() {
                    let tile = sums.wrapping_add((strip * panels.len() + j) % blocks);
                    let right = packed.panel(panel).wrapping_add(at * TILE);
                    // SAFETY: packed operands and sums are inside the scratch sized for them.
                    unsafe {
                        block.multiply(&guard, left(step), plan.k_block, right, len, tile.cast(), chunk > 0)
                    };
                    // The matrix unit works on its own for hundreds of cycles: meanwhile pack the rows that
                    // come next and store the block that came before.
                    if step + 1 < chunks * strips {
                        pack(step + 1, j, panels.len());
                    }
                    if chunk + 1 == chunks
                        && let Some(before) = finished.replace((tile, row, m, panel))
                    {
                        store(before);
                    }
                }
            }
            finished.into_iter().for_each(store);
        });
    });
}
