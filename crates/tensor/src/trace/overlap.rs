//! How much of one kind of work lies under another.

use super::{Activity, ActivityKind, COMMUNICATION, STAGING, Trace};
use std::collections::{BTreeMap, BTreeSet};

/// Seconds of something, each rank's own counted, and what of them lies under something else.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Coverage {
    /// Seconds in all.
    pub total: f64,
    /// Under work of the same rank.
    pub same_rank: f64,
    /// Under work of any rank.
    pub any_rank: f64,
}

impl Coverage {
    /// The share under work of the same rank; 1 where there is nothing to cover.
    pub fn same_rank_fraction(&self) -> f64 {
        if self.total > 0.0 { self.same_rank / self.total } else { 1.0 }
    }

    /// The share under work of any rank; 1 where there is nothing to cover.
    pub fn any_rank_fraction(&self) -> f64 {
        if self.total > 0.0 { self.any_rank / self.total } else { 1.0 }
    }
}

/// Communication and how much of it lies under computation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Overlap {
    /// Collectives as a whole, waiting for other ranks included, and anything else on communication streams.
    pub collectives: Coverage,
    /// Only while bytes move or are summed: the kernels inside collectives or on communication streams.
    pub transfers: Coverage,
}

impl Activity {
    /// A kernel that is no part of communication.
    pub fn is_compute(&self) -> bool {
        let aside = self.stream_name == COMMUNICATION || self.stream_name == STAGING;
        self.kind == ActivityKind::Kernel && !self.in_collective && !aside
    }

    /// A collective, or a kernel on a communication stream.
    pub fn is_communication(&self) -> bool {
        match self.kind {
            ActivityKind::Collective => true,
            ActivityKind::Kernel => self.stream_name == COMMUNICATION,
            ActivityKind::Region => false,
        }
    }

    /// A kernel that moves or sums data of ranks.
    pub fn is_transfer(&self) -> bool {
        self.kind == ActivityKind::Kernel && (self.in_collective || self.stream_name == COMMUNICATION)
    }
}

impl Trace {
    /// Communication under computation.
    pub fn overlap(&self) -> Overlap {
        Overlap {
            collectives: self.coverage(Activity::is_communication, Activity::is_compute),
            transfers: self.coverage(Activity::is_transfer, Activity::is_compute),
        }
    }

    /// The time during which a rank has something of `what`, and how much of it has something of `under`. Moments
    /// with several of them at once count once for each rank.
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

    /// The ranks that did something.
    pub fn ranks(&self) -> BTreeSet<usize> {
        self.activities.iter().map(|a| a.rank).collect()
    }
}

/// The same time as intervals in order, apart from each other.
fn union(mut intervals: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
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

fn length(union: &[(u64, u64)]) -> u64 {
    union.iter().map(|(start, end)| end - start).sum()
}

/// Length of what two unions have in common.
fn common(a: &[(u64, u64)], b: &[(u64, u64)]) -> u64 {
    let (mut i, mut j, mut sum) = (0, 0, 0);
    while let (Some(x), Some(y)) = (a.get(i), b.get(j)) {
        sum += x.1.min(y.1).saturating_sub(x.0.max(y.0));
        if x.1 < y.1 { i += 1 } else { j += 1 }
    }
    sum
}
