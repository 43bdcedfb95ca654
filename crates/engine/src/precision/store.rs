//! Bytes of new weights, made of the optimizer's masters after a step.

use super::experts::matrices;
use super::made::has_whole_experts;
use super::operands::{Narrowed, Source};
use super::pieces::{Run, matrix, runs};
use super::{EightState, Method, Recipe, Role, Side};
use crate::flat::{Piece, Placement};
use crate::{ParamId, ParamSpec, Params, Place, Rank};
use ferrotron_kernels::{Bytes, Quantise, QuantiseStack, Range};
use ferrotron_tensor::{Category, Result, Tensor};
use std::ops;

/// Numbers of a weight that are in the model's type at a time, or one matrix: experts have many.
const MOST: usize = 1 << 25;

/// A weight whose bytes are made.
struct New<'a> {
    id: ParamId,
    spec: &'a ParamSpec,
    bytes: &'a Bytes,
    /// What this rank has of it.
    piece: &'a Piece,
    master: &'a Tensor,
    placement: Placement,
    source: Source,
    recipe: Recipe,
    /// Did the optimizer leave the bytes?
    made: bool,
}

impl New<'_> {
    /// Must ranks have the numbers of all? Parts of ranks may cut tiles that have a scale.
    fn gathers(&self) -> bool {
        !self.recipe.per_tensor() && self.placement != Placement::Replicate
    }

    /// Elements whose bytes are made here.
    fn inside(&self) -> ops::Range<usize> {
        if self.gathers() { 0..self.spec.numel() } else { self.piece.inside.clone() }
    }

    /// Does this rank learn the scales of all matrices as it makes its bytes?
    fn learns(&self) -> bool {
        let ([n, k], inside) = (self.spec.matrix(), self.inside());
        let all = !inside.is_empty() && inside.start < n * k && inside.end + n * k > self.spec.numel();
        !self.recipe.per_tensor() || (all && !(self.made && self.spec.experts))
    }

    /// Where the scales of some of its matrices come from; `amax` is memory for their magnitudes.
    fn range<'b>(&'b self, which: &ops::Range<usize>, amax: &'b mut Option<Tensor>) -> Result<Range<'b>> {
        let pow2 = self.recipe.pow2;
        Ok(match &self.source {
            Source::Amax(all) => {
                Range::Amax { amax: amax.insert(all.narrow(0, which.start, which.len())?), pow2 }
            }
            Source::Given(scale, amax) => Range::Given { scale, amax },
            Source::Blocks => Range::Blocks { pow2 },
        })
    }

    /// The bytes of a run, as a matrix `[r, c]`, and their scales.
    fn bytes(&self, run: &Run) -> Result<Bytes> {
        if run.whole {
            return matrices(self.bytes, run.matrices.clone(), self.spec.matrices);
        }
        let flat = self.bytes.data.view(&[self.bytes.data.numel()])?;
        let data = matrix(&flat.narrow(0, run.elements.start, run.elements.len())?)?;
        let scale_inv = self.bytes.scale_inv.narrow(0, run.matrices.start, 1)?;
        Ok(Bytes { cols: data.shape()[1], data, scale_inv, ..self.bytes.clone() })
    }
}

