//! Splits a GEMM into tasks for the threads, and each task into 32x32 blocks of C.
//!
//! B is packed once, into panels of 32 columns that all tasks share. A task is a range of rows by a range of panels; for each
//! block of k it packs a strip of 32 rows of A, which stays in L1 while the panels stream from L2.

use super::GemmShape;
use super::epilogue::{Epilogue, Finished};
use super::scratch::{PIECE, SHARED};
use super::tiling::Tiling;
use crate::cpu::Isa;
use ferrotron_tensor::{Float, Threads};
use std::marker::PhantomData;
use std::ops::Range;

/// Rows and columns of a block.
pub(super) const TILE: usize = 32;
/// f32 sums of a block.
pub(super) type Sums = [[f32; TILE]; TILE];

/// A 32x32 block GEMM with f32 sums, and the packing of its operands. Blocks of A are 32 rows, k contiguous; panels of B are 32
/// columns, and the part of a panel for k in `p..q` (multiples of `K_UNIT`) is its elements `32p..32q`.
pub(super) trait Block<T>: Sync {
    /// Element type of packed operands; any bit pattern is valid.
    type Packed: Copy + Send + Sync;
    /// Per-thread state of a task.
    type Guard;
    /// A block of A that is being packed.
    type Left;
    /// Panels of B that are being packed.
    type Right;
    /// k is zero-padded to a multiple of this.
    const K_UNIT: usize;
    /// Largest k of one block GEMM.
    const K_BLOCK: usize;

    /// Instruction-set level.
    fn isa(&self) -> Isa;
    /// Prepares this thread for a task.
    fn guard(&self) -> Self::Guard;

    /// Starts to pack `m <= 32` rows by `k` of op(A) at `from` into 32 rows of `ldo` elements; rows from `m` and columns from `k`
    /// to the next multiple of `K_UNIT` become zero.
    fn left(&self, from: From<T>, m: usize, k: usize, out: *mut Self::Packed, ldo: usize) -> Self::Left;
    /// Units of work of the packing.
    fn left_units(&self, left: &Self::Left) -> usize;
    /// Packs the next `units` units, at most to the end.
    ///
    /// # Safety
    /// The elements named in `left` are valid to read, and `out` to write.
    unsafe fn pack_left(&self, guard: &mut Self::Guard, left: &mut Self::Left, units: usize);

    /// Starts to pack `k` by `n` of op(B) at `from` into zero-padded panels `stride` elements apart.
    fn right(&self, from: From<T>, k: usize, n: usize, out: *mut Self::Packed, stride: usize) -> Self::Right;
    /// Units of work of the packing.
    fn right_units(&self, right: &Self::Right) -> usize;
    /// Packs the next `units` units, at most to the end.
    ///
    /// # Safety
    /// The elements named in `right` are valid to read, and `out` to write.
    unsafe fn pack_right(&self, right: &mut Self::Right, units: usize);

    /// How often a block GEMM of this `k` calls `meanwhile`.
    fn parts(k: usize) -> usize;
    /// `sums[32][32] = a·b`, or `+=`; `k` is a multiple of `K_UNIT`. Calls `meanwhile` between steps, to overlap packing and
    /// stores with the multiplication.
    ///
    /// # Safety
    /// The operands are as [`PackedOperands`] says, `sums` is 1024 elements, and all are 64-byte aligned.
    unsafe fn multiply(
        &self,
        guard: &mut Self::Guard,
        operands: PackedOperands<Self::Packed>,
        sums: *mut f32,
        accumulate: bool,
        meanwhile: impl FnMut(&mut Self::Guard),
    );
}

/// Packed operands of a 32x32 block GEMM.
#[derive(Clone, Copy)]
pub(crate) struct PackedOperands<P> {
    /// Left-hand side: 32 rows of `k` elements, k contiguous.
    pub(crate) a: *const P,
    /// Stride between rows of `a`.
    pub(crate) lda: usize,
    /// Right-hand side: a panel of `32·k` elements.
    pub(crate) b: *const P,
    /// Length of the sums.
    pub(crate) k: usize,
}

/// A GEMM whose slices hold what the shape says.
pub(super) struct Job<'a, T, C> {
    shape: GemmShape,
    a: *const T,
    b: *const T,
    epilogue: Epilogue<'a, T>,
    c: *mut C,
    borrows: PhantomData<(&'a [T], &'a mut [C])>,
}

// SAFETY: pointers to borrowed slices of plain numbers; threads write disjoint parts of C.
unsafe impl<T: Sync, C: Send> Sync for Job<'_, T, C> {}

impl<'a, T, C> Job<'a, T, C> {
    /// A GEMM whose slice lengths `GemmShape::check` has accepted.
    pub(super) fn new(
        shape: GemmShape,
        a: &'a [T],
        b: &'a [T],
        epilogue: Epilogue<'a, T>,
        c: &'a mut [C],
    ) -> Self {
        Job { shape, a: a.as_ptr(), b: b.as_ptr(), epilogue, c: c.as_mut_ptr(), borrows: PhantomData }
    }

