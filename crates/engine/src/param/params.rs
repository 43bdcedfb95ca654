//! The weights of a model in memory.

use super::{ParamId, ParamSpec};
use crate::Rank;
use crate::data_parallel::{BucketPlan, BucketSplit, FlatBuffer, PendingGathers, Placement, bucket_elements};
use crate::quant::Fp8Params;
use ferrotron_tensor::{Category, DType, Error, Result, Tensor, shape_error};
use std::sync::Arc;

/// The weights of a model in its compute dtype, in flat buckets. Weights that only FP8 GEMMs use may be FP8-resident
/// instead, in buckets of their own.
pub struct Params {
    specs: Vec<ParamSpec>,
    plan: Arc<BucketPlan>,
    /// Which elements of each bucket are FP8-resident.
    pub(crate) splits: Vec<BucketSplit>,
    /// The other elements of each bucket.
    pub(crate) buckets: Vec<Tensor>,
    values: Vec<Tensor>,
    fp8_params: Fp8Params,
    dtype: DType,
    /// Buckets that are still being all-gathered.
    pub(crate) pending: PendingGathers,
}

impl Params {
    /// Zeroed memory for the declared parameters.
    pub fn allocate(rank: &Rank, specs: Vec<ParamSpec>, dtype: DType) -> Result<Params> {
        Params::in_buckets(rank, specs, dtype, bucket_elements(rank.dp_cp_group.size()))
    }

    /// [`Params::allocate`] with buckets that close at `target` elements.
    pub fn in_buckets(rank: &Rank, specs: Vec<ParamSpec>, dtype: DType, target: usize) -> Result<Params> {
        if dtype != DType::BF16 && specs.iter().any(|s| s.quant.is_some()) {
            let what =
                format!("FP8 GEMMs in a model that computes in {dtype}; set precision.dtype = \"bf16\"");
            return Err(Error::Unsupported { op: "parameters", what });
        }
        let replicas = [rank.dp_cp_group.size(), rank.expert_dp_group.size()];
        let plan = Arc::new(BucketPlan::new(&specs, replicas, target));
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
        let pending = PendingGathers::new(buckets.len());
        let fp8_params = Fp8Params::new(rank, &specs, &plan, &splits)?;
        Ok(Params { specs, plan, splits, buckets, values, fp8_params, dtype, pending })
    }

    /// The model's compute dtype.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// A weight for use on the compute stream, which waits for its all-gather.
    pub fn weight(&self, rank: &Rank, id: ParamId) -> Result<&Tensor> {
        if self.specs[id.0].fp8_resident() {
            return shape_error("weight", "it is FP8-resident: only FP8 GEMMs can use it");
        }
        self.wait_weight(rank, id)?;
        Ok(&self.values[id.0])
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

    /// The weights of a bucket; an error where some of them are FP8-resident.
    pub fn bucket(&self, bucket: usize) -> Result<FlatBuffer> {
        if !self.splits[bucket].is_uniform() {
            return shape_error("weights", "some are FP8-resident; use the optimizer's master weights");
        }
        Ok(FlatBuffer::of(&self.plan, bucket, Placement::Replicate, &self.buckets[bucket]))
    }

    /// All weights in order of declaration, empty where FP8-resident. Call [`Params::wait_params`] before reading them.
    pub fn values(&self) -> &[Tensor] {
        &self.values
    }

    /// Parameters of the whole model, those of other ranks included.
    pub fn numel(&self) -> usize {
        let parts = self.specs.iter().flat_map(|s| &s.parts);
        parts.map(|p| p.shape.iter().product::<usize>()).sum()
    }
}
