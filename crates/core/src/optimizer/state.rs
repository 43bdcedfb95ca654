//! One optimizer state (master weights or a moment): this rank's shard of every bucket and of every parameter in it.

use super::SavedBucket;
use crate::Result;
use ferrotron_engine::data_parallel::{Bucket, ParamShard, ShardingStrategy, gather_from_optimizer};
use ferrotron_engine::{Params, Rank};
use ferrotron_kernels::moments::BLOCK;
use ferrotron_kernels::{Moment, MomentOrder};
use ferrotron_tensor::{Category, DType, Tensor};
use std::ops::Range;

/// Master weights, or a moment.
pub struct OptimizerState {
    name: &'static str,
    kind: StateKind,
    /// Dtype in each bucket; none where its parameters have no such state.
    dtypes: Vec<Option<DType>>,
    buckets: Vec<Tensor>,
    pieces: Vec<Tensor>,
    /// Block scales of packed moments, by bucket and by parameter.
    scales: (Vec<Option<Tensor>>, Vec<Option<Tensor>>),
}

/// What the elements are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StateKind {
    /// f32 weights.
    Masters,
    /// The low 16 bits of f32 weights, whose high 16 bits are the model's bf16 weights.
    Remainders,
    /// A moment.
    Moment(MomentOrder),
}

/// Dtype of a state in a bucket; none where its parameters have no such state.
pub(super) type StoredAs<'a> = &'a dyn Fn(&Bucket) -> Option<DType>;

