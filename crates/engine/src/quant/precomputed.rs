//! What quantization needs of updated weights, computed by the optimizer kernel while it has them in registers.
//! Current scaling needs their amax; delayed scaling knows its scale beforehand, so FP8-resident weights are quantized
//! in the optimizer kernel itself.

use super::runs::{matrix, runs};
use super::{Method, QuantState};
use crate::data_parallel::{MasterShards, ShardingStrategy};
use crate::{ParamId, ParamSpec, Params, Rank, StepState};
use ferrotron_comm::ReduceOp;
use ferrotron_kernels::{Fp8DataOut, Fp8WeightOut};
use ferrotron_tensor::{Category, DType, Result, Tensor};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// amax of quantized weights, with current scaling.
pub(super) struct WeightAmax {
    /// f32 `[weights]`, all-reduced over the ranks that hold parts of them.
    all: Tensor,
    /// f32 `[matrices]` of FP8-resident expert weights; other expert weights are measured when they are quantized.
    experts: Option<Tensor>,
    /// Index of each parameter in one or the other.
    places: Vec<Option<usize>>,
    /// Whether they are those of the current weights.
    known: AtomicBool,
}

impl WeightAmax {
    /// For the parameters of a model; None where the recipe needs none.
    pub(super) fn new(rank: &Rank, specs: &[ParamSpec], method: Method) -> Result<Option<WeightAmax>> {
        if method != Method::Current {
            return Ok(None);
        }
        let [mut count, mut of_experts] = [0; 2];
        let place = |spec: &ParamSpec| {
            let (used, next, len) = match spec.experts {
                true => (spec.fp8_resident(), &mut of_experts, spec.matrices),
                false => (spec.quant.is_some_and(|e| e.fprop || e.dgrad), &mut count, 1),
            };
            used.then(|| std::mem::replace(next, *next + len))
        };
        let places = specs.iter().map(place).collect();
        let zeros = |n| rank.compute.zeros(&[n], DType::F32, Category::Parameters);
        let experts = (of_experts > 0).then(|| zeros(of_experts)).transpose()?;
        Ok(Some(WeightAmax { all: zeros(count)?, experts, places, known: AtomicBool::new(false) }))
    }

    /// amax of the matrices of a weight, f32 `[matrices]`, known or not.
    fn of(&self, id: ParamId, spec: &ParamSpec) -> Result<Option<Tensor>> {
        let Some(at) = self.places[id.0] else { return Ok(None) };
        match (spec.experts, &self.experts) {
            (true, experts) => experts.as_ref().map(|all| all.narrow(0, at, spec.matrices)).transpose(),
            (false, _) => self.all.narrow(0, at, 1).map(Some),
        }
    }

    /// The weights have changed.
    pub(super) fn invalidate(&self) {
        self.known.store(false, Ordering::Relaxed);
    }

    /// amax of a weight, if it is known.
    pub(super) fn known(&self, id: ParamId, spec: &ParamSpec) -> Result<Option<Tensor>> {
        if self.known.load(Ordering::Relaxed) { self.of(id, spec) } else { Ok(None) }
    }
}

/// Whether this rank has all of its experts' masters and shares none of them: then quantizing measures them on the
/// way.
pub(super) fn holds_whole_experts(rank: &Rank, scheme: &ShardingStrategy) -> bool {
    let whole = scheme.optimizer.is_full_size() || scheme.optimizer_place_of(rank, true).size == 1;
    whole && rank.etp.size() == 1
}

/// Where the optimizer kernel writes the amax and FP8 values of an updated weight.
pub struct Precomputed {
    /// f32 `[1]`, raised to the weight's amax.
    pub amax: Tensor,
    /// FP8 data, scale, inverse scale.
    pub fp8: Option<[Tensor; 3]>,
}

impl Precomputed {
    /// Memory of its FP8 values, where the optimizer kernel writes them.
    pub fn fp8(&self) -> Option<&Tensor> {
        self.fp8.as_ref().map(|[data, ..]| data)
    }

