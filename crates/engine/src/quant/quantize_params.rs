//! Quantizes FP8-resident weights from the optimizer's masters after a step.

use super::experts::slice_matrices;
use super::fp8_params::Fp8Param;
use super::precomputed::holds_whole_experts;
use super::quantize::{QuantScale, Quantized};
use super::runs::{Run, matrix, runs};
use super::{GemmOperand, Method, QuantState, Recipe, Role};
use crate::data_parallel::{MasterShards, ParamShard, ShardingStrategy, group_rank};
use crate::{GroupRank, ParamId, ParamSpec, Params, Rank, StepState};
use ferrotron_comm::Communicator;
use ferrotron_kernels::{Fp8Tensor, Quantize, QuantizeStack, ScaleSource};
use ferrotron_tensor::{Category, Result, Tensor};
use std::ops;

/// Elements converted to the model's dtype at a time, or one matrix: experts have many.
const MOST: usize = 1 << 25;

/// A weight to be quantized.
struct UpdatedParam<'a> {
    id: ParamId,
    spec: &'a ParamSpec,
    fp8: &'a Fp8Param,
    /// This rank's shard of it.
    piece: &'a ParamShard,
    master: &'a Tensor,
    scheme: ShardingStrategy,
    source: QuantScale,
    recipe: Recipe,
    /// Whether the optimizer has written the FP8 values already.
    precomputed: bool,
}

impl UpdatedParam<'_> {
    /// Whether the values of all ranks are needed: shards may split 128×128 blocks that share a scale.
    fn gathers(&self) -> bool {
        !self.recipe.per_tensor() && !self.scheme.optimizer.is_full_size()
    }

    /// Elements that this rank quantizes.
    fn inside(&self) -> ops::Range<usize> {
        if self.gathers() { 0..self.spec.numel() } else { self.piece.param_range.clone() }
    }

    /// Whether quantizing sets the scales of all matrices of this weight.
    fn learns(&self) -> bool {
        let ([n, k], inside) = (self.spec.matrix(), self.inside());
        let all = !inside.is_empty() && inside.start < n * k && inside.end + n * k > self.spec.numel();
        !self.recipe.per_tensor() || (all && !(self.precomputed && self.spec.experts))
    }

    /// Scale source for some of its matrices; `amax` holds the slice of their amax.
    fn range<'b>(
        &'b self,
        which: &ops::Range<usize>,
        amax: &'b mut Option<Tensor>,
    ) -> Result<ScaleSource<'b>> {
        let pow2 = self.recipe.pow2;
        Ok(match &self.source {
            QuantScale::Amax(all) => {
                ScaleSource::Amax { amax: amax.insert(all.narrow(0, which.start, which.len())?), pow2 }
            }
            QuantScale::Delayed(scale, amax) => ScaleSource::Given { scale, amax },
            QuantScale::Blocks => ScaleSource::Blocks { pow2 },
        })
    }

    /// FP8 memory for the elements of a run, flat: the weight's own, or workspace where this rank holds a shard of them, or
    /// holds them in host memory.
    fn memory_of(&self, rank: &Rank, run: &Run) -> Result<Tensor> {
        let Fp8Param { held, start, .. } = self.fp8;
        let whole = *start <= run.elements.start && run.elements.end <= start + held.numel();
        match whole && (self.precomputed || !held.is_on_host()) {
            true => self.fp8.elements(&run.elements),
            false => Tensor::empty(&rank.compute, &[run.elements.len()], held.dtype(), Category::Workspace),
        }
    }

    /// Copies the shard that this rank holds from the workspace of a run.
    fn keep(&self, rank: &Rank, run: &Run, flat: &Tensor) -> Result<()> {
        let held = self.fp8.start..self.fp8.start + self.fp8.held.numel();
        let mine = held.start.max(run.elements.start)..held.end.min(run.elements.end);
        if mine.is_empty() || (mine == run.elements && (self.precomputed || !self.fp8.held.is_on_host())) {
            return Ok(());
        }
        let from = flat.narrow(0, mine.start - run.elements.start, mine.len())?;
        rank.compute.copy(&from, &self.fp8.elements(&mine)?)
    }

    /// FP8 memory of a run as a matrix `[r, c]`, with its scales.
    fn fp8_of(&self, run: &Run, flat: &Tensor) -> Result<Fp8Tensor> {
        let Fp8Param { scale_inv, scaling, shape: [_, c], pow2, .. } = self.fp8;
        let each = if run.whole { scale_inv.shape()[0] / self.spec.matrices } else { 1 };
        let data = if run.whole { flat.view(&[flat.numel() / c, *c])? } else { matrix(flat)? };
        let matrices =
            if run.whole { run.matrices.clone() } else { run.matrices.start..run.matrices.start + 1 };
        let scale_inv = scale_inv.narrow(0, matrices.start * each, matrices.len() * each)?;
        Ok(Fp8Tensor { cols: data.shape()[1], data, scale_inv, scaling: *scaling, pow2: *pow2 })
    }
}

