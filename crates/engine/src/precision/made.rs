//! What narrow products need of new weights, left there by the optimizer: it has them in hand, so that nobody reads them
//! once more. Current scaling needs the largest magnitude of each; delayed scaling knows its scale beforehand, and weights
//! that are bytes are made bytes of in the optimizer's own pass.

use super::stored::matrix;
use super::{EightState, Method};
use crate::flat::{Piece, Placement};
use crate::{ParamId, ParamSpec, Params, Rank};
use ferrotron_comm::Reduce;
use ferrotron_kernels::{NewBytes, NewWeight};
use ferrotron_tensor::{Category, DType, Result, Tensor};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// Largest magnitudes of the weights of narrow products, under current scaling.
pub(super) struct Magnitudes {
    /// f32 `[weights]`, on which all ranks have agreed that have parts of them.
    all: Tensor,
    /// By parameter.
    places: Vec<Option<usize>>,
    /// Are they those of the weights as they are now?
    known: AtomicBool,
}

impl Magnitudes {
    /// For the parameters of a model; None where nobody asks for them.
    pub(super) fn new(rank: &Rank, specs: &[ParamSpec], method: Method) -> Result<Option<Magnitudes>> {
        if method != Method::Current {
            return Ok(None);
        }
        let mut count = 0;
        let place = |spec: &ParamSpec| {
            // Experts have a magnitude each, and look themselves.
            let used = !spec.experts && spec.eight.is_some_and(|e| e.output || e.input_grad);
            count += usize::from(used);
            used.then_some(count.wrapping_sub(1))
        };
        let places = specs.iter().map(place).collect();
        let all = rank.compute.zeros(&[count], DType::F32, Category::Parameters)?;
        Ok(Some(Magnitudes { all, places, known: AtomicBool::new(false) }))
    }

    /// That of a weight, f32 `[1]`, whether it is known or not.
    fn of(&self, id: ParamId) -> Result<Option<Tensor>> {
        self.places[id.0].map(|at| self.all.narrow(0, at, 1)).transpose()
    }

    /// Nobody knows them any more.
    pub(super) fn forget(&self) {
        self.known.store(false, Ordering::Relaxed);
    }

    /// That of a weight, if it is known.
    pub(super) fn known(&self, id: ParamId) -> Result<Option<Tensor>> {
        if self.known.load(Ordering::Relaxed) { self.of(id) } else { Ok(None) }
    }
}

/// Where an optimizer leaves what is needed of a new weight.
pub struct Made {
    amax: Tensor,
    /// Bytes, scale, inverse scale.
    bytes: Option<[Tensor; 3]>,
}

impl Made {
    /// For the kernel.
    pub fn new_weight(&self) -> NewWeight<'_> {
        let bytes = self.bytes.as_ref();
        let bytes = bytes.map(|[data, scale, scale_inv]| NewBytes { data, scale, scale_inv });
        NewWeight { amax: &self.amax, bytes }
    }
}

impl Params {
    /// Before a step of an optimizer that leaves [`Params::made`] of every weight. Of a step that changes nothing,
    /// magnitudes stay.
    pub fn begin_update(&self, rank: &Rank, scalars: &Tensor) -> Result<()> {
        let (Some(state), s) = (self.eight(), &rank.compute) else { return Ok(()) };
        if let Some(m) = state.magnitudes() {
            rank.kernels.clear_for_step(s, scalars, &m.all)?;
        }
        // These are made again by every step, under new scales.
        state.delayed().and_then(|d| d.early.as_ref()).map_or(Ok(()), |early| s.zero(early))
    }

    /// What the optimizer may leave of elements `inside` of a weight, which this rank has.
    pub fn made(&self, id: ParamId, inside: &Range<usize>) -> Result<Option<Made>> {
        let Some(state) = self.eight() else { return Ok(None) };
        if let Some(m) = state.magnitudes() {
            return Ok(m.of(id)?.map(|amax| Made { amax, bytes: None }));
        }
        let (Some(bytes), Some(delayed)) = (self.stored().weight(id), state.delayed()) else {
            return Ok(None);
        };
        let Some((scale, amax)) = delayed.of_stored(id)? else { return Ok(None) };
        let data = bytes.data.view(&[bytes.data.numel()])?.narrow(0, inside.start, inside.len())?;
        Ok(Some(Made { amax, bytes: Some([data, scale, bytes.scale_inv.clone()]) }))
    }

    /// Largest magnitudes of all weights, of which the optimizer may have `made` those of this rank's `pieces`. Every rank
    /// calls it.
    pub(super) fn measure(
        &self,
        rank: &Rank,
        state: &EightState,
        placement: Placement,
        pieces: &[Piece],
        masters: &[Tensor],
        made: bool,
    ) -> Result<()> {
        let Some(m) = state.magnitudes() else { return Ok(()) };
        let (s, k) = (&rank.compute, &rank.kernels);
        if !made {
            s.zero(&m.all)?;
            for (i, piece) in pieces.iter().enumerate().filter(|(_, p)| !p.inside.is_empty()) {
                let Some(amax) = m.of(ParamId(i))? else { continue };
                let weight = match self.specs()[i].stored() {
                    true => masters[i].clone(),
                    false => {
                        let w = &self.values()[i];
                        w.view(&[w.numel()])?.narrow(0, piece.inside.start, piece.inside.len())?
                    }
                };
                let rows = matrix(&weight).or_else(|_| weight.view(&[1, weight.numel()]))?;
                k.amax(s, &rows, &amax)?;
            }
        }
        if placement != Placement::Replicate {
            rank.copies.all_reduce(s, &m.all, Reduce::Max, "magnitudes of weights of copies")?;
        }
        rank.tp.all_reduce(s, &m.all, Reduce::Max, "magnitudes of weights")?;
        if !made {
            // Of masters: rounding keeps order, so the largest of rounded numbers is the largest, rounded.
            let rounded = Tensor::empty(s, m.all.shape(), self.dtype(), Category::Workspace)?;
            k.copy(s, &m.all, &rounded)?;
            k.copy(s, &rounded, &m.all)?;
        }
        m.known.store(true, Ordering::Relaxed);
        Ok(())
    }
}
