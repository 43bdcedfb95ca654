//! FP8-resident weights: 1 byte per parameter instead of 2, with no bf16 copy between steps.
//!
//! They are quantized from the optimizer's f32 masters exactly as a pass would quantize bf16 weights: the master is
//! rounded to the compute dtype first. GEMMs, and everything after them, keep their bits.

use super::experts::slice_matrices;
use super::{GemmOperand, QuantState, Recipe, Role};
use crate::data_parallel::{BucketPlan, BucketSplit, zeroed_shard};
use crate::{ParamId, ParamSpec, Params, Rank, UnitGuard};
use ferrotron_kernels::{ALIGN, BLOCK, Fp8Tensor, ScalingMode};
use ferrotron_tensor::{Category, DType, Error, Result, Tensor, shape_error};
use std::ops::Range;

/// The FP8-resident weights of a model.
pub(crate) struct Fp8Params {
    pub(super) recipe: Option<Recipe>,
    /// FP8 data of each bucket that this rank holds.
    buckets: Vec<Tensor>,
    /// By parameter; None for weights in the compute dtype.
    weights: Vec<Option<Fp8Param>>,
}

/// An FP8-resident weight as this rank holds it.
pub(crate) struct Fp8Param {
    /// Local shape `[out, in]`.
    pub(crate) shape: [usize; 2],
    /// Elements `start..` of its FP8 data: all of them, or a shard.
    pub(crate) held: Tensor,
    /// The first of them.
    pub(crate) start: usize,
    /// Inverse scales of all its elements.
    pub(crate) scale_inv: Tensor,
    pub(crate) scaling: ScalingMode,
    /// Scales are powers of two.
    pub(crate) pow2: bool,
}

/// An FP8-resident weight that a pass uses. Where weights are sharded, its unit stays gathered while this is held.
pub(crate) struct Fp8Weight {
    pub(crate) fp8: Fp8Tensor,
    _unit: Option<UnitGuard>,
}

impl Fp8Param {
    /// Elements `range`, which this rank holds, flat.
    pub(crate) fn elements(&self, range: &Range<usize>) -> Result<Tensor> {
        self.held.narrow(0, range.start - self.start, range.len())
    }

    /// The weight with `data`, all of its elements.
    pub(crate) fn with(&self, data: &Tensor) -> Result<Fp8Tensor> {
        let [_, cols] = self.shape;
        let (scale_inv, scaling, pow2) = (self.scale_inv.clone(), self.scaling, self.pow2);
        Ok(Fp8Tensor { data: data.view(&self.shape)?, scale_inv, scaling, cols, pow2 })
    }
}

impl Fp8Params {
    /// Zeroed memory for the parameters whose spec asks for it; `on_host`: in host memory, except for scales.
    pub(crate) fn new(
        rank: &Rank,
        specs: &[ParamSpec],
        plan: &BucketPlan,
        (splits, held): (&[BucketSplit], &[Range<usize>]),
        on_host: bool,
    ) -> Result<Fp8Params> {
        let recipe = specs.iter().filter(|s| s.fp8_resident()).find_map(|s| s.quant).map(|e| e.recipe);
        let Some(recipe) = recipe else {
            let weights = specs.iter().map(|_| None).collect();
            return Ok(Fp8Params { recipe: None, buckets: Vec::new(), weights });
        };
        let unsupported = |what: String| Error::Unsupported { op: "FP8-resident weights", what };
        if recipe.emulated() {
            return Err(unsupported(
                "emulated formats (mxfp8, nvfp4) need weights in bf16; unset precision.fp8_params".into(),
            ));
        }
        let (s, format) = (&rank.compute, recipe.format(Role::Weight));
        let zeros = |(split, held): (&BucketSplit, &Range<usize>)| {
            zeroed_shard(rank, split.separate(held).len(), format, on_host)
        };
        let buckets: Vec<Tensor> = splits.iter().zip(held).map(zeros).collect::<Result<_>>()?;
        let scaling = recipe.scaling(Role::Weight);
        let view = |(i, spec): (usize, &ParamSpec)| {
            if !spec.fp8_resident() {
                return Ok(None);
            }
            let &[r, c] = spec.shape.as_slice() else {
                return shape_error("FP8-resident weights", format!("{:?} is not a matrix", spec.shape));
            };
            if !c.is_multiple_of(ALIGN) {
                return Err(unsupported(format!("input width {c}; use a multiple of {ALIGN}")));
            }
            let scales = match (scaling, spec.matrix()) {
                (ScalingMode::PerTensor, _) => vec![spec.matrices],
                (_, [n, _]) if spec.experts && !n.is_multiple_of(BLOCK) => {
                    return Err(unsupported(format!(
                        "expert matrices of {n} rows; use multiples of {BLOCK}"
                    )));
                }
                _ => scaling.scales(r, c),
            };
            let (bucket, range) = plan.slot(ParamId(i));
            let (split, mine) = (&splits[bucket], &held[bucket]);
            let first = range.start.max(mine.start);
            let own = split.separate(&(first..range.end.min(mine.end).max(first)));
            let from = split.separate(mine).start;
            let at = if own.is_empty() { 0..0 } else { own.start - from..own.end - from };
            let held = buckets[bucket].narrow(0, at.start, at.len())?;
            let scale_inv = s.zeros(&scales, DType::F32, Category::Parameters)?;
            let start = if own.is_empty() { 0 } else { first - range.start };
            Ok(Some(Fp8Param { shape: [r, c], held, start, scale_inv, scaling, pow2: recipe.pow2 }))
        };
        let weights = specs.iter().enumerate().map(view).collect::<Result<_>>()?;
        Ok(Fp8Params { recipe: Some(recipe), buckets, weights })
    }

