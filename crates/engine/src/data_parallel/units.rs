//! ZeRO-3 (FSDP): weights live as shards, and a unit of them is all-gathered only while passes use it.
//!
//! Units are gathered into slots: memory that is kept, so that addresses are stable, and reused by whichever unit is
//! next. A unit stays in its slot until another one needs that, so the last layers of forward are there for backward.
//! While a pass computes with a unit, the next ones are gathered on the communication stream, as far as the slots'
//! bytes stay within the budget (`parallel.comm_unit`) and one unit.

use super::{BucketPlan, BucketSplit};
use crate::{ParamSpec, Rank, UnitId};
use ferrotron_tensor::{Category, DType, Event, Result, Tensor};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Units of sharded weights, and the slots they are gathered into.
pub(crate) struct ShardedUnits {
    units: Vec<UnitLayout>,
    /// Dtypes of a slot: of FP8-resident weights, and of all others.
    dtypes: [DType; 2],
    /// Lengths of a slot for any unit but embeddings and the LM head.
    layer: [usize; 2],
    /// Lengths of a slot for every unit.
    largest: [usize; 2],
    /// Bytes of slots beyond the largest one.
    budget: usize,
    state: Mutex<Slots>,
}

/// Where the buckets of a unit are in its slot.
#[derive(Clone, Debug, Default)]
pub(crate) struct UnitLayout {
    /// Gathered buckets, each with its FP8-resident elements and its other elements.
    pub(crate) buckets: Vec<(usize, [Range<usize>; 2])>,
    lengths: [usize; 2],
}

#[derive(Default)]
struct Slots {
    all: Vec<Slot>,
    /// Counts uses, to find the slot that was not used for longest.
    clock: u64,
}

struct Slot {
    /// FP8-resident weights, and all others.
    memory: [Tensor; 2],
    /// The unit it holds.
    unit: Option<UnitId>,
    /// Shared with everything that uses the unit.
    users: Arc<()>,
    /// Gathered ahead of its use.
    prefetched: bool,
    /// End of its all-gather, until the compute stream has waited for it.
    gathered: Option<Event>,
    last_use: u64,
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
    /// For the buckets of `plan`, each of one unit; `gathered` says which of them are sharded over several ranks.
    pub(crate) fn new(
        specs: &[ParamSpec],
        (plan, splits): (&BucketPlan, &[BucketSplit]),
        gathered: impl Fn(usize) -> bool,
        dtypes: [DType; 2],
        budget: usize,
    ) -> ShardedUnits {
        let count = specs.iter().map(|s| s.unit.0 + 1).max().unwrap_or(0);
        let mut units = vec![UnitLayout::default(); count];
        let mut layer = [0; 2];
        for (bucket, layout) in plan.buckets().iter().enumerate().filter(|(b, _)| gathered(*b)) {
            let Some(first) = layout.spans.first() else { continue };
            let unit = &mut units[specs[first.param.0].unit.0];
            let lengths = splits[bucket].lengths();
            let ranges = [0, 1].map(|k| unit.lengths[k]..unit.lengths[k] + lengths[k]);
            unit.lengths = [0, 1].map(|k| ranges[k].end);
            unit.buckets.push((bucket, ranges));
        }
        let table = |u: usize| specs.iter().any(|s| s.unit.0 == u && s.is_table());
        let max = |a: [usize; 2], b: [usize; 2]| [a[0].max(b[0]), a[1].max(b[1])];
        let largest = units.iter().fold([0; 2], |most, u| max(most, u.lengths));
        for (_, unit) in units.iter().enumerate().filter(|(u, _)| !table(*u)) {
            layer = max(layer, unit.lengths);
        }
        ShardedUnits { units, dtypes, layer, largest, budget, state: Mutex::default() }
    }

    /// Bytes of a slot of these lengths.
    fn bytes(&self, lengths: [usize; 2]) -> usize {
        lengths[0] * self.dtypes[0].size() + lengths[1] * self.dtypes[1].size()
    }

    /// Lengths of the slot for a unit: slots serve any layer, or any unit.
    fn slot_of(&self, unit: &UnitLayout) -> [usize; 2] {
        let fits = unit.lengths[0] <= self.layer[0] && unit.lengths[1] <= self.layer[1];
        if fits { self.layer } else { self.largest }
    }

    /// Bytes that slots take once passes have run: as many for layers as the budget allows, and the largest.
    pub(crate) fn slot_bytes(&self) -> usize {
        let (layer, largest) = (self.bytes(self.layer), self.bytes(self.largest));
        let layers = self.units.iter().filter(|u| !u.buckets.is_empty()).count();
        largest + layer * (self.budget / layer.max(1)).min(layers.saturating_sub(1))
    }

