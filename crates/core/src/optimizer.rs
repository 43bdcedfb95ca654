//! The optimizer: master weights, moments, and the update step.

mod blocks;
mod loss_scale;
mod state;

use crate::config::{MasterDtype, StateDtype};
use crate::{Error, Result};
use ferrotron_comm::ReduceOp;
use ferrotron_engine::data_parallel::{MasterShards, ParamShard, Placement, ShardingStrategy, group_rank};
use ferrotron_engine::quant::Precomputed;
use ferrotron_engine::{GradBuffer, ParamId, ParamSpec, Params, Part, Rank, StepState, draw_initial};
use ferrotron_kernels::{Adam, MomentOrder, ParamUpdate, Sgd, counter, scalars};
use ferrotron_tensor::{Category, DType, Tensor};
pub use loss_scale::{LossScale, SavedLossScale};
pub use state::OptimizerState;
use state::StateKind;
use std::ops::Range;

/// The update rule and its constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum UpdateRule {
    /// Adam or AdamW.
    Adam(Adam),
    /// SGD with momentum.
    Sgd(Sgd),
}

/// Result of a step: consecutive f32 step scalars.
pub mod outcome {
    use ferrotron_kernels::scalars;

    /// The global gradient norm before clipping.
    pub const NORM: usize = 0;
    /// The loss scale; 0 without one.
    pub const LOSS_SCALE: usize = scalars::LOSS_SCALE - scalars::GRAD_NORM;
    /// Number of values.
    pub const COUNT: usize = LOSS_SCALE + 1;
}

/// Dtypes of optimizer state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateDtypes {
    /// Of the moments.
    pub moments: StateDtype,
    /// Of the f32 masters of bf16 weights.
    pub master: MasterDtype,
}

/// Optimizer state of this rank's shard of the parameters. f32 weights are their own masters.
pub struct Optimizer {
    rule: UpdateRule,
    placement: Placement,
    /// This rank's shard of each parameter, in order of declaration; some may be empty.
    pieces: Vec<ParamShard>,
    masters: OptimizerState,
    moments: Vec<OptimizerState>,
    decays: Vec<bool>,
    scalars: Tensor,
    max_norm: Option<f32>,
    /// Loss scale of f16 training.
    loss_scale: Option<LossScale>,
    /// Step count and powers of the betas, on the device, which alone knows in time whether a step is skipped.
    counter: Tensor,
}

/// Hyperparameters of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepRates {
    /// Learning rate.
    pub lr: f64,
    /// Weight decay of matrices.
    pub weight_decay: f64,
}

/// Returns the values of element ranges of a logical tensor, concatenated.
pub type Values<'a> = dyn Fn(&Part, &[Range<usize>]) -> Result<Vec<f32>> + 'a;

