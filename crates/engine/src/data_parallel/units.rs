//! ZeRO-3 (FSDP): weights live as shards, and a unit of them is all-gathered only while passes use it.
//!
//! Units are gathered into slots: memory that is kept, so that addresses are stable, and reused by whichever unit is
//! next. A unit stays in its slot until another one needs that, so the last layers of forward are there for backward.
//! While a pass computes with a unit, the next ones are gathered on the communication stream, as far as the slots'
//! bytes stay within the budget (`parallel.comm_unit`) and one unit. [`UnitSlots`] is the rule, this file its memory.
//! Shards in host memory are copied to the slot first, in the same order and under the same budget.

use super::host_shards::HostEdge;
use super::{BucketPlan, BucketSplit, HostLink, UnitSlots};
use crate::{ParamSpec, Rank, UnitId};
use ferrotron_tensor::{Category, DType, Event, Result, Tensor};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Units of sharded weights, and the slots they are gathered into.
pub(crate) struct ShardedUnits {
    units: Vec<UnitLayout>,
    /// Dtypes of a slot: of FP8-resident weights, and of all others.
    dtypes: [DType; 2],
    /// The way of shards in host memory.
    link: Option<Arc<HostLink>>,
    state: Mutex<State>,
}

/// Where the buckets of a unit are in its slot.
#[derive(Clone, Debug, Default)]
pub(crate) struct UnitLayout {
    /// Gathered buckets, each with its FP8-resident elements and its other elements.
    pub(crate) buckets: Vec<(usize, [Range<usize>; 2])>,
    lengths: [usize; 2],
}

impl UnitLayout {
    /// The units of the buckets of `plan`, each of one unit; `gathered` says which of them are sharded over several ranks or
    /// in host memory.
    pub(crate) fn all(
        specs: &[ParamSpec],
        (plan, splits): (&BucketPlan, &[BucketSplit]),
        gathered: impl Fn(usize) -> bool,
    ) -> Vec<UnitLayout> {
        let count = specs.iter().map(|s| s.unit.0 + 1).max().unwrap_or(0);
        let mut units = vec![UnitLayout::default(); count];
        for (bucket, layout) in plan.buckets().iter().enumerate().filter(|(b, _)| gathered(*b)) {
            let Some(first) = layout.spans.first() else { continue };
            let unit = &mut units[specs[first.param.0].unit.0];
            let lengths = splits[bucket].lengths();
            let ranges = [0, 1].map(|k| unit.lengths[k]..unit.lengths[k] + lengths[k]);
            unit.lengths = [0, 1].map(|k| ranges[k].end);
            unit.buckets.push((bucket, ranges));
        }
        units
    }

    /// FP8-resident elements, and all others.
    pub(crate) fn lengths(&self) -> [usize; 2] {
        self.lengths
    }
}

struct State {
    slots: UnitSlots,
    /// Of each slot.
    memory: Vec<SlotMemory>,
}

struct SlotMemory {
    /// FP8-resident weights, and all others.
    memory: [Tensor; 2],
    /// End of its all-gather, until the compute stream has waited for it.
    gathered: Option<Event>,
}

/// A unit in its slot, which no other unit takes while this is held.
#[derive(Clone)]
pub struct UnitGuard {
    _users: Arc<()>,
    memory: [Tensor; 2],
}

impl UnitGuard {
    /// Memory of its FP8-resident weights, and of all others.
    pub(crate) fn memory(&self) -> &[Tensor; 2] {
        &self.memory
    }
}

/// All-gathers a unit into a slot's memory: FP8-resident weights, and all others.
pub(crate) type GatherUnit<'a> = dyn Fn(&UnitLayout, &[Tensor; 2]) -> Result<Option<Event>> + 'a;

impl ShardedUnits {
    /// For `units` in memory of `dtypes`, with `budget` bytes of slots beyond the largest; shards may be in host memory.
    pub(crate) fn new(
        specs: &[ParamSpec],
        units: Vec<UnitLayout>,
        dtypes: [DType; 2],
        (budget, link): (usize, Option<Arc<HostLink>>),
    ) -> ShardedUnits {
        let slots = UnitSlots::new(specs, &units, dtypes.map(DType::size), budget);
        ShardedUnits { units, dtypes, link, state: Mutex::new(State { slots, memory: Vec::new() }) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The buckets of a unit and where they are in its slot.
    pub(crate) fn layout(&self, unit: UnitId) -> &UnitLayout {
        &self.units[unit.0]
    }

    /// Gathers a unit unless it is there, makes the compute stream wait for it, and gathers the `next` ones ahead as far
    /// as the budget allows. None for a unit that is not sharded.
    pub(crate) fn enter(
        &self,
        rank: &Rank,
        unit: UnitId,
        next: &[UnitId],
        gather: &GatherUnit,
    ) -> Result<Option<UnitGuard>> {
        let ahead = rank.overlaps_dp_comm() || (rank.overlap && self.link.is_some());
        let state = &mut *self.lock();
        let Some(entered) = state.slots.enter(unit, next, ahead) else { return Ok(None) };
        let zeros = |len, k: usize| rank.compute.zeros(&[len], self.dtypes[k], Category::Parameters);
        for [fp8, rest] in state.slots.slots().skip(state.memory.len()) {
            state.memory.push(SlotMemory { memory: [zeros(fp8, 0)?, zeros(rest, 1)?], gathered: None });
        }
        let (own, ahead): (Vec<_>, Vec<_>) = entered.gathers.into_iter().partition(|(_, u)| *u == unit);
        own.into_iter().try_for_each(|at| self.fill(rank, state, at, gather))?;
        let slot = &mut state.memory[entered.slot];
        match (slot.gathered.take(), &self.link) {
            (Some(done), None) => rank.compute.wait(&done)?,
            (Some(done), Some(link)) => link.order(HostEdge::Loaded, &rank.compute, &done)?,
            (None, _) => {}
        }
        let guard = UnitGuard { _users: entered.users, memory: slot.memory.clone() };
        ahead.into_iter().try_for_each(|at| self.fill(rank, state, at, gather))?;
        Ok(Some(guard))
    }

    /// Gathers a unit into a slot that nothing uses.
    fn fill(
        &self,
        rank: &Rank,
        state: &mut State,
        (slot, unit): (usize, UnitId),
        gather: &GatherUnit,
    ) -> Result<()> {
        // A unit that was gathered ahead and never used: copies from the host follow the compute stream, all-gathers each
        // other.
        if let Some(unused) = state.memory[slot].gathered.take().filter(|_| self.link.is_some()) {
            rank.compute.wait(&unused)?;
        }
        let done = gather(&self.units[unit.0], &state.memory[slot].memory);
        state.memory[slot].gathered = done.inspect_err(|_| state.slots.forget(slot))?;
        Ok(())
    }

    /// Forgets what slots hold: the weights change. The compute stream waits for all-gathers that still read the shards.
    pub(crate) fn invalidate(&self, rank: &Rank) -> Result<()> {
        let state = &mut *self.lock();
        state.slots.invalidate();
        let pending = state.memory.iter_mut().filter_map(|slot| slot.gathered.take());
        pending.into_iter().try_for_each(|done| rank.compute.wait(&done))
    }
}
