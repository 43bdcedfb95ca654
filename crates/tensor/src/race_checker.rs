//! Detects conflicting memory accesses that no event orders.
//!
//! Every stream has a vector clock that says how far each other stream is known to have progressed. A launch advances
//! its own stream's entry, recording an event copies the clock, and waiting for an event takes the elementwise
//! maximum. Two accesses to the same bytes race if at least one writes and the earlier one's time is not yet in the
//! clock of the later one's stream. The history is kept per memory block and survives the block's return to the pool,
//! so a block that is reused while another stream still uses it is reported as well.

use std::collections::HashMap;
use std::ops::Range;

/// Entry `s` is the number of launches of stream `s` that are known to be complete.
pub(crate) type VectorClock = Vec<u64>;

#[derive(Default)]
pub(crate) struct RaceChecker {
    streams: Vec<VectorClock>,
    blocks: HashMap<u64, Vec<Access>>,
}

#[derive(Clone)]
pub(crate) struct Access {
    pub(crate) stream: u32,
    pub(crate) stream_name: &'static str,
    pub(crate) label: &'static str,
    pub(crate) write: bool,
    pub(crate) bytes: Range<usize>,
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

    /// Records an access to a block; fails if it races with an earlier one, and names both.
    pub(crate) fn access(&mut self, block: u64, new: Access) -> Result<(), String> {
        let clock = self.clock(new.stream).clone();
        let history = self.blocks.entry(block).or_default();
        let ordered = |old: &Access| old.time <= clock.get(old.stream as usize).copied().unwrap_or(0);
        let overlap = |old: &Access| old.bytes.start < new.bytes.end && new.bytes.start < old.bytes.end;
        if let Some(old) = history.iter().find(|o| (o.write || new.write) && overlap(o) && !ordered(o)) {
            let verb = |a: &Access| if a.write { "writes" } else { "reads" };
            let what = if old.buffer == new.buffer {
                "the same memory that"
            } else {
                "memory that was reused too early: it belonged to a freed tensor that"
            };
            return Err(format!(
                "'{}' on stream '{}' {} {what} '{}' on stream '{}' {} with no event between them; \
                 record an event after '{}' and make '{}' wait for it",
                new.label,
                new.stream_name,
                verb(&new),
                old.label,
                old.stream_name,
                verb(old),
                old.label,
                new.stream_name
            ));
        }
        // A write that covers an access ordered before it supersedes that access: whatever follows must be ordered
        // after the write.
        let covers = |old: &Access| new.bytes.start <= old.bytes.start && old.bytes.end <= new.bytes.end;
        let same_reader = |old: &Access| !old.write && old.stream == new.stream;
        history.retain(|old| !(covers(old) && ordered(old) && (new.write || same_reader(old))));
        history.push(new);
        Ok(())
    }
}
