//! The optimizer: master weights, moments, and the update step.

mod blocks;
mod executor;
mod groups;
mod host_update;
mod loss_scale;
mod muon;
mod offload;
mod persistent;
mod saved;
mod state;
mod streamed;
mod weights;

use crate::config::{MasterDtype, OptimizerCompute, StateDtype};
use crate::{Error, Result};
use executor::Executor;
use ferrotron_comm::ReduceOp;
use ferrotron_engine::data_parallel::{Bucket, ParamShard, Placement, ShardingStrategy};
use ferrotron_engine::quant::Precomputed;
use ferrotron_engine::{GradBuffer, ParamId, ParamSpec, Params, Part, Rank, StepState};
use ferrotron_kernels::{Kernels, Moment, ParamUpdate, counter, scalars};
use ferrotron_tensor::{Category, DType, Stream, Tensor};
pub use groups::{GroupRule, ParamGroups, UpdateRule};
pub use loss_scale::{LossScale, SavedLossScale};
use muon::LineMoments;
pub use muon::MuonRule;
pub(crate) use muon::{TpMode, is_normuon, line_name, workspace_bytes as muon_workspace_bytes};
pub use offload::StateStorage;
pub(crate) use offload::on_host as buckets_on_host;
use saved::StateReads;
pub(crate) use saved::{SavedBucket, StateRead};
pub use state::OptimizerState;
use state::{StateKind, StoredAs};
use std::ops::Range;
use std::sync::Arc;
use streamed::{StatePiece, StateStream, StreamedSizes};
pub(crate) use streamed::{staged_bytes, streamed_bytes};

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

/// Optimizer state of this rank's shard of the parameters. f32 weights are their own masters.
pub struct Optimizer {
    groups: Arc<ParamGroups>,
    scheme: ShardingStrategy,
    /// This rank's shard of each parameter, in order of declaration; some may be empty.
    pieces: Vec<ParamShard>,
    masters: OptimizerState,
    moments: Vec<OptimizerState>,
    /// Where state is in host memory: how it gets to the device and back.
    stream: Option<StateStream>,
    /// Who else reads that state.
    reads: StateReads,
    /// NorMuon's second moment, one per row or column of each matrix.
    lines: LineMoments,
    /// Step counts; the first belongs to the rule of ungrouped parameters.
    clocks: Vec<StepClock>,
    max_norm: Option<f32>,
    /// Loss scale of f16 training.
    loss_scale: Option<LossScale>,
}

/// Step count and powers of a rule's betas, on the device, which alone knows in time whether a step is skipped; and the
/// scalars of a step with them.
struct StepClock {
    betas: [f32; 2],
    counter: Tensor,
    scalars: Tensor,
}

