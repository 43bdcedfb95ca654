//! What ran when: a lane for each stream, for the passes of layers and for the host.

use crate::bench::category_of;
use ferrotron_tensor::trace::{Activity, ActivityKind, READBACK, STAGING, STEP, Trace};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Most entries: a page of them stays below two megabytes.
const ENTRIES: usize = 60_000;
/// Most ranks.
const RANKS: usize = 8;

/// Colour of collectives, beside those of kernel families.
const COMMUNICATION: &str = "communication";
/// Colour of time in which the host launches or, on the CPU, computes between kernels.
const HOST: &str = "host";
/// Colour of passes of layers.
const PASS: &str = "pass";

/// Entries of lanes by time. Times are in units of 100 ns since the start of the trace.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Timeline {
    /// Start and end of the traced steps of the first rank.
    pub steps: Vec<[u64; 2]>,
    /// Name and family of entries.
    pub names: Vec<(String, &'static str)>,
    /// The lanes, rank by rank.
    pub lanes: Vec<Lane>,
    /// Ranks that are left out.
    pub more_ranks: usize,
    /// Steps before the first that is shown.
    pub more_steps: usize,
}

/// Entries that do not overlap, except where they nest.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Lane {
    /// The rank.
    pub rank: usize,
    /// `layers`, the name of a stream, or `host`.
    pub name: String,
    /// When entries start.
    pub start: Vec<u64>,
    /// How long they take.
    pub length: Vec<u64>,
    /// Index of their names.
    pub name_of: Vec<usize>,
}

