//! Weights of the model and their masters: initial values, values from a checkpoint, gathering.

use super::state::StateKind;
use super::{Optimizer, OptimizerState, Values};
use crate::Result;
use ferrotron_engine::data_parallel::{MasterShards, gather_from_optimizer};
use ferrotron_engine::{ParamId, ParamKind, ParamSpec, Params, Rank, StepState, draw_initial};
use ferrotron_tensor::{Category, DType, Tensor};
use std::collections::VecDeque;
use std::ops::Range;

/// Parameters that are read at a time, and their elements together unless there is only one.
const READS_AHEAD: usize = 4;
const ELEMENTS_AHEAD: usize = 1 << 28;

impl Optimizer {
    /// Draws the declared initial values of the master weights on the device and copies them to the model's weights.
    pub fn initialize(&self, rank: &Rank, params: &Params, step_state: &StepState) -> Result<()> {
        params.wait_params(rank)?;
        self.reads.wait(rank)?;
        self.wait_state(rank)?;
        for (i, spec) in params.specs().iter().enumerate() {
            let (master, mut at) = (self.master_f32(rank, i)?, 0);
            for (part, runs) in spec.runs(&self.pieces[i].param_range) {
                let n = runs.iter().map(Range::len).sum();
                draw_initial(rank, part, &runs, &master.narrow(0, at, n)?)?;
                at += n;
            }
            self.set_weight(rank, (params, step_state), i, &master)?;
        }
        self.sync_params(rank, params, step_state)
    }

    /// An f32 buffer for a parameter's master weights, input of [`OptimizerState::put`]: the masters themselves where they
    /// are f32.
    pub(super) fn master_f32(&self, rank: &Rank, i: usize) -> Result<Tensor> {
        let (piece, elements) = (&self.masters.pieces()[i], self.pieces[i].param_range.len());
        match self.masters.kind() {
            StateKind::Masters if self.has_master(i) => Ok(piece.clone()),
            _ => Ok(Tensor::empty(&rank.compute, &[elements], DType::F32, Category::Workspace)?),
        }
    }

    /// Whether a parameter has master weights: the base model of adapters has none.
    pub(super) fn has_master(&self, i: usize) -> bool {
        self.masters.covers(self.pieces[i].bucket)
    }

    /// Sets this rank's shard of a parameter to f32 values: its master weights, or the weights where it has none.
    fn set_weight(
        &self,
        rank: &Rank,
        (params, state): (&Params, &StepState),
        i: usize,
        values: &Tensor,
    ) -> Result<()> {
        if params.specs()[i].fp8_resident() && !self.has_master(i) {
            return self.quantize_base(rank, (params, state), i, values);
        }
        let weight = self.weight(params, i)?;
        match self.has_master(i) {
            true => self.masters.put(rank, &weight, i, values),
            false => Ok(rank.kernels.copy(&rank.compute, values, &weight)?),
        }
    }

    /// Quantizes an FP8-resident weight of the base model from this rank's shard of its values.
    fn quantize_base(
        &self,
        rank: &Rank,
        (params, state): (&Params, &StepState),
        i: usize,
        values: &Tensor,
    ) -> Result<()> {
        let mut all = self.masters.pieces().to_vec();
        all[i] = values.clone();
        let masters = MasterShards { scheme: self.scheme, shards: &self.pieces, values: &all };
        Ok(params.quantize_base(rank, state, ParamId(i), &masters)?)
    }

    /// Sets the master weights of parameters that are adapters, or of all others, to `values` of the logical tensors and
    /// copies them to the model's weights.
    pub fn fill(
        &self,
        rank: &Rank,
        params: &Params,
        step_state: &StepState,
        (adapters, values): (bool, &Values),
    ) -> Result<()> {
        params.wait_params(rank)?;
        self.reads.wait(rank)?;
        self.wait_state(rank)?;
        let meant = |spec: &ParamSpec| (spec.kind() == ParamKind::Adapter) == adapters;
        let specs = params.specs();
        let list: Vec<usize> = (0..specs.len()).filter(|i| meant(&specs[*i])).collect();
        let elements = |i: usize| self.pieces[i].param_range.len();
        let read = |i: usize| -> Result<Vec<f32>> {
            let mut held = Vec::new();
            for (part, runs) in specs[i].runs(&self.pieces[i].param_range) {
                let of_part = values(part, &runs)?;
                match held.is_empty() {
                    true => held = of_part,
                    false => held.extend_from_slice(&of_part),
                }
            }
            Ok(held)
        };
        // Threads read the next parameters from their files while one is uploaded.
        std::thread::scope(|scope| {
            let (mut next, mut in_flight, mut reads) = (0, 0, VecDeque::new());
            for i in &list {
                while let Some(&ahead) = list.get(next) {
                    let room = reads.len() < READS_AHEAD && in_flight + elements(ahead) <= ELEMENTS_AHEAD;
                    if !room && !reads.is_empty() {
                        break;
                    }
                    let read = &read;
                    // None where the system refuses a thread.
                    let thread = std::thread::Builder::new().spawn_scoped(scope, move || read(ahead));
                    reads.push_back(thread.ok());
                    (in_flight, next) = (in_flight + elements(ahead), next + 1);
                }
                let held = match reads.pop_front() {
                    Some(Some(thread)) => {
                        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?
                    }
                    Some(None) => read(*i)?,
                    None => break,
                };
                in_flight -= elements(*i);
                let held = rank.compute.upload(&held, &[held.len()], Category::Workspace)?;
                self.set_weight(rank, (params, step_state), *i, &held)?;
            }
            Ok::<(), crate::Error>(())
        })?;
        self.sync_params(rank, params, step_state)
    }