impl Params {
    /// Measures updated weights and quantizes the FP8-resident ones from this rank's master shards, one matrix (or a few
    /// experts' matrices) at a time. `precomputed`: the optimizer's step has filled [`Params::precomputed`]. Collective
    /// over the ranks that hold parts of a weight; the all-gather of the buckets follows.
    pub(crate) fn quantize_params(
        &self,
        rank: &Rank,
        state: &QuantState,
        masters: &MasterShards,
        precomputed: bool,
    ) -> Result<()> {
        self.measure_weights(rank, state, masters, precomputed)?;
        let Some(recipe) = self.fp8_params().recipe else { return Ok(()) };
        let fp8_written = precomputed && matches!(recipe.method, Method::Delayed { .. });
        for (id, fp8) in self.fp8_params().all() {
            let (spec, piece, master) = (&self.specs()[id.0], &masters.shards[id.0], &masters.values[id.0]);
            let (precomputed, scheme) = (fp8_written && master.numel() > 0, masters.scheme);
            let delayed = state.delayed().map(|d| d.of_fp8_resident(id)).transpose()?.flatten();
            let source = match (state.known(id, spec)?, delayed) {
                (Some(amax), _) => QuantScale::Amax(amax),
                (_, Some((scale, amax))) => QuantScale::Delayed(scale, amax),
                _ => QuantScale::Blocks,
            };
            let new = UpdatedParam { id, spec, fp8, piece, master, scheme, source, recipe, precomputed };
            self.quantize_param(rank, state, &new)?;
        }
        Ok(())
    }

    /// Quantizes one FP8-resident weight of a frozen base model, once, from this rank's shard of its values f32. Collective
    /// over the ranks that hold parts of it.
    pub fn quantize_base(
        &self,
        rank: &Rank,
        state: &StepState,
        id: ParamId,
        masters: &MasterShards,
    ) -> Result<()> {
        let params = self.fp8_params();
        let (Some(state), Some(recipe), Some(fp8)) = (state.quant(), params.recipe, params.param(id)) else {
            return Ok(());
        };
        let (spec, piece, master) = (&self.specs()[id.0], &masters.shards[id.0], &masters.values[id.0]);
        let source = match self.measure_base(rank, state, (id, spec), masters)? {
            Some(amax) => QuantScale::Amax(amax),
            None => QuantScale::Blocks,
        };
        let (scheme, precomputed) = (masters.scheme, false);
        self.quantize_param(
            rank,
            state,
            &UpdatedParam { id, spec, fp8, piece, master, scheme, source, recipe, precomputed },
        )
    }

