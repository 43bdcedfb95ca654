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
mod step;
mod streamed;
mod weights;

use crate::config::{MasterDtype, OptimizerCompute, StateDtype};
use crate::{Error, Result};
use ferrotron_engine::data_parallel::{Bucket, ParamShard, Placement, ShardingStrategy};
use ferrotron_engine::{ParamId, ParamSpec, Params, Part, Rank};
use ferrotron_kernels::{counter, scalars};
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
use streamed::{StateStream, StreamedSizes};
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
    /// Fresh state for `params`, whose specs name their groups. [`Optimizer::initialize`] or [`Optimizer::fill`] must set
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
