//! The weights of a model in memory.

use super::{ParamId, ParamSpec};
use crate::data_parallel::{BucketPlan, BucketSplit, FlatBuffer, Placement, bucket_elements, group_rank};
use crate::moe::{MoeLayerSpec, MoeState};
use crate::quant::{Fp8Params, QuantState};
use crate::{GroupRank, Rank};
use ferrotron_tensor::{Category, DType, Error, Event, Result, Stream, Tensor, shape_error};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The weights of a model in the type it computes in, in flat buckets; those that are in narrow products alone may be
/// bytes instead, in buckets of their own.
pub struct Params {
    specs: Vec<ParamSpec>,
    plan: Arc<BucketPlan>,
    /// What of each bucket is numbers, and what is not.
    splits: Vec<BucketSplit>,
    buckets: Vec<Tensor>,
    values: Vec<Tensor>,
    fp8_params: Fp8Params,
    dtype: DType,
    quant: Option<QuantState>,
    moe: Option<MoeState>,
    /// Of each bucket that is being gathered: when it is there.
    pending: Mutex<Vec<Option<Event>>>,
}

impl Params {
    /// Memory for all parameters, zeros.
    pub fn allocate(rank: &Rank, specs: Vec<ParamSpec>, dtype: DType) -> Result<Params> {
        Params::in_buckets(rank, specs, dtype, bucket_elements(rank.dp_cp_group.size()))
    }

    /// The same in buckets that close at `target` elements.
    pub fn in_buckets(rank: &Rank, specs: Vec<ParamSpec>, dtype: DType, target: usize) -> Result<Params> {
        if dtype != DType::BF16 && specs.iter().any(|s| s.quant.is_some()) {
            let what = format!("narrow products in a model of {dtype}; have it compute in bf16");
            return Err(Error::Unsupported { op: "parameters", what });
        }
        let copies = [rank.dp_cp_group.size(), rank.expert_dp_group.size()];
        let plan = Arc::new(BucketPlan::new(&specs, copies, target));
        let split = |b| BucketSplit::new(b, |id| specs[id.0].fp8_resident());
        let splits: Vec<BucketSplit> = plan.buckets().iter().map(split).collect();
        let zeros = |len| rank.compute.zeros(&[len], dtype, Category::Parameters);
        let buckets: Vec<Tensor> = splits.iter().map(|s| zeros(s.lengths()[1])).collect::<Result<_>>()?;
        let view = |(i, spec): (usize, &ParamSpec)| {
            let (bucket, range) = plan.slot(ParamId(i));
            let range = splits[bucket].rest(&range);
            let value = buckets[bucket].narrow(0, range.start, range.len())?;
            if spec.fp8_resident() { Ok(value) } else { value.view(&spec.shape) }
        };
        let values = specs.iter().enumerate().map(view).collect::<Result<_>>()?;
        let pending = Mutex::new(vec![None; buckets.len()]);
        let quant = QuantState::new(rank, &specs)?;
        let fp8_params = Fp8Params::new(rank, &specs, &plan, &splits)?;
        let moe = None;
        Ok(Params { specs, plan, splits, buckets, values, fp8_params, dtype, quant, moe, pending })
    }

    /// The type the model computes in.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// What narrow products remember, if there are any.
    pub fn quant(&self) -> Option<&QuantState> {
        self.quant.as_ref()
    }

    /// With state for the mixtures declared beside the parameters.
    pub fn with_moe(self, rank: &Rank, specs: &[MoeLayerSpec]) -> Result<Params> {
        Ok(Params { moe: MoeState::new(&rank.compute, specs.to_vec())?, ..self })
    }

    /// What mixtures remember, if there are any here.
    pub fn moe(&self) -> Option<&MoeState> {
        self.moe.as_ref()
    }

    /// The weight, for work on the compute stream, which waits until it is there.
    pub fn weight(&self, rank: &Rank, id: ParamId) -> Result<&Tensor> {
        if self.specs[id.0].fp8_resident() {
            return shape_error("weight", "it is kept as bytes, which only narrow products take");
        }
        self.wait_weight(rank, id)?;
        Ok(&self.values[id.0])
    }

    /// Makes the compute stream wait until a weight is there.
    pub(crate) fn wait_weight(&self, rank: &Rank, id: ParamId) -> Result<()> {
        let pending = self.pending()[self.plan.slot(id).0].take();
        pending.map_or(Ok(()), |event| rank.compute.wait(&event))
    }

    /// The weights that are bytes.
    pub(crate) fn fp8_params(&self) -> &Fp8Params {
        &self.fp8_params
    }

    /// Makes the compute stream wait for all weights: before anything but a pass of the model uses them.
    pub fn wait_params(&self, rank: &Rank) -> Result<()> {
        self.pending().iter_mut().filter_map(Option::take).try_for_each(|event| rank.compute.wait(&event))
    }

    /// A bucket will be whole after `event`; passes wait for it at its first use.
    pub fn set_pending(&self, bucket: usize, event: Event) {
        self.pending()[bucket] = Some(event);
    }

    fn pending(&self) -> MutexGuard<'_, Vec<Option<Event>>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The declarations.
    pub fn specs(&self) -> &[ParamSpec] {
        &self.specs
    }

    /// How parameters lie in buckets.
    pub fn plan(&self) -> &Arc<BucketPlan> {
        &self.plan
    }

    /// All weights of a bucket; an error where some of them are bytes.
    pub fn bucket(&self, bucket: usize) -> Result<FlatBuffer> {
        if !self.splits[bucket].is_uniform() {
            return shape_error("weights", "some are kept as bytes; take the optimizer's masters");
        }
        Ok(FlatBuffer::of(&self.plan, bucket, Placement::Replicate, &self.buckets[bucket]))
    }

    /// Brings a bucket from what ranks with equal weights have of it under `placement` to all of them. Every rank calls
    /// it. Weights that are bytes travel as bytes, if a part of them is all that a rank made.
    pub fn gather(&self, rank: &Rank, bucket: usize, placement: Placement, s: &Stream) -> Result<()> {
        const LABEL: &str = "weights";
        let (split, group) = (&self.splits[bucket], rank.dp_group(self.plan.buckets()[bucket].experts));
        if split.is_uniform() {
            let all = self.bucket(bucket)?;
            return all.view_as(placement, group_rank(group))?.redistribute(rank, group, &all, s, LABEL);
        }
        let held = |rank| self.plan.buckets()[bucket].held(placement, GroupRank { rank, size: group.size() });
        let gather = |memory: &Tensor, part: &dyn Fn(usize) -> Range<usize>| {
            let counts: Vec<usize> = (0..group.size()).map(|r| part(r).len()).collect();
            let mine = part(group.rank());
            let mine = memory.narrow(0, mine.start, mine.len())?;
            group.all_gather_v(s, &mine, memory, &counts, LABEL)
        };
        gather(&self.buckets[bucket], &|r| split.rest(&held(r)))?;
        if let Some(bytes) = self.fp8_params.gathered_memory(bucket)? {
            gather(&bytes, &|r| split.separate(&held(r)))?;
        }
        Ok(())
    }

    /// All weights in order of declaration, nothing of those that are bytes; see [`Params::wait_params`].
    pub fn values(&self) -> &[Tensor] {
        &self.values
    }

    /// Elements of the whole model, those of other ranks included.
    pub fn numel(&self) -> usize {
        let parts = self.specs.iter().flat_map(|s| &s.parts);
        parts.map(|p| p.shape.iter().product::<usize>()).sum()
    }
}