    /// Writes f32 values to this rank's shard of a parameter of `state`, rounded to its dtype. [`Optimizer::sync_params`] must
    /// follow master weights.
    pub fn put(
        &self,
        rank: &Rank,
        params: &Params,
        state: &OptimizerState,
        i: usize,
        values: &[f32],
    ) -> Result<()> {
        self.reads.wait(rank)?;
        self.wait_state(rank)?;
        let wide = rank.compute.upload(values, &[values.len()], Category::Workspace)?;
        state.put(rank, &self.weight(params, i)?, i, &wide)
    }

    /// Rounds the master weights to the model's weights and gathers those on all ranks. Collective.
    pub fn sync_params(&self, rank: &Rank, params: &Params, step_state: &StepState) -> Result<()> {
        params.wait_params(rank)?;
        self.wait_state(rank)?;
        // With remainders, the model's weights are the high halves of the masters.
        if params.dtype() != DType::F32 && self.masters.kind() == StateKind::Masters {
            let numbers =
                |(i, _): &(usize, &Tensor)| !params.specs()[*i].fp8_resident() && self.has_master(*i);
            for (i, master) in self.masters.pieces().iter().enumerate().filter(numbers) {
                rank.kernels.copy(&rank.compute, master, &self.weight(params, i)?)?;
            }
        }
        self.all_gather_params(rank, params, step_state, (0..params.plan().buckets().len(), false))?;
        params.sync_base(rank, &self.scheme)?;
        Ok(params.wait_params(rank)?)
    }

    /// The shard of parameter `i`; empty for an FP8-resident weight.
    pub(super) fn weight(&self, params: &Params, i: usize) -> Result<Tensor> {
        Ok(params.shard(ParamId(i), &self.pieces[i])?)
    }

    /// Gathers the model's weights of some buckets on all ranks; see [`Params::sync_params`].
    pub(super) fn all_gather_params(
        &self,
        rank: &Rank,
        params: &Params,
        step_state: &StepState,
        what: (Range<usize>, bool),
    ) -> Result<()> {
        let (scheme, shards, values) = (self.scheme, &self.pieces[..], self.masters.pieces());
        Ok(params.sync_params(rank, step_state, &MasterShards { scheme, shards, values }, what)?)
    }

    /// f32 master weights in order of declaration, gathered from their shards. Collective.
    pub fn gathered(&self, rank: &Rank, params: &Params) -> Result<Vec<Tensor>> {
        params.wait_params(rank)?;
        self.wait_state(rank)?;
        let mut buckets = Vec::new();
        for bucket in 0..params.plan().buckets().len() {
            buckets.push(match self.masters.covers(bucket) {
                true => self.masters.gathered(rank, params, &self.scheme, bucket)?,
                false => self.gathered_base(rank, params, bucket)?,
            });
        }
        let view = |(i, spec): (usize, &ParamSpec)| {
            let (bucket, r) = params.plan().slot(ParamId(i));
            Ok(buckets[bucket].narrow(0, r.start, r.len())?.view(&spec.shape)?)
        };
        params.specs().iter().enumerate().map(view).collect()
    }

    /// A bucket of the base model in f32, gathered from its shards.
    fn gathered_base(&self, rank: &Rank, params: &Params, bucket: usize) -> Result<Tensor> {
        let weights = params.optimizer_shard(rank, bucket, &self.scheme)?;
        let wide = Tensor::empty(&rank.compute, weights.shape(), DType::F32, Category::Workspace)?;
        rank.kernels.copy(&rank.compute, &weights, &wide)?;
        Ok(gather_from_optimizer(rank, (params.plan(), bucket), &self.scheme, &wide, "base model")?)
    }
}