impl StepClock {
    fn new(rank: &Rank, betas: [f32; 2]) -> Result<StepClock> {
        let zeros = |n, dtype| rank.compute.zeros(&[n], dtype, Category::Optimizer);
        let (counter, scalars) = (zeros(counter::COUNT, DType::F64)?, zeros(scalars::COUNT, DType::F32)?);
        Ok(StepClock { betas, counter, scalars })
    }
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
pub type Values<'a> = dyn Fn(&Part, &[Range<usize>]) -> Result<Vec<f32>> + Sync + 'a;

impl Optimizer {
    /// Fresh state for `params`, whose specs name their groups. [`Optimizer::initialise`] or [`Optimizer::fill`] must set
    /// the weights afterwards.
    pub fn new(
        rank: &Rank,
        params: &Params,
        groups: Arc<ParamGroups>,
        storage: StateStorage,
        max_norm: Option<f32>,
    ) -> Result<Optimizer> {
        let (scheme, master) = (storage.sharding, storage.master);
        let piece = |(i, spec): (usize, &ParamSpec)| {
            params.plan().piece(ParamId(i), scheme.optimizer, scheme.optimizer_place_of(rank, spec.experts))
        };
        let pieces: Vec<ParamShard> = params.specs().iter().enumerate().map(piece).collect();
        blocks::check(params.specs(), &pieces, |spec| {
            let rule = &groups.rules()[spec.group.index];
            !rule.frozen && matches!(rule.moments, StateDtype::F16 | StateDtype::Fp8)
        })?;
        if master == MasterDtype::Remainder && params.specs().iter().any(|s| s.fp8_resident()) {
            return Err(Error::Invalid(MasterDtype::REMAINDER_OF_FP8.into()));
        }
        let held = |b: &Bucket| b.held(scheme.optimizer, scheme.optimizer_place_of(rank, b.experts)).len();
        let bytes = |b: &Bucket| held(b) * storage.bytes_per_element(params, &groups, b);
        let on_host = offload::on_host(params.plan().buckets().iter().map(bytes), storage.on_host);
        let new = |name, kind, dtype: StoredAs| {
            OptimizerState::new((name, kind), rank, params, &scheme, (dtype, &on_host), &pieces)
        };
        // The base model of adapters is its own copy.
        let base = |b: &Bucket| groups.rules().get(b.storage).is_some_and(|rule| rule.base);
        let masters = match (params.dtype(), master) {
            (DType::F32, _) => {
                let stored = |b: &Bucket| (!base(b)).then_some(DType::F32);
                OptimizerState::in_weights("model", rank, params, &scheme, (&pieces, &stored))?
            }
            (_, MasterDtype::F32) => {
                new("model", StateKind::Masters, &|b: &Bucket| (!base(b)).then_some(DType::F32))?
            }
            (_, MasterDtype::Remainder) => {
                new("model", StateKind::Remainders, &|b: &Bucket| (!base(b)).then_some(DType::I16))?
            }
        };
        let mut moments: Vec<OptimizerState> = Vec::new();
        for (name, order) in groups.states() {
            let dtype = |b: &Bucket| {
                let rule = groups.storage(b.storage);
                rule.states().iter().any(|s| s.0 == name).then(|| rule.state_dtype(name))
            };
            moments.push(new(name, StateKind::Moment(order), &dtype)?);
        }
        let owned = |i: usize| !pieces[i].param_range.is_empty();
        let lines = LineMoments::new(rank, params.specs(), groups.rules(), owned)?;
        let mut clocks: Vec<StepClock> = Vec::new();
        for betas in groups.betas() {
            clocks.push(StepClock::new(rank, betas)?);
        }
        let mut optimizer = Optimizer {
            groups,
            scheme,
            pieces,
            masters,
            moments,
            stream: None,
            reads: StateReads::default(),
            lines,
            clocks,
            max_norm,
            loss_scale: None,
        };
        optimizer.set_steps(rank, 0)?;
        if on_host.contains(&true) || scheme.host.any() {
            let longest = params.plan().buckets().iter().map(held).max().unwrap_or(0);
            let most = params.plan().buckets().iter().map(|b| b.spans.len()).max().unwrap_or(0);
            let sizes = StreamedSizes {
                bucket: (longest, most),
                slot: optimizer.slot_sizes(params),
                params: params.specs().len(),
                clocks: optimizer.clocks.len(),
            };
            // The device updates where weights or gradients are in host memory, too.
            let compute = if scheme.host.any() { OptimizerCompute::Device } else { storage.compute };
            optimizer.stream = Some(StateStream::new(rank, compute, sizes)?);
        }
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

    /// Master weights and moments, as checkpoints hold them.
    pub fn states(&self) -> Vec<&OptimizerState> {
        std::iter::once(&self.masters).chain(&self.moments).collect()
    }

    /// This rank's shard of each parameter, in order of declaration.
    pub fn pieces(&self) -> &[ParamShard] {
        &self.pieces
    }

    /// How the state is distributed over data-parallel ranks.
    pub(crate) fn placement(&self) -> Placement {
        self.scheme.optimizer
    }

    /// This rank's shard of a bucket of state `index`, as checkpoints hold it.
    pub(crate) fn saved_bucket(
        &self,
        rank: &Rank,
        params: &Params,
        index: usize,
        bucket: usize,
    ) -> Result<SavedBucket> {
        self.wait_state(rank)?;
        self.states()[index].saved_bucket(rank, params, &self.scheme, bucket)
    }

    /// State in host memory is read on `stream`, by any thread, until what is returned is dropped: updates wait until then.
    pub(crate) fn begin_read(&self, stream: &Stream) -> StateRead {
        self.reads.begin(stream)
    }

    /// Makes the compute stream wait for state on its way to the host.
    pub(crate) fn wait_state(&self, rank: &Rank) -> Result<()> {
        self.stream.as_ref().map_or(Ok(()), |stream| stream.wait(rank))
    }

    /// Steps done, without skipped ones. Synchronizes with the device.
    pub fn steps(&self, rank: &Rank) -> Result<u64> {
        Ok(rank.compute.download::<f64>(&self.clocks[0].counter)?[counter::STEPS] as u64)
    }

    /// Continues from `steps` steps.
    pub fn set_steps(&self, rank: &Rank, steps: u64) -> Result<()> {
        let set = |c: &StepClock| rank.compute.upload_into(&c.counter, &counter::after(steps, c.betas));
        Ok(self.clocks.iter().try_for_each(set)?)
    }

    /// The step scalars of a rule.
    fn scalars_of(&self, rule: &UpdateRule) -> &Tensor {
        &self.clocks[self.clock_of(rule)].scalars
    }

    /// The step clock of a rule.
    fn clock_of(&self, rule: &UpdateRule) -> usize {
        self.clocks.iter().position(|c| rule.betas().is_none_or(|betas| betas == c.betas)).unwrap_or(0)
    }

    /// Second moments of NorMuon: their parameter, and their name in checkpoints.
    pub(crate) fn line_moments<'a>(
        &'a self,
        params: &'a Params,
    ) -> impl Iterator<Item = (&'a ParamSpec, String, &'a Tensor)> {
        self.lines.named(params.specs())
    }

