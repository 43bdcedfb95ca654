//! Reductions that give the same bits whatever the backend: every element is reduced on one rank, in rank order, and
//! rounded once.

use super::{Owned, Transfer};
use crate::ReduceOp;
use crate::backend::OpError;
use crate::threads::reduce::{Reducible, fold};
use std::ops::Range;
use std::time::Instant;

/// Elements of a part exchanged at a time; bounds the receive buffers.
const SEGMENT: usize = 1 << 20;
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
        let theirs = swap(transfer, &vec![&*t; n], t.len(), deadline)?;
        let own = t.to_vec();
        fold(t, &slices(&theirs, &own, me), op);
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
    let me = transfer.group().me;
    segments(len, |seg| {
        let seg = within(&seg, len);
        let sent: Vec<&[T]> = all.chunks(len).map(|part| &part[seg.clone()]).collect();
        let theirs = swap(transfer, &sent, seg.len(), deadline)?;
        fold(&mut mine[seg], &slices(&theirs, sent[me], me), op);
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
    segments(longest, |seg| {
        let sent: Vec<&[T]> = parts.iter().map(|p| &t[p.clone()][within(&seg, p.len())]).collect();
        let theirs = swap(transfer, &sent, sent[me].len(), deadline)?;
        let own = sent[me].to_vec();
        let out = &mut t[parts[me].clone()][within(&seg, parts[me].len())];
        fold(out, &slices(&theirs, &own, me), op);
        Ok(())
    })
}

/// Calls `step` for segments of `len` elements.
fn segments(len: usize, mut step: impl FnMut(Range<usize>) -> Result<(), OpError>) -> Result<(), OpError> {
    (0..len).step_by(SEGMENT).try_for_each(|start| step(start..start + SEGMENT))
}

/// The intersection of a segment with a part of `len` elements.
fn within(segment: &Range<usize>, len: usize) -> Range<usize> {
    segment.start.min(len)..segment.end.min(len)
}

/// Sends `sent[r]` to rank r and receives `len` elements from each; this rank's own entry stays empty.
fn swap<T: Reducible, X: Transfer>(
    transfer: &Owned<X>,
    sent: &[&[T]],
    len: usize,
    deadline: Instant,
) -> Result<Vec<Vec<T>>, OpError> {
    let me = transfer.group().me;
    let mut theirs: Vec<Vec<T>> =
        (0..sent.len()).map(|r| vec![T::zeroed(); if r == me { 0 } else { len }]).collect();
    let sends: Vec<_> = transfer.group().others().map(|r| (r, bytemuck::cast_slice(sent[r]))).collect();
    let mut receives = receives(&mut theirs, me);
    match transfer.run(&sends, &mut receives, deadline) {
        Ok(()) => Ok(theirs),
        Err(error) => {
            // The transfer may still write to it: MPI does.
            std::mem::forget(theirs);
            Err(error)
        }
    }
}

fn receives<T: Reducible>(theirs: &mut [Vec<T>], me: usize) -> Vec<(usize, &mut [u8])> {
    let all = theirs.iter_mut().enumerate().filter(|(r, _)| *r != me);
    all.map(|(r, x)| (r, bytemuck::cast_slice_mut(x.as_mut_slice()))).collect()
}

fn slices<'a, T>(theirs: &'a [Vec<T>], own: &'a [T], me: usize) -> Vec<&'a [T]> {
    theirs.iter().enumerate().map(|(r, x)| if r == me { own } else { x.as_slice() }).collect()
}
