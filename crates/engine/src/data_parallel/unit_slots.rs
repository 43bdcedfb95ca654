//! Which unit of sharded weights is in which slot (ZeRO-3): the rule, without memory. [`super::units`] gathers by it, and
//! the communication volume of a step is counted by it.

use super::units::UnitLayout;
use crate::{ParamSpec, UnitId};
use std::sync::Arc;

/// Slots and the units in them.
#[derive(Debug)]
pub struct UnitSlots {
    /// Lengths of each unit: FP8-resident elements, and all others; 0 for units that are not sharded.
    lengths: Vec<[usize; 2]>,
    /// Bytes of an element of each kind.
    sizes: [usize; 2],
    /// Lengths of a slot for any unit but embeddings and the LM head.
    layer: [usize; 2],
    /// Lengths of a slot for every unit.
    largest: [usize; 2],
    /// Bytes of slots beyond the largest one.
    budget: usize,
    slots: Vec<Slot>,
    /// Counts uses, to find the slot that was not used for longest.
    clock: u64,
}

#[derive(Debug)]
struct Slot {
    lengths: [usize; 2],
    /// The unit it holds.
    unit: Option<UnitId>,
    /// Shared with everything that uses the unit.
    users: Arc<()>,
    /// Gathered ahead of its use.
    prefetched: bool,
    last_use: u64,
}

/// A unit in its slot, which no other unit takes while `users` is held.
pub struct EnteredUnit {
    /// Its slot.
    pub slot: usize,
    /// Held while the unit is in use.
    pub users: Arc<()>,
    /// Units to gather, in order, each into a slot: this one unless it was there, then others ahead of their use.
    pub gathers: Vec<(usize, UnitId)>,
}

impl UnitSlots {
    /// Slots for units of elements of these sizes in bytes; `budget` bytes of them beyond the largest.
    pub(crate) fn new(
        specs: &[ParamSpec],
        units: &[UnitLayout],
        sizes: [usize; 2],
        budget: usize,
    ) -> UnitSlots {
        let lengths: Vec<[usize; 2]> = units.iter().map(UnitLayout::lengths).collect();
        let table = |u: usize| specs.iter().any(|s| s.unit.0 == u && s.is_table());
        let max = |a: [usize; 2], b: &[usize; 2]| [a[0].max(b[0]), a[1].max(b[1])];
        let largest = lengths.iter().fold([0; 2], max);
        let layers = lengths.iter().enumerate().filter(|(u, _)| !table(*u)).map(|(_, l)| l);
        let layer = layers.fold([0; 2], max);
        UnitSlots { lengths, sizes, layer, largest, budget, slots: Vec::new(), clock: 0 }
    }

    /// Bytes of a slot of these lengths.
    fn bytes(&self, lengths: [usize; 2]) -> usize {
        lengths[0] * self.sizes[0] + lengths[1] * self.sizes[1]
    }

    fn is_sharded(&self, unit: UnitId) -> bool {
        self.lengths[unit.0] != [0; 2]
    }

    /// Lengths of the slot for a unit: slots serve any layer, or any unit.
    fn slot_of(&self, unit: UnitId) -> [usize; 2] {
        let lengths = self.lengths[unit.0];
        let fits = lengths[0] <= self.layer[0] && lengths[1] <= self.layer[1];
        if fits { self.layer } else { self.largest }
    }

    /// Bytes that slots take once passes have run: as many for layers as the budget allows, and the largest.
    pub fn slot_bytes(&self) -> usize {
        let (layer, largest) = (self.bytes(self.layer), self.bytes(self.largest));
        let units = self.lengths.iter().filter(|l| **l != [0; 2]).count();
        largest + layer * (self.budget / layer.max(1)).min(units.saturating_sub(1))
    }

    /// Lengths of every slot, in order of their first use.
    pub(crate) fn slots(&self) -> impl ExactSizeIterator<Item = [usize; 2]> {
        self.slots.iter().map(|s| s.lengths)
    }

    /// Enters a unit; with `ahead` the `next` ones are gathered as far as the budget allows. None for a unit that is not
    /// sharded.
    pub fn enter(&mut self, unit: UnitId, next: &[UnitId], ahead: bool) -> Option<EnteredUnit> {
        if !self.is_sharded(unit) {
            return None;
        }
        let mut gathers = Vec::new();
        let slot = match self.holding(unit) {
            Some(slot) => slot,
            None => {
                let slot = self.free(unit, true).unwrap_or_else(|| self.add(unit));
                self.slots[slot].unit = Some(unit);
                gathers.push((slot, unit));
                slot
            }
        };
        self.clock += 1;
        let entered = &mut self.slots[slot];
        (entered.last_use, entered.prefetched) = (self.clock, false);
        let users = entered.users.clone();
        if ahead {
            self.prefetch(next, &mut gathers);
        }
        Some(EnteredUnit { slot, users, gathers })
    }

    /// Chooses slots for units that are gathered ahead of their use.
    fn prefetch(&mut self, next: &[UnitId], gathers: &mut Vec<(usize, UnitId)>) {
        for unit in next.iter().copied() {
            if !self.is_sharded(unit) {
                continue;
            }
            if let Some(slot) = self.holding(unit) {
                self.slots[slot].prefetched = true;
                continue;
            }
            let held: usize = self.slots.iter().map(|s| self.bytes(s.lengths)).sum();
            let room = held + self.bytes(self.slot_of(unit)) <= self.budget + self.bytes(self.largest);
            let slot = match self.free(unit, false) {
                Some(slot) => slot,
                None if room => self.add(unit),
                None => break,
            };
            let taken = &mut self.slots[slot];
            (taken.unit, taken.prefetched) = (Some(unit), true);
            gathers.push((slot, unit));
        }
    }

    /// Forgets what a slot holds: its all-gather failed.
    pub(crate) fn forget(&mut self, slot: usize) {
        self.slots[slot].unit = None;
    }

    /// Forgets what all slots hold: the weights change.
    pub fn invalidate(&mut self) {
        for slot in &mut self.slots {
            (slot.unit, slot.prefetched, slot.last_use) = (None, false, 0);
        }
    }

    fn holding(&self, unit: UnitId) -> Option<usize> {
        self.slots.iter().position(|s| s.unit == Some(unit))
    }

    /// The best slot for a unit among those that nothing uses: the smallest, then one without a unit, then the one not
    /// used for longest. What was gathered ahead is evicted only `by_force`, and last.
    fn free(&self, unit: UnitId, by_force: bool) -> Option<usize> {
        let size = self.slot_of(unit);
        let candidates = self.slots.iter().enumerate().filter(|(_, s)| {
            let fits = s.lengths[0] >= size[0] && s.lengths[1] >= size[1];
            fits && Arc::strong_count(&s.users) == 1 && (by_force || !s.prefetched)
        });
        let cost = |s: &Slot| (s.prefetched, s.lengths[0] + s.lengths[1], s.unit.is_some(), s.last_use);
        candidates.min_by_key(|(_, s)| cost(s)).map(|(slot, _)| slot)
    }

    /// Adds a slot for a unit.
    fn add(&mut self, unit: UnitId) -> usize {
        let lengths = self.slot_of(unit);
        self.slots.push(Slot { lengths, unit: None, users: Arc::default(), prefetched: false, last_use: 0 });
        self.slots.len() - 1
    }
}
