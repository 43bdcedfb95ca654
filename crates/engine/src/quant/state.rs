//! Quantization state between passes: amax histories and scales of delayed scaling, and cached FP8 weights.

use super::precomputed::WeightAmax;
use super::quantize::Quantized;
use super::stats::{OperandStats, measure};
use super::{GemmOperand, LinearQuant, Method, Recipe, Role};
use crate::{ParamId, ParamSpec, Params, Rank};
use ferrotron_comm::ReduceOp;
use ferrotron_kernels::DelayedUpdate;
use ferrotron_tensor::fp8::{E4m3, E5m2};
use ferrotron_tensor::{Category, DType, Result, Tensor};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One operand of one linear: what a delayed scale belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScaleSlot {
    /// The linear's weight.
    pub param: ParamId,
    /// Which operand.
    pub role: Role,
}

/// Quantization state of a model.
pub struct QuantState {
    delayed: Option<DelayedState>,
    /// amax of weights, with current scaling.
    weight_amax: Option<WeightAmax>,
    /// Cached FP8 weights, by parameter.
    weights: Mutex<Vec<CachedWeight>>,
    counters: Mutex<Counters>,
    /// Zeroed memory for the amax values of a step.
    zeros: Mutex<Option<Zeros>>,
    /// Operand statistics, while they are recorded.
    stats: Mutex<Option<Vec<OperandStats>>>,
    /// Whether GEMMs stay in bf16 and steps only measure amax (calibration).
    calibrating: AtomicBool,
    /// Weights are sharded: nothing is kept of them that is as large as they are.
    sharded: bool,
}

/// Delayed scaling: amax history and scales.
pub struct DelayedState {
    recipe: Recipe,
    /// Index of each parameter's first scale.
    first: Vec<Option<usize>>,
    /// The operand of each scale.
    slots: Vec<ScaleSlot>,
    /// f32 `[steps, n]`: amax history; row 0 collects this step's, the last row is the newest.
    pub history: Tensor,
    /// f32 `[n]`
    pub scale: Tensor,
    /// f32 `[n]`: largest finite value of each operand's format.
    largest: Tensor,
    /// f32 `[n]`, with FP8-resident weights: their amax when they were quantized, which is before the step it counts
    /// for; zero for other operands.
    pub(super) next_amax: Option<Tensor>,
}

/// The largest finite value of an operand's format.
fn largest(recipe: Recipe, role: Role) -> f32 {
    if recipe.format(role) == DType::E5M2 { E5m2::MAX } else { E4m3::MAX }
}

/// f32 values zeroed together and handed out one by one.
struct Zeros {
    all: Tensor,
    given: usize,
}

/// Values zeroed at a time: enough for a layer, and the smallest allocation of the pool.
const ZEROS: usize = 128;

/// What is cached of a weight until it changes.
#[derive(Clone, Default)]
pub(super) struct CachedWeight {
    /// amax f32 `[1]`, all-reduced.
    pub(super) amax: Option<Tensor>,
    /// Rowwise operand.
    pub(super) rows: Option<GemmOperand>,
    /// Columnwise operand.
    pub(super) cols: Option<GemmOperand>,
}

/// Which passes cache FP8 weights.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum WeightCache {
    /// None.
    #[default]
    Off,
    /// Training passes. Others may run at any time and do not know when weights change.
    Training,
    /// All passes.
    All,
}

#[derive(Clone, Copy, Default)]
struct Counters {
    cache: WeightCache,
    /// Index of the next tensor with stochastic rounding.
    draws: u64,
}

impl QuantState {
    /// State for the parameters of a model; None if no GEMM is quantized.
    pub fn new(rank: &Rank, params: &Params) -> Result<Option<QuantState>> {
        let specs = params.specs();
        let Some(recipe) = specs.iter().find_map(|s| s.quant).map(|e| e.recipe) else { return Ok(None) };
        let delayed = match recipe.method {
            Method::Delayed { history, .. } => Some(DelayedState::new(rank, specs, recipe, history)?),
            _ => None,
        };
        let weight_amax = WeightAmax::new(rank, specs, recipe.method)?;
        let weights = Mutex::new(vec![CachedWeight::default(); specs.len()]);
        let (counters, zeros, stats, calibrating) = Default::default();
        let sharded = !params.placement().is_full_size();
        Ok(Some(QuantState { delayed, weight_amax, weights, counters, zeros, stats, calibrating, sharded }))
    }