impl Optimizer {
    /// Fresh state for `params`. [`Optimizer::initialise`] or [`Optimizer::fill`] must set the weights afterwards.
    pub fn new(
        rank: &Rank,
        params: &Params,
        scheme: ShardingStrategy,
        rule: UpdateRule,
        dtypes: StateDtypes,
        max_norm: Option<f32>,
    ) -> Result<Optimizer> {
        let placement = scheme.optimizer;
        let piece = |(i, spec): (usize, &ParamSpec)| {
            params.plan().piece(ParamId(i), placement, group_rank(rank.dp_group(spec.experts)))
        };
        let pieces: Vec<ParamShard> = params.specs().iter().enumerate().map(piece).collect();
        if matches!(dtypes.moments, StateDtype::F16 | StateDtype::Fp8) {
            blocks::check(params.specs(), &pieces)?;
        }
        if dtypes.master == MasterDtype::Remainder && params.specs().iter().any(|s| s.fp8_resident()) {
            let what = "optimizer.master_dtype: a remainder completes a bf16 weight, and weights that are bytes have none; use \"f32\"";
            return Err(Error::Invalid(what.into()));
        }
        let new =
            |name, kind, dtype| OptimizerState::new((name, kind), rank, params, placement, dtype, &pieces);
        let masters = match (params.dtype(), dtypes.master) {
            (DType::F32, _) => OptimizerState::in_weights("model", rank, params, placement, &pieces)?,
            (_, MasterDtype::F32) => new("model", StateKind::Masters, DType::F32)?,
            (_, MasterDtype::Remainder) => new("model", StateKind::Remainders, DType::I16)?,
        };
        let names: &[(&'static str, MomentOrder)] = match rule {
            UpdateRule::Adam(_) => &[("adam.m", MomentOrder::First), ("adam.v", MomentOrder::Second)],
            UpdateRule::Sgd(_) => &[("sgd.momentum", MomentOrder::First)],
        };
        let moment = |(name, order): &(&'static str, MomentOrder)| {
            new(name, StateKind::Moment(*order), dtypes.moments.dtype())
        };
        let moments = names.iter().map(moment).collect::<Result<_>>()?;
        let zeros = |n, dtype| rank.compute.zeros(&[n], dtype, Category::Optimizer);
        let optimizer = Optimizer {
            rule,
            placement,
            masters,
            moments,
            pieces,
            decays: params.specs().iter().map(|p| p.decays()).collect(),
            scalars: zeros(scalars::COUNT, DType::F32)?,
            max_norm,
            loss_scale: None,
            counter: zeros(counter::COUNT, DType::F64)?,
        };
        optimizer.set_steps(rank, 0)?;
        Ok(optimizer)
    }

    /// The optimizer of a scaled loss.
    pub fn with_loss_scale(self, loss_scale: Option<LossScale>) -> Optimizer {
        Optimizer { loss_scale, ..self }
    }

    /// The loss scale, if there is one.
    pub fn loss_scale(&self) -> Option<&LossScale> {
        self.loss_scale.as_ref()
    }

    /// Draws the declared initial values of the master weights on the device and copies them to the model's weights.
    pub fn initialise(&self, rank: &Rank, params: &Params, step_state: &StepState) -> Result<()> {
        params.wait_params(rank)?;
        for (i, spec) in params.specs().iter().enumerate() {
            let (master, mut at) = (self.master_f32(rank, i)?, 0);
            for (part, runs) in spec.runs(&self.pieces[i].param_range) {
                let n = runs.iter().map(Range::len).sum();
                draw_initial(rank, part, &runs, &master.narrow(0, at, n)?)?;
                at += n;
            }
            self.masters.put(rank, &self.weight(params, i)?, i, &master)?;
        }
        self.sync_params(rank, params, step_state)
    }

    /// An f32 buffer for a parameter's master weights, input of [`OptimizerState::put`]: the masters themselves where they
    /// are f32.
    fn master_f32(&self, rank: &Rank, i: usize) -> Result<Tensor> {
        let piece = &self.masters.pieces()[i];
        match self.masters.kind() {
            StateKind::Remainders => {
                Ok(Tensor::empty(&rank.compute, piece.shape(), DType::F32, Category::Workspace)?)
            }
            _ => Ok(piece.clone()),
        }
    }

    /// Sets the master weights to `values` of the logical tensors and copies them to the model's weights.
    pub fn fill(&self, rank: &Rank, params: &Params, step_state: &StepState, values: &Values) -> Result<()> {
        params.wait_params(rank)?;
        for (i, spec) in params.specs().iter().enumerate() {
            let mut held = Vec::with_capacity(self.pieces[i].param_range.len());
            for (part, runs) in spec.runs(&self.pieces[i].param_range) {
                held.extend(values(part, &runs)?);
            }
            self.put(rank, params, &self.masters, i, &held)?;
        }
        self.sync_params(rank, params, step_state)
    }

    /// Writes f32 values to this rank's shard of a parameter of `state`, rounded to its dtype. [`Optimizer::publish`] must
    /// follow master weights.
    pub fn put(
        &self,
        rank: &Rank,
        params: &Params,
        state: &OptimizerState,
        i: usize,
        values: &[f32],
    ) -> Result<()> {
        let wide = rank.compute.upload(values, &[values.len()], Category::Workspace)?;
        state.put(rank, &self.weight(params, i)?, i, &wide)
    }

    /// Rounds the master weights to the model's weights and gathers those on all ranks. Collective.
    pub fn sync_params(&self, rank: &Rank, params: &Params, step_state: &StepState) -> Result<()> {
        params.wait_params(rank)?;
        // With remainders, the model's weights are the high halves of the masters.
        if params.dtype() != DType::F32 && self.masters.kind() == StateKind::Masters {
            let numbers = |(i, _): &(usize, &Tensor)| !params.specs()[*i].fp8_resident();
            for (i, master) in self.masters.pieces().iter().enumerate().filter(numbers) {
                rank.kernels.copy(&rank.compute, master, &self.weight(params, i)?)?;
            }
        }
        self.all_gather_params(rank, params, step_state, false)?;
        Ok(params.wait_params(rank)?)
    }

    /// This rank's shards of the model's weights.
    fn weights(&self, params: &Params) -> Result<Vec<Tensor>> {
        (0..self.pieces.len()).map(|i| self.weight(params, i)).collect()
    }

    /// The shard of parameter `i`; empty for an FP8-resident weight.
    fn weight(&self, params: &Params, i: usize) -> Result<Tensor> {
        let (inside, value) = (&self.pieces[i].param_range, &params.values()[i]);
        if params.specs()[i].fp8_resident() {
            return Ok(value.clone());
        }
        Ok(value.view(&[value.numel()])?.narrow(0, inside.start, inside.len())?)
    }

    /// Gathers the model's weights on all ranks; see [`Params::sync_params`].
    fn all_gather_params(
        &self,
        rank: &Rank,
        params: &Params,
        step_state: &StepState,
        precomputed: bool,
    ) -> Result<()> {
        let (placement, shards, values) = (self.placement, &self.pieces[..], self.masters.pieces());
        Ok(params.sync_params(rank, step_state, &MasterShards { placement, shards, values }, precomputed)?)
    }

    /// Master weights and moments, as checkpoints hold them.
    pub fn states(&self) -> Vec<&OptimizerState> {
        std::iter::once(&self.masters).chain(&self.moments).collect()
    }

    /// This rank's shard of each parameter, in order of declaration.
    pub fn pieces(&self) -> &[ParamShard] {
        &self.pieces
    }

    /// f32 master weights in order of declaration, gathered from their shards. Collective.
    pub fn gathered(&self, rank: &Rank, params: &Params) -> Result<Vec<Tensor>> {
        params.wait_params(rank)?;
        let mut buckets = Vec::new();
        for bucket in 0..params.plan().buckets().len() {
            buckets.push(self.masters.gathered(rank, params, self.placement, bucket)?);
        }
        let view = |(i, spec): (usize, &ParamSpec)| {
            let (bucket, r) = params.plan().slot(ParamId(i));
            Ok(buckets[bucket].narrow(0, r.start, r.len())?.view(&spec.shape)?)
        };
        params.specs().iter().enumerate().map(view).collect()
    }

    /// How the state is distributed over data-parallel ranks.
    pub(crate) fn placement(&self) -> Placement {
        self.placement
    }

    /// This rank's shard of a bucket of state `index`, as checkpoints hold it, and whether it is the state's own memory.
    pub(crate) fn saved_bucket(
        &self,
        rank: &Rank,
        params: &Params,
        index: usize,
        bucket: usize,
    ) -> Result<(Tensor, bool)> {
        self.states()[index].saved_bucket(rank, params, self.placement, bucket)
    }

    /// Steps done, without skipped ones. Synchronizes with the device.
    pub fn steps(&self, rank: &Rank) -> Result<u64> {
        Ok(rank.compute.download::<f64>(&self.counter)?[counter::STEPS] as u64)
    }

    /// Continues from `steps` steps.
    pub fn set_steps(&self, rank: &Rank, steps: u64) -> Result<()> {
        Ok(rank.compute.upload_into(&self.counter, &counter::after(steps, self.betas()))?)
    }

    fn betas(&self) -> [f32; 2] {
        match self.rule {
            UpdateRule::Adam(a) => [a.beta1, a.beta2],
            UpdateRule::Sgd(_) => [0.0; 2],
        }
    }

    /// One step with reduced gradients. Returns, on the device, the global gradient norm before clipping and the loss scale
    /// ([`outcome`]). If the norm is not finite, nothing changes.
    pub fn step(
        &self,
        rank: &Rank,
        params: &Params,
        step_state: &StepState,
        grads: &GradBuffer,
        rates: StepRates,
    ) -> Result<Tensor> {
        rank.compute.upload_into(&self.scalars, &self.scalar_values(rates))?;
        self.apply(rank, params, step_state, grads)
    }

    /// The device part of a step. It reads its inputs from [`Optimizer::scalars`], so that a CUDA graph can replay it.
    pub(crate) fn apply(
        &self,
        rank: &Rank,
        params: &Params,
        step_state: &StepState,
        grads: &GradBuffer,
    ) -> Result<Tensor> {
        let (k, s) = (&rank.kernels, &rank.compute);
        params.wait_params(rank)?;
        // Exactly one rank counts each element of the model.
        let counted = grads.norm_shards(rank)?;
        let square = Tensor::empty(s, &[1], DType::F64, Category::Communication)?;
        k.grad_square_sum(s, &counted.iter().collect::<Vec<_>>(), &square)?;
        rank.world.all().all_reduce(s, &square, ReduceOp::Sum, "gradient norm")?;
        if let Some(scale) = &self.loss_scale {
            scale.unscale(rank, &square)?;
        }
        k.clip_factor_from_square_sum(s, &square, self.max_norm, &self.scalars)?;
        if let Some(scale) = &self.loss_scale {
            scale.update(rank, &self.scalars)?;
        }
        k.advance_step(s, self.betas(), &self.counter, &self.scalars)?;
        let narrow = params.dtype() != DType::F32;
        let weights = self.weights(params)?;
        let grads = (0..weights.len())
            .map(|i| Ok(grads.piece(rank, ParamId(i))?.1))
            .collect::<Result<Vec<Tensor>>>()?;
        // Adam computes the amax of new FP8 weights (or casts them) in the same pass.
        let looks = matches!(self.rule, UpdateRule::Adam(_));
        let made = (0..weights.len())
            .map(|i| {
                if looks {
                    Ok(params.precomputed(step_state, ParamId(i), &self.pieces[i].param_range)?)
                } else {
                    Ok(None)
                }
            })
            .collect::<Result<Vec<Option<Precomputed>>>>()?;
        if looks {
            params.begin_update(rank, step_state, &self.scalars)?;
        }
        let update = |i: usize| ParamUpdate {
            master: &self.masters.pieces()[i],
            weight: (narrow && !params.specs()[i].fp8_resident()).then(|| &weights[i]),
            grad: &grads[i],
            first: self.moments[0].moment(i),
            second: self.moments.get(1).map(|m| m.moment(i)),
            lr_mult: 1.0,
            wd_mult: if self.decays[i] { 1.0 } else { 0.0 },
            fp8: made[i].as_ref().map(Precomputed::kernel_outputs),
        };
        let list: Vec<ParamUpdate> =
            (0..weights.len()).filter(|i| !self.pieces[*i].param_range.is_empty()).map(update).collect();
        match self.rule {
            UpdateRule::Adam(adam) => k.adam(s, adam, &self.scalars, &list)?,
            UpdateRule::Sgd(sgd) => k.sgd(s, sgd, &self.scalars, &list)?,
        }
        self.all_gather_params(rank, params, step_state, looks)?;
        // A copy: the next step overwrites the buffer.
        let outcome = Tensor::empty(s, &[outcome::COUNT], DType::F32, Category::Workspace)?;
        s.copy(&self.scalars.narrow(0, scalars::GRAD_NORM, outcome::COUNT)?, &outcome)?;
        Ok(outcome)
    }

    /// Number of zero elements in the reduced gradients of the model. Collective, and slow.
    pub fn count_zero_grads(&self, rank: &Rank, grads: &GradBuffer) -> Result<u64> {
        let s = &rank.compute;
        let mut zeros = 0;
        for g in grads.norm_shards(rank)? {
            zeros += s.download::<f32>(&g)?.iter().filter(|x| **x == 0.0).count();
        }
        let zeros = s.upload(&[zeros as i64], &[1], Category::Communication)?;
        rank.world.all().all_reduce(s, &zeros, ReduceOp::Sum, "zeros")?;
        Ok(s.download::<i64>(&zeros)?[0] as u64)
    }

    /// Inputs of a step on the device: f32 `[scalars::COUNT]`.
    pub(crate) fn scalars(&self) -> &Tensor {
        &self.scalars
    }

    /// The step scalars that the host sets; the device computes the norm and the clip factor.
    pub(crate) fn scalar_values(&self, rates: StepRates) -> [f32; scalars::COUNT] {
        let mut values = [0f32; scalars::COUNT];
        values[scalars::LR] = rates.lr as f32;
        values[scalars::WEIGHT_DECAY] = rates.weight_decay as f32;
        values
    }
}
