//! What eight-bit products remember between passes: the scales of delayed scaling, and weights that are already bytes.

use super::precomputed::WeightAmax;
use super::quantize::Quantized;
use super::stats::{OperandStats, measure};
use super::{GemmOperand, LinearQuant, Method, Recipe, Role};
use crate::{ParamId, ParamSpec, Rank};
use ferrotron_comm::ReduceOp;
use ferrotron_kernels::DelayedUpdate;
use ferrotron_tensor::fp8::{E4m3, E5m2};
use ferrotron_tensor::{Category, DType, Result, Tensor};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One operand of one map: what a scale of delayed scaling belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScaleSlot {
    /// The map's weight.
    pub param: ParamId,
    /// Which operand.
    pub role: Role,
}

/// The memory of a model's eight-bit products.
pub struct QuantState {
    delayed: Option<DelayedState>,
    /// Of weights, under current scaling.
    weight_amax: Option<WeightAmax>,
    /// By parameter.
    weights: Mutex<Vec<CachedWeight>>,
    counters: Mutex<Counters>,
    /// Zeros for the magnitudes of a step.
    zeros: Mutex<Option<Zeros>>,
    /// What operands were like, while that is asked for.
    stats: Mutex<Option<Vec<OperandStats>>>,
    /// Are products in full width, and magnitudes only collected?
    calibrating: AtomicBool,
}

/// Scales of earlier steps.
pub struct DelayedState {
    recipe: Recipe,
    /// GroupRank of a parameter's first scale, by parameter.
    first: Vec<Option<usize>>,
    /// What each scale belongs to.
    slots: Vec<ScaleSlot>,
    /// f32 `[steps, n]`; row 0 gathers this step's magnitudes, the last row is the newest.
    pub history: Tensor,
    /// f32 `[n]`
    pub scale: Tensor,
    /// f32 `[n]`: the largest number of each one's format.
    largest: Tensor,
    /// f32 `[n]`, where weights are bytes between steps: their magnitudes when these were made, which is before the step that
    /// they belong to; zero for everything else.
    pub(super) next_amax: Option<Tensor>,
}

/// f32 numbers zeroed at once, each given out once.
struct Zeros {
    all: Tensor,
    given: usize,
}

/// So many: those of a layer or of many small ones, in the least that memory is given out in.
const ZEROS: usize = 128;

/// What is known of a weight until it changes.
#[derive(Clone, Default)]
pub(super) struct CachedWeight {
    /// Its largest magnitude, agreed on by ranks; f32 `[1]`.
    pub(super) amax: Option<Tensor>,
    /// As it is stored.
    pub(super) rows: Option<GemmOperand>,
    /// Transposed.
    pub(super) cols: Option<GemmOperand>,
}

/// From which passes weights stay as bytes.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum WeightCache {
    /// None.
    #[default]
    Off,
    /// Those that train. Others may run at any time, and need not know when weights change.
    Training,
    /// All.
    All,
}

#[derive(Clone, Copy, Default)]
struct Counters {
    cache: WeightCache,
    /// Number of the next tensor that is rounded at random.
    draws: u64,
}

impl QuantState {
    /// For the parameters of a model; None if no product of it is narrow.
    pub fn new(rank: &Rank, specs: &[ParamSpec]) -> Result<Option<QuantState>> {
        let Some(recipe) = specs.iter().find_map(|s| s.quant).map(|e| e.recipe) else { return Ok(None) };
        let delayed = match recipe.method {
            Method::Delayed { history, .. } => Some(DelayedState::new(rank, specs, recipe, history)?),
            _ => None,
        };
        let weight_amax = WeightAmax::new(rank, specs, recipe.method)?;
        let weights = Mutex::new(vec![CachedWeight::default(); specs.len()]);
        let (counters, zeros, stats, calibrating) = Default::default();
        Ok(Some(QuantState { delayed, weight_amax, weights, counters, zeros, stats, calibrating }))
    }

    /// From now on, products stay in full width and steps only collect how large operands are, for the scales of later
    /// ones; or no longer. Of delayed scaling; others need none.
    pub fn calibrate_only(&self, on: bool) {
        self.calibrating.store(on && self.delayed.is_some(), Ordering::Relaxed);
    }

    /// Are magnitudes only collected?
    pub fn is_calibrating(&self) -> bool {
        self.calibrating.load(Ordering::Relaxed)
    }

    /// From now on, note how well operands fit their formats, or no longer. The host waits for every one of them.
    pub fn record_stats(&self, on: bool) {
        *lock(&self.stats) = on.then(Vec::new);
    }

    /// What was noted since the last time, by parameter and role, of this rank's parts of operands.
    pub fn take_stats(&self) -> Vec<OperandStats> {
        let mut all = lock(&self.stats).as_mut().map(std::mem::take).unwrap_or_default();
        all.sort_by_key(|s| (s.slot.param, Role::ALL.iter().position(|r| *r == s.slot.role)));
        all
    }

    /// Is it noted how well operands fit?
    pub(super) fn records_stats(&self) -> bool {
        lock(&self.stats).is_some()
    }

    /// Notes how well an operand fits.
    pub(super) fn record(
        &self,
        rank: &Rank,
        param: ParamId,
        role: Role,
        x: &Tensor,
        made: &Quantized,
    ) -> Result<()> {
        if !self.records_stats() {
            return Ok(());
        }
        let (found, slot) = (measure(rank, x, made)?, ScaleSlot { param, role });
        if let (Some(stats), Some(all)) = (found, lock(&self.stats).as_mut()) {
            match all.iter_mut().find(|s| s.slot == slot) {
                Some(known) => known.stats.merge(&stats),
                None => all.push(OperandStats { slot, stats }),
            }
        }
        Ok(())
    }

