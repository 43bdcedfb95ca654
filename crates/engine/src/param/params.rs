//! The weights of a model in memory.

use super::{ParamId, ParamSpec, UnitId};
use crate::Rank;
use crate::data_parallel::{
    BucketLimit, BucketPlan, BucketSplit, FlatBuffer, HostLink, HostShards, ParamShard, PendingGathers,
    Placement, ShardedUnits, ShardingStrategy, UnitGuard, UnitLayout, UnitSlots, bucket_elements, group_rank,
    zeroed_shard,
};
use crate::quant::Fp8Params;
use ferrotron_tensor::{DType, Error, Event, Result, Tensor, shape_error};
use std::ops::{Deref, Range};
use std::sync::Arc;

/// The weights of a model in its compute dtype, in flat buckets. Weights that only FP8 GEMMs use may be FP8-resident
/// instead, in buckets of their own.
pub struct Params {
    specs: Vec<ParamSpec>,
    plan: Arc<BucketPlan>,
    /// How buckets are distributed over the data-parallel ranks.
    placement: Placement,
    /// Which elements of each bucket are FP8-resident.
    pub(crate) splits: Vec<BucketSplit>,
    /// The other elements of each bucket that this rank holds.
    pub(crate) buckets: Vec<Tensor>,
    /// Elements of each bucket that this rank holds.
    held: Vec<Range<usize>>,
    /// Views of whole weights; of sharded ones, of what this rank holds of them, flat.
    values: Vec<Tensor>,
    fp8_params: Fp8Params,
    dtype: DType,
    /// Buckets that are still being all-gathered.
    pub(crate) pending: PendingGathers,
    /// Where weights are sharded: their units.
    pub(crate) units: Option<ShardedUnits>,
    comm_unit: usize,
    /// Which shards are in host memory, and how those get to the device and back.
    host: HostShards,
    link: Option<Arc<HostLink>>,
}

/// How weights are laid out in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParamLayout {
    /// Distribution over the data-parallel ranks: `Replicate`, or `Flat` (ZeRO-3).
    pub placement: Placement,
    /// Where buckets close; at the end of a unit where weights are sharded.
    pub bucket: BucketLimit,
    /// Bytes in flight in each direction: of units gathered ahead of their use, and of gradients being reduced.
    pub comm_unit: usize,
    /// Pieces of a shard that the groups which hold it update (HFSDP); 1 where each updates all of it.
    pub outer_pieces: usize,
    /// Which shards are in host memory.
    pub host: HostShards,
}

impl ParamLayout {
    /// The layout of a sharding strategy over `replicas` data-parallel ranks in `groups`. Unless `comm_unit` is given, buckets
    /// are large enough that a collective is bound by bandwidth, and two of them are in flight; where weights are sharded,
    /// two layers are.
    pub fn new(
        sharding: ShardingStrategy,
        (replicas, groups): (usize, usize),
        comm_unit: Option<usize>,
        (specs, dtype): (&[ParamSpec], DType),
    ) -> ParamLayout {
        let (placement, outer_pieces) = (sharding.param, sharding.outer_pieces(groups));
        let host = sharding.host;
        if placement.is_full_size() && !host.gradients {
            let comm_unit = comm_unit.unwrap_or_else(|| 2 * GRADIENT_BYTES * bucket_elements(replicas));
            let bucket = BucketLimit::Elements((comm_unit / (2 * GRADIENT_BYTES)).max(1));
            return ParamLayout { placement, bucket, comm_unit, outer_pieces, host };
        }
        let comm_unit = comm_unit.unwrap_or_else(|| 2 * largest_layer(specs, dtype));
        ParamLayout { placement, bucket: BucketLimit::Unit, comm_unit, outer_pieces, host }
    }
}

impl ParamLayout {
    /// The buckets of parameters that `shards` data-parallel and expert data-parallel ranks shard between them.
    pub fn plan(&self, specs: &[ParamSpec], shards: [usize; 2]) -> BucketPlan {
        BucketPlan::new(specs, shards.map(|n| n * self.outer_pieces), self.bucket)
    }