impl OptimizerState {
    /// Allocates zeros in the buckets that `dtype` gives one for, in host memory where `on_host` says so. Block scales are
    /// small and stay on the device.
    pub(super) fn new(
        (name, kind): (&'static str, StateKind),
        rank: &Rank,
        params: &Params,
        scheme: &ShardingStrategy,
        (dtype, on_host): (StoredAs, &[bool]),
        pieces: &[ParamShard],
    ) -> Result<OptimizerState> {
        let dtypes: Vec<Option<DType>> = params.plan().buckets().iter().map(dtype).collect();
        let zeros = |len, dtype| rank.compute.zeros(&[len], dtype, Category::Optimizer);
        let (mut buckets, mut scales) = (Vec::new(), Vec::new());
        for (i, (b, dtype)) in params.plan().buckets().iter().zip(&dtypes).enumerate() {
            let held = b.held(scheme.optimizer, scheme.optimizer_place_of(rank, b.experts)).len();
            let len = if dtype.is_some() { held } else { 0 };
            let kept_as = dtype.unwrap_or(DType::F32);
            buckets.push(match on_host.get(i) {
                Some(true) if len > 0 => {
                    let memory = Tensor::host(&rank.compute, &[len], kept_as)?;
                    rank.compute.zero(&memory)?;
                    memory
                }
                _ => zeros(len, kept_as)?,
            });
            let packed = matches!(dtype, Some(DType::F16 | DType::U8));
            scales.push(packed.then(|| zeros(len.div_ceil(BLOCK), DType::U8)).transpose()?);
        }
        let mut state = OptimizerState::over((name, kind), dtypes, buckets, pieces)?;
        // Shards, and parameters in them, begin at multiples of a block.
        let blocks = |r: &Range<usize>| r.start / BLOCK..r.end.div_ceil(BLOCK);
        let view = |p: &ParamShard| match &scales[p.bucket] {
            None => Ok(None),
            Some(scales) => {
                let r = blocks(&p.local_range);
                Ok(Some(scales.narrow(0, r.start, r.len())?))
            }
        };
        let views = pieces.iter().map(view).collect::<Result<_>>()?;
        state.scales = (scales, views);
        Ok(state)
    }

    /// f32 weights as their own masters, in the buckets that `stored` gives a dtype for.
    pub(super) fn in_weights(
        name: &'static str,
        rank: &Rank,
        params: &Params,
        scheme: &ShardingStrategy,
        (pieces, stored): (&[ParamShard], StoredAs),
    ) -> Result<OptimizerState> {
        let layout = params.plan().buckets();
        let dtypes: Vec<Option<DType>> = layout.iter().map(stored).collect();
        let part = |(b, dtype): (usize, &Option<DType>)| match dtype {
            Some(_) => Ok(params.optimizer_shard(rank, b, scheme)?),
            None => Ok(rank.compute.zeros(&[0], params.dtype(), Category::Optimizer)?),
        };
        let buckets = dtypes.iter().enumerate().map(part).collect::<Result<_>>()?;
        OptimizerState::over((name, StateKind::Masters), dtypes, buckets, pieces)
    }

    fn over(
        (name, kind): (&'static str, StateKind),
        dtypes: Vec<Option<DType>>,
        buckets: Vec<Tensor>,
        pieces: &[ParamShard],
    ) -> Result<OptimizerState> {
        let view = |p: &ParamShard| match dtypes[p.bucket] {
            Some(_) => buckets[p.bucket].narrow(0, p.local_range.start, p.local_range.len()),
            None => Ok(buckets[p.bucket].clone()),
        };
        let scales = (vec![None; buckets.len()], vec![None; pieces.len()]);
        let pieces = pieces.iter().map(view).collect::<Result<_, _>>()?;
        Ok(OptimizerState { name, kind, dtypes, buckets, pieces, scales })
    }

    /// Its name in checkpoints: `model`, `adam.m`.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Whether these are master weights, in f32 or as remainders.
    pub fn is_masters(&self) -> bool {
        !matches!(self.kind, StateKind::Moment(_))
    }

    /// Whether the parameters of a bucket have this state.
    pub fn covers(&self, bucket: usize) -> bool {
        self.dtypes[bucket].is_some()
    }

    /// Dtype in checkpoints of a state stored as `dtype`. They hold every value exactly: f32 for master weights, bf16 for
    /// bf16 moments.
    pub fn saved_as(&self, dtype: DType) -> DType {
        match (self.kind, dtype) {
            (StateKind::Moment(_), DType::BF16 | DType::U8) => DType::BF16,
            _ => DType::F32,
        }
    }

    /// Dtype of a bucket in checkpoints.
    pub fn saved(&self, bucket: usize) -> DType {
        self.saved_as(self.dtypes[bucket].unwrap_or(DType::F32))
    }

    pub(super) fn kind(&self) -> StateKind {
        self.kind
    }

    /// This rank's shard of each parameter, flat, in order of declaration.
    pub(super) fn pieces(&self) -> &[Tensor] {
        &self.pieces
    }

    /// This rank's shard of a bucket.
    pub(super) fn bucket(&self, bucket: usize) -> &Tensor {
        &self.buckets[bucket]
    }

    /// Whether a bucket is in host memory.
    pub(crate) fn is_on_host(&self, bucket: usize) -> bool {
        self.buckets[bucket].is_on_host()
    }

    /// Bytes of its widest element.
    pub(super) fn widest(&self) -> usize {
        self.buckets.iter().map(|b| b.dtype().size()).max().unwrap_or(0)
    }

    /// This rank's shard of a parameter's moment.
    pub(super) fn moment(&self, i: usize) -> Moment<'_> {
        Moment { values: &self.pieces[i], scales: self.scales.1[i].as_ref() }
    }

    /// Rounds f32 values into this rank's shard of a parameter.
    pub(super) fn put(&self, rank: &Rank, weight: &Tensor, i: usize, values: &Tensor) -> Result<()> {
        let (k, s) = (&rank.kernels, &rank.compute);
        if values.numel() == 0 {
            return Ok(());
        }
        match self.kind {
            StateKind::Masters if values.same_memory(&self.pieces[i]) => {}
            StateKind::Masters => s.copy(values, &self.pieces[i])?,
            StateKind::Remainders => k.split_master(s, values, weight, &self.pieces[i])?,
            StateKind::Moment(order) => k.pack_moment(s, order, values, self.moment(i))?,
        }
        Ok(())
    }

    /// This rank's shard of a bucket, as checkpoints hold it.
    pub(super) fn saved_bucket(
        &self,
        rank: &Rank,
        params: &Params,
        scheme: &ShardingStrategy,
        bucket: usize,
    ) -> Result<SavedBucket> {
        let weights = match self.kind {
            StateKind::Remainders => Some(params.optimizer_shard(rank, bucket, scheme)?),
            _ => None,
        };
        let (held, scales) = (self.buckets[bucket].clone(), self.scales.0[bucket].clone());
        Ok(SavedBucket { kind: self.kind, held, scales, weights, saved: self.saved(bucket) })
    }

    /// A full bucket, flat, as checkpoints hold it.
    pub(super) fn gathered(
        &self,
        rank: &Rank,
        params: &Params,
        scheme: &ShardingStrategy,
        bucket: usize,
    ) -> Result<Tensor> {
        let saved = self.saved_bucket(rank, params, scheme, bucket)?;
        let mut part = saved.elements(&*rank.kernels, &rank.compute, 0..saved.len())?;
        if part.is_on_host() {
            // Collectives take device memory.
            let copy = Tensor::empty(&rank.compute, part.shape(), part.dtype(), Category::Workspace)?;
            rank.compute.copy(&part, &copy)?;
            part = copy;
        }
        Ok(gather_from_optimizer(rank, (params.plan(), bucket), scheme, &part, "whole state")?)
    }
}
