//! Detects conflicting memory accesses that no event orders.
//!
//! Every stream has a vector clock that says how far each other stream is known to have progressed. A launch advances
//! its own stream's entry, recording an event copies the clock, and waiting for an event takes the elementwise
//! maximum. Two accesses to the same bytes race if at least one writes and the earlier one's time is not yet in the
//! clock of the later one's stream. The history is kept by address and survives the memory's return to the pool, so memory
//! that is reused while another stream still uses it is reported as well, even if only a part of it is.
//!
//! A stream may wait for an event of another device. Clocks therefore count the launches of every device's streams by
//! themselves: stream 0 of one device is not stream 0 of another.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// The number of launches of each stream that are known to be complete.
#[derive(Clone, Default)]
pub(crate) struct VectorClock {
    /// Of each device, by identity: entry `s` is its stream `s`. A clock keeps the identities that it names alive, so that
    /// no later device is taken for one of them.
    devices: Vec<(Arc<()>, Vec<u64>)>,
}

impl VectorClock {
    /// The entries of a device's streams, at least `streams` of them.
    fn entries(&mut self, device: &Arc<()>, streams: usize) -> &mut Vec<u64> {
        let known = self.devices.iter().position(|(d, _)| Arc::ptr_eq(d, device));
        let at = known.unwrap_or_else(|| {
            self.devices.push((device.clone(), Vec::new()));
            self.devices.len() - 1
        });
        let entries = &mut self.devices[at].1;
        entries.resize(entries.len().max(streams), 0);
        entries
    }

    /// Elementwise maximum.
    fn join(&mut self, other: &VectorClock) {
        for (device, theirs) in &other.devices {
            let mine = self.entries(device, theirs.len());
            mine.iter_mut().zip(theirs).for_each(|(mine, theirs)| *mine = (*mine).max(*theirs));
        }
    }
}

#[derive(Default)]
pub(crate) struct RaceChecker {
    /// The device's identity in clocks.
    device: Arc<()>,
    streams: Vec<VectorClock>,
    /// Disjoint ranges of addresses by their start.
    history: BTreeMap<usize, History>,
}

/// What happened to a range of addresses.
#[derive(Clone)]
struct History {
    end: usize,
    /// At most one write, the oldest entry, and the accesses since.
    accesses: Vec<Access>,
}

#[derive(Clone, Debug)]
pub(crate) struct Access {
    pub(crate) stream: u32,
    pub(crate) stream_name: &'static str,
    pub(crate) label: &'static str,
    pub(crate) write: bool,
    pub(crate) buffer: u64,
    pub(crate) time: u64,
}

impl RaceChecker {
    fn clock(&mut self, stream: u32) -> &mut VectorClock {
        let n = self.streams.len().max(stream as usize + 1);
        self.streams.resize_with(n, VectorClock::default);
        &mut self.streams[stream as usize]
    }

    /// What `stream` knows of this device's streams.
    fn entries(&mut self, stream: u32) -> &mut Vec<u64> {
        let device = self.device.clone();
        self.clock(stream).entries(&device, stream as usize + 1)
    }

    /// Starts a launch and returns its time on its stream.
    pub(crate) fn tick(&mut self, stream: u32) -> u64 {
        let t = &mut self.entries(stream)[stream as usize];
        *t += 1;
        *t
    }

    /// The clock that an event on `stream` carries.
    pub(crate) fn record(&mut self, stream: u32) -> VectorClock {
        self.clock(stream).clone()
    }

    /// Makes `stream` wait for `event`, which may be another device's.
    pub(crate) fn wait(&mut self, stream: u32, event: &VectorClock) {
        self.clock(stream).join(event);
    }

    /// Records an access to a range of addresses; fails if it races with an earlier one, and names both.
    pub(crate) fn access(&mut self, range: Range<usize>, new: Access) -> Result<(), String> {
        let known = self.entries(new.stream).clone();
        let ordered = |old: &Access| old.time <= known.get(old.stream as usize).copied().unwrap_or(0);
        self.split(range.start);
        self.split(range.end);
        let earlier = self.history.range(range.clone()).flat_map(|(_, h)| &h.accesses);
        if let Some(old) = earlier.into_iter().find(|o| (o.write || new.write) && !ordered(o)) {
            return Err(race(old, &new));
        }
        if new.write {
            // Everything before is ordered before this write: whatever follows must be ordered after the write.
            self.forget(range.clone());
            self.history.insert(range.start, History { end: range.end, accesses: vec![new] });
            return Ok(());
        }
        let mut at = range.start;
        let mut untouched = Vec::new();
        for (start, h) in self.history.range_mut(range.clone()) {
            untouched.push(at..*start);
            at = h.end;
            h.accesses.retain(|old| old.write || old.stream != new.stream);
            h.accesses.push(new.clone());
        }
        untouched.push(at..range.end);
        for r in untouched.into_iter().filter(|r| !r.is_empty()) {
            self.history.insert(r.start, History { end: r.end, accesses: vec![new.clone()] });
        }
        Ok(())
    }

    /// Forgets what happened to addresses whose memory was given back to the system.
    pub(crate) fn forget(&mut self, range: Range<usize>) {
        self.split(range.start);
        self.split(range.end);
        let inside: Vec<usize> = self.history.range(range).map(|(start, _)| *start).collect();
        inside.iter().for_each(|start| drop(self.history.remove(start)));
    }

    /// Splits the history of the range that contains `at` there.
    fn split(&mut self, at: usize) {
        if let Some((_, h)) = self.history.range_mut(..at).next_back().filter(|(_, h)| at < h.end) {
            let after = h.clone();
            h.end = at;
            self.history.insert(at, after);
        }
    }
}

fn race(old: &Access, new: &Access) -> String {
    let verb = |a: &Access| if a.write { "writes" } else { "reads" };
    let what = if old.buffer == new.buffer {
        "the same memory that"
    } else {
        "memory that was reused too early: it belonged to a freed tensor that"
    };
    format!(
        "'{}' on stream '{}' {} {what} '{}' on stream '{}' {} with no event between them; \
         record an event after '{}' and make '{}' wait for it",
        new.label,
        new.stream_name,
        verb(new),
        old.label,
        old.stream_name,
        verb(old),
        old.label,
        new.stream_name
    )
}
