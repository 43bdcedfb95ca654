//! Bucket layout: which parameters share a bucket, and where in it.

use super::Placement;
use crate::{GroupRank, ParamId, ParamSpec};
use ferrotron_kernels::moments::BLOCK;
use ferrotron_kernels::newton_schulz_cost;
use std::ops::Range;

/// Parameters start at multiples of this many elements.
pub(super) const ALIGN: usize = 64;
/// Buckets end at multiples of this many elements, and shards of ranks at multiples of [`BLOCK`]: no shard splits a
/// block of elements that share a scale.
const END: usize = 128;

/// Buckets over the parameters in reverse order of declaration, about the order in which backward completes them.
/// Tensor-parallel ranks have the same parameters in the same buckets, so that they reduce in one order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketPlan {
    buckets: Vec<Bucket>,
    /// Bucket of each parameter, and its index in the bucket.
    slots: Vec<(usize, usize)>,
}

/// One bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// Elements, alignment gaps included.
    pub len: usize,
    /// Its parameters, in order.
    pub spans: Vec<Span>,
    /// Its parameter is also on another pipeline stage (tied embeddings).
    pub tied_across_stages: bool,
    /// Its parameters belong to experts and are replicated over the expert data-parallel group.
    pub experts: bool,
    /// Storage of its parameters' optimizer states ([`UpdateGroup::storage`](crate::UpdateGroup)).
    pub storage: usize,
    /// Its parameters are not trained: it has weights, but no gradients.
    pub frozen: bool,
    /// End of each rank's parameters, where ranks own whole parameters for their updates; none otherwise.
    pub owned: Option<Vec<usize>>,
}

/// A parameter's range in its bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// The parameter.
    pub param: ParamId,
    /// Its elements in the bucket.
    pub range: Range<usize>,
}

/// A rank's shard of a parameter under a placement; it may be empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamShard {
    /// The bucket.
    pub bucket: usize,
    /// Elements of the parameter.
    pub param_range: Range<usize>,
    /// The same elements in the rank's local memory of the bucket.
    pub local_range: Range<usize>,
}

/// Where a bucket closes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BucketLimit {
    /// Once it has this many elements.
    Elements(usize),
    /// At the end of a unit, where weights are gathered unit by unit.
    Unit,
}

impl From<usize> for BucketLimit {
    fn from(elements: usize) -> BucketLimit {
        BucketLimit::Elements(elements)
    }
}

/// Elements at which a bucket closes, for `replicas` data-parallel ranks: large enough that a collective is bound by
/// bandwidth, not latency.
pub fn bucket_elements(replicas: usize) -> usize {
    40_000_000.max(replicas * 1_000_000)
}

impl BucketPlan {
    /// Buckets that close at `limit` and divide evenly over `replicas` data-parallel and expert
    /// data-parallel ranks.
    pub fn new(specs: &[ParamSpec], replicas: [usize; 2], limit: impl Into<BucketLimit>) -> BucketPlan {
        let limit = limit.into();
        let mut plan = BucketPlan { buckets: Vec::new(), slots: vec![(0, 0); specs.len()] };
        let mut close = BucketCloser::new(specs, replicas);
        // The open bucket of each storage, of dense and of expert parameters, and its length on the rank that holds most.
        let storages = specs.iter().map(|s| s.group.storage + 1).max().unwrap_or(1);
        let mut kinds: Vec<(Bucket, usize)> = (0..storages)
            .flat_map(|storage| [false, true].map(|experts| (Bucket::empty(experts, storage), 0)))
            .collect();
        for (i, spec) in specs.iter().enumerate().rev() {
            if limit == BucketLimit::Unit && specs.get(i + 1).is_some_and(|next| next.unit != spec.unit) {
                let ended = kinds.iter_mut().filter(|(open, _)| !open.spans.is_empty());
                ended.for_each(|(open, _)| plan.push(close.close(open.take())));
            }
            let (open, widest) = &mut kinds[2 * spec.group.storage + usize::from(spec.experts)];
            if spec.tied_across_stages && !open.spans.is_empty() {
                plan.push(close.close(open.take()));
                *widest = 0;
            }
            let start = open.len.next_multiple_of(ALIGN);
            open.len = start + spec.numel();
            open.spans.push(Span { param: ParamId(i), range: start..open.len });
            open.tied_across_stages = spec.tied_across_stages;
            open.frozen = spec.group.frozen;
            *widest = usize::next_multiple_of(*widest, ALIGN) + spec.widest;
            let full = matches!(limit, BucketLimit::Elements(most) if *widest >= most);
            if full || spec.tied_across_stages {
                plan.push(close.close(open.take()));
                *widest = 0;
            }
        }
        for (open, _) in kinds {
            if !open.spans.is_empty() {
                plan.push(close.close(open));
            }
        }
        plan
    }

