//! MoE permutation on slices.

use super::reduce::lane_dot;
use super::rows::PIECE;
use super::{CpuContext, multiversion};
use crate::ALIGN;
use ferrotron_tensor::{Element, Float, Threads};

/// Slices of a [`crate::RowMap`].
#[derive(Debug)]
pub struct Sorted<'a> {
    /// `[E + 1]`
    pub offsets: &'a mut [i32],
    /// `[E]`
    pub counts: &'a mut [i32],
    /// `[T·k]`
    pub rows: &'a mut [i32],
    /// `[N]`
    pub source: &'a mut [i32],
}

/// Sizes of permuted rows.
#[derive(Clone, Copy, Debug)]
pub struct PermuteShape {
    /// Elements of a row.
    pub hidden: usize,
    /// Selections per token.
    pub topk: usize,
}

impl PermuteShape {
    /// Rows per chunk of work.
    fn grain(&self) -> usize {
        (PIECE / self.hidden.max(1)).max(1)
    }

    /// Number of rows of `x`.
    fn rows<T>(&self, x: &[T]) -> usize {
        x.len().checked_div(self.hidden).unwrap_or(0)
    }
}

/// `i` as an index into `0..n`; none where it is out of range.
#[inline(always)]
fn within(i: i32, n: usize) -> Option<usize> {
    usize::try_from(i).ok().filter(|i| *i < n)
}

/// Row `i` of rows of `h` elements.
#[inline(always)]
fn row<T>(x: &[T], h: usize, i: usize) -> &[T] {
    &x[i * h..][..h]
}

/// Sorts selections of the experts `first..first + E` by expert; each expert's rows start at a multiple of `align`. The source
/// holds the largest possible number of rows.
pub fn sort(index: &[i32], first: usize, align: usize, to: Sorted) {
    let Sorted { offsets, counts, rows, source } = to;
    let expert = |id: i32| usize::try_from(id).ok()?.checked_sub(first).filter(|e| *e < counts.len());
    let expert = |id: &i32| expert(*id);
    let mut found = vec![0usize; counts.len()];
    index.iter().filter_map(expert).for_each(|e| found[e] += 1);
    let mut next = Vec::with_capacity(found.len());
    let mut end = 0;
    for count in &found {
        next.push(end);
        end += count.next_multiple_of(align);
    }
    for (offset, start) in offsets.iter_mut().zip(next.iter().chain([&end])) {
        *offset = *start as i32;
    }
    source.fill(-1);
    for (selection, (id, row)) in index.iter().zip(rows).enumerate() {
        *row = -1;
        if let Some(e) = expert(id) {
            (*row, source[next[e]]) = (next[e] as i32, selection as i32);
            next[e] += 1;
        }
    }
    for (count, found) in counts.iter_mut().zip(found) {
        *count = found as i32;
    }
}

/// `out[r] = x[source[r] / k]`, zeros for padding: x is `[tokens, h]`, out is `[N, h]`.
pub fn gather_rows<T: Element>(
    threads: &Threads,
    shape: PermuteShape,
    x: &[T],
    source: &[i32],
    out: &mut [T],
) {
    let PermuteShape { hidden: h, topk: k } = shape;
    let (grain, selections) = (shape.grain(), shape.rows(x) * k);
    threads.parallel_chunks(out, grain * h, &|i, out| {
        for (out, from) in out.chunks_exact_mut(h).zip(&source[i * grain..]) {
            match within(*from, selections) {
                Some(selection) => out.copy_from_slice(row(x, h, selection / k)),
                None => out.fill(T::zeroed()),
            }
        }
    });
}

/// `out[c, r] = x[source[r] / k, c]`, zeros for padding and beyond N: x is `[tokens, h]`, out is
/// `[columns, N rounded up to a multiple of 16]`.
pub fn moe_permute_transposed(
    threads: &Threads,
    shape: PermuteShape,
    x: &[u8],
    source: &[i32],
    out: &mut [u8],
) {
    let PermuteShape { hidden: h, topk: k } = shape;
    // A block of columns at a time, so that the cache line read from x is used while it is cached.
    const TOGETHER: usize = 16;
    let (pitch, selections) = (source.len().next_multiple_of(ALIGN), shape.rows(x) * k);
    threads.parallel_chunks(out, TOGETHER * pitch, &|i, out| {
        out.fill(0);
        let (first, columns) = (i * TOGETHER, out.len() / pitch.max(1));
        for (r, from) in source.iter().enumerate() {
            if let Some(selection) = within(*from, selections) {
                let from = &row(x, h, selection / k)[first..first + columns];
                from.iter().enumerate().for_each(|(c, x)| out[c * pitch + r] = *x);
            }
        }
    });
}

