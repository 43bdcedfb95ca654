//! f32 GEMM on AVX2 and AVX-512: how it is split.
//!
//! B is packed a slab at a time, into panels of 32 columns that each thread keeps in its L2. Where there are many rows for every
//! thread, each packs a slab for itself: panels that another core wrote are read more slowly, L2 or not. Where there are few, the
//! threads share the packing. Tasks are ranges of rows of C, and of panels where rows are few; a task takes its rows strip by strip
//! (`f32_strip`), so that A is read once for a slab.
//! Every element of C is a sum of blocks of k in order. Their length depends on the shape alone.

use super::driver::TILE;
use super::f32_strip::{K_BLOCK, K_BLOCK_TRANS, SCRATCH, Strip, StripFn};
use super::scratch::{PIECE, SHARED};
use super::vector::flip;
use super::{Epilogue, GemmShape};
use crate::cpu::{CpuContext, Isa};
use std::ops::Range;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Elements of packed B that leave room in L2.
const SLAB: usize = 256 << 10;
/// Strips of a task: so few that its part of C stays in L2 from one block of k to the next.
const TASK_STRIPS: usize = 8;
/// Rows for each thread from which it packs B for itself: to pack an element costs as much as its
/// multiply-adds of some tens of rows.
const OWN_ROWS: usize = 384;
/// Tasks for each thread, so that none waits long for the last one.
const TASKS: usize = 4;
/// Multiply-adds that are worth handing over to another thread.
const TASK_WORK: usize = 1 << 18;
/// Rows of B in a part.
const ROWS: usize = 32;
/// Parts that one task packs.
const PACK: usize = 4;

/// Memory that threads share: A, B and packed B are read, and every task writes other elements of C.
#[derive(Clone, Copy)]
struct Shared(*mut f32);
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    fn at(&self, index: usize) -> *mut f32 {
        self.0.wrapping_add(index)
    }
}

/// Part `i` of `parts` of `0..len`; their lengths differ by one at most.
fn part(i: usize, parts: usize, len: usize) -> Range<usize> {
    i * len / parts..(i + 1) * len / parts
}

/// A range of k and of panels.
#[derive(Clone)]
struct Slab<'a> {
    shape: GemmShape,
    epilogue: Epilogue<'a, f32>,
    a: Shared,
    b: Shared,
    c: Shared,
    /// Blocks of k, in each the panels; null where threads pack for themselves.
    packed: Shared,
    isa: Isa,
    /// For strips of `1..=len` rows.
    kernels: &'static [StripFn],
    /// Length of a block of k; the last may be shorter.
    block: usize,
    k: Range<usize>,
    panels: Range<usize>,
}

impl Slab<'_> {
    /// Block `i` of k.
    fn block(&self, i: usize) -> Range<usize> {
        let start = self.k.start + i * self.block;
        start..(start + self.block).min(self.k.end)
    }

    fn blocks(&self) -> usize {
        self.k.len().div_ceil(self.block)
    }

    /// Elements.
    fn len(&self) -> usize {
        self.k.len() * self.panels.len() * TILE
    }

    /// Parts that can be packed one by one: of each block of k the panels of Bᵀ, or groups of rows of B.
    fn parts(&self) -> usize {
        self.blocks() * self.parts_of_block()
    }

    fn parts_of_block(&self) -> usize {
        if self.shape.trans_b { self.panels.len() } else { self.block.div_ceil(ROWS) }
    }

    /// Strips of all rows.
    fn strips(&self) -> usize {
        self.shape.m.div_ceil(self.kernels.len())
    }

    /// Panel `j` of block `i`, packed.
    fn packed(&self, i: usize, j: usize) -> *mut f32 {
        let block = i * self.block * self.panels.len() * TILE;
        self.packed.at(block + (j - self.panels.start) * self.block(i).len() * TILE)
    }

    /// Packs these parts; columns that B does not have become zero.
    fn pack(&self, parts: Range<usize>) {
        for p in parts {
            let (i, p) = (p / self.parts_of_block(), p % self.parts_of_block());
            if self.shape.trans_b {
                self.pack_panel(i, self.panels.start + p);
            } else {
                let len = self.block(i).len();
                self.pack_rows(i, (p * ROWS).min(len)..((p + 1) * ROWS).min(len));
            }
        }
    }

    /// Packs panel `j` of block `i` of Bᵀ, whose columns are contiguous.
    fn pack_panel(&self, i: usize, j: usize) {
        let (s, k, col, out) = (&self.shape, self.block(i), j * TILE, self.packed(i, j));
        let cols = (s.n - col).min(TILE);
        // SAFETY: these columns and this block of k are inside B; no other thread writes this panel of the block.
        unsafe {
            if cols < TILE {
                out.write_bytes(0, k.len() * TILE);
            }
            let b = self.b.at(col * s.ldb + k.start).cast_const();
            flip(self.isa, b, s.ldb, [cols, k.len()], out, TILE);
        }
    }

    /// Packs these rows of block `i` of B into all panels: whole rows, which the CPU fetches ahead by itself.
    fn pack_rows(&self, i: usize, rows: Range<usize>) {
        let s = &self.shape;
        for l in rows {
            for j in self.panels.clone() {
                let cols = (s.n - j * TILE).min(TILE);
                let from = self.b.at((self.block(i).start + l) * s.ldb + j * TILE).cast_const();
                let to = self.packed(i, j).wrapping_add(l * TILE);
                // SAFETY: this row and these columns are inside B; no other thread writes this row of the block.
                unsafe {
                    if cols == TILE {
                        to.cast::<[f32; TILE]>().write(from.cast::<[f32; TILE]>().read());
                    } else {
                        to.copy_from_nonoverlapping(from, cols);
                        to.add(cols).write_bytes(0, TILE - cols);
                    }
                }
            }
        }
    }

    /// Parts of the strips, and of the panels, that are one task each.
    fn tasks(&self, threads: usize) -> [usize; 2] {
        let work = self.shape.m * self.panels.len() * TILE * self.k.len();
        let wanted = if threads == 1 { 1 } else { TASKS * threads.min(work.div_ceil(TASK_WORK)) };
        let strips = self.strips();
        let down = strips.div_ceil(TASK_STRIPS).max(wanted).min(strips);
        [down, wanted.div_ceil(down).min(self.panels.len())]
    }

    /// Computes these strips of C for these panels. `scratch` is the memory of a strip.
    fn task(&self, strips: Range<usize>, panels: Range<usize>, scratch: *mut f32) {
        let Slab { shape: s, epilogue, .. } = self;
        let rows = |strip: usize| part(strip, self.strips(), s.m);
        let a = |row: usize, k: usize| {
            self.a.at(if s.trans_a { k * s.lda + row } else { row * s.lda + k }).cast_const()
        };
        let col = panels.start * TILE;
        for i in 0..self.blocks() {
            let k = self.block(i);
            let bias =
                epilogue.bias.filter(|_| k.start == 0).map_or(null(), |b| b.as_ptr().wrapping_add(col));
            for strip in strips.clone() {
                let rows_of = rows(strip);
                let next_a = match strip + 1 < strips.end {
                    true => a(rows(strip + 1).start, k.start),
                    false => a(rows(strips.start).start, k.end),
                };
                let operands = Strip {
                    k: k.len(),
                    a: a(rows_of.start, k.start),
                    lda: s.lda,
                    next_a,
                    b: self.packed(i, panels.start),
                    c: self.c.at(rows_of.start * s.ldc + col),
                    ldc: s.ldc,
                    cols: s.n.min(panels.end * TILE) - col,
                    bias,
                    accumulate: epilogue.accumulate || k.start > 0,
                    scratch,
                };
                // SAFETY: the kernels are those of this CPU. Rows, columns and the block are inside the operands, whose lengths
                // the caller of `run` has checked; no other task writes this part of C.
                unsafe { self.kernels[rows_of.len() - 1](&operands) };
            }
        }
    }
}