    fn push(&mut self, bucket: Bucket) {
        for (k, span) in bucket.spans.iter().enumerate() {
            self.slots[span.param.0] = (self.buckets.len(), k);
        }
        self.buckets.push(bucket);
    }

    /// The buckets, in the order in which backward completes them.
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// Ranges of buckets in forward order, in which an optimizer updates and gathers in turn: of about 40, 40 and 20 % of the
    /// elements. The last, whose gather nothing of the update hides, is the smallest.
    pub fn update_parts(&self) -> Vec<Range<usize>> {
        in_parts(&self.buckets.iter().map(|b| b.len).collect::<Vec<_>>(), &[0.4, 0.8])
    }

    /// Bucket of a parameter, and its elements there.
    pub fn slot(&self, id: ParamId) -> (usize, Range<usize>) {
        let (bucket, span) = self.slots[id.0];
        (bucket, self.buckets[bucket].spans[span].range.clone())
    }

    /// Shard of a parameter on rank `place`.
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

/// Closes buckets: gives them their final length, and parameters that ranks own whole their owners.
struct BucketCloser<'a> {
    specs: &'a [ParamSpec],
    replicas: [usize; 2],
    /// Cost of the updates that each rank owns so far, of dense and of expert parameters.
    costs: [Vec<f64>; 2],
}

impl<'a> BucketCloser<'a> {
    fn new(specs: &'a [ParamSpec], replicas: [usize; 2]) -> BucketCloser<'a> {
        let replicas = replicas.map(|n| n.max(1));
        BucketCloser { specs, replicas, costs: replicas.map(|n| vec![0.0; n]) }
    }

    fn close(&mut self, mut bucket: Bucket) -> Bucket {
        let kind = usize::from(bucket.experts);
        let whole = bucket.spans.first().is_some_and(|s| self.specs[s.param.0].group.whole);
        if whole && self.replicas[kind] > 1 {
            self.deal(&mut bucket, kind);
        }
        bucket.len = bucket.len.next_multiple_of(lcm(self.replicas[kind] * BLOCK, END));
        if let Some(last) = bucket.owned.as_mut().and_then(|ends| ends.last_mut()) {
            *last = bucket.len;
        }
        bucket
    }

    /// Gives every parameter to the rank with the least cost so far, costly ones first, and orders the bucket by owner.
    /// Costs are those of global shapes: tensor-parallel ranks decide alike.
    fn deal(&mut self, bucket: &mut Bucket, kind: usize) {
        let costs = &mut self.costs[kind];
        let cost = |s: &Span| self.specs[s.param.0].parts.iter().map(|p| update_cost(&p.shape)).sum::<f64>();
        let mut spans: Vec<(f64, ParamId)> = bucket.spans.iter().map(|s| (cost(s), s.param)).collect();
        spans.sort_by(|a, b| b.0.total_cmp(&a.0));
        let mut owned: Vec<Vec<ParamId>> = vec![Vec::new(); costs.len()];
        for (cost, param) in spans {
            // Two stages hold a tied parameter and sum its gradient: its owner must not depend on what else they hold.
            let least = match bucket.tied_across_stages {
                true => 0,
                false => (0..costs.len()).min_by(|a, b| costs[*a].total_cmp(&costs[*b])).unwrap_or(0),
            };
            costs[least] += cost;
            owned[least].push(param);
        }
        (bucket.len, bucket.spans) = (0, Vec::new());
        let mut ends = Vec::with_capacity(owned.len());
        for params in owned {
            for param in params {
                let start = bucket.len.next_multiple_of(ALIGN);
                bucket.len = start + self.specs[param.0].numel();
                bucket.spans.push(Span { param, range: start..bucket.len });
            }
            bucket.len = bucket.len.next_multiple_of(ALIGN);
            ends.push(bucket.len);
        }
        bucket.owned = Some(ends);
    }
}

/// Cost of the update of a logical tensor: that of Newton–Schulz for a matrix, of one pass otherwise.
fn update_cost(shape: &[usize]) -> f64 {
    match *shape {
        [rows, cols] => newton_schulz_cost([rows, cols]),
        _ => shape.iter().product::<usize>() as f64,
    }
}

impl Bucket {
    fn empty(experts: bool, storage: usize) -> Bucket {
        let (spans, tied_across_stages, frozen, owned) = (Vec::new(), false, false, None);
        Bucket { len: 0, spans, tied_across_stages, experts, storage, frozen, owned }
    }

