//! Causal and sliding-window masks.

use super::{AttentionShape, MaskAlign, QUERIES, Span};
use std::ops::Range;

/// Visibility of a block of scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MaskCoverage {
    /// Nothing.
    None,
    /// Some of it.
    Part,
    /// All of it.
    All,
}

/// Visible keys of each query of a span: one range, whose ends never decrease from query to query.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mask {
    off: i64,
    left: Option<i64>,
    right: Option<i64>,
    k_len: i64,
}

impl Mask {
    /// The mask of one span.
    pub fn new(shape: &AttentionShape, span: &Span) -> Mask {
        let bound = |n: usize| i64::try_from(n).unwrap_or(i64::MAX / 4).min(i64::MAX / 4);
        let (left, right) = (shape.window.0.map(bound), shape.window.1.map(bound));
        let off = match shape.align {
            MaskAlign::TopLeft => 0,
            MaskAlign::BottomRight => bound(span.k_len) - bound(span.q_len),
        };
        let right = if shape.causal { Some(right.map_or(0, |r| r.min(0))) } else { right };
        Mask { off, left, right, k_len: bound(span.k_len) }
    }

    /// First and last key that query `i` sees; it sees none when the first is greater.
    fn ends(&self, i: usize) -> (i64, i64) {
        let diagonal = i as i64 + self.off;
        let first = self.left.map_or(0, |l| (diagonal - l).max(0));
        let last = self.right.map_or(self.k_len - 1, |r| (diagonal + r).min(self.k_len - 1));
        (first, last)
    }

    /// The keys from the first to the last that any of `queries` (not empty) sees.
    pub fn keys(&self, queries: &Range<usize>) -> Range<usize> {
        let (first, _) = self.ends(queries.start);
        let (_, last) = self.ends(queries.end - 1);
        if first > last { 0..0 } else { first as usize..last as usize + 1 }
    }

    /// How much of `queries` x `keys` (neither empty) is visible.
    pub fn cover(&self, queries: &Range<usize>, keys: &Range<usize>) -> MaskCoverage {
        let (from, to) = (keys.start as i64, keys.end as i64 - 1);
        let (first, first_last) = self.ends(queries.start);
        let (last_first, last) = self.ends(queries.end - 1);
        if to < first || from > last || first > last {
            MaskCoverage::None
        } else if from >= last_first && to <= first_last {
            MaskCoverage::All
        } else {
            MaskCoverage::Part
        }
    }

    /// First and last visible key of every lane; lanes without a query see none.
    pub fn lanes(&self, queries: &Range<usize>, lo: &mut [i32; QUERIES], hi: &mut [i32; QUERIES]) {
        let clamp = |x: i64| x.clamp(-1, i64::from(i32::MAX)) as i32;
        for (lane, (lo, hi)) in lo.iter_mut().zip(hi).enumerate() {
            let (first, last) = if lane < queries.len() { self.ends(queries.start + lane) } else { (1, 0) };
            (*lo, *hi) = if first > last { (1, 0) } else { (clamp(first), clamp(last)) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cover_agrees_with_every_pair() {
        let shape = |causal, align, window| AttentionShape {
            heads: 1,
            kv_heads: 1,
            d_qk: 1,
            d_v: 1,
            scale: 1.0,
            softcap: None,
            causal,
            align,
            window,
            fp8: false,
            lse_head: 0,
            lse_token: 1,
        };
        let windows =
            [(None, None), (Some(2), None), (None, Some(1)), (Some(0), Some(0)), (Some(3), Some(2))];
        for (q_len, k_len) in [(1, 1), (7, 7), (5, 11), (11, 5), (3, 0)] {
            for (causal, align, window) in windows
                .iter()
                .flat_map(|w| [(false, MaskAlign::TopLeft, *w), (true, MaskAlign::TopLeft, *w)])
                .flat_map(|(c, _, w)| [(c, MaskAlign::TopLeft, w), (c, MaskAlign::BottomRight, w)])
            {
                let span = Span { batch: 0, q_start: 0, q_len, k_start: 0, k_len, lse_base: 0 };
                let shape = shape(causal, align, window);
                let mask = Mask::new(&shape, &span);
                let off = if align == MaskAlign::TopLeft { 0 } else { k_len as i64 - q_len as i64 };
                let sees = |i: usize, j: usize| {
                    let (i, j) = (i as i64 + off, j as i64);
                    window.0.is_none_or(|l| j >= i - l as i64)
                        && window.1.is_none_or(|r| j <= i + r as i64)
                        && (!causal || j <= i)
                };
                let (mut lo, mut hi) = ([0; QUERIES], [0; QUERIES]);
                mask.lanes(&(0..q_len), &mut lo, &mut hi);
                for i in 0..QUERIES {
                    for j in 0..k_len {
                        assert_eq!(lo[i] <= j as i32 && j as i32 <= hi[i], i < q_len && sees(i, j));
                    }
                }
                for q in (0..q_len).flat_map(|a| (a + 1..=q_len).map(move |b| a..b)) {
                    let all = mask.keys(&q);
                    for k in (0..k_len).flat_map(|a| (a + 1..=k_len).map(move |b| a..b)) {
                        let pairs = q.clone().flat_map(|i| k.clone().map(move |j| (i, j)));
                        let seen = pairs.clone().filter(|(i, j)| sees(*i, *j)).count();
                        match mask.cover(&q, &k) {
                            MaskCoverage::All => assert_eq!(seen, pairs.clone().count()),
                            MaskCoverage::None => assert_eq!(seen, 0),
                            MaskCoverage::Part => {}
                        }
                        assert!(seen == 0 || (all.start < k.end && all.end > k.start));
                        if seen == pairs.clone().count() {
                            assert_eq!(mask.cover(&q, &k), MaskCoverage::All);
                        }
                    }
                }
            }
        }
    }
}
