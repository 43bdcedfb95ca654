//! Overlap of communication with computation.

use super::{Activity, ActivityKind, COMMUNICATION, OFFLOAD, READBACK, STAGING, Trace};
use std::collections::{BTreeMap, BTreeSet};

/// Time spent in one kind of work, summed over ranks, and how much of it another kind of work overlaps.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Coverage {
    /// Seconds in total.
    pub total: f64,
    /// Seconds overlapped by work of the same rank.
    pub same_rank: f64,
    /// Seconds overlapped by work of any rank.
    pub any_rank: f64,
}

impl Coverage {
    /// Fraction overlapped by work of the same rank; 1 if the total is 0.
    pub fn same_rank_fraction(&self) -> f64 {
        if self.total > 0.0 { self.same_rank / self.total } else { 1.0 }
    }

    /// Fraction overlapped by work of any rank; 1 if the total is 0.
    pub fn any_rank_fraction(&self) -> f64 {
        if self.total > 0.0 { self.any_rank / self.total } else { 1.0 }
    }
}

/// Communication time and how much of it computation overlaps.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Overlap {
    /// Whole collectives, including the time spent waiting for other ranks, and anything else on communication
    /// streams.
    pub collectives: Coverage,
    /// Only the kernels that move or reduce data: those inside collectives or on communication streams.
    pub transfers: Coverage,
}

impl Activity {
    /// True for a kernel that is not part of communication.
    pub fn is_compute(&self) -> bool {
        let aside =
            [COMMUNICATION, STAGING, READBACK].iter().chain(&OFFLOAD).any(|name| self.stream_name == *name);
        self.kind == ActivityKind::Kernel && !self.in_collective && !aside
    }

    /// True for a collective of the step, or a kernel on a communication stream.
    pub fn is_communication(&self) -> bool {
        match self.kind {
            ActivityKind::Collective => self.stream_name != READBACK,
            ActivityKind::Kernel => self.stream_name == COMMUNICATION,
            ActivityKind::Region => false,
        }
    }

    /// True for a kernel that moves or reduces data between ranks.
    pub fn is_transfer(&self) -> bool {
        let collective = self.in_collective && self.stream_name != READBACK;
        self.kind == ActivityKind::Kernel && (collective || self.stream_name == COMMUNICATION)
    }
}

impl Trace {
    /// Overlap of communication with computation.
    pub fn overlap(&self) -> Overlap {
        Overlap {
            collectives: self.coverage(Activity::is_communication, Activity::is_compute),
            transfers: self.coverage(Activity::is_transfer, Activity::is_compute),
        }
    }

    /// The time during which a rank runs any of `what`, and how much of that time something of `under` runs.
    /// Concurrent entries of one rank count once.
    pub fn coverage(&self, what: impl Fn(&Activity) -> bool, under: impl Fn(&Activity) -> bool) -> Coverage {
        let collect = |which: &dyn Fn(&Activity) -> bool| {
            let mut by_rank: BTreeMap<usize, Vec<(u64, u64)>> = BTreeMap::new();
            for a in self.activities.iter().filter(|a| which(a)) {
                by_rank.entry(a.rank).or_default().push((a.start, a.end));
            }
            by_rank
        };
        let (what, under) = (collect(&what), collect(&under));
        let everyone = union(under.values().flatten().copied().collect());
        let mut ns = [0u64; 3];
        for (rank, mine) in what {
            let mine = union(mine);
            let own = union(under.get(&rank).cloned().unwrap_or_default());
            ns[0] += length(&mine);
            ns[1] += common(&mine, &own);
            ns[2] += common(&mine, &everyone);
        }
        let [total, same_rank, any_rank] = ns.map(|n| n as f64 / 1e9);
        Coverage { total, same_rank, any_rank }
    }

    /// The ranks with entries.
    pub fn ranks(&self) -> BTreeSet<usize> {
        self.activities.iter().map(|a| a.rank).collect()
    }
}

/// Merges intervals into sorted, disjoint ones.
pub(super) fn union(mut intervals: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    intervals.sort_unstable();
    let mut out: Vec<(u64, u64)> = Vec::with_capacity(intervals.len());
    for (start, end) in intervals {
        match out.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => out.push((start, end)),
        }
    }
    out
}

pub(super) fn length(union: &[(u64, u64)]) -> u64 {
    union.iter().map(|(start, end)| end - start).sum()
}

/// Total length of the intersection of two sorted lists of disjoint intervals.
pub(super) fn common(a: &[(u64, u64)], b: &[(u64, u64)]) -> u64 {
    let (mut i, mut j, mut sum) = (0, 0, 0);
    while let (Some(x), Some(y)) = (a.get(i), b.get(j)) {
        sum += x.1.min(y.1).saturating_sub(x.0.max(y.0));
        if x.1 < y.1 { i += 1 } else { j += 1 }
    }
    sum
}
