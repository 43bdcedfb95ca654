//! Reductions that give the same bits whatever the backend: every element is reduced on one rank, in rank order, and
//! rounded once.

use super::{Owned, Transfer};
use crate::ReduceOp;
use crate::backend::OpError;
use crate::threads::reduce::{Reducible, fold};
use std::ops::Range;
use std::sync::PoisonError;
use std::time::Instant;

/// Bytes that a rank receives at a time, from all ranks together; bounds the receive buffers.
const SEGMENT_BYTES: usize = 16 << 20;
/// Up to this many elements every rank sends everything to every other and reduces locally: one round instead of two.
const SMALL: usize = 2048;

/// The part of rank `r` when `len` elements are split over `n` ranks.
fn part(len: usize, n: usize, r: usize) -> Range<usize> {
    let each = len.div_ceil(n);
    (each * r).min(len)..(each * (r + 1)).min(len)
}

/// `t` = reduction over ranks.
pub(super) fn all_reduce<T: Reducible, X: Transfer>(
    transfer: &Owned<X>,
    t: &mut [T],
    op: ReduceOp,
    deadline: Instant,
) -> Result<(), OpError> {
    let (n, me) = (transfer.group().ranks.len(), transfer.group().me);
    if t.len() <= SMALL {
        let mut scratch = Vec::new();
        let all = exchange(transfer, &vec![&*t; n], &mut scratch, deadline)?;
        fold(t, &all, op);
        return Ok(());
    }
    let parts: Vec<Range<usize>> = (0..n).map(|r| part(t.len(), n, r)).collect();
    reduce_parts(transfer, t, &parts, op, deadline)?;
    let mut rest = &mut *t;
    let mut mine: &[T] = &[];
    let mut others: Vec<(usize, &mut [u8])> = Vec::with_capacity(n);
    for (r, range) in parts.iter().enumerate() {
        let (this, after) = rest.split_at_mut(range.len());
        rest = after;
        match r == me {
            true => mine = this,
            false => others.push((r, bytemuck::cast_slice_mut(this))),
        }
    }
    let sends: Vec<_> = transfer.group().others().map(|r| (r, bytemuck::cast_slice(mine))).collect();
    transfer.run(&sends, &mut others, deadline)
}

/// Part `me` of n equal parts of `all` = reduction over ranks.
pub(super) fn reduce_scatter<T: Reducible, X: Transfer>(
    transfer: &Owned<X>,
    all: &mut [T],
    op: ReduceOp,
    deadline: Instant,
) -> Result<(), OpError> {
    let n = transfer.group().ranks.len();
    let parts: Vec<Range<usize>> = (0..n).map(|r| all.len() / n * r..all.len() / n * (r + 1)).collect();
    reduce_parts(transfer, all, &parts, op, deadline)
}

/// [`reduce_scatter`] out of place: `all` is only read.
pub(super) fn reduce_scatter_into<T: Reducible, X: Transfer>(
    transfer: &Owned<X>,
    all: &[T],
    mine: &mut [T],
    op: ReduceOp,
    deadline: Instant,
) -> Result<(), OpError> {
    let len = mine.len();
    segments::<T, X>(transfer, len, |seg, scratch| {
        let seg = within(&seg, len);
        let sent: Vec<&[T]> = all.chunks(len).map(|part| &part[seg.clone()]).collect();
        fold(&mut mine[seg], &exchange(transfer, &sent, scratch, deadline)?, op);
        Ok(())
    })
}

/// Reduces part r of `t` on rank r, in place.
fn reduce_parts<T: Reducible, X: Transfer>(
    transfer: &Owned<X>,
    t: &mut [T],
    parts: &[Range<usize>],
    op: ReduceOp,
    deadline: Instant,
) -> Result<(), OpError> {
    let me = transfer.group().me;
    let longest = parts.iter().map(Range::len).max().unwrap_or(0);
    segments::<T, X>(transfer, longest, |seg, scratch| {
        let sent: Vec<&[T]> = parts.iter().map(|p| &t[p.clone()][within(&seg, p.len())]).collect();
        let all = exchange(transfer, &sent, scratch, deadline)?;
        let out = &mut t[parts[me].clone()][within(&seg, parts[me].len())];
        fold(out, &all, op);
        Ok(())
    })
}

/// Calls `step` for segments of `len` elements, with receive buffers that are kept for later calls: fresh ones would cost
/// a page fault for every 4 KiB received.
fn segments<T: Reducible, X: Transfer>(
    transfer: &Owned<X>,
    len: usize,
    mut step: impl FnMut(Range<usize>, &mut Vec<u64>) -> Result<(), OpError>,
) -> Result<(), OpError> {
    let ranks = transfer.group().ranks.len();
    let segment = (SEGMENT_BYTES / ranks / size_of::<T>()).max(SMALL);
    let mut scratch = transfer.scratch.lock().unwrap_or_else(PoisonError::into_inner);
    (0..len).step_by(segment).try_for_each(|start| step(start..start + segment, &mut scratch))
}

/// The intersection of a segment with a part of `len` elements.
fn within(segment: &Range<usize>, len: usize) -> Range<usize> {
    segment.start.min(len)..segment.end.min(len)
}

/// Sends `sent[r]` to rank r and receives as many elements from each as this rank keeps; what each rank sent, in rank
/// order, this rank's own included.
fn exchange<'a, T: Reducible, X: Transfer>(
    transfer: &Owned<X>,
    sent: &[&[T]],
    scratch: &'a mut Vec<u64>,
    deadline: Instant,
) -> Result<Vec<&'a [T]>, OpError> {
    let me = transfer.group().me;
    let bytes = size_of_val(sent[me]);
    // A row starts at a multiple of 8 bytes, which suits every element type.
    let row = bytes.div_ceil(8);
    if scratch.len() < row * sent.len() {
        scratch.resize(row * sent.len(), 0);
    }
    let rows = scratch.chunks_mut(row.max(1)).take(sent.len());
    let mut rows: Vec<&mut [u8]> = rows.map(|row| &mut bytemuck::cast_slice_mut(row)[..bytes]).collect();
    if bytes == 0 {
        rows.resize_with(sent.len(), || &mut []);
    }
    rows[me].copy_from_slice(bytemuck::cast_slice(sent[me]));
    let sends: Vec<_> = transfer.group().others().map(|r| (r, bytemuck::cast_slice(sent[r]))).collect();
    let mut receives: Vec<_> = rows.into_iter().enumerate().filter(|(r, _)| *r != me).collect();
    if let Err(error) = transfer.run(&sends, &mut receives, deadline) {
        // The transfer may still write to it: MPI does.
        std::mem::forget(std::mem::take(scratch));
        return Err(error);
    }
    let row_of = |r: usize| {
        bytemuck::cast_slice(&bytemuck::cast_slice::<u64, u8>(&scratch[row * r..row * (r + 1)])[..bytes])
    };
    Ok((0..sent.len()).map(row_of).collect())
}
