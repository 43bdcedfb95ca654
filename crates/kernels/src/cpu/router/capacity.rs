//! Tokens per expert, and dropping beyond an expert's capacity.

use super::check_below;
use super::top_k::{best, key, number};
use ferrotron_tensor::{Result, Threads, shape_error};

/// `counts [E] +=` selections of `index [T, k]`, padding excluded.
pub fn count_tokens(index: &[i32], k: usize, segments: &[i32], counts: &mut [i64]) -> Result<()> {
    check_below("count_tokens", "expert", index, counts.len())?;
    if k == 0 {
        return Ok(());
    }
    for (row, _) in index.chunks(k).zip(segments).filter(|(_, s)| **s >= 0) {
        row.iter().filter(|e| **e >= 0).for_each(|e| counts[*e as usize] += 1);
    }
    Ok(())
}

/// Drops selections beyond the capacity; see [`crate::CapacityDrop`]. Returns how many were dropped.
pub fn drop_over_capacity(
    threads: &Threads,
    capacity: usize,
    experts: usize,
    by_probability: bool,
    index: &mut [i32],
    probs: &mut [f32],
) -> Result<i64> {
    check_below("drop_over_capacity", "expert", index, experts)?;
    if u32::try_from(index.len()).is_err() {
        return shape_error("drop_over_capacity", format!("{} selections are too many to sort", index.len()));
    }
    let mut lists: Vec<Vec<u64>> = vec![Vec::new(); experts];
    for (at, e) in index.iter().enumerate().filter(|(_, e)| **e >= 0) {
        lists[*e as usize].push(key(if by_probability { probs[at] } else { 0.0 }, at));
    }
    threads.parallel_chunks(&mut lists, 1, &|_, list| {
        let keep = capacity.min(list[0].len());
        best(&mut list[0], keep);
    });
    let mut dropped = 0;
    for at in lists.iter().flat_map(|list| list.iter().skip(capacity)) {
        let at = number(*at);
        (index[at], probs[at]) = (-1, 0.0);
        dropped += 1;
    }
    Ok(dropped)
}
