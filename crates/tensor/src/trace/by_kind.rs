//! Communication by kind: which collectives of which group computation hides.

use super::{Activity, ActivityKind, Trace};
use serde::Serialize;
use std::collections::BTreeMap;

/// Time of one collective of one group.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CommunicationTime {
    /// The group of ranks, such as `tp`.
    pub group: String,
    /// The operation, such as `all-reduce`.
    pub op: String,
    /// Number of calls over all ranks.
    pub calls: u64,
    /// Seconds on the streams of all ranks, with the time spent waiting for other ranks.
    pub total: f64,
    /// Seconds of them during which the same rank computed.
    pub hidden: f64,
    /// The other seconds.
    pub exposed: f64,
}

impl Activity {
    fn is_collective_of_step(&self) -> bool {
        self.kind == ActivityKind::Collective && self.is_communication()
    }

    /// The group of a collective, whose details are `group: 'label'`.
    fn group(&self) -> &str {
        self.detail.split_once(": ").map_or(self.detail.as_str(), |(group, _)| group)
    }
}

impl Trace {
    /// Communication by group and operation, the most exposed first. Calls that run at the same time are in the time of each
    /// kind, so that kinds may sum up to more than [`Trace::overlap`] says.
    pub fn by_communication(&self) -> Vec<CommunicationTime> {
        let mut kinds: BTreeMap<(&str, &str), u64> = BTreeMap::new();
        for a in self.activities.iter().filter(|a| a.is_collective_of_step()) {
            *kinds.entry((a.group(), &a.name)).or_default() += 1;
        }
        let time = |((group, op), calls): ((&str, &str), u64)| {
            let of_kind =
                |a: &Activity| a.is_collective_of_step() && (a.group(), a.name.as_str()) == (group, op);
            let c = self.coverage(of_kind, Activity::is_compute);
            let (group, op) = (group.to_string(), op.to_string());
            let (total, hidden) = (c.total, c.same_rank);
            CommunicationTime { group, op, calls, total, hidden, exposed: total - hidden }
        };
        let mut out: Vec<CommunicationTime> = kinds.into_iter().map(time).collect();
        out.sort_by(|a, b| b.exposed.total_cmp(&a.exposed));
        out
    }
}

#[cfg(test)]
mod tests {
    use super::super::COMMUNICATION;
    use super::*;

    fn activity(
        rank: usize,
        kind: ActivityKind,
        name: &str,
        detail: &str,
        [start, end]: [u64; 2],
    ) -> Activity {
        let collective = kind == ActivityKind::Collective;
        Activity {
            name: name.into(),
            detail: detail.into(),
            kind,
            in_collective: false,
            rank,
            stream: u32::from(collective),
            stream_name: if collective { COMMUNICATION } else { "compute" }.into(),
            start: start * 1_000_000_000,
            end: end * 1_000_000_000,
        }
    }

    #[test]
    fn time_is_hidden_where_the_same_rank_computes() {
        use ActivityKind::{Collective, Kernel};
        let activities = vec![
            activity(0, Kernel, "gemm", "", [0, 10]),
            activity(0, Collective, "all-reduce", "dp: 'a'", [5, 15]),
            activity(0, Collective, "all-reduce", "dp: 'b'", [15, 16]),
            activity(0, Collective, "all-reduce", "tp: 'c'", [20, 23]),
            activity(0, Collective, "all-gather", "dp: 'd'", [1, 3]),
            // Another rank's computation hides nothing of rank 0.
            activity(1, Kernel, "gemm", "", [0, 30]),
            activity(1, Collective, "all-reduce", "dp: 'a'", [5, 15]),
        ];
        let trace = Trace { activities, ..Trace::default() };
        let kind = |group: &str, op: &str, calls, total, hidden| CommunicationTime {
            group: group.into(),
            op: op.into(),
            calls,
            total,
            hidden,
            exposed: total - hidden,
        };
        assert_eq!(
            trace.by_communication(),
            [
                kind("dp", "all-reduce", 3, 21.0, 15.0),
                kind("tp", "all-reduce", 1, 3.0, 0.0),
                kind("dp", "all-gather", 1, 2.0, 2.0),
            ]
        );
    }
}