    fn a(&self) -> From<T> {
        From { at: self.a, ld: self.shape.lda, trans: self.shape.trans_a }
    }

    fn b(&self) -> From<T> {
        From { at: self.b, ld: self.shape.ldb, trans: self.shape.trans_b }
    }
}

/// Part of an operand: first element, leading dimension, and whether it is stored transposed.
#[derive(Clone, Copy)]
pub(super) struct From<T> {
    pub(super) at: *const T,
    pub(super) ld: usize,
    pub(super) trans: bool,
}

impl<T> From<T> {
    /// The part that begins at this row and column of op(·). The offset wraps, since an empty operand has no valid address.
    pub(super) fn part(self, row: usize, col: usize) -> From<T> {
        let at = if self.trans { col * self.ld + row } else { row * self.ld + col };
        From { at: self.at.wrapping_add(at), ..self }
    }
}

/// Packed panels `first..` of B, `stride` elements apart.
#[derive(Clone, Copy)]
struct Panels<P> {
    at: *mut P,
    first: usize,
    stride: usize,
}

// SAFETY: threads write disjoint parts while packing, and only read afterwards.
unsafe impl<P: Send + Sync> Sync for Panels<P> {}

impl<P> Panels<P> {
    /// Panel `j` from index `at` of k on.
    fn panel(&self, j: usize, at: usize) -> *mut P {
        self.at.wrapping_add((j - self.first) * self.stride + at * TILE)
    }
}

/// Computes the GEMM with `block`.
pub(super) fn run<T: Float, C: Float, K: Block<T>>(threads: &Threads, block: &K, job: Job<'_, T, C>) {
    let GemmShape { m, n, k, .. } = job.shape;
    if m == 0 || n == 0 {
        return;
    }
    let size = size_of::<K::Packed>();
    let job = &job;
    let plan = Tiling::new(&job.shape, K::K_UNIT, K::K_BLOCK, size, threads.count());
    let all = n.div_ceil(TILE);
    for first in (0..all).step_by(plan.slab) {
        let count = plan.slab.min(all - first);
        let pieces = |packed: Option<Panels<K::Packed>>| {
            let across = count.div_ceil(plan.panels);
            threads.parallel_for(m.div_ceil(plan.rows) * across, &|p| {
                let (row, col) = (p / across * plan.rows, first + p % across * plan.panels);
                let rows = row..(row + plan.rows).min(m);
                let cols = col..(col + plan.panels).min(first + count);
                piece(block, job, &plan, packed.as_ref(), rows, cols);
            });
        };
        if !plan.share {
            pieces(None);
            continue;
        }
        SHARED.with(|s| {
            s.with(count * plan.k * TILE * size, |packed| {
                let packed = Panels { at: packed.cast::<K::Packed>(), first, stride: plan.k * TILE };
                threads.parallel_ranges(k, plan.pack, &|part| {
                    let (from, n) = (job.b().part(part.start, first * TILE), n.min((first + count) * TILE));
                    let out = packed.panel(first, part.start);
                    let mut right = block.right(from, part.len(), n - first * TILE, out, packed.stride);
                    // SAFETY: these columns and this part of k are inside B; no other thread writes this part
                    // of the panels.
                    unsafe { block.pack_right(&mut right, usize::MAX) };
                });
                pieces(Some(packed));
            });
        });
    }
}