#[derive(Default)]
struct Names {
    index: BTreeMap<String, usize>,
    list: Vec<(String, &'static str)>,
}

impl Names {
    fn of(&mut self, name: String, family: &'static str) -> usize {
        *self.index.entry(name.clone()).or_insert_with(|| {
            self.list.push((name, family));
            self.list.len() - 1
        })
    }
}

impl Lane {
    fn add(&mut self, [start, end]: [u64; 2], name: usize) {
        self.start.push(start / 100);
        self.length.push((end / 100).saturating_sub(start / 100));
        self.name_of.push(name);
    }
}

/// An entry of the lane of its stream; kernels inside a collective are part of it.
fn is_shown(a: &Activity) -> bool {
    let aside = [READBACK, STAGING].contains(&&*a.stream_name);
    let entry = match a.kind {
        ActivityKind::Kernel => !a.in_collective,
        ActivityKind::Collective => true,
        ActivityKind::Region => a.name != STEP,
    };
    entry && !aside
}

/// The timeline of a trace: of the last steps and first ranks, where there is too much.
pub(super) fn timeline(trace: &Trace) -> Timeline {
    let all = trace.ranks();
    let ranks: BTreeSet<usize> = all.iter().copied().take(RANKS).collect();
    let steps = ranks.first().map_or(Vec::new(), |rank| trace.steps(*rank));
    let shown = |from: u64| trace.activities.iter().filter(move |a| a.end > from && is_shown(a));
    let entries = |from: u64| shown(from).filter(|a| ranks.contains(&a.rank)).count();
    let starts = steps.iter().map(|(start, _)| *start);
    let skipped = starts.take_while(|start| entries(*start) > ENTRIES).count();
    let skipped = skipped.min(steps.len().saturating_sub(1));
    let from = steps.get(skipped).map_or(0, |(start, _)| *start);
    let mut names = Names::default();
    let mut lanes: BTreeMap<(usize, u32, u32), Lane> = BTreeMap::new();
    let mut activities: Vec<&Activity> = shown(from).filter(|a| ranks.contains(&a.rank)).collect();
    activities.sort_by_key(|a| (a.start, std::cmp::Reverse(a.end)));
    for a in activities.into_iter().take(2 * ENTRIES) {
        let (name, family) = match a.kind {
            ActivityKind::Kernel => (a.name.clone(), category_of(&a.name).name()),
            ActivityKind::Collective => (format!("{} {}", a.name, a.detail), COMMUNICATION),
            ActivityKind::Region => (format!("{} {}", a.name, a.detail), PASS),
        };
        let is_pass = a.kind == ActivityKind::Region;
        let (order, lane_name) = if is_pass { (0, "layers") } else { (1, a.stream_name.as_str()) };
        let lane = lanes.entry((a.rank, order, a.stream)).or_default();
        (lane.rank, lane.name) = (a.rank, lane_name.into());
        lane.add([a.start, a.end], names.of(name, family));
    }
    for rank in &ranks {
        let (name, host) = host_time(trace, *rank, from);
        let name = names.of(name.into(), HOST);
        let lane = lanes.entry((*rank, 2, 0)).or_default();
        (lane.rank, lane.name) = (*rank, HOST.into());
        host.into_iter().take(ENTRIES).for_each(|span| lane.add(span, name));
    }
    Timeline {
        steps: steps.iter().skip(skipped).map(|(start, end)| [start / 100, end / 100]).collect(),
        names: names.list,
        lanes: lanes.into_values().filter(|l| !l.start.is_empty()).collect(),
        more_ranks: all.len() - ranks.len(),
        more_steps: skipped,
    }
}

/// When the host of a rank was busy: launching, where a GPU computes; between kernels, where it computes itself.
fn host_time(trace: &Trace, rank: usize, from: u64) -> (&'static str, Vec<[u64; 2]>) {
    let launches: Vec<[u64; 2]> =
        trace.launches.iter().filter(|l| l.rank == rank && l.end > from).map(|l| [l.start, l.end]).collect();
    if !trace.launches.is_empty() {
        return ("kernel launch", launches);
    }
    let mut busy: Vec<(u64, u64)> = trace
        .activities
        .iter()
        .filter(|a| a.rank == rank && a.kind != ActivityKind::Region)
        .map(|a| (a.start, a.end))
        .collect();
    busy.sort_unstable();
    let mut gaps = Vec::new();
    for (start, end) in trace.steps(rank).into_iter().filter(|(start, _)| *start >= from) {
        let mut at = start;
        for (begin, stop) in busy.iter().filter(|(begin, stop)| *stop > start && *begin < end) {
            if *begin > at {
                gaps.push([at, *begin]);
            }
            at = at.max(*stop);
        }
        if end > at {
            gaps.push([at, end]);
        }
    }
    ("between kernels", gaps)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn activity(kind: ActivityKind, name: &str, [start, end]: [u64; 2]) -> Activity {
        Activity {
            name: name.into(),
            detail: String::new(),
            kind,
            in_collective: false,
            rank: 0,
            stream: 0,
            stream_name: "compute".into(),
            start,
            end,
        }
    }

    #[test]
    fn on_the_cpu_the_host_works_between_kernels() {
        use ActivityKind::{Collective, Kernel, Region};
        let activities = vec![
            activity(Region, STEP, [1000, 9000]),
            activity(Region, "forward", [1000, 5000]),
            activity(Kernel, "gemm (output)", [2000, 4000]),
            activity(Collective, "all-reduce", [3500, 6000]),
            activity(Kernel, "adam", [7000, 8000]),
        ];
        let t = timeline(&Trace { activities, ..Trace::default() });
        let lanes: Vec<&str> = t.lanes.iter().map(|l| l.name.as_str()).collect();
        assert_eq!((lanes, t.steps), (vec!["layers", "compute", "host"], vec![[10, 90]]));
        let host = &t.lanes[2];
        assert_eq!((&host.start, &host.length), (&vec![10, 60, 80], &vec![10, 10, 10]));
        let family = |i: usize| t.names[t.lanes[1].name_of[i]].1;
        assert_eq!([0, 1, 2].map(family), ["GEMMs", "communication", "optimizer"]);
    }

    /// Of too many entries the last steps stay.
    #[test]
    fn a_long_trace_shows_its_last_steps() {
        let mut activities = Vec::new();
        for step in 0..4u64 {
            let begin = step * 10_000_000;
            activities.push(activity(ActivityKind::Region, STEP, [begin, begin + 9_000_000]));
            let kernel =
                |i: u64| activity(ActivityKind::Kernel, "adam", [begin + 400 * i, begin + 400 * i + 300]);
            activities.extend((0..20_000).map(kernel));
        }
        let t = timeline(&Trace { activities, ..Trace::default() });
        assert_eq!((t.more_steps, t.steps.len(), t.lanes[0].start.len()), (1, 3, 60_000));
        assert_eq!(t.lanes[0].start[0], 100_000);
    }
}
