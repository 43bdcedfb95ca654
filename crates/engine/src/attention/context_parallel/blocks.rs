//! Which blocks of the causal score matrix each rank computes, and the order of rows.

use super::super::layout::offsets;
use crate::GroupRank;
use crate::attention::Layout;
use ferrotron_kernels::{AttentionParams, MaskAlign, Sequences};
use ferrotron_tensor::{Result, shape_error};

/// The mask between a rank's queries and one rank's keys. A rank holds an early and a late chunk of each sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingBlock {
    /// Its own keys: causal.
    Diagonal,
    /// Keys of an earlier rank: all queries attend to the early chunk, none to the late one.
    Lower,
    /// Keys of a later rank: queries of the late chunk attend to all keys, those of the early chunk to none.
    Upper,
}

/// The mask between a rank's queries and the keys of rank `from`.
pub fn ring_block(rank: usize, from: usize) -> RingBlock {
    match rank.cmp(&from) {
        std::cmp::Ordering::Equal => RingBlock::Diagonal,
        std::cmp::Ordering::Greater => RingBlock::Lower,
        std::cmp::Ordering::Less => RingBlock::Upper,
    }
}

/// The rank whose keys are present at a step of the forward ring: keys arrive from the previous rank and go to the next.
pub fn forward_source(place: GroupRank, step: usize) -> usize {
    (place.rank + place.size - step % place.size) % place.size
}

/// The same for the backward ring, which runs in the opposite direction: it begins with the keys that forward used last
/// and ends with the rank's own, when all other ranks have added to their gradients.
pub fn backward_source(place: GroupRank, step: usize) -> usize {
    (place.rank + step + 1) % place.size
}

/// One attention launch: packed ranges of queries and of the keys they attend to. Either may be empty, which leaves
/// queries without keys or keys without queries.
pub(super) struct Block {
    q: Vec<i32>,
    k: Vec<i32>,
    pub(super) scores: AttentionParams,
}

impl Block {
    fn new(runs: Vec<(usize, usize)>, scores: AttentionParams) -> Result<Block> {
        let (q, k) = (offsets(runs.iter().map(|r| r.0)), offsets(runs.iter().map(|r| r.1)));
        match (q, k) {
            (Some(q), Some(k)) => Ok(Block { q, k, scores }),
            _ => shape_error("attention", "the batch has more than 2^31 tokens; use a smaller micro-batch"),
        }
    }

    pub(super) fn sequences(&self) -> Sequences<'_> {
        Sequences::Packed { q: &self.q, k: &self.k }
    }
}

/// The sequences from the view of one context-parallel rank.
pub(super) struct CpPlan {
    place: GroupRank,
    /// Chunk length of each sequence.
    chunks: Vec<usize>,
}

impl CpPlan {
    /// From the full, padded sequences.
    pub(super) fn new(layout: &Layout, place: GroupRank) -> Result<CpPlan> {
        let unit = 2 * place.size;
        let lengths = layout.lengths();
        if let Some(bad) = lengths.iter().find(|n| !n.is_multiple_of(unit)) {
            return shape_error(
                "attention",
                format!(
                    "a sequence of {bad} tokens over {} ranks must be padded to a multiple of {unit}",
                    place.size
                ),
            );
        }
        Ok(CpPlan { place, chunks: lengths.into_iter().map(|n| n / unit).collect() })
    }

    /// Rows of this rank.
    pub(super) fn local(&self) -> usize {
        2 * self.chunks.iter().sum::<usize>()
    }

    /// This rank's queries against the keys of rank `from`.
    pub(super) fn ring(&self, scores: &AttentionParams, from: usize) -> Result<Block> {
        let kind = ring_block(self.place.rank, from);
        let runs = |h: &usize| match kind {
            RingBlock::Diagonal => vec![(2 * h, 2 * h)],
            RingBlock::Lower => vec![(2 * h, *h), (0, *h)],
            RingBlock::Upper => vec![(*h, 0), (*h, 2 * h)],
        };
        let scores = AttentionParams { causal: scores.causal && kind == RingBlock::Diagonal, ..*scores };
        Block::new(self.chunks.iter().flat_map(runs).collect(), scores)
    }

    /// The queries of this rank's early or late chunks against all keys in natural order: each chunk attends to the prefix
    /// that ends with it.
    pub(super) fn prefix(&self, scores: &AttentionParams, late: bool) -> Result<Block> {
        let GroupRank { rank, size } = self.place;
        let seen = if late { 2 * size - rank } else { rank + 1 };
        let runs = |h: &usize| match late {
            false => vec![(*h, seen * h), (0, (2 * size - seen) * h), (*h, 0)],
            true => vec![(*h, 0), (*h, seen * h), (0, (2 * size - seen) * h)],
        };
        let scores = AttentionParams { align: MaskAlign::BottomRight, ..*scores };
        Block::new(self.chunks.iter().flat_map(runs).collect(), scores)
    }

    /// For each token in natural order, its row in the concatenation of all ranks' rows.
    pub(super) fn to_natural(&self) -> Result<Vec<i32>> {
        let (size, local) = (self.place.size, self.local());
        let mut rows = Vec::with_capacity(size * local);
        let mut start = 0;
        for h in &self.chunks {
            for chunk in 0..2 * size {
                let (owner, late) = if chunk < size { (chunk, 0) } else { (2 * size - 1 - chunk, 1) };
                let first = owner * local + start + late * h;
                rows.extend(first..first + h);
            }
            start += 2 * h;
        }
        let numbers = rows.into_iter().map(i32::try_from).collect::<std::result::Result<_, _>>();
        numbers.or_else(|_| {
            shape_error("attention", "the batch has more than 2^31 tokens; use a smaller micro-batch")
        })
    }