    /// The same with other memory for FP8 values, which are copied from there.
    pub fn through(mut self, memory: Tensor) -> Precomputed {
        if let Some([data, ..]) = &mut self.fp8 {
            *data = memory;
        }
        self
    }

    /// As kernel arguments.
    pub fn kernel_outputs(&self) -> Fp8WeightOut<'_> {
        let fp8 = self.fp8.as_ref();
        let fp8 = fp8.map(|[data, scale, scale_inv]| Fp8DataOut { data, scale, scale_inv });
        Fp8WeightOut { amax: &self.amax, data: fp8 }
    }
}

impl Params {
    /// Call before an optimizer step that fills [`Params::precomputed`] of every weight. A skipped step keeps the
    /// amax.
    pub fn begin_update(&self, rank: &Rank, state: &StepState, scalars: &Tensor) -> Result<()> {
        let (Some(state), s) = (state.quant(), &rank.compute) else { return Ok(()) };
        if let Some(m) = state.weight_amax() {
            rank.kernels.reset_amax(s, scalars, &m.all)?;
        }
        // Every step computes these anew, under new scales.
        state.delayed().and_then(|d| d.next_amax.as_ref()).map_or(Ok(()), |amax| s.zero(amax))
    }

    /// What the optimizer may precompute for elements `inside` of a weight, which this rank holds.
    pub fn precomputed(
        &self,
        state: &StepState,
        id: ParamId,
        inside: &Range<usize>,
    ) -> Result<Option<Precomputed>> {
        let Some(state) = state.quant() else { return Ok(None) };
        if let Some(m) = state.weight_amax() {
            // Experts have one amax per matrix and are measured afterwards.
            let spec = &self.specs()[id.0];
            let amax = if spec.experts { None } else { m.of(id, spec)? };
            return Ok(amax.map(|amax| Precomputed { amax, fp8: None }));
        }
        let (Some(fp8), Some(delayed)) = (self.fp8_params().param(id), state.delayed()) else {
            return Ok(None);
        };
        let Some((scale, amax)) = delayed.of_fp8_resident(id)? else { return Ok(None) };
        let data = fp8.elements(inside)?;
        // Experts share one delayed scale: the first inverse scale is written here, the others are set from it.
        let scale_inv = fp8.scale_inv.narrow(0, 0, 1)?;
        Ok(Some(Precomputed { amax, fp8: Some([data, scale, scale_inv]) }))
    }

