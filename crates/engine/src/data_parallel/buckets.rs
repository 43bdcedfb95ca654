//! Which parameters share a bucket, and where in it they lie.

use super::Placement;
use crate::{GroupRank, ParamId, ParamSpec};
use ferrotron_kernels::moments::BLOCK;
use std::ops::Range;

/// Parameters start at multiples of so many elements.
pub(super) const ALIGN: usize = 64;
/// Buckets end at multiples of so many elements, and parts of ranks that divide them at multiples of [`BLOCK`]: no rank
/// has a part of a block of elements that share a scale.
const END: usize = 128;

/// Buckets over a list of parameters, in reverse order of declaration: about the order in which backward finishes
/// them. The same parameters share a bucket on all ranks that share layers, so that they sum in one order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketPlan {
    buckets: Vec<Bucket>,
    /// Of each parameter: its bucket and its place among the bucket's.
    slots: Vec<(usize, usize)>,
}

/// One bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// Elements, gaps included.
    pub len: usize,
    /// What is in it, in order.
    pub spans: Vec<Span>,
    /// Its parameter is also on the other end of a pipeline.
    pub tied_across_stages: bool,
    /// Its parameters are those of experts, and have their copies.
    pub experts: bool,
}

/// A parameter's place in its bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// The parameter.
    pub param: ParamId,
    /// Its elements.
    pub range: Range<usize>,
}

/// What a rank has of a parameter under a placement; it may be nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamShard {
    /// The bucket.
    pub bucket: usize,
    /// Elements of the parameter.
    pub param_range: Range<usize>,
    /// The same in the rank's local memory of the bucket.
    pub local_range: Range<usize>,
}

/// Elements at which a bucket closes, for `copies` ranks with equal weights: long enough that the time of a
/// collective is that of its bytes.
pub fn bucket_elements(copies: usize) -> usize {
    40_000_000.max(copies * 1_000_000)
}

impl BucketPlan {
    /// Buckets that close as soon as they have `target` elements and divide over the ranks that have copies of them:
    /// so many, and so many of experts.
    pub fn new(specs: &[ParamSpec], copies: [usize; 2], target: usize) -> BucketPlan {
        let ends = copies.map(|n| lcm(n.max(1) * BLOCK, END));
        let mut plan = BucketPlan { buckets: Vec::new(), slots: vec![(0, 0); specs.len()] };
        // The open bucket of each kind, and its length on the rank that has most.
        let mut kinds = [(Bucket::empty(false), 0), (Bucket::empty(true), 0)];
        for (i, spec) in specs.iter().enumerate().rev() {
            let (open, widest) = &mut kinds[usize::from(spec.experts)];
            let end = ends[usize::from(spec.experts)];
            if spec.tied_across_stages && !open.spans.is_empty() {
                plan.close(std::mem::replace(open, Bucket::empty(spec.experts)), end);
                *widest = 0;
            }
            let start = open.len.next_multiple_of(ALIGN);
            open.len = start + spec.numel();
            open.spans.push(Span { param: ParamId(i), range: start..open.len });
            open.tied_across_stages = spec.tied_across_stages;
            *widest = usize::next_multiple_of(*widest, ALIGN) + spec.widest;
            if *widest >= target || spec.tied_across_stages {
                plan.close(std::mem::replace(open, Bucket::empty(spec.experts)), end);
                *widest = 0;
            }
        }
        for ((open, _), end) in kinds.into_iter().zip(ends) {
            if !open.spans.is_empty() {
                plan.close(open, end);
            }
        }
        plan
    }

    fn close(&mut self, mut bucket: Bucket, end: usize) {
        bucket.len = bucket.len.next_multiple_of(end);
        for (k, span) in bucket.spans.iter().enumerate() {
            self.slots[span.param.0] = (self.buckets.len(), k);
        }
        self.buckets.push(bucket);
    }

    /// The buckets, in the order of backward.
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// Bucket of a parameter, and its elements there.
    pub fn slot(&self, id: ParamId) -> (usize, Range<usize>) {
        let (bucket, span) = self.slots[id.0];
        (bucket, self.buckets[bucket].spans[span].range.clone())
    }

    /// What rank `place` has of a parameter.
    pub fn piece(&self, id: ParamId, placement: Placement, place: GroupRank) -> ParamShard {
        let (bucket, range) = self.slot(id);
        let held = self.buckets[bucket].held(placement, place);
        let (start, end) = (range.start.max(held.start), range.end.min(held.end));
        if start >= end {
            return ParamShard { bucket, param_range: 0..0, local_range: 0..0 };
        }
        let param_range = start - range.start..end - range.start;
        ParamShard { bucket, param_range, local_range: start - held.start..end - held.start }
    }
}

impl Bucket {
    fn empty(experts: bool) -> Bucket {
        Bucket { len: 0, spans: Vec::new(), tied_across_stages: false, experts }
    }

    /// The elements that rank `place` has in its memory. Of all ranks in order, parts lie back to back.
    pub fn held(&self, placement: Placement, place: GroupRank) -> Range<usize> {
        match placement {
            Placement::Replicate | Placement::Partial => 0..self.len,
            Placement::Flat => self.len * place.rank / place.size..self.len * (place.rank + 1) / place.size,
            Placement::TensorAtomic => {
                self.first_of(place.rank, place.size)..self.first_of(place.rank + 1, place.size)
            }
        }
    }

    /// Where the parameters of `rank` and those after it begin. A parameter belongs to the rank in whose equal part
    /// its middle lies: neighbours stay together, and loads are as even as whole parameters allow.
    fn first_of(&self, rank: usize, size: usize) -> usize {
        let owner = |s: &Span| (s.range.start + s.range.end) * size / (2 * self.len).max(1);
        match rank {
            0 => 0,
            _ => self.spans.iter().find(|s| owner(s) >= rank).map_or(self.len, |s| s.range.start),
        }
    }

    /// What lies between parameters and behind the last.
    pub fn gaps(&self) -> impl Iterator<Item = Range<usize>> {
        let starts = self.spans.iter().map(|s| s.range.start).skip(1).chain([self.len]);
        self.spans.iter().map(|s| s.range.end).zip(starts).map(|(a, b)| a..b).filter(|r| !r.is_empty())
    }
}

fn lcm(a: usize, b: usize) -> usize {
    let gcd = |mut a: usize, mut b: usize| {
        while b > 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    a / gcd(a, b) * b
}