    /// The inverse: for each row of the concatenation, its token.
    pub(super) fn to_ranks(&self) -> Result<Vec<i32>> {
        let natural = self.to_natural()?;
        let mut rows = vec![0; natural.len()];
        natural.iter().enumerate().for_each(|(token, row)| rows[*row as usize] = token as i32);
        Ok(rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Calls `f` with every (query, key) pair that a rank computes.
    type Visit<'a> = dyn Fn(usize, &mut dyn FnMut(usize, usize)) + 'a;

    fn cases(rank: usize, size: usize, source: fn(GroupRank, usize) -> usize) -> String {
        let letter = |step| match ring_block(rank, source(GroupRank { rank, size }, step)) {
            RingBlock::Diagonal => 'D',
            RingBlock::Lower => 'L',
            RingBlock::Upper => 'U',
        };
        (0..size).map(letter).collect()
    }

    #[test]
    fn the_cases_come_in_the_order_of_the_ring() {
        let all = |source| -> Vec<String> { (0..4).map(|r| cases(r, 4, source)).collect() };
        assert_eq!(all(backward_source), ["UUUD", "UULD", "ULLD", "LLLD"]);
        assert_eq!(all(forward_source), ["DUUU", "DLUU", "DLLU", "DLLL"]);
        for size in [1, 2, 3, 4, 8] {
            for rank in 0..size {
                let place = GroupRank { rank, size };
                for step in 0..size - 1 {
                    // The next keys are those that the neighbour holds now.
                    let before = GroupRank { rank: (rank + size - 1) % size, size };
                    assert_eq!(forward_source(place, step + 1), forward_source(before, step));
                    let after = GroupRank { rank: (rank + 1) % size, size };
                    assert_eq!(backward_source(place, step + 1), backward_source(after, step));
                }
                assert_eq!(forward_source(place, size - 1), backward_source(place, 0));
                assert_eq!(backward_source(place, size - 1), rank);
            }
        }
    }

    /// Over all ranks and launches, every (query, key) pair under the causal mask is computed exactly once, no other ever.
    #[test]
    fn every_pair_meets_once() {
        let layout = Layout::Packed { offsets: vec![0, 24, 24, 32, 72] };
        let scores = AttentionParams {
            scale: 1.0,
            softcap: None,
            causal: true,
            align: MaskAlign::TopLeft,
            left: None,
            right: None,
            fp8: false,
        };
        for size in [2, 4] {
            let layout = layout.padded(2 * size).unwrap();
            let total = layout.tokens();
            let plans: Vec<CpPlan> =
                (0..size).map(|rank| CpPlan::new(&layout, GroupRank { rank, size }).unwrap()).collect();
            let natural = plans[0].to_ranks().unwrap();
            let token = |rank: usize, row: usize| natural[rank * plans[0].local() + row] as usize;
            let sequence: Vec<usize> =
                layout.lengths().iter().enumerate().flat_map(|(s, n)| vec![s; *n]).collect();
            let check = |what: &str, visit: &Visit| {
                let mut met = vec![0; total * total];
                (0..size).for_each(|rank| visit(rank, &mut |q, k| met[q * total + k] += 1));
                for (i, n) in met.iter().enumerate() {
                    let (q, k) = (i / total, i % total);
                    assert_eq!(
                        *n,
                        i32::from(sequence[q] == sequence[k] && k <= q),
                        "{what} {size}: {q} and {k}"
                    );
                }
            };
            check("ring", &|rank, meet| {
                for from in 0..size {
                    let block = plans[rank].ring(&scores, from).unwrap();
                    pairs(&block, &mut |q, k| meet(token(rank, q), token(from, k)));
                }
            });
            check("prefix", &|rank, meet| {
                for late in [false, true] {
                    let block = plans[rank].prefix(&scores, late).unwrap();
                    pairs(&block, &mut |q, k| meet(token(rank, q), k));
                }
            });
        }
    }

    fn pairs(b: &Block, meet: &mut dyn FnMut(usize, usize)) {
        for (q, k) in b.q.windows(2).zip(b.k.windows(2)) {
            let off =
                if b.scores.align == MaskAlign::BottomRight { (k[1] - k[0]) - (q[1] - q[0]) } else { 0 };
            for (i, j) in (q[0]..q[1]).flat_map(|i| (k[0]..k[1]).map(move |j| (i, j))) {
                if !b.scores.causal || j - k[0] <= i - q[0] + off {
                    meet(i as usize, j as usize);
                }
            }
        }
    }

    #[test]
    fn natural_order_and_back() {
        let layout = Layout::Packed { offsets: vec![0, 8, 8, 24] };
        let plan = CpPlan::new(&layout, GroupRank { rank: 1, size: 2 }).unwrap();
        let (there, back) = (plan.to_natural().unwrap(), plan.to_ranks().unwrap());
        assert_eq!(&back[12..], [2, 3, 4, 5, 12, 13, 14, 15, 16, 17, 18, 19]);
        (0..24).for_each(|i| assert_eq!(back[there[i] as usize], i as i32));
        let e =
            CpPlan::new(&Layout::Rows { count: 1, len: 6 }, GroupRank { rank: 0, size: 2 }).err().unwrap();
        assert!(e.to_string().contains("multiple of 4"), "{e}");
    }
}
