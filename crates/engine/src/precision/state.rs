//! What eight-bit products remember between passes: the scales of delayed scaling, and weights that are already bytes.

use super::made::Magnitudes;
use super::operands::Narrowed;
use super::stats::{OperandStats, measure};
use super::{Eight, Method, Recipe, Role, Side};
use crate::{ParamId, ParamSpec, Rank};
use ferrotron_comm::Reduce;
use ferrotron_tensor::fp8::{E4m3, E5m2};
use ferrotron_tensor::{Category, DType, Result, Tensor};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One operand of one map: what a scale of delayed scaling belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slot {
    /// The map's weight.
    pub param: ParamId,
    /// Which operand.
    pub role: Role,
}

/// The memory of a model's eight-bit products.
pub struct EightState {
    delayed: Option<DelayedState>,
    /// Of weights, under current scaling.
    magnitudes: Option<Magnitudes>,
    /// By parameter.
    weights: Mutex<Vec<Kept>>,
    counters: Mutex<Counters>,
    /// Zeros for the magnitudes of a step.
    zeros: Mutex<Option<Zeros>>,
    /// What operands were like, while that is asked for.
    watched: Mutex<Option<Vec<OperandStats>>>,
    /// Are products in full width, and magnitudes only collected?
    collecting: AtomicBool,
}

/// Scales of earlier steps.
pub struct DelayedState {
    recipe: Recipe,
    /// Place of a parameter's first scale, by parameter.
    first: Vec<Option<usize>>,
    /// What each scale belongs to.
    slots: Vec<Slot>,
    /// f32 `[steps, n]`; row 0 gathers this step's magnitudes, the last row is the newest.
    pub history: Tensor,
    /// f32 `[n]`
    pub scale: Tensor,
    /// f32 `[n]`: the largest number of each one's format.
    largest: Tensor,
    /// f32 `[n]`, where weights are bytes between steps: their magnitudes when these were made, which is before the step that
    /// they belong to; zero for everything else.
    pub(super) early: Option<Tensor>,
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
pub(super) struct Kept {
    /// Its largest magnitude, agreed on by ranks; f32 `[1]`.
    pub(super) amax: Option<Tensor>,
    /// As it is stored.
    pub(super) rows: Option<Side>,
    /// Transposed.
    pub(super) cols: Option<Side>,
}

/// From which passes weights stay as bytes.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Keep {
    /// None.
    #[default]
    Nothing,
    /// Those that train. Others may run at any time, and need not know when weights change.
    Training,
    /// All.
    Everything,
}

#[derive(Clone, Copy, Default)]
struct Counters {
    keep: Keep,
    /// Number of the next tensor that is rounded at random.
    draws: u64,
}

impl EightState {
    /// For the parameters of a model; None if no product of it is narrow.
    pub fn new(rank: &Rank, specs: &[ParamSpec]) -> Result<Option<EightState>> {
        let Some(recipe) = specs.iter().find_map(|s| s.eight).map(|e| e.recipe) else { return Ok(None) };
        let delayed = match recipe.method {
            Method::Delayed { history, .. } => Some(DelayedState::new(rank, specs, recipe, history)?),
            _ => None,
        };
        let magnitudes = Magnitudes::new(rank, specs, recipe.method)?;
        let weights = Mutex::new(vec![Kept::default(); specs.len()]);
        let (counters, zeros, watched, collecting) = Default::default();
        Ok(Some(EightState { delayed, magnitudes, weights, counters, zeros, watched, collecting }))
    }

    /// From now on, products stay in full width and steps only collect how large operands are, for the scales of later
    /// ones; or no longer. Of delayed scaling; others need none.
    pub fn collect_only(&self, on: bool) {
        self.collecting.store(on && self.delayed.is_some(), Ordering::Relaxed);
    }

    /// Are magnitudes only collected?
    pub fn is_collecting(&self) -> bool {
        self.collecting.load(Ordering::Relaxed)
    }

    /// From now on, note how well operands fit their formats, or no longer. The host waits for every one of them.
    pub fn watch(&self, on: bool) {
        *lock(&self.watched) = on.then(Vec::new);
    }

    /// What was noted since the last time, by parameter and role, of this rank's parts of operands.
    pub fn take_stats(&self) -> Vec<OperandStats> {
        let mut all = lock(&self.watched).as_mut().map(std::mem::take).unwrap_or_default();
        all.sort_by_key(|s| (s.slot.param, Role::ALL.iter().position(|r| *r == s.slot.role)));
        all
    }

    /// Is it noted how well operands fit?
    pub(super) fn is_watched(&self) -> bool {
        lock(&self.watched).is_some()
    }