    /// Switches calibration on or off: GEMMs stay in bf16 and steps only measure amax for later scales. Delayed
    /// scaling only; other recipes need none.
    pub fn calibrate_only(&self, on: bool) {
        self.calibrating.store(on && self.delayed.is_some(), Ordering::Relaxed);
    }

    /// Whether calibration is on.
    pub fn is_calibrating(&self) -> bool {
        self.calibrating.load(Ordering::Relaxed)
    }

    /// Switches recording of operand statistics on or off. The host waits for every operand while it is on.
    pub fn record_stats(&self, on: bool) {
        *lock(&self.stats) = on.then(Vec::new);
    }

    /// Takes the statistics recorded since the last call, by parameter and role, of this rank's shards of the
    /// operands.
    pub fn take_stats(&self) -> Vec<OperandStats> {
        let mut all = lock(&self.stats).as_mut().map(std::mem::take).unwrap_or_default();
        all.sort_by_key(|s| (s.slot.param, Role::ALL.iter().position(|r| *r == s.slot.role)));
        all
    }

    /// Whether operand statistics are recorded.
    pub(super) fn records_stats(&self) -> bool {
        lock(&self.stats).is_some()
    }

    /// Records statistics of an operand.
    pub(super) fn record(
        &self,
        rank: &Rank,
        param: ParamId,
        role: Role,
        x: &Tensor,
        quantized: &Quantized,
    ) -> Result<()> {
        if !self.records_stats() {
            return Ok(());
        }
        let (found, slot) = (measure(rank, x, quantized)?, ScaleSlot { param, role });
        if let (Some(stats), Some(all)) = (found, lock(&self.stats).as_mut()) {
            match all.iter_mut().find(|s| s.slot == slot) {
                Some(known) => known.stats.merge(&stats),
                None => all.push(OperandStats { slot, stats }),
            }
        }
        Ok(())
    }

    /// Begins step `step`. With several micro-batches, FP8 weights are cached between them; with one it saves memory
    /// to quantize each weight when it is used.
    pub fn begin_step(&self, step: u64, micro_batches: usize) {
        let cache = if micro_batches > 1 { WeightCache::Training } else { WeightCache::Off };
        *lock(&self.counters) = Counters { cache, draws: step << 32 };
        self.drop_cached();
    }

    /// Begins passes without backward, between which weights do not change: FP8 weights are cached until a step begins
    /// or [`QuantState::end_evaluation`] is called.
    pub fn begin_evaluation(&self) {
        lock(&self.counters).cache = WeightCache::All;
        self.drop_cached();
    }

    /// Ends those passes and drops the cache.
    pub fn end_evaluation(&self) {
        lock(&self.counters).cache = WeightCache::Off;
        self.drop_cached();
    }

    /// Invalidates everything known of the weights: they have changed.
    pub fn weights_changed(&self) {
        if let Some(m) = &self.weight_amax {
            m.invalidate();
        }
        self.drop_cached();
    }

    /// Drops cached FP8 weights.
    fn drop_cached(&self) {
        lock(&self.weights).iter_mut().for_each(|cached| *cached = CachedWeight::default());
        *lock(&self.zeros) = None;
    }

    /// Ends a step: new scales from the amax history, equal on all ranks. Collective over the tp×cp×dp ranks.
    pub fn end_step(&self, rank: &Rank) -> Result<()> {
        // A replayed CUDA graph zeroes what it uses, so nothing is carried from one step to the next.
        *lock(&self.zeros) = None;
        let Some(d) = &self.delayed else { return Ok(()) };
        let Method::Delayed { update, .. } = d.recipe.method else { return Ok(()) };
        let (s, row) = (&rank.compute, d.history.select(0, 0)?);
        let reduced = Tensor::empty(s, row.shape(), DType::F32, Category::Communication)?;
        s.copy(&row, &reduced)?;
        if let Some(next_amax) = &d.next_amax {
            rank.kernels.add_assign(s, &reduced, next_amax)?;
        }
        rank.dp_cp_group.all_reduce(s, &reduced, ReduceOp::Max, "amax (dp)")?;
        rank.tp.all_reduce(s, &reduced, ReduceOp::Max, "amax (tp)")?;
        rank.kernels.delayed_update(
            s,
            &DelayedUpdate {
                scaling: update,
                history: &d.history,
                reduced: &reduced,
                largest: &d.largest,
                scale: &d.scale,
            },
        )
    }

    /// Delayed scales; None for other recipes.
    pub fn delayed(&self) -> Option<&DelayedState> {
        self.delayed.as_ref()
    }