    fn take(&mut self) -> Bucket {
        let next = Bucket::empty(self.experts, self.storage);
        std::mem::replace(self, next)
    }

    /// The placement in effect: what would be equal shards is whole parameters where ranks own those.
    pub fn placed(&self, placement: Placement) -> Placement {
        match placement {
            Placement::Flat if self.owned.is_some() => Placement::TensorAtomic,
            other => other,
        }
    }

    /// Elements of the bucket on rank `place`; shards of consecutive ranks are adjacent.
    pub fn held(&self, placement: Placement, place: GroupRank) -> Range<usize> {
        match self.placed(placement) {
            Placement::Replicate | Placement::Partial => 0..self.len,
            Placement::Flat => self.len * place.rank / place.size..self.len * (place.rank + 1) / place.size,
            Placement::TensorAtomic => {
                self.first_of(place.rank, place.size)..self.first_of(place.rank + 1, place.size)
            }
        }
    }

    /// First element of the parameters of `rank` and those after it. A parameter belongs to the rank whose equal shard
    /// contains its middle: neighbours stay together, and the load is as even as whole parameters allow.
    fn first_of(&self, rank: usize, size: usize) -> usize {
        let owner = |s: &Span| (s.range.start + s.range.end) * size / (2 * self.len).max(1);
        match (rank, &self.owned) {
            (0, _) => 0,
            // Groups of owners hold what their owners hold.
            (_, Some(ends)) if ends.len().is_multiple_of(size) => ends[rank * (ends.len() / size) - 1],
            _ => self.spans.iter().find(|s| owner(s) >= rank).map_or(self.len, |s| s.range.start),
        }
    }

    /// Gaps between parameters, and after the last.
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

/// Cuts a list of buckets where the sum of elements from its end first reaches each of `fractions` of all; the last bucket has
/// the first layers. Parts in the order of layers.
fn in_parts(elements: &[usize], fractions: &[f64]) -> Vec<Range<usize>> {
    let all = elements.iter().sum::<usize>() as f64;
    let (mut end, mut sum, mut parts) = (elements.len(), 0.0, Vec::new());
    let mut fractions = fractions.iter().peekable();
    for (at, n) in elements.iter().enumerate().rev() {
        sum += *n as f64;
        if fractions.peek().is_some_and(|f| sum >= **f * all) && at > 0 {
            while fractions.next_if(|f| sum >= **f * all).is_some() {}
            parts.push(at..end);
            end = at;
        }
    }
    parts.push(0..end);
    parts
}

#[cfg(test)]
mod update_order_tests {
    use super::in_parts;

    #[test]
    fn parts_follow_the_layers_and_cover_every_bucket() {
        let starts_and_ends = |bytes: &[usize]| {
            let parts = in_parts(bytes, &[0.4, 0.8]);
            parts.into_iter().map(|part| (part.start, part.end)).collect::<Vec<_>>()
        };
        assert_eq!(starts_and_ends(&[10; 10]), [(6, 10), (2, 6), (0, 2)]);
        assert_eq!(starts_and_ends(&[1]), [(0, 1)]);
        assert_eq!(starts_and_ends(&[]), [(0, 0)]);
        // A large bucket passes both marks.
        assert_eq!(starts_and_ends(&[5, 90, 5]), [(1, 3), (0, 1)]);
        assert_eq!(starts_and_ends(&[90, 5, 5]), [(0, 3)]);
    }
}