    /// The FP8 data of a bucket as u8 for the all-gather, where each rank quantizes its own shard.
    pub(crate) fn gathered_memory(&self, bucket: usize) -> Result<Option<Tensor>> {
        match self.recipe {
            Some(recipe) if recipe.per_tensor() => self.buckets[bucket].as_bytes().map(Some),
            _ => Ok(None),
        }
    }

    /// The FP8 data of a bucket that this rank holds.
    pub(crate) fn bucket(&self, bucket: usize) -> &Tensor {
        &self.buckets[bucket]
    }

    /// The FP8 format of weights.
    pub(crate) fn format(&self) -> DType {
        self.recipe.map_or(DType::U8, |recipe| recipe.format(Role::Weight))
    }

    /// An FP8-resident weight as this rank holds it.
    pub(crate) fn param(&self, id: ParamId) -> Option<&Fp8Param> {
        self.weights[id.0].as_ref()
    }

    pub(super) fn all(&self) -> impl Iterator<Item = (ParamId, &Fp8Param)> {
        self.weights.iter().enumerate().filter_map(|(i, b)| Some((ParamId(i), b.as_ref()?)))
    }
}

impl Params {
    /// An FP8-resident weight `[out, in]` for use on the compute stream, which waits for its all-gather; of experts the
    /// stacked matrices, each with its own scale under per-tensor scaling. None for a weight in the compute dtype.
    pub(crate) fn fp8_weight(&self, rank: &Rank, id: ParamId) -> Result<Option<Fp8Weight>> {
        let Some(param) = self.fp8_params().param(id) else { return Ok(None) };
        let (data, _unit) = match self.gathered(rank, id)? {
            None => (param.held.clone(), None),
            Some((guard, [fp8, _])) => (guard.memory()[0].narrow(0, fp8.start, fp8.len())?, Some(guard)),
        };
        Ok(Some(Fp8Weight { fp8: param.with(&data)?, _unit }))
    }
}

/// Matrix `i` of an FP8-resident weight `[out, in]` in the compute dtype, in memory of its own.
pub(crate) fn dequantized_matrix(rank: &Rank, params: &Params, id: ParamId, i: usize) -> Result<Tensor> {
    let Some(weight) = params.fp8_weight(rank, id)? else {
        return shape_error("dequantize", "the weight is not FP8-resident");
    };
    let spec = &params.specs()[id.0];
    let one = slice_matrices(&weight.fp8, i..i + 1, spec.matrices)?;
    let out = Tensor::empty(&rank.compute, &spec.matrix(), params.dtype(), Category::Workspace)?;
    rank.kernels.dequantize(&rank.compute, &one, &out)?;
    Ok(out)
}

impl QuantState {
    /// The transpose of an FP8-resident weight for dgrad, made by `transpose` and cached where the cache is on.
    pub(super) fn transposed(
        &self,
        train: bool,
        id: ParamId,
        transpose: impl FnOnce() -> Result<Fp8Tensor>,
    ) -> Result<GemmOperand> {
        if let Some(cols) = self.weights()[id.0].cols.clone() {
            return Ok(cols);
        }
        let cols = GemmOperand::Fp8(transpose()?);
        if self.caches(train) {
            self.weights()[id.0].cols = Some(cols.clone());
        }
        Ok(cols)
    }
}

/// Transposes an FP8 matrix.
pub(super) fn transpose(rank: &Rank, fp8: &Fp8Tensor) -> Result<Fp8Tensor> {
    let (s, k, shape) = (&rank.compute, &rank.kernels, [fp8.cols, fp8.rows()]);
    let cols = Fp8Tensor::empty(s, shape, fp8.data.dtype(), fp8.scaling, Category::Activations)?;
    let cols = Fp8Tensor { pow2: fp8.pow2, ..cols };
    if fp8.scaling == ScalingMode::PerTensor {
        k.fp8_transpose(s, fp8, &cols)?;
        return Ok(cols);
    }
    // Data first, then the scales of 128×128 blocks.
    let alone = |b: &Fp8Tensor| -> Result<Fp8Tensor> {
        let scale_inv = s.zeros(&[1], DType::F32, Category::Workspace)?;
        Ok(Fp8Tensor { scale_inv, scaling: ScalingMode::PerTensor, ..b.clone() })
    };
    k.fp8_transpose(s, &alone(fp8)?, &alone(&cols)?)?;
    let [from, to] = [fp8, &cols].map(|b| b.scale_inv.clone());
    let (down, across) = (from.shape()[0], to.shape()[0]);
    s.zero(&to)?;
    // Element by element: the copy kernel needs a contiguous last axis.
    let shape = [across, down, 1];
    let from = from.narrow(1, 0, across)?.transpose(0, 1)?.view(&shape)?;
    k.copy(s, &from, &to.narrow(1, 0, down)?.view(&shape)?)?;
    Ok(cols)
}