impl Params {
    /// Finds out what narrow products need of new weights, and makes the bytes of what this rank has of each weight that is
    /// bytes: of its f32 `masters`, flat, which are `pieces` of the parameters. One matrix at a time is in the model's type, or
    /// some experts'.
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
        let Some(state) = self.eight() else { return Ok(()) };
        self.measure(rank, state, placement, pieces, masters, made)?;
        let Some(recipe) = self.stored().recipe else { return Ok(()) };
        let bytes_made = made && matches!(recipe.method, Method::Delayed { .. });
        for (id, bytes) in self.stored().all() {
            let (spec, piece, master) = (&self.specs()[id.0], &pieces[id.0], &masters[id.0]);
            let made = bytes_made && master.numel() > 0;
            let given = state.delayed().map(|d| d.of_stored(id)).transpose()?.flatten();
            let source = match (state.known(id, spec)?, given) {
                (Some(amax), _) => Source::Amax(amax),
                (_, Some((scale, amax))) => Source::Given(scale, amax),
                _ => Source::Blocks,
            };
            let new = New { id, spec, bytes, piece, master, placement, source, recipe, made };
            self.store_weight(rank, state, &new)?;
        }
        Ok(())
    }

    fn store_weight(&self, rank: &Rank, state: &EightState, new: &New) -> Result<()> {
        let (s, k) = (&rank.compute, &rank.kernels);
        if let (Source::Given(_, amax), false) = (&new.source, new.made) {
            s.zero(amax)?;
        }
        let [n, c] = new.spec.matrix();
        if !new.learns() {
            // Of matrices without elements there are still the scales.
            let all = 0..new.spec.matrices;
            let x = Tensor::empty(s, &[all.len(), 0, c], self.dtype(), Category::Workspace)?;
            let none = Bytes { data: new.bytes.data.narrow(0, 0, 0)?, ..new.bytes.clone() };
            let mut amax = None;
            let range = new.range(&all, &mut amax)?;
            k.quantise_stack(s, &QuantiseStack { x: &x, range, rows: Some(&none), cols: None })?;
        }
        if new.made && !state.is_watched() {
            return Ok(());
        }
        for run in runs(&new.inside(), n * c, MOST) {
            let (value, rows) = (self.numbers(rank, new, &run)?, new.bytes(&run)?);
            let x = value.view(rows.data.shape())?;
            let each = new.spec.experts && run.whole && new.recipe.per_tensor();
            let mut amax = None;
            let range = new.range(&run.matrices, &mut amax)?;
            match each {
                _ if new.made => {}
                true => {
                    let x = &x.view(&[run.matrices.len(), n, c])?;
                    let q = QuantiseStack { x, range, rows: Some(&rows), cols: None };
                    match has_whole_experts(rank, new.placement) {
                        true => k.measure_and_quantise_stack(s, &q)?,
                        false => k.quantise_stack(s, &q)?,
                    }
                }
                false => {
                    k.quantise(s, &Quantise { x: &x, range, rows: Some(&rows), cols: None, sums: None })?
                }
            }
            let parts = if each { run.matrices.len() } else { 1 };
            for e in (0..parts).filter(|_| state.is_watched()) {
                let one = matrices(&rows, e..e + 1, parts)?;
                let made = Narrowed { rows: Some(Side::Bytes(one)), cols: None };
                let each = x.shape()[0] / parts;
                state.note(rank, new.id, Role::Weight, &x.narrow(0, e * each, each)?, &made)?;
            }
        }
        Ok(())
    }

    /// Numbers of a weight in the model's type, flat: a run of this rank's, or of all ranks'.
    fn numbers(&self, rank: &Rank, new: &New, run: &Run) -> Result<Tensor> {
        let (s, kind) = (&rank.compute, Category::Workspace);
        let part = |inside: &ops::Range<usize>| {
            let start = inside.start.max(run.elements.start);
            start..inside.end.min(run.elements.end).max(start)
        };
        let mine = part(&new.piece.inside);
        let value = Tensor::empty(s, &[mine.len()], self.dtype(), kind)?;
        if !mine.is_empty() {
            let master = new.master.narrow(0, mine.start - new.piece.inside.start, mine.len())?;
            rank.kernels.copy(s, &master, &value)?;
        }
        if !new.gathers() {
            return Ok(value);
        }
        let copies = rank.copies_of(new.spec.experts);
        let all = Tensor::empty(s, &[run.elements.len()], self.dtype(), Category::Communication)?;
        let piece = |rank| self.plan().piece(new.id, new.placement, Place { rank, size: copies.size() });
        let counts: Vec<usize> = (0..copies.size()).map(|r| part(&piece(r).inside).len()).collect();
        copies.all_gather_v(s, &value, &all, &counts, "numbers of a weight")?;
        Ok(all)
    }
}
