//! Which part of a logical tensor a tensor-parallel rank holds. Memory, initialization, checkpoints and Hugging Face
//! conversion all shard and join tensors by this file.

use crate::Part;
use std::ops::Range;

/// A rank's position in its tensor-parallel group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupRank {
    /// Index in the group.
    pub rank: usize,
    /// Size of the group.
    pub size: usize,
}

impl GroupRank {
    /// A group of one.
    pub const SINGLE: GroupRank = GroupRank { rank: 0, size: 1 };
}

/// How a logical tensor is split over tensor-parallel ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// Replicated on every rank.
    Replicated,
    /// Ranks hold ranges of axis 0 in whole units of `unit` rows: a head's channels, or single rows. With more ranks than
    /// units, each unit is replicated on as many neighbouring ranks.
    Rows {
        /// Rows that stay together.
        unit: usize,
    },
    /// The same along axis 1.
    Columns {
        /// Columns that stay together.
        unit: usize,
    },
}

/// A shard of a logical tensor: a range of one axis, all of the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// The axis.
    pub axis: usize,
    /// The range.
    pub range: Range<usize>,
}

/// The units of `count` that rank `p` holds.
fn units(count: usize, p: GroupRank) -> Range<usize> {
    if count >= p.size {
        // Ceiling division: the last ranks may hold less, or nothing.
        let each = count.div_ceil(p.size);
        return (p.rank * each).min(count)..((p.rank + 1) * each).min(count);
    }
    let one = p.rank * count / p.size;
    one..(one + 1).min(count)
}

impl Part {
    /// The shard of rank `p`.
    pub fn cut(&self, p: GroupRank) -> Shard {
        let (axis, unit) = match self.split {
            Split::Replicated => {
                return Shard { axis: 0, range: 0..self.shape.first().copied().unwrap_or(1) };
            }
            Split::Rows { unit } => (0, unit.max(1)),
            Split::Columns { unit } => (1, unit.max(1)),
        };
        let size = self.shape.get(axis).copied().unwrap_or(1);
        let u = units(size / unit, p);
        Shard { axis, range: u.start * unit..u.end * unit }
    }

    /// Whether some, but not all, of `size` ranks hold the same shard.
    pub fn shared(&self, size: usize) -> bool {
        let units = match self.split {
            Split::Replicated => return false,
            Split::Rows { unit } => self.shape[0] / unit.max(1),
            Split::Columns { unit } => self.shape[1] / unit.max(1),
        };
        units > 1 && units < size
    }

    /// Number of ranks that hold the same shard as `p`, itself included.
    pub fn holders(&self, p: GroupRank) -> Range<usize> {
        let mine = self.cut(p);
        let same = |rank: &usize| self.cut(GroupRank { rank: *rank, ..p }) == mine;
        let first = (0..p.size).find(same).unwrap_or(p.rank);
        first..first + (first..p.size).take_while(same).count()
    }
}

impl Shard {
    /// Shape of the shard of a tensor of `shape`.
    pub fn shape(&self, shape: &[usize]) -> Vec<usize> {
        let mut out = shape.to_vec();
        out[self.axis] = self.range.len();
        out
    }

    /// Element ranges of the full tensor (row-major) in the shard, in order.
    pub fn runs(&self, shape: &[usize]) -> Vec<Range<usize>> {
        let inner: usize = shape[self.axis + 1..].iter().product();
        let outer: usize = shape[..self.axis].iter().product();
        let stride = shape[self.axis] * inner;
        if self.range == (0..shape[self.axis]) {
            // The whole axis: the tensor lies in one piece.
            return std::iter::once(0..outer * stride).filter(|r| !r.is_empty()).collect();
        }
        let run = |o: usize| o * stride + self.range.start * inner..o * stride + self.range.end * inner;
        (0..outer).map(run).filter(|r| !r.is_empty()).collect()
    }