    /// Bytes of the memory that sharded weights are gathered into, for `replicas` data-parallel and expert data-parallel
    /// ranks; 0 where every rank holds all weights.
    pub fn gathered_bytes(&self, specs: &[ParamSpec], replicas: [usize; 2], dtype: DType) -> usize {
        self.unit_slots(specs, replicas, dtype).map_or(0, |slots| slots.slot_bytes())
    }

    /// The slots that units of sharded weights are gathered into, without memory; none where every rank holds all weights.
    pub fn unit_slots(&self, specs: &[ParamSpec], replicas: [usize; 2], dtype: DType) -> Option<UnitSlots> {
        if self.placement.is_full_size() {
            return None;
        }
        let plan = self.plan(specs, replicas);
        let split = |b| BucketSplit::new(b, |id| specs[id.0].fp8_resident());
        let splits: Vec<BucketSplit> = plan.buckets().iter().map(split).collect();
        let gathered = |b: usize| self.host.weights || replicas[usize::from(plan.buckets()[b].experts)] > 1;
        let units = UnitLayout::all(specs, (&plan, &splits), gathered);
        Some(UnitSlots::new(specs, &units, [DType::U8.size(), dtype.size()], self.comm_unit))
    }
}

/// Bytes of an element of the gradients.
const GRADIENT_BYTES: usize = 4;

/// Bytes of the weights of the largest unit besides embeddings and LM head, or of the largest where there is no other.
fn largest_layer(specs: &[ParamSpec], dtype: DType) -> usize {
    let mut units: Vec<(usize, bool)> = Vec::new();
    for spec in specs {
        let bytes = spec.widest * if spec.fp8_resident() { 1 } else { dtype.size() };
        units.resize(units.len().max(spec.unit.0 + 1), (0, false));
        let (sum, table) = &mut units[spec.unit.0];
        *sum += bytes;
        *table |= spec.is_table();
    }
    let largest = |tables: bool| units.iter().filter(|u| tables || !u.1).map(|u| u.0).max();
    largest(false).filter(|bytes| *bytes > 0).or_else(|| largest(true)).unwrap_or(0)
}

/// A weight that a pass uses. Where weights are sharded, its unit stays gathered while this is held.
#[derive(Clone)]
pub struct Weight {
    tensor: Tensor,
    _unit: Option<UnitGuard>,
}

impl Deref for Weight {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        &self.tensor
    }
}

impl Params {
    /// Zeroed memory for the declared parameters.
    pub fn allocate(rank: &Rank, specs: Vec<ParamSpec>, dtype: DType) -> Result<Params> {
        Params::in_buckets(rank, specs, dtype, bucket_elements(rank.dp_cp_group.size()))
    }

    /// [`Params::allocate`] with buckets that close at `target` elements.
    pub fn in_buckets(rank: &Rank, specs: Vec<ParamSpec>, dtype: DType, target: usize) -> Result<Params> {
        let bucket = BucketLimit::Elements(target);
        let (placement, comm_unit) = (Placement::Replicate, 2 * GRADIENT_BYTES * target);
        let host = HostShards::default();
        Params::new(rank, specs, dtype, ParamLayout { placement, bucket, comm_unit, outer_pieces: 1, host })
    }

