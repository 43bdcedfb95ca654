//! Weights that are bytes between steps, and nothing else: 1 byte a parameter where the model's own type takes 2.
//!
//! They are made of the optimizer's f32 masters as passes would narrow weights: the master rounded to the type the model
//! computes in, then by the recipe. Products are the same to the last bit, and so is everything that follows.

use super::{GemmOperand, QuantState, Recipe, Role};
use crate::data_parallel::{BucketPlan, BucketSplit};
use crate::{ParamId, ParamSpec, Rank};
use ferrotron_kernels::{ALIGN, BLOCK, Fp8Tensor, ScalingMode};
use ferrotron_tensor::{Category, DType, Error, Result, Tensor, shape_error};

/// The weights of a model that are bytes.
pub(crate) struct Fp8Params {
    pub(super) recipe: Option<Recipe>,
    /// What is apart of each bucket.
    buckets: Vec<Tensor>,
    /// By parameter.
    weights: Vec<Option<Fp8Tensor>>,
}

impl Fp8Params {
    /// Memory for them.
    pub(crate) fn new(
        rank: &Rank,
        specs: &[ParamSpec],
        plan: &BucketPlan,
        splits: &[BucketSplit],
    ) -> Result<Fp8Params> {
        let recipe = specs.iter().filter(|s| s.fp8_resident()).find_map(|s| s.quant).map(|e| e.recipe);
        let Some(recipe) = recipe else {
            return Ok(Fp8Params { recipe: None, buckets: Vec::new(), weights: vec![None; specs.len()] });
        };
        let unsupported = |what: String| Error::Unsupported { op: "weights as bytes", what };
        if recipe.emulated() {
            return Err(unsupported("products that are emulated in bf16 need weights in bf16".into()));
        }
        let (s, format) = (&rank.compute, recipe.format(Role::Weight));
        let zeros = |split: &BucketSplit| s.zeros(&split.lengths()[..1], format, Category::Parameters);
        let buckets: Vec<Tensor> = splits.iter().map(zeros).collect::<Result<_>>()?;
        let scaling = recipe.scaling(Role::Weight);
        let view = |(i, spec): (usize, &ParamSpec)| {
            if !spec.fp8_resident() {
                return Ok(None);
            }
            let &[r, c] = spec.shape.as_slice() else {
                return shape_error("weights as bytes", format!("{:?} where a matrix belongs", spec.shape));
            };
            if !c.is_multiple_of(ALIGN) {
                return Err(unsupported(format!("rows of {c}; have multiples of {ALIGN}")));
            }
            let scales = match (scaling, spec.matrix()) {
                (ScalingMode::PerTensor, _) => vec![spec.matrices],
                (_, [n, _]) if spec.experts && !n.is_multiple_of(BLOCK) => {
                    return Err(unsupported(format!(
                        "experts' matrices of {n} rows; have multiples of {BLOCK}"
                    )));
                }
                _ => scaling.scales(r, c),
            };
            let (bucket, range) = plan.slot(ParamId(i));
            let range = splits[bucket].separate(&range);
            let data = buckets[bucket].narrow(0, range.start, range.len())?.view(&[r, c])?;
            let scale_inv = s.zeros(&scales, DType::F32, Category::Parameters)?;
            Ok(Some(Fp8Tensor { data, scale_inv, scaling, cols: c }))
        };
        let weights = specs.iter().enumerate().map(view).collect::<Result<_>>()?;
        Ok(Fp8Params { recipe: Some(recipe), buckets, weights })
    }

    /// The bytes of a bucket, u8, where ranks make parts of them.
    pub(crate) fn gathered_memory(&self, bucket: usize) -> Result<Option<Tensor>> {
        match self.recipe {
            Some(recipe) if recipe.per_tensor() => self.buckets[bucket].as_bytes().map(Some),
            _ => Ok(None),
        }
    }

    /// A weight `[out, in]`, if it is one of them; those of experts one after another, with a scale for each where blocks have
    /// none.
    pub(crate) fn weight(&self, id: ParamId) -> Option<&Fp8Tensor> {
        self.weights[id.0].as_ref()
    }

    pub(super) fn all(&self) -> impl Iterator<Item = (ParamId, &Fp8Tensor)> {
        self.weights.iter().enumerate().filter_map(|(i, b)| Some((ParamId(i), b.as_ref()?)))
    }
}

impl QuantState {
    /// A weight that is bytes the other way round, for products along its columns, as `turn` makes it. It stays where weights are
    /// kept.
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

/// A matrix in bytes the other way round.
pub(super) fn transpose(rank: &Rank, bytes: &Fp8Tensor) -> Result<Fp8Tensor> {
    let (s, k, shape) = (&rank.compute, &rank.kernels, [bytes.cols, bytes.rows()]);
    let cols = Fp8Tensor::empty(s, shape, bytes.data.dtype(), bytes.scaling, Category::Activations)?;
    if bytes.scaling == ScalingMode::PerTensor {
        k.fp8_transpose(s, bytes, &cols)?;
        return Ok(cols);
    }
    // The bytes alone, then the scales of tiles.
    let alone = |b: &Fp8Tensor| -> Result<Fp8Tensor> {
        let scale_inv = s.zeros(&[1], DType::F32, Category::Workspace)?;
        Ok(Fp8Tensor { scale_inv, scaling: ScalingMode::PerTensor, ..b.clone() })
    };
    k.fp8_transpose(s, &alone(bytes)?, &alone(&cols)?)?;
    let [from, to] = [bytes, &cols].map(|b| b.scale_inv.clone());
    let (down, across) = (from.shape()[0], to.shape()[0]);
    s.zero(&to)?;
    // One by one: copies want a last axis that lies back to back.
    let shape = [across, down, 1];
    let from = from.narrow(1, 0, across)?.transpose(0, 1)?.view(&shape)?;
    k.copy(s, &from, &to.narrow(1, 0, down)?.view(&shape)?)?;
    Ok(cols)
}