    /// amax of all weights; with `precomputed` the optimizer has measured this rank's shards. Collective.
    pub(super) fn measure_weights(
        &self,
        rank: &Rank,
        state: &QuantState,
        masters: &MasterShards,
        precomputed: bool,
    ) -> Result<()> {
        let Some(m) = state.weight_amax() else { return Ok(()) };
        let (s, k) = (&rank.compute, &rank.kernels);
        if !precomputed {
            s.zero(&m.all)?;
            for (i, piece) in masters.shards.iter().enumerate().filter(|(_, p)| !p.param_range.is_empty()) {
                let spec = &self.specs()[i];
                let Some(amax) = m.of(ParamId(i), spec)?.filter(|_| !spec.experts) else { continue };
                let weight = match spec.fp8_resident() {
                    true => masters.values[i].clone(),
                    false => self.shard(ParamId(i), piece)?,
                };
                let rows = matrix(&weight).or_else(|_| weight.view(&[1, weight.numel()]))?;
                k.amax(s, &rows, &amax)?;
            }
        }
        if !masters.scheme.optimizer.is_full_size() {
            rank.dp_cp_group.all_reduce(s, &m.all, ReduceOp::Max, "amax of weights (dp)")?;
        }
        rank.tp.all_reduce(s, &m.all, ReduceOp::Max, "amax of weights (tp)")?;
        if !precomputed {
            self.round(rank, &m.all)?;
        }
        if let Some(experts) = &m.experts {
            s.zero(experts)?;
            if !holds_whole_experts(rank, &masters.scheme) {
                self.measure_experts(rank, m, masters)?;
                self.round(rank, experts)?;
            }
        }
        m.known.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// amax of one weight of a frozen base model, whose values f32 are given as `masters`; none where the recipe needs none.
    /// Collective.
    pub(super) fn measure_base(
        &self,
        rank: &Rank,
        state: &QuantState,
        (id, spec): (ParamId, &ParamSpec),
        masters: &MasterShards,
    ) -> Result<Option<Tensor>> {
        let Some(m) = state.weight_amax() else { return Ok(None) };
        let Some(amax) = m.of(id, spec)? else { return Ok(None) };
        let (s, k) = (&rank.compute, &rank.kernels);
        s.zero(&amax)?;
        if spec.experts && holds_whole_experts(rank, &masters.scheme) {
            return Ok(Some(amax));
        }
        let [n, c] = spec.matrix();
        for run in runs(&masters.shards[id.0].param_range, n * c, usize::MAX) {
            let start = run.elements.start - masters.shards[id.0].param_range.start;
            let x = masters.values[id.0].narrow(0, start, run.elements.len())?;
            let amax = amax.narrow(0, run.matrices.start, run.matrices.len())?;
            match run.whole {
                true => k.amax_stack(s, &x.view(&[run.matrices.len(), n, c])?, &amax)?,
                false => k.amax(s, &matrix(&x)?, &amax)?,
            }
        }
        if !masters.scheme.optimizer.is_full_size() {
            let group = if spec.experts { &rank.expert_dp_group } else { &rank.dp_cp_group };
            group.all_reduce(s, &amax, ReduceOp::Max, "amax of a base weight (dp)")?;
        }
        let group = if spec.experts { &rank.etp } else { &rank.tp };
        group.all_reduce(s, &amax, ReduceOp::Max, "amax of a base weight (tp)")?;
        self.round(rank, &amax)?;
        Ok(Some(amax))
    }

    /// Rounds the amax of masters to that of weights: rounding is monotonic, so the amax of rounded values is the
    /// rounded amax.
    fn round(&self, rank: &Rank, all: &Tensor) -> Result<()> {
        let (s, k) = (&rank.compute, &rank.kernels);
        let rounded = Tensor::empty(s, all.shape(), self.dtype(), Category::Workspace)?;
        k.copy(s, all, &rounded)?;
        k.copy(s, &rounded, all)
    }

    /// amax of the masters of FP8-resident expert weights, all-reduced over the ranks that hold parts of them.
    fn measure_experts(&self, rank: &Rank, m: &WeightAmax, masters: &MasterShards) -> Result<()> {
        let (Some(all), s, k) = (&m.experts, &rank.compute, &rank.kernels) else { return Ok(()) };
        for (i, spec) in self.specs().iter().enumerate().filter(|(_, spec)| spec.experts) {
            let (Some(amax), [n, c]) = (m.of(ParamId(i), spec)?, spec.matrix()) else { continue };
            for run in runs(&masters.shards[i].param_range, n * c, usize::MAX) {
                let start = run.elements.start - masters.shards[i].param_range.start;
                let x = masters.values[i].narrow(0, start, run.elements.len())?;
                let amax = amax.narrow(0, run.matrices.start, run.matrices.len())?;
                match run.whole {
                    true => k.amax_stack(s, &x.view(&[run.matrices.len(), n, c])?, &amax)?,
                    false => k.amax(s, &matrix(&x)?, &amax)?,
                }
            }
        }
        if !masters.scheme.optimizer.is_full_size() {
            rank.expert_dp_group.all_reduce(s, all, ReduceOp::Max, "amax of expert weights (dp)")?;
        }
        Ok(rank.etp.all_reduce(s, all, ReduceOp::Max, "amax of expert weights (etp)")?)
    }
}
