//! Communication volume: bytes sent by a rank, by the formulas of ring algorithms.
//!
//! For n ranks and a tensor of B bytes, each rank sends (n−1)/n·B in an all-gather or reduce-scatter, 2(n−1)/n·B in
//! an all-reduce, and everything meant for other ranks in an all-to-all. With uneven parts, a rank of an all-gather
//! forwards everything except its right neighbour's part. A broadcast runs along a chain from the root: every rank
//! but the last sends B.

use crate::op_descriptor::OpKind;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Number of calls and bytes sent by this rank, by kind of operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Volume {
    entries: [(u64, u64); OpKind::ALL.len()],
    /// Calls launched together with the one before.
    coalesced: u64,
}

impl Volume {
    /// Number of calls of a kind.
    pub fn calls(&self, kind: OpKind) -> u64 {
        self.entries[kind as usize].0
    }

    /// Bytes sent by calls of a kind.
    pub fn bytes(&self, kind: OpKind) -> u64 {
        self.entries[kind as usize].1
    }

    /// Bytes sent in total.
    pub fn total(&self) -> u64 {
        self.entries.iter().map(|e| e.1).sum()
    }

    /// Number of launches: collectives that are coalesced count as one, as NCCL launches them.
    pub fn launches(&self) -> u64 {
        self.entries.iter().map(|e| e.0).sum::<u64>() - self.coalesced
    }

    /// The difference to an earlier reading.
    pub fn since(&self, earlier: &Volume) -> Volume {
        let mut out = *self;
        out.coalesced = self.coalesced.saturating_sub(earlier.coalesced);
        for (now, then) in out.entries.iter_mut().zip(&earlier.entries) {
            *now = (now.0.saturating_sub(then.0), now.1.saturating_sub(then.1));
        }
        out
    }
}

impl fmt::Display for Volume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let used: Vec<String> = OpKind::ALL
            .iter()
            .filter(|k| self.calls(**k) > 0)
            .map(|k| format!("{} {} B in {}", k.name(), self.bytes(*k), self.calls(*k)))
            .collect();
        f.write_str(&if used.is_empty() { "nothing".to_string() } else { used.join(", ") })
    }
}

/// Counters, updated with every call.
#[derive(Default)]
pub(crate) struct VolumeMeter {
    entries: [(AtomicU64, AtomicU64); OpKind::ALL.len()],
    coalesced: AtomicU64,
}

impl VolumeMeter {
    pub(crate) fn add(&self, kind: OpKind, bytes: u64) {
        let (calls, sum) = &self.entries[kind as usize];
        calls.fetch_add(1, Relaxed);
        sum.fetch_add(bytes, Relaxed);
    }

    pub(crate) fn add_coalesced(&self, calls: u64) {
        self.coalesced.fetch_add(calls, Relaxed);
    }

    pub(crate) fn add_all(&self, volume: &Volume) {
        for (to, from) in self.entries.iter().zip(&volume.entries) {
            to.0.fetch_add(from.0, Relaxed);
            to.1.fetch_add(from.1, Relaxed);
        }
        self.coalesced.fetch_add(volume.coalesced, Relaxed);
    }

    pub(crate) fn read(&self) -> Volume {
        let mut out = Volume { coalesced: self.coalesced.load(Relaxed), ..Volume::default() };
        for (to, from) in out.entries.iter_mut().zip(&self.entries) {
            *to = (from.0.load(Relaxed), from.1.load(Relaxed));
        }
        out
    }
}

/// All-reduce of `bytes` over `n` ranks: 2(n−1)/n·bytes, rounded down.
pub(crate) fn all_reduce(n: usize, bytes: usize) -> u64 {
    (2 * (n as u128 - 1) * bytes as u128 / n as u128) as u64
}

/// All-gather of parts: all but the right neighbour's.
pub(crate) fn all_gather(rank: usize, parts: impl Iterator<Item = usize> + Clone) -> u64 {
    let n = parts.clone().count();
    parts.enumerate().filter(|(r, _)| n > 0 && *r != (rank + 1) % n).map(|(_, b)| b as u64).sum()
}

/// Broadcast along the chain root, root+1, ….
pub(crate) fn broadcast(rank: usize, n: usize, root: usize, bytes: usize) -> u64 {
    if (rank + 1) % n == root { 0 } else { bytes as u64 }
}
