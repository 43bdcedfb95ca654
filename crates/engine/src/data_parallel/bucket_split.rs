//! Buckets of which some parameters are FP8-resident.

use super::Bucket;
use super::buckets::ALIGN;
use crate::ParamId;
use std::ops::Range;

/// Splits a bucket into two buffers: the elements of chosen parameters, and the rest. Both keep the bucket's order, so
/// a rank's shard of the bucket is one contiguous range of each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketSplit {
    len: usize,
    /// Ranges of the chosen parameters, in order. Each ends where the next parameter may start, so that both buffers
    /// keep the bucket's alignment.
    separate: Vec<Range<usize>>,
}

impl BucketSplit {
    /// Splits off the parameters that `separate` chooses.
    pub fn new(bucket: &Bucket, separate: impl Fn(ParamId) -> bool) -> BucketSplit {
        let aligned = |r: &Range<usize>| r.start..r.end.next_multiple_of(ALIGN).min(bucket.len);
        let ranges = bucket.spans.iter().filter(|s| separate(s.param)).map(|s| aligned(&s.range));
        BucketSplit { len: bucket.len, separate: ranges.collect() }
    }

    /// Whether no parameter is split off.
    pub fn is_uniform(&self) -> bool {
        self.separate.is_empty()
    }

    fn before(&self, at: usize) -> usize {
        self.separate.iter().map(|r| at.clamp(r.start, r.end) - r.start).sum()
    }

    /// The part of `range` of the bucket that is split off, as a range of its buffer.
    pub fn separate(&self, range: &Range<usize>) -> Range<usize> {
        self.before(range.start)..self.before(range.end)
    }

    /// The rest of `range`, as a range of the other buffer.
    pub fn rest(&self, range: &Range<usize>) -> Range<usize> {
        range.start - self.before(range.start)..range.end - self.before(range.end)
    }

    /// Lengths of both buffers: split off, and the rest.
    pub fn lengths(&self) -> [usize; 2] {
        let separate = self.before(self.len);
        [separate, self.len - separate]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GroupRank;
    use crate::data_parallel::{BucketPlan, Placement};
    use crate::{Declarations, Init, Part, Split};

    /// Every element is in one of the two buffers, in order, on whichever rank; parameters start aligned.
    #[test]
    fn parts_of_ranks_are_runs_of_both_memories() {
        let mut d = Declarations::default();
        for (i, n) in [1000, 48, 100, 7, 640, 96].into_iter().enumerate() {
            let (name, init) = (format!("p{i}"), Init::Constant(0.0));
            d.declare(vec![Part { name, shape: vec![n], init, split: Split::Replicated }]).unwrap();
        }
        let specs = d.finish();
        for (size, target) in [(1, 1 << 20), (3, 1 << 20), (4, 700)] {
            let plan = BucketPlan::new(&specs, [size; 2], target);
            for chosen in [&[][..], &[0, 1, 4], &[5], &[0, 1, 2, 3, 4, 5]] {
                for bucket in plan.buckets() {
                    let split = BucketSplit::new(bucket, |id| chosen.contains(&id.0));
                    let [separate, rest] = split.lengths();
                    assert_eq!(separate + rest, bucket.len);
                    assert_eq!(split.is_uniform(), separate == 0);
                    let (mut a, mut o) = (0, 0);
                    for placement in [Placement::Flat, Placement::TensorAtomic] {
                        (a, o) = (0, 0);
                        for rank in 0..size {
                            let held = bucket.held(placement, GroupRank { rank, size });
                            let (x, y) = (split.separate(&held), split.rest(&held));
                            assert_eq!((x.start, y.start, x.len() + y.len()), (a, o, held.len()));
                            (a, o) = (x.end, y.end);
                        }
                    }
                    assert_eq!((a, o), (separate, rest));
                    for span in &bucket.spans {
                        let (x, y) = (split.separate(&span.range), split.rest(&span.range));
                        let (whole, none) = if chosen.contains(&span.param.0) { (x, y) } else { (y, x) };
                        assert!(whole.len() == span.range.len() && none.is_empty());
                        assert!(whole.start.is_multiple_of(ALIGN), "{span:?}");
                    }
                }
            }
        }
    }
}
