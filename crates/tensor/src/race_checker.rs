//! Detects conflicting memory accesses that no event orders.
//!
//! Every stream has a vector clock that says how far each other stream is known to have progressed. A launch advances
//! its own stream's entry, recording an event copies the clock, and waiting for an event takes the elementwise
//! maximum. Two accesses to the same bytes race if at least one writes and the earlier one's time is not yet in the
//! clock of the later one's stream. The history is kept by address and survives the memory's return to the pool, so memory
//! that is reused while another stream still uses it is reported as well, even if only a part of it is.

use std::collections::BTreeMap;
use std::ops::Range;

/// Entry `s` is the number of launches of stream `s` that are known to be complete.
pub(crate) type VectorClock = Vec<u64>;

#[derive(Default)]
pub(crate) struct RaceChecker {
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
        self.streams.resize_with(n, Vec::new);
        let clock = &mut self.streams[stream as usize];
        clock.resize(clock.len().max(n), 0);
        clock
    }

    /// Starts a launch and returns its time on its stream.
    pub(crate) fn tick(&mut self, stream: u32) -> u64 {
        let t = &mut self.clock(stream)[stream as usize];
        *t += 1;
        *t
    }

    /// The clock that an event on `stream` carries.
    pub(crate) fn record(&mut self, stream: u32) -> VectorClock {
        self.clock(stream).clone()
    }

    /// Makes `stream` wait for `event`.
    pub(crate) fn wait(&mut self, stream: u32, event: &VectorClock) {
        let clock = self.clock(stream);
        clock.resize(clock.len().max(event.len()), 0);
        for (mine, theirs) in clock.iter_mut().zip(event) {
            *mine = (*mine).max(*theirs);
        }
    }

    /// Records an access to a range of addresses; fails if it races with an earlier one, and names both.
    pub(crate) fn access(&mut self, range: Range<usize>, new: Access) -> Result<(), String> {
        let clock = self.clock(new.stream).clone();
        let ordered = |old: &Access| old.time <= clock.get(old.stream as usize).copied().unwrap_or(0);
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