    /// The parameter groups.
    pub fn groups(&self) -> &Arc<ParamGroups> {
        &self.groups
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
        rank.compute.upload_into(self.scalars(), &self.scalar_values(rates))?;
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
        k.clip_factor_from_square_sum(s, &square, self.max_norm, self.scalars())?;
        if let Some(scale) = &self.loss_scale {
            scale.update(rank, self.scalars())?;
        }
        for (i, clock) in self.clocks.iter().enumerate() {
            if i > 0 {
                s.copy(self.scalars(), &clock.scalars)?;
            }
            k.advance_step(s, clock.betas, &clock.counter, &clock.scalars)?;
        }
        // Nothing reads the old weights any more, nor a checkpoint the old state.
        params.wait_params(rank)?;
        self.reads.wait(rank)?;
        // Adam computes the amax of new FP8 weights (or casts them) in the same pass.
        let looks = self.groups.all_adam();
        if looks {
            params.begin_update(rank, step_state, self.scalars())?;
        }
        let scalars: Vec<&Tensor> = self.clocks.iter().map(|c| &c.scalars).collect();
        let executor = match &self.stream {
            Some(stream) => stream.begin_step(rank, &scalars)?,
            None => Executor::Device,
        };
        for buckets in params.update_order(rank, step_state, self.scheme.optimizer) {
            for (index, group) in self.groups.rules().iter().enumerate().filter(|(_, g)| !g.frozen) {
                let is_muon = matches!(group.rule, UpdateRule::Muon(_));
                let mine = |i: &usize| {
                    params.specs()[*i].group.index == index
                        && !self.pieces[*i].param_range.is_empty()
                        && buckets.contains(&params.plan().slot(ParamId(*i)).0)
                        && (is_muon || !self.is_streamed(*i))
                };
                let list: Vec<usize> = (0..self.pieces.len()).filter(mine).collect();
                match &group.rule {
                    UpdateRule::Muon(rule) => self.muon_step(rank, params, grads, (group, rule), &list)?,
                    _ => {
                        let list: Vec<StatePiece> = list.iter().map(|i| self.whole(*i)).collect();
                        self.elementwise_step(rank, params, (step_state, looks), grads, (group, &list))?;
                    }
                }
            }
            self.streamed_step(rank, params, (step_state, looks), grads, (buckets.clone(), executor))?;
            if step_state.quant().is_some() {
                // Weights are quantized from their masters.
                self.wait_state(rank)?;
            }
            self.all_gather_params(rank, params, step_state, (buckets, looks))?;
        }
        // A copy: the next step overwrites the buffer.
        let outcome = Tensor::empty(s, &[outcome::COUNT], DType::F32, Category::Workspace)?;
        s.copy(&self.scalars().narrow(0, scalars::GRAD_NORM, outcome::COUNT)?, &outcome)?;
        Ok(outcome)
    }

    /// A step of a group whose rule updates every element by itself: one launch for many parameters.
    fn elementwise_step(
        &self,
        rank: &Rank,
        params: &Params,
        (step_state, looks): (&StepState, bool),
        grads: &GradBuffer,
        (group, list): (&GroupRule, &[StatePiece]),
    ) -> Result<()> {
        let pieces = self.updated_pieces(rank, params, (step_state, looks), grads, (group, list))?;
        if params.host().weights && self.masters.kind() == StateKind::Masters {
            // A skipped step leaves the slot as it is, which is copied to the host all the same.
            for (master, weight) in pieces.iter().filter_map(|p| Some((&p.master, p.weight.as_ref()?))) {
                rank.kernels.copy(&rank.compute, master, weight)?;
            }
        }
        let list: Vec<ParamUpdate> = pieces.iter().filter_map(|p| p.update(group)).collect();
        group.rule.launch(&*rank.kernels, &rank.compute, self.scalars_of(&group.rule), &list)
    }