    /// Notes how well an operand fits.
    pub(super) fn note(
        &self,
        rank: &Rank,
        param: ParamId,
        role: Role,
        x: &Tensor,
        made: &Narrowed,
    ) -> Result<()> {
        if !self.is_watched() {
            return Ok(());
        }
        let (found, slot) = (measure(rank, x, made)?, Slot { param, role });
        if let (Some(stats), Some(all)) = (found, lock(&self.watched).as_mut()) {
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
        let keep = if micro_batches > 1 { Keep::Training } else { Keep::Nothing };
        *lock(&self.counters) = Counters { keep, draws: step << 32 };
        self.drop_bytes();
    }

    /// Passes without a backward begin, between which weights stay what they are: they are kept as bytes until a step
    /// begins or [`EightState::end_evaluation`] is called.
    pub fn begin_evaluation(&self) {
        lock(&self.counters).keep = Keep::Everything;
        self.drop_bytes();
    }

    /// Those passes are over: nothing of weights stays.
    pub fn end_evaluation(&self) {
        lock(&self.counters).keep = Keep::Nothing;
        self.drop_bytes();
    }

    /// Weights have changed: nothing is known of them.
    pub fn weights_changed(&self) {
        if let Some(m) = &self.magnitudes {
            m.forget();
        }
        self.drop_bytes();
    }

    /// Nothing that was made of weights stays.
    fn drop_bytes(&self) {
        lock(&self.weights).iter_mut().for_each(|kept| *kept = Kept::default());
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
        if let Some(early) = &d.early {
            rank.kernels.add_assign(s, &reduced, early)?;
        }
        rank.copies.all_reduce(s, &reduced, Reduce::Max, "magnitudes of copies")?;
        rank.tp.all_reduce(s, &reduced, Reduce::Max, "magnitudes")?;
        rank.kernels.delayed_update(s, update, &d.history, &reduced, &d.largest, &d.scale)
    }

    /// Scales of earlier steps, if the recipe has any.
    pub fn delayed(&self) -> Option<&DelayedState> {
        self.delayed.as_ref()
    }

    /// Largest magnitudes of weights, if the recipe needs them.
    pub(super) fn magnitudes(&self) -> Option<&Magnitudes> {
        self.magnitudes.as_ref()
    }

    /// Those of the matrices of a weight, f32 `[matrices]`, if they are known.
    pub(super) fn known(&self, param: ParamId, spec: &ParamSpec) -> Result<Option<Tensor>> {
        self.magnitudes.as_ref().map_or(Ok(None), |m| m.known(param, spec))
    }

    pub(super) fn weights(&self) -> MutexGuard<'_, Vec<Kept>> {
        lock(&self.weights)
    }

    /// Are weights kept as bytes that a pass makes, which trains or not?
    pub(super) fn keeps(&self, train: bool) -> bool {
        match lock(&self.counters).keep {
            Keep::Nothing => false,
            Keep::Training => train,
            Keep::Everything => true,
        }
    }

    /// Zero, f32 `[1]`, that nobody else gets.
    pub(crate) fn magnitude(&self, rank: &Rank) -> Result<Tensor> {
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
    pub(super) fn draw(&self) -> u64 {
        let mut c = lock(&self.counters);
        c.draws += 1;
        c.draws
    }
}

impl DelayedState {
    fn new(rank: &Rank, specs: &[ParamSpec], recipe: Recipe, len: usize) -> Result<DelayedState> {
        let (mut slots, mut largest) = (Vec::new(), Vec::new());
        let mut add = |(i, spec): (usize, &ParamSpec)| {
            let Eight { .. } = spec.eight?;
            let first = slots.len();
            for role in Role::ALL {
                slots.push(Slot { param: ParamId(i), role });
                largest.push(if recipe.format(role) == DType::E5M2 { E5m2::MAX } else { E4m3::MAX });
            }
            Some(first)
        };
        let first = specs.iter().enumerate().map(&mut add).collect();
        let (s, n) = (&rank.compute, largest.len());
        let stored = specs.iter().any(ParamSpec::stored);
        let early = stored.then(|| s.zeros(&[n], DType::F32, Category::Parameters)).transpose()?;
        Ok(DelayedState {
            early,
            recipe,
            first,
            slots,
            history: s.zeros(&[len, n], DType::F32, Category::Parameters)?,
            scale: s.upload(&vec![1f32; n], &[n], Category::Parameters)?,
            largest: s.upload(&largest, &[n], Category::Parameters)?,
        })
    }

    /// What each scale belongs to.
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// The scale of an operand, and where its magnitude is gathered; f32 `[1]` each.
    pub(super) fn of(&self, param: ParamId, role: Role) -> Result<Option<(Tensor, Tensor)>> {
        let Some(first) = self.first[param.0] else { return Ok(None) };
        let at = first + Role::ALL.iter().position(|r| *r == role).unwrap_or(0);
        Ok(Some((self.scale.narrow(0, at, 1)?, self.history.select(0, 0)?.narrow(0, at, 1)?)))
    }

    /// The scale of a weight that is bytes, and where its magnitude is kept for the next step; f32 `[1]` each.
    pub(super) fn of_stored(&self, param: ParamId) -> Result<Option<(Tensor, Tensor)>> {
        let (Some(first), Some(early)) = (self.first[param.0], &self.early) else { return Ok(None) };
        let at = first + Role::ALL.iter().position(|r| *r == Role::Weight).unwrap_or(0);
        Ok(Some((self.scale.narrow(0, at, 1)?, early.narrow(0, at, 1)?)))
    }
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}