    /// The same for elements `share` of the shard.
    pub fn runs_within(&self, shape: &[usize], share: Range<usize>) -> Vec<Range<usize>> {
        let mut at = 0;
        let within = |r: Range<usize>| {
            let (start, end) = (share.start.max(at), share.end.min(at + r.len()));
            let run = (start < end).then(|| r.start + start - at..r.start + end - at);
            at += r.len();
            run
        };
        self.runs(shape).into_iter().filter_map(within).collect()
    }

    /// Copies the shard out of the full tensor.
    pub fn take<T: Copy>(&self, shape: &[usize], whole: &[T]) -> Vec<T> {
        self.runs(shape).into_iter().flat_map(|r| whole[r].iter().copied()).collect()
    }

    /// Copies the shard into the full tensor.
    pub fn put<T: Copy>(&self, shape: &[usize], held: &[T], whole: &mut [T]) {
        let mut at = 0;
        for r in self.runs(shape) {
            let n = r.len();
            whole[r].copy_from_slice(&held[at..at + n]);
            at += n;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Init;

    fn part(shape: &[usize], split: Split) -> Part {
        Part { name: "x".into(), shape: shape.to_vec(), init: Init::Constant(0.0), split }
    }

    #[test]
    fn cuts_of_all_ranks_make_the_whole_again() {
        for split in
            [Split::Replicated, Split::Rows { unit: 1 }, Split::Rows { unit: 3 }, Split::Columns { unit: 2 }]
        {
            for size in 1..=8 {
                let p = part(&[12, 10], split);
                let whole: Vec<usize> = (0..120).collect();
                let mut joined = vec![usize::MAX; 120];
                for rank in 0..size {
                    let place = GroupRank { rank, size };
                    let cut = p.cut(place);
                    assert!(p.holders(place).contains(&rank));
                    cut.put(&p.shape, &cut.take(&p.shape, &whole), &mut joined);
                }
                assert_eq!(joined, whole, "{split:?} over {size}");
            }
        }
    }

    #[test]
    fn a_whole_axis_is_one_run() {
        let p = part(&[6, 5], Split::Columns { unit: 1 });
        let cut = |size| p.cut(GroupRank { rank: 0, size }).runs(&p.shape);
        assert_eq!((cut(1).len(), cut(1)[0].clone()), (1, 0..30));
        assert_eq!(cut(5).len(), 6);
        assert!(part(&[6, 0], Split::Columns { unit: 1 }).cut(GroupRank::SINGLE).runs(&[6, 0]).is_empty());
    }

    #[test]
    fn parts_of_a_share_are_parts_of_the_whole() {
        let whole: Vec<usize> = (0..120).collect();
        for split in [Split::Replicated, Split::Rows { unit: 3 }, Split::Columns { unit: 2 }] {
            let p = part(&[12, 10], split);
            let cut = p.cut(GroupRank { rank: 1, size: 3 });
            let held = cut.take(&p.shape, &whole);
            for start in 0..=held.len() {
                for end in start..=held.len() {
                    let runs = cut.runs_within(&p.shape, start..end);
                    let got: Vec<usize> = runs.into_iter().flat_map(|r| whole[r].to_vec()).collect();
                    assert_eq!(got, held[start..end], "{split:?} {start}..{end}");
                }
            }
        }
    }

    #[test]
    fn few_heads_are_shared_by_neighbours() {
        let p = part(&[2 * 16, 8], Split::Rows { unit: 16 });
        let held = |rank| p.cut(GroupRank { rank, size: 4 }).range;
        assert_eq!([held(0), held(1), held(2), held(3)], [0..16, 0..16, 16..32, 16..32]);
        assert_eq!(p.holders(GroupRank { rank: 3, size: 4 }), 2..4);
    }

    #[test]
    fn a_vocabulary_that_does_not_divide_is_short_at_the_end() {
        let p = part(&[10, 4], Split::Rows { unit: 1 });
        let sizes: Vec<usize> = (0..4).map(|rank| p.cut(GroupRank { rank, size: 4 }).range.len()).collect();
        assert_eq!(sizes, [3, 3, 3, 1]);
    }
}
