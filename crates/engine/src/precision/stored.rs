//! Weights that are bytes between steps, and nothing else: 1 byte a parameter where the model's own type takes 2.
//!
//! They are made of the optimizer's f32 masters as passes would narrow weights: the master rounded to the type the model
//! computes in, then by the recipe. Products are the same to the last bit, and so is everything that follows.

use super::{EightState, Recipe, Role, Side};
use crate::flat::{Plan, Shelf};
use crate::{ParamId, ParamSpec, Rank};
use ferrotron_kernels::{ALIGN, BLOCK, Bytes, Scaling};
use ferrotron_tensor::{Category, DType, Error, Result, Tensor, shape_error};

/// The weights of a model that are bytes.
pub(crate) struct Stored {
    pub(super) recipe: Option<Recipe>,
    /// What is apart of each bucket.
    buckets: Vec<Tensor>,
    /// By parameter.
    weights: Vec<Option<Bytes>>,
}

impl Stored {
    /// Memory for them.
    pub(crate) fn new(rank: &Rank, specs: &[ParamSpec], plan: &Plan, shelves: &[Shelf]) -> Result<Stored> {
        let recipe = specs.iter().filter(|s| s.stored()).find_map(|s| s.eight).map(|e| e.recipe);
        let Some(recipe) = recipe else {
            return Ok(Stored { recipe: None, buckets: Vec::new(), weights: vec![None; specs.len()] });
        };
        let unsupported = |what: String| Error::Unsupported { op: "weights as bytes", what };
        if recipe.emulated() {
            return Err(unsupported("products that are emulated in bf16 need weights in bf16".into()));
        }
        let (s, format) = (&rank.compute, recipe.format(Role::Weight));
        let zeros = |shelf: &Shelf| s.zeros(&shelf.lengths()[..1], format, Category::Parameters);
        let buckets: Vec<Tensor> = shelves.iter().map(zeros).collect::<Result<_>>()?;
        let scaling = recipe.scaling(Role::Weight);
        let view = |(i, spec): (usize, &ParamSpec)| {
            if !spec.stored() {
                return Ok(None);
            }
            let &[r, c] = spec.shape.as_slice() else {
                return shape_error("weights as bytes", format!("{:?} where a matrix belongs", spec.shape));
            };
            if !c.is_multiple_of(ALIGN) {
                return Err(unsupported(format!("rows of {c}; have multiples of {ALIGN}")));
            }
            let scales = match (scaling, spec.matrix()) {
                (Scaling::Tensor, _) => vec![spec.matrices],
                (_, [n, _]) if spec.experts && !n.is_multiple_of(BLOCK) => {
                    return Err(unsupported(format!(
                        "experts' matrices of {n} rows; have multiples of {BLOCK}"
                    )));
                }
                _ => scaling.scales(r, c),
            };
            let (bucket, range) = plan.slot(ParamId(i));
            let range = shelves[bucket].apart(&range);
            let data = buckets[bucket].narrow(0, range.start, range.len())?.view(&[r, c])?;
            let scale_inv = s.zeros(&scales, DType::F32, Category::Parameters)?;
            Ok(Some(Bytes { data, scale_inv, scaling, cols: c }))
        };
        let weights = specs.iter().enumerate().map(view).collect::<Result<_>>()?;
        Ok(Stored { recipe: Some(recipe), buckets, weights })
    }

    /// The bytes of a bucket, u8, where ranks make parts of them.
    pub(crate) fn travelling(&self, bucket: usize) -> Result<Option<Tensor>> {
        match self.recipe {
            Some(recipe) if recipe.per_tensor() => self.buckets[bucket].as_bytes().map(Some),
            _ => Ok(None),
        }
    }

    /// A weight `[out, in]`, if it is one of them; those of experts one after another, with a scale for each where blocks have
    /// none.
    pub(crate) fn weight(&self, id: ParamId) -> Option<&Bytes> {
        self.weights[id.0].as_ref()
    }

    pub(super) fn all(&self) -> impl Iterator<Item = (ParamId, &Bytes)> {
        self.weights.iter().enumerate().filter_map(|(i, b)| Some((ParamId(i), b.as_ref()?)))
    }
}

impl EightState {
    /// A weight that is bytes the other way round, for products along its columns, as `turn` makes it. It stays where weights are
    /// kept.
    pub(super) fn turned(
        &self,
        train: bool,
        id: ParamId,
        turn: impl FnOnce() -> Result<Bytes>,
    ) -> Result<Side> {
        if let Some(cols) = self.weights()[id.0].cols.clone() {
            return Ok(cols);
        }
        let cols = Side::Bytes(turn()?);
        if self.keeps(train) {
            self.weights()[id.0].cols = Some(cols.clone());
        }
        Ok(cols)
    }
}

/// A matrix in bytes the other way round.
pub(super) fn turn(rank: &Rank, bytes: &Bytes) -> Result<Bytes> {
    let (s, k, shape) = (&rank.compute, &rank.kernels, [bytes.cols, bytes.rows()]);
    let cols = Bytes::empty(s, shape, bytes.data.dtype(), bytes.scaling, Category::Activations)?;
    if bytes.scaling == Scaling::Tensor {
        k.turn(s, bytes, &cols)?;
        return Ok(cols);
    }
    // The bytes alone, then the scales of tiles.
    let alone = |b: &Bytes| -> Result<Bytes> {
        let scale_inv = s.zeros(&[1], DType::F32, Category::Workspace)?;
        Ok(Bytes { scale_inv, scaling: Scaling::Tensor, ..b.clone() })
    };
    k.turn(s, &alone(bytes)?, &alone(&cols)?)?;
    let [from, to] = [bytes, &cols].map(|b| b.scale_inv.clone());
    let (down, across) = (from.shape()[0], to.shape()[0]);
    s.zero(&to)?;
    // One by one: copies want a last axis that lies back to back.
    let shape = [across, down, 1];
    let from = from.narrow(1, 0, across)?.transpose(0, 1)?.view(&shape)?;
    k.copy(s, &from, &to.narrow(1, 0, down)?.view(&shape)?)?;
    Ok(cols)
}