/// See [`super::gemm_f32`], which has checked the lengths. `m`, `n` and `k` are not zero; `kernels` are those of the level.
pub(super) fn run(
    cpu: CpuContext,
    kernels: [&'static [StripFn]; 2],
    shape: GemmShape,
    [a, b]: [&[f32]; 2],
    epilogue: Epilogue<'_, f32>,
    c: &mut [f32],
) {
    let GemmShape { m, n, k, trans_a, .. } = shape;
    let longest = if trans_a { K_BLOCK_TRANS } else { K_BLOCK };
    let block = k.div_ceil(k.div_ceil(longest));
    let all = n.div_ceil(TILE);
    let slabs = all.div_ceil((SLAB / (TILE * block)).max(1));
    for panels in (0..slabs).map(|i| part(i, slabs, all)) {
        let blocks = (SLAB / (panels.len() * TILE * block)).max(1);
        for start in (0..k).step_by(blocks * block) {
            let slab = Slab {
                shape,
                epilogue,
                a: Shared(a.as_ptr().cast_mut()),
                b: Shared(b.as_ptr().cast_mut()),
                c: Shared(c.as_mut_ptr()),
                packed: Shared(null_mut()),
                isa: cpu.isa,
                kernels: kernels[usize::from(trans_a)],
                block,
                k: start..k.min(start + blocks * block),
                panels: panels.clone(),
            };
            if m >= OWN_ROWS * cpu.threads.count() {
                multiply(&slab, cpu);
            } else {
                SHARED.with(|packed| {
                    packed.with(slab.len() * size_of::<f32>(), |packed| {
                        let slab = Slab { packed: Shared(packed.cast()), ..slab };
                        cpu.threads.parallel_ranges(slab.parts(), PACK, &|parts| slab.pack(parts));
                        multiply(&slab, cpu);
                    });
                });
            }
        }
    }
}

/// Computes C of a slab. If nobody has packed it, every thread does so for itself.
fn multiply(slab: &Slab<'_>, cpu: CpuContext) {
    let own = if slab.packed.0.is_null() { slab.len() } else { 0 };
    let [down, across] = slab.tasks(cpu.threads.count());
    let workers = cpu.threads.count().min(down * across);
    // Every worker goes through a range of tasks of its own, then helps with the others'.
    let ranges = (0..workers).map(|worker| part(worker, workers, down * across));
    let ranges: Vec<_> = ranges.map(|tasks| (AtomicUsize::new(tasks.start), tasks.end)).collect();
    let take = |worker: usize| {
        let nth = |i: usize| {
            let (next, end) = &ranges[(worker + i) % workers];
            Some(next.fetch_add(1, Ordering::Relaxed)).filter(|task| task < end)
        };
        (0..workers).find_map(nth)
    };
    cpu.threads.parallel_for(workers, &|worker| {
        let work = |scratch: *mut f32| {
            let mut next = take(worker);
            let mut slab = slab.clone();
            if own > 0 && next.is_some() {
                slab.packed = Shared(scratch.wrapping_add(SCRATCH));
                slab.pack(0..slab.parts());
            }
            while let Some(task) = next {
                let columns = part(task % across, across, slab.panels.len());
                let panels = slab.panels.start + columns.start..slab.panels.start + columns.end;
                slab.task(part(task / across, down, slab.strips()), panels, scratch);
                next = take(worker);
            }
        };
        PIECE.with(|scratch| scratch.with((SCRATCH + own) * size_of::<f32>(), |memory| work(memory.cast())));
    });
}