    /// Zeroed memory for the declared parameters in a given layout.
    pub fn new(rank: &Rank, specs: Vec<ParamSpec>, dtype: DType, layout: ParamLayout) -> Result<Params> {
        if dtype != DType::BF16 && specs.iter().any(|s| s.quant.is_some()) {
            let what =
                format!("FP8 GEMMs in a model that computes in {dtype}; set precision.dtype = \"bf16\"");
            return Err(Error::Unsupported { op: "parameters", what });
        }
        let replicas = [false, true].map(|experts| rank.dp_group(experts).size());
        let plan = Arc::new(layout.plan(&specs, replicas));
        let split = |b| BucketSplit::new(b, |id| specs[id.0].fp8_resident());
        let splits: Vec<BucketSplit> = plan.buckets().iter().map(split).collect();
        let held: Vec<Range<usize>> = plan
            .buckets()
            .iter()
            .map(|b| b.held(layout.placement, group_rank(rank.dp_group(b.experts))))
            .collect();
        let zeros = |(s, held): (&BucketSplit, &Range<usize>)| {
            zeroed_shard(rank, s.rest(held).len(), dtype, layout.host.weights)
        };
        let buckets: Vec<Tensor> = splits.iter().zip(&held).map(zeros).collect::<Result<_>>()?;
        let fp8_params = Fp8Params::new(rank, &specs, &plan, (&splits, &held), layout.host.weights)?;
        let link = layout.host.any().then(|| HostLink::new(rank).map(Arc::new)).transpose()?;
        let units = (!layout.placement.is_full_size()).then(|| {
            let on_host = layout.host.weights;
            let gathered = |b: usize| on_host || rank.dp_group(plan.buckets()[b].experts).size() > 1;
            let dtypes = [fp8_params.format(), dtype];
            let units = UnitLayout::all(&specs, (&plan, &splits), gathered);
            ShardedUnits::new(&specs, units, dtypes, (layout.comm_unit, link.clone().filter(|_| on_host)))
        });
        let view = |(i, spec): (usize, &ParamSpec)| {
            let (bucket, range) = plan.slot(ParamId(i));
            let (split, held) = (&splits[bucket], &held[bucket]);
            let mine = range.start.max(held.start)..range.end.min(held.end).max(range.start.max(held.start));
            let (mine, from) = (split.rest(&mine), split.rest(held).start);
            let mine = if mine.is_empty() { 0..0 } else { mine.start - from..mine.end - from };
            let value = buckets[bucket].narrow(0, mine.start, mine.len())?;
            let flat = spec.fp8_resident() || units.is_some();
            if flat { Ok(value) } else { value.view(&spec.shape) }
        };
        let values = specs.iter().enumerate().map(view).collect::<Result<_>>()?;
        let pending = PendingGathers::new(buckets.len());
        let ParamLayout { placement, comm_unit, host, .. } = layout;

        Ok(Params {
            specs,
            plan,
            placement,
            splits,
            buckets,
            held,
            values,
            fp8_params,
            dtype,
            pending,
            units,
            comm_unit,
            host,
            link,
        })
    }

    /// The model's compute dtype.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// How weights are distributed over the data-parallel ranks.
    pub fn placement(&self) -> Placement {
        self.placement
    }

    /// Bytes in flight in each direction; see [`ParamLayout`].
    pub fn comm_unit(&self) -> usize {
        self.comm_unit
    }

    /// Which shards are in host memory.
    pub fn host(&self) -> HostShards {
        self.host
    }

    /// The way between shards in host memory and the device.
    pub(crate) fn link(&self) -> Option<&Arc<HostLink>> {
        self.link.as_ref()
    }

    /// The way of weights in host memory.
    pub(crate) fn host_weights(&self) -> Option<&HostLink> {
        self.link.as_deref().filter(|_| self.host.weights)
    }

    /// Updated weights are in host memory at `done`; passes fetch them after that.
    pub fn weights_stored(&self, done: Event) {
        if let Some(link) = self.host_weights() {
            link.weights_stored(done);
        }
    }

    /// A weight for use on the compute stream, which waits for its all-gather.
    pub fn weight(&self, rank: &Rank, id: ParamId) -> Result<Weight> {
        let spec = &self.specs[id.0];
        if spec.fp8_resident() {
            return shape_error("weight", "it is FP8-resident: only FP8 GEMMs can use it");
        }
        let (tensor, _unit) = match self.gathered(rank, id)? {
            None => (self.values[id.0].view(&spec.shape)?, None),
            Some((guard, [_, rest])) => {
                let value = guard.memory()[1].narrow(0, rest.start, rest.len())?;
                (value.view(&spec.shape)?, Some(guard))
            }
        };
        Ok(Weight { tensor, _unit })
    }