    /// Step number `step` begins. With several micro-batches, weights are kept as bytes between them; with one it is
    /// cheaper in memory to make each when it is needed.
    pub fn begin_step(&self, step: u64, micro_batches: usize) {
        let cache = if micro_batches > 1 { WeightCache::Training } else { WeightCache::Off };
        *lock(&self.counters) = Counters { cache, draws: step << 32 };
        self.drop_cached();
    }

    /// Passes without a backward begin, between which weights stay what they are: they are kept as bytes until a step
    /// begins or [`QuantState::end_evaluation`] is called.
    pub fn begin_evaluation(&self) {
        lock(&self.counters).cache = WeightCache::All;
        self.drop_cached();
    }

    /// Those passes are over: nothing of weights stays.
    pub fn end_evaluation(&self) {
        lock(&self.counters).cache = WeightCache::Off;
        self.drop_cached();
    }

    /// Weights have changed: nothing is known of them.
    pub fn weights_changed(&self) {
        if let Some(m) = &self.weight_amax {
            m.invalidate();
        }
        self.drop_cached();
    }

    /// Nothing that was made of weights stays.
    fn drop_cached(&self) {
        lock(&self.weights).iter_mut().for_each(|kept| *kept = CachedWeight::default());
        *lock(&self.zeros) = None;
    }

    /// The end of a step: new scales from what its tensors were like, on all ranks alike. Every rank calls it.
    pub fn end_step(&self, rank: &Rank) -> Result<()> {
        // A replayed step zeroes what it uses: nothing goes from one step to the next.
        *lock(&self.zeros) = None;
        let Some(d) = &self.delayed else { return Ok(()) };
        let Method::Delayed { update, .. } = d.recipe.method else { return Ok(()) };
        let (s, row) = (&rank.compute, d.history.select(0, 0)?);
        let reduced = Tensor::empty(s, row.shape(), DType::F32, Category::Communication)?;
        s.copy(&row, &reduced)?;
        if let Some(next_amax) = &d.next_amax {
            rank.kernels.add_assign(s, &reduced, next_amax)?;
        }
        rank.dp_cp_group.all_reduce(s, &reduced, ReduceOp::Max, "magnitudes of copies")?;
        rank.tp.all_reduce(s, &reduced, ReduceOp::Max, "magnitudes")?;
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

    /// Scales of earlier steps, if the recipe has any.
    pub fn delayed(&self) -> Option<&DelayedState> {
        self.delayed.as_ref()
    }

    /// Largest magnitudes of weights, if the recipe needs them.
    pub(super) fn weight_amax(&self) -> Option<&WeightAmax> {
        self.weight_amax.as_ref()
    }

    /// Those of the matrices of a weight, f32 `[matrices]`, if they are known.
    pub(super) fn known(&self, param: ParamId, spec: &ParamSpec) -> Result<Option<Tensor>> {
        self.weight_amax.as_ref().map_or(Ok(None), |m| m.known(param, spec))
    }

    pub(super) fn weights(&self) -> MutexGuard<'_, Vec<CachedWeight>> {
        lock(&self.weights)
    }

    /// Are weights kept as bytes that a pass makes, which trains or not?
    pub(super) fn caches(&self, train: bool) -> bool {
        match lock(&self.counters).cache {
            WeightCache::Off => false,
            WeightCache::Training => train,
            WeightCache::All => true,
        }
    }

    /// Zero, f32 `[1]`, that nobody else gets.
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

    /// A number that no other tensor of the run gets.
    pub(super) fn next_draw(&self) -> u64 {
        let mut c = lock(&self.counters);
        c.draws += 1;
        c.draws
    }
}

impl DelayedState {
    fn new(rank: &Rank, specs: &[ParamSpec], recipe: Recipe, len: usize) -> Result<DelayedState> {
        let (mut slots, mut largest) = (Vec::new(), Vec::new());
        let mut add = |(i, spec): (usize, &ParamSpec)| {
            let LinearQuant { .. } = spec.quant?;
            let first = slots.len();
            for role in Role::ALL {
                slots.push(ScaleSlot { param: ParamId(i), role });
                largest.push(if recipe.format(role) == DType::E5M2 { E5m2::MAX } else { E4m3::MAX });
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

    /// What each scale belongs to.
    pub fn slots(&self) -> &[ScaleSlot] {
        &self.slots
    }

    /// The scale of an operand, and where its magnitude is gathered; f32 `[1]` each.
    pub(super) fn of(&self, param: ParamId, role: Role) -> Result<Option<(Tensor, Tensor)>> {
        let Some(first) = self.first[param.0] else { return Ok(None) };
        let at = first + Role::ALL.iter().position(|r| *r == role).unwrap_or(0);
        Ok(Some((self.scale.narrow(0, at, 1)?, self.history.select(0, 0)?.narrow(0, at, 1)?)))
    }

    /// The scale of a weight that is bytes, and where its magnitude is kept for the next step; f32 `[1]` each.
    pub(super) fn of_fp8_resident(&self, param: ParamId) -> Result<Option<(Tensor, Tensor)>> {
        let (Some(first), Some(next_amax)) = (self.first[param.0], &self.next_amax) else { return Ok(None) };
        let at = first + Role::ALL.iter().position(|r| *r == Role::Weight).unwrap_or(0);
        Ok(Some((self.scale.narrow(0, at, 1)?, next_amax.narrow(0, at, 1)?)))
    }
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}