/// `out[r] = weights[source[r]]·x[source[r] / k]`, zeros for padding.
pub fn moe_unpermute_backward<T: Float, O: Float>(
    cpu: CpuContext,
    shape: PermuteShape,
    x: &[T],
    source: &[i32],
    weights: &[f32],
    out: &mut [O],
) {
    let PermuteShape { hidden: h, topk: k } = shape;
    let grain = shape.grain();
    cpu.threads.parallel_chunks(out, grain * h, &|i, out| {
        for (out, from) in out.chunks_exact_mut(h).zip(&source[i * grain..]) {
            match within(*from, weights.len()) {
                Some(selection) => times(cpu.isa, row(x, h, selection / k), weights[selection], out),
                None => out.fill(O::zeroed()),
            }
        }
    });
}

/// `out[t] = Σ_j x[rows[t, j]]·(weights[t, j])` in f32: x is `[N, h]`, out is `[tokens, h]`.
pub fn moe_unpermute<T: Float, O: Float>(
    cpu: CpuContext,
    shape: PermuteShape,
    x: &[T],
    rows: &[i32],
    weights: Option<&[f32]>,
    out: &mut [O],
) {
    let PermuteShape { hidden: h, topk: k } = shape;
    let (grain, n) = ((PIECE / (h * k).max(1)).max(1), shape.rows(x));
    cpu.threads.parallel_chunks(out, grain * h, &|i, out| {
        let mut sum = vec![0f32; h];
        for (t, out) in out.chunks_exact_mut(h).enumerate() {
            sum.fill(0.0);
            let selections = (i * grain + t) * k..(i * grain + t + 1) * k;
            for selection in selections {
                if let Some(at) = within(rows[selection], n) {
                    add(cpu.isa, row(x, h, at), weights.map_or(1.0, |w| w[selection]), &mut sum);
                }
            }
            times(cpu.isa, &sum, 1.0, out);
        }
    });
}

/// `out[t, j] = <x[rows[t, j]], dy[t]>`, 0 for no row.
pub fn moe_unpermute_dprobs<T: Float, D: Float>(
    cpu: CpuContext,
    shape: PermuteShape,
    x: &[T],
    rows: &[i32],
    dy: &[D],
    out: &mut [f32],
) {
    let PermuteShape { hidden: h, topk: k } = shape;
    let (grain, n) = (shape.grain(), shape.rows(x));
    cpu.threads.parallel_chunks(out, grain, &|i, out| {
        for (selection, out) in (i * grain..).zip(out) {
            *out = match within(rows[selection], n) {
                Some(at) => dot(cpu.isa, row(x, h, at), row(dy, h, selection / k)),
                None => 0.0,
            };
        }
    });
}

/// `out[i] = x[source[i]]`, 0 for padding.
pub fn gather_values<T: Element>(x: &[T], source: &[i32], out: &mut [T]) {
    for (out, from) in out.iter_mut().zip(source) {
        *out = within(*from, x.len()).map_or(T::zeroed(), |i| x[i]);
    }
}

/// Reorders chunks of `sizes` by `order`: the source of each row, and the inverse.
pub fn chunk_map(sizes: &[i32], order: &[i32], source: &mut [i32], back: &mut [i32]) {
    let n = source.len();
    let size = |c: usize| usize::try_from(sizes[c]).unwrap_or(0).min(n);
    let mut start = Vec::with_capacity(sizes.len());
    let mut end = 0;
    for c in 0..sizes.len() {
        start.push(end);
        end += size(c);
    }
    for rows in [&mut *source, &mut *back] {
        rows.iter_mut().zip(0..).for_each(|(row, r)| *row = r);
    }
    let chunks = order.iter().filter_map(|c| within(*c, sizes.len()));
    let rows = chunks.flat_map(|c| start[c]..start[c] + size(c));
    for (to, from) in rows.take(n).enumerate() {
        source[to] = i32::try_from(from).unwrap_or(-1);
        if let Some(back) = back.get_mut(from) {
            *back = to as i32;
        }
    }
}

/// The first zeros of each column of `map [tokens, experts]` become ones until their number is a multiple of `align`.
pub fn pad_routing_map(map: &mut [u8], experts: usize, align: usize) {
    if experts == 0 {
        return;
    }
    let mut missing = vec![0usize; experts];
    for row in map.chunks_exact(experts) {
        missing.iter_mut().zip(row).for_each(|(n, on)| *n += usize::from(*on != 0));
    }
    missing.iter_mut().for_each(|n| *n = n.next_multiple_of(align) - *n);
    for row in map.chunks_exact_mut(experts) {
        for (on, missing) in
            row.iter_mut().zip(&mut missing).filter(|(on, missing)| **on == 0 && **missing > 0)
        {
            (*on, *missing) = (1, *missing - 1);
        }
    }
}

multiversion! {
    fn add<T: Float>(x: &[T], weight: f32, sum: &mut [f32]) {
        for (sum, x) in sum.iter_mut().zip(x) {
            *sum += weight * x.to_f32();
        }
    }
}

multiversion! {
    fn times<T: Float, O: Float>(x: &[T], weight: f32, out: &mut [O]) {
        for (out, x) in out.iter_mut().zip(x) {
            *out = O::from_f32(weight * x.to_f32());
        }
    }
}

multiversion! {
    fn dot<T: Float, D: Float>(x: &[T], y: &[D]) -> f32 {
        lane_dot(x, y)
    }
}