/// One task: a range of rows by a range of panels. Without `shared` panels it packs its own, block of k by block of k.
fn piece<T: Float, C: Float, K: Block<T>>(
    block: &K,
    job: &Job<'_, T, C>,
    plan: &Tiling,
    shared: Option<&Panels<K::Packed>>,
    rows: Range<usize>,
    panels: Range<usize>,
) {
    let GemmShape { n, k, ldc, .. } = job.shape;
    let mut guard = block.guard();
    let width = panels.len();
    let (col, cols) = (panels.start * TILE, (n - panels.start * TILE).min(width * TILE));
    let strips = rows.len().div_ceil(TILE);
    let chunks = plan.k.div_ceil(plan.k_block).max(1);
    // All sums are kept between blocks of k. With a single block of k only two are needed: the one being computed and the one
    // being stored.
    let kept = if chunks == 1 { 2 } else { strips * width };
    let (left_len, right_len) =
        (TILE * plan.k_block, if shared.is_some() { 0 } else { width * TILE * plan.k_block });
    let sums_bytes = kept * size_of::<Sums>();
    let bias_bytes = width * size_of::<[f32; TILE]>();
    let packed_bytes = 2 * (left_len + right_len) * size_of::<K::Packed>();
    PIECE.with(|s| {
        s.with(sums_bytes + bias_bytes + packed_bytes, |scratch| {
            let sums: *mut Sums = scratch.cast();
            let bias: *mut [f32; TILE] = scratch.wrapping_add(sums_bytes).cast();
            let left: *mut K::Packed = scratch.wrapping_add(sums_bytes + bias_bytes).cast();
            let right = left.wrapping_add(2 * left_len);
            // SAFETY: the part of the scratch meant for it, of plain numbers.
            let bias = unsafe { std::slice::from_raw_parts_mut(bias, width) };
            widen_bias(job.epilogue.bias, n, col, bias.as_flattened_mut());
            let bias = &*bias;

            // Double buffering: the next strip of A, and the next block of k of B, are packed while the current ones are in use.
            let left = |step: usize| left.wrapping_add(step % 2 * left_len);
            let next_left = |step: usize| {
                let (at, row) = (step / strips * plan.k_block, rows.start + step % strips * TILE);
                let (m, k) = ((rows.end - row).min(TILE), plan.k_block.min(k - at));
                block.left(job.a().part(row, at), m, k, left(step), plan.k_block)
            };
            let right = |chunk: usize| right.wrapping_add(chunk % 2 * right_len);
            let next_right = |chunk: usize| {
                let at = chunk * plan.k_block;
                let k = plan.k_block.min(k - at);
                block.right(job.b().part(at, col), k, cols, right(chunk), TILE * plan.k_block)
            };

            let mut storing: Option<Finished<'_, C>> = None;
            let mut packing = next_left(0);
            let mut packing_right = None;
            // SAFETY: rows, columns and parts of k are inside the operands; the buffers hold a block of k.
            unsafe {
                block.pack_left(&mut guard, &mut packing, usize::MAX);
                if shared.is_none() {
                    block.pack_right(&mut next_right(0), usize::MAX);
                }
            }
            for chunk in 0..chunks {
                let at = chunk * plan.k_block;
                let len = plan.k_block.min(plan.k - at);
                let parts = K::parts(len);
                let mut right_units = 0;
                if shared.is_none() && chunk + 1 < chunks {
                    let next = next_right(chunk + 1);
                    right_units = block.right_units(&next).div_ceil(strips * width * parts);
                    packing_right = Some(next);
                }
                for strip in 0..strips {
                    let step = chunk * strips + strip;
                    let row = rows.start + strip * TILE;
                    if step + 1 < strips * chunks {
                        packing = next_left(step + 1);
                    }
                    let left_units = block.left_units(&packing).div_ceil(width * parts);
                    for (j, panel) in panels.clone().enumerate() {
                        let tile = sums.wrapping_add((strip * width + j) % kept);
                        let mut finished = (chunk + 1 == chunks).then(|| Finished {
                            sums: tile,
                            m: (rows.end - row).min(TILE),
                            n: (n - panel * TILE).min(TILE),
                            bias: &bias[j],
                            accumulate: job.epilogue.accumulate,
                            c: job.c.wrapping_add(row * ldc + panel * TILE),
                            ldc,
                            fetched: 0,
                            row: 0,
                        });
                        // AMX works asynchronously for hundreds of cycles: meanwhile pack the next operands and store the
                        // previous block, a little at a time, so that neither AMX nor the rest of the core idles.
                        let block_rows = TILE.div_ceil(parts);
                        let meanwhile = |guard: &mut K::Guard| {
                            // SAFETY: as above; a finished block is inside C, and only this piece writes it.
                            unsafe {
                                block.pack_left(guard, &mut packing, left_units);
                                if let Some(right) = &mut packing_right {
                                    block.pack_right(right, right_units);
                                }
                                if let Some(block_before) = &mut storing {
                                    block_before.advance(block.isa(), block_rows);
                                }
                                if let Some(finished) = &mut finished {
                                    finished.fetch(block_rows);
                                }
                            }
                        };
                        let b = match shared {
                            Some(packed) => packed.panel(panel, at),
                            None => right(chunk).wrapping_add(j * TILE * plan.k_block),
                        };
                        // SAFETY: packed operands and sums are inside the scratch sized for them.
                        unsafe {
                            let operands = PackedOperands { a: left(step), lda: plan.k_block, b, k: len };
                            block.multiply(&mut guard, operands, tile.cast(), chunk > 0, meanwhile);
                        }
                        if let Some(mut before) = std::mem::replace(&mut storing, finished) {
                            // SAFETY: as above.
                            unsafe { before.advance(block.isa(), usize::MAX) };
                        }
                    }
                    // SAFETY: as above.
                    unsafe { block.pack_left(&mut guard, &mut packing, usize::MAX) };
                }
                if let Some(mut right) = packing_right.take() {
                    // SAFETY: as above.
                    unsafe { block.pack_right(&mut right, usize::MAX) };
                }
            }
            if let Some(mut last) = storing {
                // SAFETY: as above.
                unsafe { last.advance(block.isa(), usize::MAX) };
            }
        });
    });
}

/// Bias of the columns from `col` in f32, zero where there is none.
fn widen_bias<T: Float>(bias: Option<&[T]>, n: usize, col: usize, out: &mut [f32]) {
    out.fill(0.0);
    if let Some(bias) = bias {
        for (o, b) in out.iter_mut().zip(&bias[col..n]) {
            *o = b.to_f32();
        }
    }
}
