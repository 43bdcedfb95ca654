//! One kind of state of the optimizer: what a rank has of every bucket, and of every parameter in it.

use crate::Result;
use ferrotron_engine::flat::{FlatBuffer, Piece, Placement, place};
use ferrotron_engine::{Params, Place, Rank};
use ferrotron_tensor::{Category, DType, Tensor};

/// Master weights, or a moment.
pub struct State {
    name: &'static str,
    dtype: DType,
    buckets: Vec<Tensor>,
    pieces: Vec<Tensor>,
}

impl State {
    /// New memory, zeros.
    pub(super) fn new(
        name: &'static str,
        rank: &Rank,
        params: &Params,
        placement: Placement,
        dtype: DType,
        pieces: &[Piece],
    ) -> Result<State> {
        let me = place(&rank.copies);
        let zeros = |len| rank.compute.zeros(&[len], dtype, Category::Optimizer);
        let all = params.plan().buckets().iter();
        let buckets = all.map(|b| zeros(b.held(placement, me).len())).collect::<Result<_, _>>()?;
        State::over(name, dtype, buckets, pieces)
    }

    /// In the memory of the weights themselves.
    pub(super) fn in_weights(
        name: &'static str,
        params: &Params,
        placement: Placement,
        me: Place,
        pieces: &[Piece],
    ) -> Result<State> {
        let part = |b| Ok(params.bucket(b).seen_as(placement, me)?.memory().clone());
        let buckets = (0..params.plan().buckets().len()).map(part).collect::<Result<_>>()?;
        State::over(name, params.dtype(), buckets, pieces)
    }

    fn over(name: &'static str, dtype: DType, buckets: Vec<Tensor>, pieces: &[Piece]) -> Result<State> {
        let view = |p: &Piece| buckets[p.bucket].narrow(0, p.local.start, p.local.len());
        let pieces = pieces.iter().map(view).collect::<Result<_, _>>()?;
        Ok(State { name, dtype, buckets, pieces })
    }

    /// Its name in checkpoints: `model`, `adam.m`.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Its type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// What this rank has of each parameter, flat, in order of declaration.
    pub fn pieces(&self) -> &[Tensor] {
        &self.pieces
    }

    /// A bucket whole, flat.
    pub(super) fn gathered(
        &self,
        rank: &Rank,
        params: &Params,
        placement: Placement,
        bucket: usize,
    ) -> Result<Tensor> {
        let mine = FlatBuffer::of(params.plan(), bucket, placement, &self.buckets[bucket]);
        if placement == Placement::Replicate {
            return Ok(mine.memory().clone());
        }
        let (me, kind) = (place(&rank.copies), (self.dtype, Category::Workspace));
        let all = FlatBuffer::empty(params.plan(), bucket, Placement::Replicate, me, kind, &rank.compute)?;
        mine.redistribute(rank, &rank.copies, &all, &rank.compute, "whole state")?;
        Ok(all.memory().clone())
    }
}