    /// amax of weights; None where the recipe needs none.
    pub(super) fn weight_amax(&self) -> Option<&WeightAmax> {
        self.weight_amax.as_ref()
    }

    /// amax of each matrix of a weight, f32 `[matrices]`, if it is known.
    pub(super) fn known(&self, param: ParamId, spec: &ParamSpec) -> Result<Option<Tensor>> {
        self.weight_amax.as_ref().map_or(Ok(None), |m| m.known(param, spec))
    }

    pub(super) fn weights(&self) -> MutexGuard<'_, Vec<CachedWeight>> {
        lock(&self.weights)
    }

    /// Whether weights are sharded over the data-parallel ranks.
    pub(super) fn sharded(&self) -> bool {
        self.sharded
    }

    /// Whether FP8 weights quantized in a training or other pass are cached.
    pub(super) fn caches(&self, train: bool) -> bool {
        if self.sharded {
            return false;
        }
        match lock(&self.counters).cache {
            WeightCache::Off => false,
            WeightCache::Training => train,
            WeightCache::All => true,
        }
    }

    /// A zeroed f32 `[1]` for an amax.
    pub(crate) fn zero_amax(&self, rank: &Rank) -> Result<Tensor> {
        let mut zeros = lock(&self.zeros);
        let (all, at) = match zeros.take() {
            Some(z) if z.given < ZEROS => (z.all, z.given),
            _ => (rank.compute.zeros(&[ZEROS], DType::F32, Category::Workspace)?, 0),
        };
        let one = all.narrow(0, at, 1)?;
        *zeros = Some(Zeros { all, given: at + 1 });
        Ok(one)
    }

    /// An index that no other tensor of this pipeline stage gets.
    pub(super) fn next_draw(&self) -> u64 {
        let mut c = lock(&self.counters);
        c.draws += 1;
        c.draws
    }
}

impl DelayedState {
    /// What a scale maps its amax to: of inputs and weights, and of gradients.
    pub fn scaled_to(&self) -> [f32; 2] {
        let margin = match self.recipe.method {
            Method::Delayed { update, .. } => update.margin,
            _ => 0,
        };
        [Role::Input, Role::Gradient].map(|role| largest(self.recipe, role) * 2f32.powi(-margin))
    }

    fn new(rank: &Rank, specs: &[ParamSpec], recipe: Recipe, len: usize) -> Result<DelayedState> {
        let (mut slots, mut largest) = (Vec::new(), Vec::new());
        let mut add = |(i, spec): (usize, &ParamSpec)| {
            let LinearQuant { .. } = spec.quant?;
            let first = slots.len();
            for role in Role::ALL {
                slots.push(ScaleSlot { param: ParamId(i), role });
                largest.push(self::largest(recipe, role));
            }
            Some(first)
        };
        let first = specs.iter().enumerate().map(&mut add).collect();
        let (s, n) = (&rank.compute, largest.len());
        let stored = specs.iter().any(ParamSpec::fp8_resident);
        let next_amax = stored.then(|| s.zeros(&[n], DType::F32, Category::Parameters)).transpose()?;
        Ok(DelayedState {
            next_amax,
            recipe,
            first,
            slots,
            history: s.zeros(&[len, n], DType::F32, Category::Parameters)?,
            scale: s.upload(&vec![1f32; n], &[n], Category::Parameters)?,
            largest: s.upload(&largest, &[n], Category::Parameters)?,
        })
    }

    /// The operand of each scale.
    pub fn slots(&self) -> &[ScaleSlot] {
        &self.slots
    }

    /// Scale of an operand, and where its amax is collected; f32 `[1]` each.
    pub(super) fn of(&self, param: ParamId, role: Role) -> Result<Option<(Tensor, Tensor)>> {
        let Some(first) = self.first[param.0] else { return Ok(None) };
        let at = first + Role::ALL.iter().position(|r| *r == role).unwrap_or(0);
        Ok(Some((self.scale.narrow(0, at, 1)?, self.history.select(0, 0)?.narrow(0, at, 1)?)))
    }

    /// Scale of an FP8-resident weight, and where its amax is kept for the next step; f32 `[1]` each.
    pub(super) fn of_fp8_resident(&self, param: ParamId) -> Result<Option<(Tensor, Tensor)>> {
        let (Some(first), Some(next_amax)) = (self.first[param.0], &self.next_amax) else { return Ok(None) };
        let at = first + Role::ALL.iter().position(|r| *r == Role::Weight).unwrap_or(0);
        Ok(Some((self.scale.narrow(0, at, 1)?, next_amax.narrow(0, at, 1)?)))
    }
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}