    /// Waits for a weight; if it is sharded, its unit, gathered, and its elements there: FP8-resident, or not.
    pub(crate) fn gathered(
        &self,
        rank: &Rank,
        id: ParamId,
    ) -> Result<Option<(UnitGuard, [Range<usize>; 2])>> {
        let (bucket, range) = self.plan.slot(id);
        let Some(units) = &self.units else {
            self.wait_weight(rank, id)?;
            return Ok(None);
        };
        let unit = self.specs[id.0].unit;
        let Some((_, at)) = units.layout(unit).buckets.iter().find(|(b, _)| *b == bucket) else {
            self.wait_weight(rank, id)?;
            return Ok(None);
        };
        let Some(guard) = self.enter_unit(rank, unit, &[])? else { return Ok(None) };
        let inside = [self.splits[bucket].separate(&range), self.splits[bucket].rest(&range)];
        let ranges = [0, 1].map(|k| at[k].start + inside[k].start..at[k].start + inside[k].end);
        Ok(Some((guard, ranges)))
    }

    /// Where weights are sharded: gathers a unit for use on the compute stream, and the `next` ones ahead.
    pub fn enter_unit(&self, rank: &Rank, unit: UnitId, next: &[UnitId]) -> Result<Option<UnitGuard>> {
        let Some(units) = &self.units else { return Ok(None) };
        units.enter(rank, unit, next, &|layout, memory| self.all_gather_unit(rank, layout, memory))
    }

    /// The FP8-resident weights.
    pub(crate) fn fp8_params(&self) -> &Fp8Params {
        &self.fp8_params
    }

    /// The declarations.
    pub fn specs(&self) -> &[ParamSpec] {
        &self.specs
    }

    /// The bucket layout of the parameters.
    pub fn plan(&self) -> &Arc<BucketPlan> {
        &self.plan
    }

    /// What this rank holds of the weights of a bucket; an error where some of them are FP8-resident.
    pub fn bucket(&self, bucket: usize) -> Result<FlatBuffer> {
        if !self.splits[bucket].is_uniform() {
            return shape_error("weights", "some are FP8-resident; use the optimizer's master weights");
        }
        Ok(FlatBuffer::of(&self.plan, bucket, self.placement, &self.buckets[bucket]))
    }

    /// All weights in order of declaration, empty where FP8-resident; what this rank holds of them, flat, where they are
    /// sharded. Call [`Params::wait_params`] before reading them.
    pub fn values(&self) -> &[Tensor] {
        &self.values
    }

    /// Elements `shard` of a weight, which this rank's optimizer updates, flat; empty where FP8-resident.
    pub fn shard(&self, id: ParamId, shard: &ParamShard) -> Result<Tensor> {
        let value = &self.values[id.0];
        if self.specs[id.0].fp8_resident() {
            return Ok(value.clone());
        }
        // Of a sharded weight, the value begins where what this rank holds does.
        let (bucket, range) = self.plan.slot(id);
        let first = self.held[bucket].start.max(range.start) - range.start;
        let start = if shard.param_range.is_empty() { 0 } else { shard.param_range.start - first };
        value.view(&[value.numel()])?.narrow(0, start, shard.param_range.len())
    }

    /// What this rank's optimizer updates of the weights of a bucket; an error where some of them are FP8-resident.
    pub fn optimizer_shard(&self, rank: &Rank, bucket: usize, scheme: &ShardingStrategy) -> Result<Tensor> {
        let experts = self.plan.buckets()[bucket].experts;
        let inner = group_rank(rank.dp_group(experts));
        if scheme.optimizer.is_full_size() {
            // Also of weights in host memory, which are a shard of one rank.
            return Ok(self.bucket(bucket)?.memory().clone());
        }
        let shard = self.bucket(bucket)?.view_as(scheme.optimizer, inner)?;
        if scheme.outer_optimizer.is_full_size() {
            return Ok(shard.memory().clone());
        }
        let shard = FlatBuffer::of_shard(&self.plan, bucket, inner, Placement::Replicate, shard.memory());
        let outer = group_rank(rank.shard_replica_group(experts));
        Ok(shard.view_as(scheme.outer_optimizer, outer)?.memory().clone())
    }

    /// Parameters of the whole model, those of other ranks included.
    pub fn numel(&self) -> usize {
        let parts = self.specs.iter().flat_map(|s| &s.parts);
        parts.map(|p| p.shape.iter().product::<usize>()).sum()
    }
}
