//! Top-k selection of experts per token.

use super::scores::softmax;
use super::{Router, grain, take_row};
use crate::{GroupLimit, RouterParams, ScoreFunction};
use ferrotron_tensor::{Float, Threads};

/// An integer that orders like x; NaN is smallest, and both zeros are equal.
#[inline(always)]
pub(super) fn order(x: f32) -> u32 {
    if x.is_nan() {
        return 0;
    }
    let bits = (x + 0.0).to_bits();
    if bits >> 31 == 0 { bits | 0x8000_0000 } else { !bits }
}

/// Sort key: larger values first, and the smaller index first among equal values. All keys of a row differ.
#[inline(always)]
pub(super) fn key(x: f32, number: usize) -> u64 {
    u64::from(order(x)) << 32 | u64::from(!(number as u32))
}

/// Index of a key.
#[inline(always)]
pub(super) fn number(key: u64) -> usize {
    !(key as u32) as usize
}

/// Moves the `k` largest keys to the front, sorted.
pub(super) fn best(keys: &mut [u64], k: usize) -> &[u64] {
    if k > 0 && k < keys.len() {
        keys.select_nth_unstable_by(k - 1, |a, b| b.cmp(a));
    }
    let front = &mut keys[..k];
    front.sort_unstable_by(|a, b| b.cmp(a));
    front
}

/// `index [T, k]` = the k largest of each row of `scores [T, E] − minus [E]`.
pub fn top_k(
    threads: &Threads,
    scores: &[f32],
    minus: Option<&[f32]>,
    experts: usize,
    k: usize,
    index: &mut [i32],
) {
    let rows = grain(experts);
    threads.parallel_chunks(index, rows * k, &|piece, index| {
        let mut keys = Vec::with_capacity(experts);
        for (t, index) in index.chunks_mut(k).enumerate() {
            let row = &scores[(piece * rows + t) * experts..][..experts];
            keys.clear();
            let less = |e: usize| minus.map_or(0.0, |m| m[e]);
            keys.extend(row.iter().enumerate().map(|(e, x)| key(x - less(e), e)));
            index.iter_mut().zip(best(&mut keys, k)).for_each(|(i, key)| *i = number(*key) as i32);
        }
    });
}

/// Scratch of one row's selection.
struct TopKSelector<'a> {
    how: RouterParams,
    bias: Option<&'a [f32]>,
    k: usize,
    /// Selection scores `[E]`: they rank groups, and experts where there is a bias.
    selection: Vec<f32>,
    keys: Vec<u64>,
}

impl TopKSelector<'_> {
    fn choose(&mut self, x: &[f32], index: &mut [i32]) {
        let groups = self.how.groups;
        if self.bias.is_some() || groups.is_some() {
            self.select(x);
        }
        // Rank by logits: scores grow with them, but rounding may make scores equal.
        let ranked = if self.bias.is_some() { &self.selection } else { x };
        let keys = &mut self.keys;
        keys.clear();
        match groups {
            None => keys.extend(ranked.iter().enumerate().map(|(e, v)| key(*v, e))),
            Some(GroupLimit { count, keep, best: ranked_by }) => {
                let size = x.len() / count;
                let of_group = |g: usize| (g * size..(g + 1) * size).map(|e| key(ranked[e], e));
                let mut sums = Vec::with_capacity(count);
                for g in 0..count {
                    keys.clear();
                    keys.extend(of_group(g));
                    let sum: f32 = best(keys, ranked_by).iter().map(|e| self.selection[number(*e)]).sum();
                    sums.push(key(sum, g));
                }
                keys.clear();
                best(&mut sums, keep).iter().for_each(|g| keys.extend(of_group(number(*g))));
            }
        }
        index.iter_mut().zip(best(keys, self.k)).for_each(|(i, key)| *i = number(*key) as i32);
    }

    fn select(&mut self, x: &[f32]) {
        let (score, selection) = (self.how.score, &mut self.selection);
        match score {
            ScoreFunction::Softmax => softmax(x, selection),
            _ => selection.iter_mut().zip(x).for_each(|(s, x)| *s = score.alone(*x)),
        }
        if let Some(bias) = self.bias {
            selection.iter_mut().zip(bias).for_each(|(s, b)| *s += b);
        }
    }
}

/// `index [T, k]`: the experts of each row of `logits [T, E]`, best first.
pub fn choose<T: Float>(
    threads: &Threads,
    router: Router,
    bias: Option<&[f32]>,
    logits: &[T],
    index: &mut [i32],
) {
    let Router { params: how, experts, topk: k } = router;
    let rows = grain(experts);
    threads.parallel_chunks(index, rows * k, &|piece, index| {
        let mut x = vec![0f32; experts];
        let mut selector =
            TopKSelector { how, bias, k, selection: vec![0.0; experts], keys: Vec::with_capacity(experts) };
        for (t, index) in index.chunks_mut(k).enumerate() {
            take_row(logits, piece * rows + t, &mut x);
            selector.choose(&x, index);
        }
    });
}
