//! Free address ranges of a segment: best fit with split and coalesce. Plain data; nothing here touches memory.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Disjoint free ranges. Neighbours are one range unless a border separates them: memory on the two sides of a border comes
/// from different allocations, which no tensor may span.
#[derive(Default)]
pub(crate) struct FreeRanges {
    /// End by start.
    ends: BTreeMap<usize, usize>,
    /// (bytes, start): the first entry of at least n bytes is the best fit, at the lowest address.
    by_size: BTreeSet<(usize, usize)>,
}

impl FreeRanges {
    /// Takes the start of the smallest range that holds `bytes`.
    pub(crate) fn take(&mut self, bytes: usize) -> Option<Range<usize>> {
        let (size, start) = *self.by_size.range((bytes, 0)..).next()?;
        self.cut(start);
        if size > bytes {
            self.add(start + bytes..start + size);
        }
        Some(start..start + bytes)
    }

    /// Frees a range and joins it with its neighbours, except across the addresses for which `border` holds.
    pub(crate) fn insert(&mut self, range: Range<usize>, border: impl Fn(usize) -> bool) {
        let Range { mut start, mut end } = range;
        if let Some(before) = self.ending_at(start).filter(|_| !border(start)) {
            self.cut(before.start);
            start = before.start;
        }
        if let Some(after) = self.starting_at(end).filter(|_| !border(end)) {
            self.cut(after.start);
            end = after.end;
        }
        self.add(start..end);
    }

    /// Removes `range`, of which every byte is free and which crosses no border; false, and no change, if it is not.
    pub(crate) fn remove(&mut self, range: Range<usize>) -> bool {
        let Some(around) = self.around(range.start).filter(|a| range.end <= a.end) else { return false };
        self.cut(around.start);
        self.add(around.start..range.start);
        self.add(range.end..around.end);
        true
    }

    /// The free range that contains the address.
    pub(crate) fn around(&self, at: usize) -> Option<Range<usize>> {
        let (start, end) = self.ends.range(..=at).next_back()?;
        (at < *end).then_some(*start..*end)
    }

    pub(crate) fn ending_at(&self, at: usize) -> Option<Range<usize>> {
        let (start, end) = self.ends.range(..at).next_back()?;
        (*end == at).then_some(*start..*end)
    }

    pub(crate) fn starting_at(&self, at: usize) -> Option<Range<usize>> {
        self.ends.get(&at).map(|end| at..*end)
    }

    /// All ranges by address.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        self.ends.iter().map(|(start, end)| *start..*end)
    }

    fn add(&mut self, range: Range<usize>) {
        if !range.is_empty() {
            self.ends.insert(range.start, range.end);
            self.by_size.insert((range.len(), range.start));
        }
    }

    fn cut(&mut self, start: usize) {
        if let Some(end) = self.ends.remove(&start) {
            self.by_size.remove(&(end - start, start));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A generator of test values: splitmix64.
    fn random(state: &mut u64, below: usize) -> usize {
        *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = *state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % below as u64) as usize
    }

    /// Random takes, frees and removals against one flag per byte, with a border in the middle.
    #[test]
    fn ranges_agree_with_a_map_of_bytes() {
        const BYTES: usize = 1024;
        let border = |at: usize| at == BYTES / 2;
        for seed in 0..40 {
            let mut state = seed;
            let mut ranges = FreeRanges::default();
            ranges.insert(0..BYTES / 2, border);
            ranges.insert(BYTES / 2..BYTES, border);
            let mut free = [true; BYTES];
            let mut live: Vec<Range<usize>> = Vec::new();
            for _ in 0..400 {
                match random(&mut state, 5) {
                    0..2 => {
                        let bytes = 1 + random(&mut state, 90);
                        let best = runs(&free)
                            .into_iter()
                            .filter(|r| r.len() >= bytes)
                            .min_by_key(|r| (r.len(), r.start));
                        let taken = ranges.take(bytes);
                        assert_eq!(taken, best.map(|r| r.start..r.start + bytes), "best fit, lowest address");
                        if let Some(r) = taken {
                            free[r.clone()].fill(false);
                            live.push(r);
                        }
                    }
                    2 => {
                        let start = random(&mut state, BYTES - 1);
                        let range = start..(start + 1 + random(&mut state, 40)).min(BYTES);
                        let whole = runs(&free).iter().any(|r| r.start <= range.start && range.end <= r.end);
                        assert_eq!(ranges.remove(range.clone()), whole);
                        if whole {
                            free[range.clone()].fill(false);
                            live.push(range);
                        }
                    }
                    _ if !live.is_empty() => {
                        let r = live.swap_remove(random(&mut state, live.len()));
                        free[r.clone()].fill(true);
                        ranges.insert(r, border);
                    }
                    _ => {}
                }
                assert_eq!(ranges.iter().collect::<Vec<_>>(), runs(&free));
                assert_eq!(ranges.by_size.len(), ranges.ends.len());
            }
            live.drain(..).for_each(|r| ranges.insert(r, border));
            assert_eq!(ranges.iter().collect::<Vec<_>>(), [0..BYTES / 2, BYTES / 2..BYTES]);
        }
    }

    /// Maximal runs of free bytes, cut at the border.
    fn runs(free: &[bool]) -> Vec<Range<usize>> {
        let mut out: Vec<Range<usize>> = Vec::new();
        for at in (0..free.len()).filter(|at| free[*at]) {
            match out.last_mut() {
                Some(last) if last.end == at && at != free.len() / 2 => last.end += 1,
                _ => out.push(at..at + 1),
            }
        }
        out
    }
}
