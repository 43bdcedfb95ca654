//! Weights that are bytes between steps, and nothing else: 1 byte a parameter where the model's own type takes 2.
//!
//! They are made of the optimizer's f32 masters as passes would narrow weights: the master rounded to the type the model
//! computes in, then by the recipe. Products are the same to the last bit, and so is everything that follows.

use super::operands::Narrowed;
use super::{EightState, Method, Recipe, Role, Side};
use crate::flat::{Piece, Placement, Plan, Shelf};
use crate::{ParamId, ParamSpec, Params, Place, Rank};
use ferrotron_kernels::{ALIGN, Bytes, Quantise, Range, Scaling};
use ferrotron_tensor::{Category, DType, Error, Result, Tensor, shape_error};

/// Elements of the rows into which a part of a weight is cut for kernels that want a matrix.
const WIDTH: usize = 4096;

/// The weights of a model that are bytes.
pub(crate) struct Stored {
    recipe: Option<Recipe>,
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
            let (bucket, range) = plan.slot(ParamId(i));
            let range = shelves[bucket].apart(&range);
            let data = buckets[bucket].narrow(0, range.start, range.len())?.view(&[r, c])?;
            let scale_inv = s.zeros(&scaling.scales(r, c), DType::F32, Category::Parameters)?;
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

    /// A weight `[out, in]`, if it is one of them.
    pub(crate) fn weight(&self, id: ParamId) -> Option<&Bytes> {
        self.weights[id.0].as_ref()
    }

    fn all(&self) -> impl Iterator<Item = (ParamId, &Bytes)> {
        self.weights.iter().enumerate().filter_map(|(i, b)| Some((ParamId(i), b.as_ref()?)))
    }
}

impl Params {
    /// Finds out what narrow products need of new weights, and makes the bytes of what this rank has of each weight that is
    /// bytes: of its f32 `masters`, flat, which are `pieces` of the parameters. One weight at a time is in the model's type.
    /// `made`: the step that made the weights left what [`Params::made`] says. Every rank calls it, [`Params::gather`]
    /// follows.
    pub fn store(
        &self,
        rank: &Rank,
        placement: Placement,
        pieces: &[Piece],
        masters: &[Tensor],
        made: bool,
    ) -> Result<()> {
        let (stored, s, k) = (self.stored(), &rank.compute, &rank.kernels);
        let Some(state) = self.eight() else { return Ok(()) };
        self.measure(rank, state, placement, pieces, masters, made)?;
        let Some(recipe) = stored.recipe else { return Ok(()) };
        let bytes_made = made && matches!(recipe.method, Method::Delayed { .. });
        for (id, bytes) in stored.all() {
            let (piece, master) = (&pieces[id.0], &masters[id.0]);
            // A rank that has nothing of a weight still learns its scale.
            let made = bytes_made && master.numel() > 0;
            if made && !state.is_watched() {
                continue;
            }
            let value = Tensor::empty(s, master.shape(), self.dtype(), Category::Workspace)?;
            if master.numel() > 0 {
                k.copy(s, master, &value)?;
            }
            // Scales of tiles, which parts of ranks may cut, need the numbers of all ranks.
            let whole = !recipe.per_tensor() && placement != Placement::Replicate;
            let (value, inside) = match whole {
                true => (self.whole(rank, placement, id, &value)?, 0..bytes.data.numel()),
                false => (value, piece.inside.clone()),
            };
            let (x, rows) = match inside.len() == bytes.data.numel() {
                true => (value.view(bytes.data.shape())?, bytes.clone()),
                false => {
                    let x = matrix(&value)?;
                    let flat = bytes.data.view(&[bytes.data.numel()])?;
                    let data = flat.narrow(0, inside.start, inside.len())?.view(x.shape())?;
                    (x.clone(), Bytes { data, cols: x.shape()[1], ..bytes.clone() })
                }
            };
            let given = match state.delayed() {
                Some(delayed) => delayed.of_stored(id)?,
                None => None,
            };
            let amax = state.magnitudes().map(|m| m.known(id)).transpose()?.flatten();
            let range = match (&amax, &given) {
                (Some(amax), _) => Range::Amax { amax, pow2: recipe.pow2 },
                (_, Some((scale, amax))) => {
                    if !made {
                        s.zero(amax)?;
                    }
                    Range::Given { scale, amax }
                }
                _ => Range::Blocks { pow2: recipe.pow2 },
            };
            if !made {
                k.quantise(s, &Quantise { x: &x, range, rows: Some(&rows), cols: None, sums: None })?;
            }
            if x.numel() > 0 {
                let made = Narrowed { rows: Some(Side::Bytes(rows)), cols: None };
                state.note(rank, id, Role::Weight, &x, &made)?;
            }
        }
        Ok(())
    }

    /// All of a weight, flat, from the parts of ranks.
    fn whole(&self, rank: &Rank, placement: Placement, id: ParamId, mine: &Tensor) -> Result<Tensor> {
        let (s, size) = (&rank.compute, rank.copies.size());
        let all = Tensor::empty(s, &[self.specs()[id.0].numel()], mine.dtype(), Category::Communication)?;
        let part = |rank| self.plan().piece(id, placement, Place { rank, size }).inside.len();
        let counts: Vec<usize> = (0..size).map(part).collect();
        rank.copies.all_gather_v(s, mine, &all, &counts, "numbers of a weight")?;
        Ok(all)
    }
}

impl EightState {
    /// A weight that is bytes the other way round, for products along its columns. It stays where weights are kept.
    pub(super) fn turned(&self, rank: &Rank, train: bool, id: ParamId, bytes: &Bytes) -> Result<Side> {
        if let Some(cols) = self.weights()[id.0].cols.clone() {
            return Ok(cols);
        }
        let (s, k, shape) = (&rank.compute, &rank.kernels, [bytes.cols, bytes.rows()]);
        let cols = Bytes::empty(s, shape, bytes.data.dtype(), bytes.scaling, Category::Activations)?;
        match bytes.scaling {
            Scaling::Tensor => k.turn(s, bytes, &cols)?,
            // The bytes alone, then the scales of tiles.
            _ => {
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
            }
        }
        let cols = Side::Bytes(cols);
        if self.keeps(train) {
            self.weights()[id.0].cols = Some(cols.clone());
        }
        Ok(cols)
    }
}

/// A flat tensor as rows of equal length, as long as they may be.
pub(super) fn matrix(flat: &Tensor) -> Result<Tensor> {
    let n = flat.numel();
    let width = if n == 0 { ALIGN } else { 1 << n.trailing_zeros().min(WIDTH.trailing_zeros()) };
    if width < ALIGN {
        return shape_error("weights as bytes", format!("{n} elements do not divide into rows of {ALIGN}"));
    }
    flat.view(&[n / width, width])
}