    fn quantize_param(&self, rank: &Rank, state: &QuantState, new: &UpdatedParam) -> Result<()> {
        let (s, k) = (&rank.compute, &rank.kernels);
        if let (QuantScale::Delayed(_, amax), false) = (&new.source, new.precomputed) {
            s.zero(amax)?;
        }
        let [n, c] = new.spec.matrix();
        if !new.learns() {
            // Set the scales of matrices this rank has no elements of.
            let all = 0..new.spec.matrices;
            let x = Tensor::empty(s, &[all.len(), 0, c], self.dtype(), Category::Workspace)?;
            let (scale_inv, scaling) = (new.fp8.scale_inv.clone(), new.fp8.scaling);
            let data = new.fp8.held.narrow(0, 0, 0)?.view(&[0, c])?;
            let none = Fp8Tensor { data, scale_inv, scaling, cols: c, pow2: new.fp8.pow2 };
            let mut amax = None;
            let range = new.range(&all, &mut amax)?;
            k.quantize_stack(s, &QuantizeStack { x: &x, range, rows: Some(&none), cols: None })?;
        }
        if new.precomputed && !state.records_stats() {
            return Ok(());
        }
        for run in runs(&new.inside(), n * c, MOST) {
            let (value, flat) = (self.high_precision(rank, new, &run)?, new.memory_of(rank, &run)?);
            let rows = new.fp8_of(&run, &flat)?;
            let x = value.view(rows.data.shape())?;
            let each = new.spec.experts && run.whole && new.recipe.per_tensor();
            let mut amax = None;
            let range = new.range(&run.matrices, &mut amax)?;
            match each {
                _ if new.precomputed => {}
                true => {
                    let x = &x.view(&[run.matrices.len(), n, c])?;
                    let q = QuantizeStack { x, range, rows: Some(&rows), cols: None };
                    match holds_whole_experts(rank, &new.scheme) {
                        true => k.amax_quantize_stack(s, &q)?,
                        false => k.quantize_stack(s, &q)?,
                    }
                }
                false => {
                    k.quantize(s, &Quantize { x: &x, range, rows: Some(&rows), cols: None, sums: None })?
                }
            }
            new.keep(rank, &run, &flat)?;
            let parts = if each { run.matrices.len() } else { 1 };
            for e in (0..parts).filter(|_| state.records_stats()) {
                let one = slice_matrices(&rows, e..e + 1, parts)?;
                let quantized = Quantized { rows: Some(GemmOperand::Fp8(one)), cols: None };
                let each = x.shape()[0] / parts;
                state.record(rank, new.id, Role::Weight, &x.narrow(0, e * each, each)?, &quantized)?;
            }
        }
        Ok(())
    }

    /// Values of a run in the model's dtype, flat: this rank's, or all-gathered.
    fn high_precision(&self, rank: &Rank, new: &UpdatedParam, run: &Run) -> Result<Tensor> {
        let (s, kind) = (&rank.compute, Category::Workspace);
        let part = |inside: &ops::Range<usize>| {
            let start = inside.start.max(run.elements.start);
            start..inside.end.min(run.elements.end).max(start)
        };
        let mine = part(&new.piece.param_range);
        let value = Tensor::empty(s, &[mine.len()], self.dtype(), kind)?;
        if !mine.is_empty() {
            let master = new.master.narrow(0, mine.start - new.piece.param_range.start, mine.len())?;
            rank.kernels.copy(s, &master, &value)?;
        }
        if !new.gathers() {
            return Ok(value);
        }
        // Pieces of a shard first, where groups that hold the same shards update one each.
        let (group, outer) = (rank.dp_group(new.spec.experts), rank.shard_replica_group(new.spec.experts));
        let inner = group_rank(group);
        let pieces = new.scheme.outer_pieces(outer.size());
        let held = |place| part(&self.plan().piece(new.id, new.scheme.optimizer, place).param_range).len();
        let gather = |group: &Communicator, value: &Tensor, counts: Vec<usize>| {
            let all = Tensor::empty(s, &[counts.iter().sum()], self.dtype(), Category::Communication)?;
            group.all_gather_v(s, value, &all, &counts, "values of an FP8 weight")?;
            Ok::<_, ferrotron_tensor::Error>(all)
        };
        let value = match pieces {
            1 => value,
            _ => {
                let piece = |rank| GroupRank { rank: inner.rank * pieces + rank, size: inner.size * pieces };
                gather(outer, &value, (0..pieces).map(|r| held(piece(r))).collect())?
            }
        };
        let shard = |rank| GroupRank { rank, size: inner.size };
        gather(group, &value, (0..inner.size).map(|r| held(shard(r))).collect())
    }
}