    /// The tensors of a group's pieces.
    fn updated_pieces<'a>(
        &self,
        rank: &Rank,
        params: &'a Params,
        (step_state, looks): (&StepState, bool),
        grads: &GradBuffer,
        (group, list): (&GroupRule, &[StatePiece]),
    ) -> Result<Vec<UpdatedPiece<'a>>> {
        let narrow = params.dtype() != DType::F32;
        let named = |name: &str| self.moments.iter().position(|m| m.name() == name);
        let states: Vec<usize> = group.states().iter().filter_map(|(n, _)| named(n)).map(|i| 1 + i).collect();
        let mut pieces = Vec::with_capacity(list.len());
        for piece in list {
            let (i, range) = (piece.param, &piece.range);
            let spec = &params.specs()[i];
            let weight = match narrow && !spec.fp8_resident() {
                true => {
                    let weight = self.weight(params, i)?.narrow(0, range.start, range.len())?;
                    Some(self.through_slot(piece, weight)?)
                }
                false => None,
            };
            let begin = self.pieces[i].param_range.start;
            let inside = begin + range.start..begin + range.end;
            let fp8 = match looks {
                true => params.precomputed(step_state, ParamId(i), &inside)?,
                false => None,
            };
            let fp8 = match fp8 {
                Some(outputs) => Some(match outputs.fp8().cloned() {
                    Some(data) => outputs.through(self.through_slot(piece, data)?),
                    None => outputs,
                }),
                None => None,
            };
            let (master, grad) = (self.state_of(0, piece)?.0, self.grad_of(rank, grads, piece)?);
            let moments = states.iter().map(|m| self.state_of(*m, piece)).collect::<Result<Vec<_>>>()?;
            pieces.push(UpdatedPiece { spec, master, weight, grad, moments, fp8 });
        }
        Ok(pieces)
    }

    /// Number of zero elements in the reduced gradients of the model, f64 `[1]` on the device. Collective.
    pub fn count_zero_grads(&self, rank: &Rank, grads: &GradBuffer) -> Result<Tensor> {
        let s = &rank.compute;
        let zeros = Tensor::empty(s, &[1], DType::F64, Category::Communication)?;
        rank.kernels.count_zeros(s, &grads.norm_shards(rank)?.iter().collect::<Vec<_>>(), &zeros)?;
        rank.world.all().all_reduce(s, &zeros, ReduceOp::Sum, "zeros")?;
        Ok(zeros)
    }

    /// Inputs of a step on the device: f32 `[scalars::COUNT]`.
    pub(crate) fn scalars(&self) -> &Tensor {
        &self.clocks[0].scalars
    }

    /// The step scalars that the host sets; the device computes the norm and the clip factor.
    pub(crate) fn scalar_values(&self, rates: StepRates) -> [f32; scalars::COUNT] {
        let mut values = [0f32; scalars::COUNT];
        values[scalars::LR] = rates.lr as f32;
        values[scalars::WEIGHT_DECAY] = rates.weight_decay as f32;
        values
    }
}

impl UpdateRule {
    /// A step of a rule that updates every element by itself.
    fn launch(&self, k: &dyn Kernels, s: &Stream, scalars: &Tensor, list: &[ParamUpdate]) -> Result<()> {
        match *self {
            UpdateRule::Adam(adam) => k.adam(s, adam, scalars, list)?,
            UpdateRule::Sgd(sgd) => k.sgd(s, sgd, scalars, list)?,
            UpdateRule::Lion(lion) => k.lion(s, lion, scalars, list)?,
            UpdateRule::Muon(_) => {}
        }
        Ok(())
    }
}

/// The tensors of a range of a parameter that is updated.
struct UpdatedPiece<'a> {
    spec: &'a ParamSpec,
    master: Tensor,
    weight: Option<Tensor>,
    grad: Tensor,
    /// Values and block scales.
    moments: Vec<(Tensor, Option<Tensor>)>,
    fp8: Option<Precomputed>,
}

impl UpdatedPiece<'_> {
    /// As kernels take it; none without a moment.
    fn update(&self, group: &GroupRule) -> Option<ParamUpdate<'_>> {
        let mut moments =
            self.moments.iter().map(|(values, scales)| Moment { values, scales: scales.as_ref() });
        Some(ParamUpdate {
            master: &self.master,
            weight: self.weight.as_ref(),
            grad: &self.grad,
            first: moments.next()?,
            second: moments.next(),
            lr_mult: group.lr,
            wd_mult: group.weight_decay_of(self.spec),
            fp8: self.fp8.as_ref().map(Precomputed::kernel_outputs),
        })
    }
}
