//! What narrow products need of new weights, left there by the optimizer: it has them in hand, so that nobody reads them
//! once more. Current scaling needs the largest magnitude of each; delayed scaling knows its scale beforehand, and weights
//! that are bytes are made bytes of in the optimizer's own pass.

use super::runs::{matrix, runs};
use super::{Method, QuantState};
use crate::data_parallel::{MasterShards, Placement};
use crate::{ParamId, ParamSpec, Params, Rank, StepState};
use ferrotron_comm::ReduceOp;
use ferrotron_kernels::{Fp8DataOut, Fp8WeightOut};
use ferrotron_tensor::{Category, DType, Result, Tensor};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// Largest magnitudes of the weights of narrow products, under current scaling.
pub(super) struct WeightAmax {
    /// f32 `[weights]`, on which all ranks have agreed that have parts of them.
    all: Tensor,
    /// f32 `[matrices]` of experts' weights that are bytes; others are looked at when they are narrowed.
    experts: Option<Tensor>,
    /// By parameter, in one or the other.
    places: Vec<Option<usize>>,
    /// Are they those of the weights as they are now?
    known: AtomicBool,
}

impl WeightAmax {
    /// For the parameters of a model; None where nobody asks for them.
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

    /// Those of the matrices of a weight, f32 `[matrices]`, whether they are known or not.
    fn of(&self, id: ParamId, spec: &ParamSpec) -> Result<Option<Tensor>> {
        let Some(at) = self.places[id.0] else { return Ok(None) };
        match (spec.experts, &self.experts) {
            (true, experts) => experts.as_ref().map(|all| all.narrow(0, at, spec.matrices)).transpose(),
            (false, _) => self.all.narrow(0, at, 1).map(Some),
        }
    }

    /// Nobody knows them any more.
    pub(super) fn invalidate(&self) {
        self.known.store(false, Ordering::Relaxed);
    }

    /// Those of a weight, if they are known.
    pub(super) fn known(&self, id: ParamId, spec: &ParamSpec) -> Result<Option<Tensor>> {
        if self.known.load(Ordering::Relaxed) { self.of(id, spec) } else { Ok(None) }
    }
}

/// Has a rank all of its experts' masters, which nobody shares with it? Then it measures weights as it makes bytes of them.
pub(super) fn holds_whole_experts(rank: &Rank, placement: Placement) -> bool {
    let whole = placement == Placement::Replicate || rank.expert_dp_group.size() == 1;
    whole && rank.etp.size() == 1
}

/// Where an optimizer leaves what is needed of a new weight.
pub struct Precomputed {
    amax: Tensor,
    /// Bytes, scale, inverse scale.
    bytes: Option<[Tensor; 3]>,
}

impl Precomputed {
    /// For the kernel.
    pub fn kernel_outputs(&self) -> Fp8WeightOut<'_> {
        let bytes = self.bytes.as_ref();
        let bytes = bytes.map(|[data, scale, scale_inv]| Fp8DataOut { data, scale, scale_inv });
        Fp8WeightOut { amax: &self.amax, bytes }
    }
}

impl Params {
    /// Before a step of an optimizer that leaves [`Params::precomputed`] of every weight. Of a step that changes nothing,
    /// magnitudes stay.
    pub fn begin_update(&self, rank: &Rank, state: &StepState, scalars: &Tensor) -> Result<()> {
        let (Some(state), s) = (state.quant(), &rank.compute) else { return Ok(()) };
        if let Some(m) = state.weight_amax() {
            rank.kernels.reset_amax(s, scalars, &m.all)?;
        }
        // These are made again by every step, under new scales.
        state.delayed().and_then(|d| d.next_amax.as_ref()).map_or(Ok(()), |amax| s.zero(amax))
    }

    /// What the optimizer may leave of elements `inside` of a weight, which this rank has.
    pub fn precomputed(
        &self,
        state: &StepState,
        id: ParamId,
        inside: &Range<usize>,
    ) -> Result<Option<Precomputed>> {
        let Some(state) = state.quant() else { return Ok(None) };
        if let Some(m) = state.weight_amax() {
            // Experts have a magnitude each, and are measured afterwards.
            let spec = &self.specs()[id.0];
            let amax = if spec.experts { None } else { m.of(id, spec)? };
            return Ok(amax.map(|amax| Precomputed { amax, bytes: None }));
        }
        let (Some(bytes), Some(delayed)) = (self.fp8_params().weight(id), state.delayed()) else {
            return Ok(None);
        };
        let Some((scale, amax)) = delayed.of_fp8_resident(id)? else { return Ok(None) };
        let data = bytes.data.view(&[bytes.data.numel()])?.narrow(0, inside.start, inside.len())?;
        // Of experts, who share one, the first; the others follow.
        let scale_inv = bytes.scale_inv.narrow(0, 0, 1)?;
        Ok(Some(Precomputed { amax, bytes: Some([data, scale, scale_inv]) }))
    }

    /// Largest magnitudes of all weights, of which the optimizer may have `made` those of this rank's `pieces`. Every rank
    /// calls it.
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
                    false => {
                        let w = &self.values()[i];
                        w.view(&[w.numel()])?.narrow(0, piece.param_range.start, piece.param_range.len())?
                    }
                };
                let rows = matrix(&weight).or_else(|_| weight.view(&[1, weight.numel()]))?;
                k.amax(s, &rows, &amax)?;
            }
        }
        if masters.placement != Placement::Replicate {
            rank.dp_cp_group.all_reduce(s, &m.all, ReduceOp::Max, "magnitudes of weights of copies")?;
        }
        rank.tp.all_reduce(s, &m.all, ReduceOp::Max, "magnitudes of weights")?;
        if !precomputed {
            self.round(rank, &m.all)?;
        }
        if let Some(experts) = &m.experts {
            s.zero(experts)?;
            if !holds_whole_experts(rank, masters.placement) {
                self.measure_experts(rank, m, masters)?;
                self.round(rank, experts)?;
            }
        }
        m.known.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// WeightAmax of masters as those of weights: rounding keeps order, so the largest of rounded numbers is the largest,
    /// rounded.
    fn round(&self, rank: &Rank, all: &Tensor) -> Result<()> {
        let (s, k) = (&rank.compute, &rank.kernels);
        let rounded = Tensor::empty(s, all.shape(), self.dtype(), Category::Workspace)?;
        k.copy(s, all, &rounded)?;
        k.copy(s, &rounded, all)
    }

    /// Largest magnitudes of the masters of experts' weights that are bytes, on which all ranks agree that have parts of them;
    /// zeros before.
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
        if masters.placement != Placement::Replicate {
            rank.expert_dp_group.all_reduce(
                s,
                all,
                ReduceOp::Max,
                "magnitudes of experts' weights of copies",
            )?;
        }
        Ok(rank.etp.all_reduce(s, all, ReduceOp::Max, "magnitudes of experts' weights")?)
    }
}