    fn lock(&self) -> MutexGuard<'_, Slots> {
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
        if self.units[unit.0].buckets.is_empty() {
            return Ok(None);
        }
        let slots = &mut *self.lock();
        let at = match slots.holding(unit) {
            Some(at) => at,
            None => {
                let at = match slots.free(self, &self.units[unit.0], true) {
                    Some(at) => at,
                    None => slots.add(self, rank, &self.units[unit.0])?,
                };
                self.fill(slots, at, unit, gather)?;
                at
            }
        };
        slots.clock += 1;
        let slot = &mut slots.all[at];
        (slot.last_use, slot.prefetched) = (slots.clock, false);
        slot.gathered.take().map_or(Ok(()), |done| rank.compute.wait(&done))?;
        let guard = UnitGuard { _users: slot.users.clone(), memory: slot.memory.clone() };
        if rank.overlaps_dp_comm() {
            self.prefetch(rank, slots, next, gather)?;
        }
        Ok(Some(guard))
    }

    /// Gathers units ahead of their use.
    fn prefetch(&self, rank: &Rank, slots: &mut Slots, next: &[UnitId], gather: &GatherUnit) -> Result<()> {
        for unit in next.iter().filter(|u| !self.units[u.0].buckets.is_empty()) {
            let layout = &self.units[unit.0];
            if let Some(at) = slots.holding(*unit) {
                slots.all[at].prefetched = true;
                continue;
            }
            let held: usize = slots.all.iter().map(|s| self.bytes([0, 1].map(|k| s.memory[k].numel()))).sum();
            let room = held + self.bytes(self.slot_of(layout)) <= self.budget + self.bytes(self.largest);
            let at = match slots.free(self, layout, false) {
                Some(at) => at,
                None if room => slots.add(self, rank, layout)?,
                None => break,
            };
            self.fill(slots, at, *unit, gather)?;
            slots.all[at].prefetched = true;
        }
        Ok(())
    }

    /// Gathers `unit` into a slot that nothing uses.
    fn fill(&self, slots: &mut Slots, at: usize, unit: UnitId, gather: &GatherUnit) -> Result<()> {
        let slot = &mut slots.all[at];
        slot.unit = None;
        slot.gathered = gather(&self.units[unit.0], &slot.memory)?;
        slot.unit = Some(unit);
        Ok(())
    }

    /// Forgets what slots hold: the weights change. The compute stream waits for all-gathers that still read the shards.
    pub(crate) fn invalidate(&self, rank: &Rank) -> Result<()> {
        for slot in &mut self.lock().all {
            (slot.unit, slot.prefetched, slot.last_use) = (None, false, 0);
            slot.gathered.take().map_or(Ok(()), |done| rank.compute.wait(&done))?;
        }
        Ok(())
    }
}

impl Slots {
    fn holding(&self, unit: UnitId) -> Option<usize> {
        self.all.iter().position(|s| s.unit == Some(unit))
    }

    /// The best slot for a unit among those that nothing uses: the smallest, then one without a unit, then the one not
    /// used for longest. What was gathered ahead is evicted only `by_force`, and last.
    fn free(&self, units: &ShardedUnits, unit: &UnitLayout, by_force: bool) -> Option<usize> {
        let size = units.slot_of(unit);
        let candidates = self.all.iter().enumerate().filter(|(_, s)| {
            let fits = [0, 1].iter().all(|k| s.memory[*k].numel() >= size[*k]);
            fits && Arc::strong_count(&s.users) == 1 && (by_force || !s.prefetched)
        });
        let cost = |s: &Slot| {
            (s.prefetched, s.memory[0].numel() + s.memory[1].numel(), s.unit.is_some(), s.last_use)
        };
        candidates.min_by_key(|(_, s)| cost(s)).map(|(at, _)| at)
    }

    /// Adds a slot for a unit.
    fn add(&mut self, units: &ShardedUnits, rank: &Rank, unit: &UnitLayout) -> Result<usize> {
        let lengths = units.slot_of(unit);
        let zeros = |k: usize| rank.compute.zeros(&[lengths[k]], units.dtypes[k], Category::Parameters);
        let memory = [zeros(0)?, zeros(1)?];
        let users = Arc::default();
        self.all.push(Slot { memory, unit: None, users, prefetched: false, gathered: None, last_use: 0 });
        Ok(self.all.len() - 1)
    }
}
