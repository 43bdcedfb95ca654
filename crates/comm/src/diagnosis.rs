//! Why a job does not go on, found from what every rank has done.
//!
//! Rank 0 collects a [`Snapshot`] from every rank when one of them reports a stall. [`diagnose`] looks for, in this
//! order: a rank that exited, two ranks that made different calls, a rank that does not respond, a rank that the others
//! wait for and that waits for nobody itself (its host has not made the call, or its GPU has not reached it), ranks that
//! wait for each other, and a transfer that all ranks have started and none completes.

use crate::flight_recorder::{Channel, OpRecord, OpState, OpStatus, Snapshot};
use crate::op_descriptor::OpDescriptor;
use crate::{Error, watchdog};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// What is known of a rank.
#[derive(Clone, Debug)]
pub(crate) enum RankState {
    /// Its process has ended; its last known operation.
    Exited(Option<OpRecord>),
    /// It does not answer; its last known operation.
    Silent(Option<OpRecord>),
    /// Its answer.
    Answered(Snapshot),
}

/// The cause of a stall.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Diagnosis {
    /// The rank that holds up the others, or one of them.
    pub(crate) rank: usize,
    pub(crate) text: String,
}

/// Finds the cause. `groups` has the members of every group, ranks of the job; `states` has one entry per rank.
pub(crate) fn diagnose(states: &[RankState], groups: &HashMap<u64, Vec<usize>>) -> Diagnosis {
    let job = Job { states, groups };
    job.exited()
        .or_else(|| job.different_calls())
        .or_else(|| job.silent())
        .or_else(|| job.missing())
        .unwrap_or_else(|| job.stuck())
}

/// Two ranks that made different calls, if their operations are still known.
pub(crate) fn different_calls(states: &[RankState], groups: &HashMap<u64, Vec<usize>>) -> Option<Diagnosis> {
    Job { states, groups }.different_calls()
}

struct Job<'a> {
    states: &'a [RankState],
    groups: &'a HashMap<u64, Vec<usize>>,
}

impl<'a> Job<'a> {
    fn answered(&self) -> impl Iterator<Item = (usize, &'a Snapshot)> + '_ {
        self.states.iter().enumerate().filter_map(|(rank, state)| match state {
            RankState::Answered(snapshot) => Some((rank, snapshot)),
            _ => None,
        })
    }

    /// Members of a channel as ranks of the job, in group order.
    fn members(&self, channel: Channel) -> Vec<usize> {
        let group = self.groups.get(&channel.group).map_or(&[][..], Vec::as_slice);
        match channel.route {
            None => group.to_vec(),
            Some((from, to)) => {
                [from, to].iter().filter_map(|r| group.get(usize::try_from(*r).ok()?).copied()).collect()
            }
        }
    }

    /// The ranks that wait in an operation on their GPU or host, each with its oldest one.
    fn waiting(&self) -> BTreeMap<usize, OpState> {
        let waits = |op: &&OpState| matches!(op.status, OpStatus::Running | OpStatus::Waiting);
        self.answered().filter_map(|(rank, s)| Some((rank, s.ops.iter().find(waits)?.clone()))).collect()
    }

    /// "rank 0 has been moving data in …", for the rank that has waited longest.
    fn longest_wait(&self) -> String {
        let waiting = self.waiting();
        let longest = waiting.iter().max_by_key(|(_, op)| op.age);
        longest.map_or(String::new(), |(rank, op)| format!("; rank {rank} {}", op.record()))
    }

    fn exited(&self) -> Option<Diagnosis> {
        let (rank, last) = self.states.iter().enumerate().find_map(|(rank, state)| match state {
            RankState::Exited(last) => Some((rank, last)),
            _ => None,
        })?;
        let text = format!("rank {rank} has exited ({}){}", last_deed(last.as_ref()), self.longest_wait());
        Some(Diagnosis { rank, text })
    }

    fn silent(&self) -> Option<Diagnosis> {
        let silent: Vec<(usize, &Option<OpRecord>)> = self
            .states
            .iter()
            .enumerate()
            .filter_map(|(rank, state)| match state {
                RankState::Silent(last) => Some((rank, last)),
                _ => None,
            })
            .collect();
        let list: Vec<String> =
            silent.iter().map(|(rank, last)| format!("rank {rank} ({})", last_deed(last.as_ref()))).collect();
        let verb = if list.len() == 1 { "does" } else { "do" };
        let text = format!(
            "stalled: {} {verb} not respond: stopped, or the host hangs{}",
            list.join(", "),
            self.longest_wait()
        );
        silent.first().map(|(rank, _)| Diagnosis { rank: *rank, text })
    }

    /// Two ranks with different calls at the same place of a channel.
    fn different_calls(&self) -> Option<Diagnosis> {
        let mut calls: BTreeMap<(Channel, u64), BTreeMap<usize, Arc<OpDescriptor>>> = BTreeMap::new();
        for (rank, snapshot) in self.answered() {
            for op in &snapshot.ops {
                let key = (op.channel, op.descriptor.sequence);
                calls.entry(key).or_default().insert(rank, op.descriptor.clone());
            }
        }
        calls.iter().find_map(|((channel, _), by_rank)| {
            let members = self.members(*channel);
            // Pairwise splits are compared by the rank's place in the group; others only by equality.
            let group: &[usize] = self.groups.get(&channel.group).map_or(&[], Vec::as_slice);
            let known: Vec<(usize, usize, &Arc<OpDescriptor>)> = members
                .iter()
                .filter_map(|r| Some((group.iter().position(|g| g == r)?, *r, by_rank.get(r)?)))
                .collect();
            let conflicts = |a: &(usize, usize, &Arc<OpDescriptor>),
                             b: &(usize, usize, &Arc<OpDescriptor>)| {
                a.2.conflicts_with(a.0, b.2, b.0)
            };
            if known.len() == members.len() && channel.route.is_none() {
                let all: Vec<Arc<OpDescriptor>> = known.iter().map(|k| k.2.clone()).collect();
                let error = watchdog::compare(&members, &all).err()?;
                let Error::Mismatch { other: rank, .. } = error else { return None };
                return Some(Diagnosis { rank, text: error.to_string() });
            }
            let (a, b) = known
                .iter()
                .enumerate()
                .find_map(|(i, a)| known[i + 1..].iter().find(|b| conflicts(a, b)).map(|b| (a, b)))?;
            let (call, other_call) = (a.2.to_string(), b.2.to_string());
            let error = Error::Mismatch { rank: a.1, call, other: b.1, other_call };
            Some(Diagnosis { rank: b.1, text: error.to_string() })
        })
    }

    /// Ranks that others wait for and that wait for nobody.
    fn missing(&self) -> Option<Diagnosis> {
        let waiting = self.waiting();
        // The channels and sequence numbers that some rank waits in, longest wait first.
        let mut waits: Vec<(&usize, &OpState)> = waiting.iter().collect();
        waits.sort_by_key(|(_, op)| std::cmp::Reverse(op.age));
        waits.into_iter().find_map(|(waiter, op)| {
            let sequence = op.descriptor.sequence;
            let absent: BTreeSet<usize> = self
                .members(op.channel)
                .into_iter()
                .filter(|rank| {
                    !waiting.contains_key(rank) && !self.has_completed(*rank, op.channel, sequence)
                })
                .collect();
            let rank = *absent.first()?;
            let list: Vec<String> = absent.iter().map(|r| self.why_absent(*r, op)).collect();
            let text = format!("stalled: {}; rank {waiter} {}", list.join("; "), op.record());
            Some(Diagnosis { rank, text })
        })
    }

    fn snapshot(&self, rank: usize) -> Option<&'a Snapshot> {
        match self.states.get(rank) {
            Some(RankState::Answered(snapshot)) => Some(snapshot),
            _ => None,
        }
    }

    fn has_completed(&self, rank: usize, channel: Channel, sequence: u64) -> bool {
        let Some(snapshot) = self.snapshot(rank) else { return false };
        let op = snapshot.ops.iter().find(|o| o.channel == channel && o.descriptor.sequence == sequence);
        match op {
            Some(op) => op.status == OpStatus::Done,
            // Older than what it keeps.
            None => snapshot.issued.get(&channel).is_some_and(|issued| *issued > sequence),
        }
    }

    /// What keeps `rank` from an operation that another rank waits in.
    fn why_absent(&self, rank: usize, op: &OpState) -> String {
        let Some(snapshot) = self.snapshot(rank) else { return format!("rank {rank} is missing") };
        let called = snapshot.issued.get(&op.channel).is_some_and(|n| *n > op.descriptor.sequence);
        if called {
            return format!(
                "the GPU of rank {rank} has not reached {}: work given to it before does not end",
                op.descriptor
            );
        }
        let last = snapshot.ops.last().map(OpState::record);
        format!("rank {rank} has not called {} ({})", op.descriptor, last_deed(last.as_ref()))
    }

    /// Every rank waits: for each other in different operations, or in one that does not complete.
    fn stuck(&self) -> Diagnosis {
        let waiting = self.waiting();
        let mut calls: BTreeMap<(Channel, u64), (usize, String)> = BTreeMap::new();
        for (rank, op) in &waiting {
            let call = (*rank, op.record().to_string());
            calls.entry((op.channel, op.descriptor.sequence)).or_insert(call);
        }
        let rank = waiting.keys().next().copied().unwrap_or(0);
        let list: Vec<String> = calls.values().map(|(rank, call)| format!("rank {rank} {call}")).collect();
        let text = match list.as_slice() {
            [] => "stalled, but no rank waits for another".to_string(),
            [one] => format!("stalled: all ranks have started it, but it does not complete: {one}"),
            several => format!("stalled: ranks wait for each other: {}", several.join(", ")),
        };
        Diagnosis { rank, text }
    }
}

/// What a rank did last, in brackets after its number.
pub(crate) fn last_deed(record: Option<&OpRecord>) -> String {
    record.map_or("it has made no call yet".to_string(), |r| format!("it {r}"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::op_descriptor::{Detail, OpKind};
    use std::time::Duration;

    /// Group 1: ranks 0 and 1; group 2: ranks 2 and 3; group 3: all.
    fn groups() -> HashMap<u64, Vec<usize>> {
        HashMap::from([(1, vec![0, 1]), (2, vec![2, 3]), (3, vec![0, 1, 2, 3])])
    }

    fn op(group: u64, sequence: u64, status: OpStatus) -> OpState {
        let mut d = OpDescriptor::new("g", OpKind::AllReduce, "sum");
        (d.sequence, d.shape) = (sequence, vec![4]);
        let channel = Channel { group, route: None };
        OpState { channel, descriptor: Arc::new(d), status, age: Duration::from_secs(15) }
    }

    fn rank(ops: Vec<OpState>) -> RankState {
        let mut issued = HashMap::new();
        for op in &ops {
            let n: &mut u64 = issued.entry(op.channel).or_default();
            *n = (*n).max(op.descriptor.sequence + 1);
        }
        RankState::Answered(Snapshot { ops, issued })
    }

    use OpStatus::{Done, Enqueued, Running, Waiting};

    #[test]
    fn a_rank_that_exited_is_the_cause() {
        let wait = || rank(vec![op(3, 7, Running)]);
        let last = Some(op(3, 6, Done).record());
        let d = diagnose(&[wait(), wait(), RankState::Exited(last), wait()], &groups());
        assert_eq!(d.rank, 2);
        assert!(
            d.text.contains("rank 2 has exited (it completed all-reduce 'sum' (group g, seq 6"),
            "{}",
            d.text
        );
    }

    #[test]
    fn a_silent_rank_is_named_with_its_last_operation() {
        let wait = || rank(vec![op(3, 7, Running)]);
        let d =
            diagnose(&[wait(), RankState::Silent(Some(op(3, 6, Done).record())), wait(), wait()], &groups());
        assert_eq!(d.rank, 1);
        assert!(d.text.contains("rank 1 (it completed") && d.text.contains("does not respond"), "{}", d.text);
        assert!(
            d.text.contains("rank 3 has been moving data in all-reduce 'sum' (group g, seq 7"),
            "{}",
            d.text
        );
    }

    #[test]
    fn a_rank_that_made_another_call_is_named() {
        let mut other = op(3, 7, Running);
        other.descriptor = Arc::new(OpDescriptor { shape: vec![5], ..(*other.descriptor).clone() });
        let wait = || rank(vec![op(3, 6, Done), op(3, 7, Running)]);
        let d = diagnose(&[wait(), wait(), rank(vec![op(3, 6, Done), other]), wait()], &groups());
        assert_eq!(d.rank, 2);
        assert!(d.text.contains("ranks differ: rank 0 calls"), "{}", d.text);
    }

    #[test]
    fn a_skipped_call_is_named_even_if_ranks_behind_it_wait_elsewhere() {
        // Rank 1 has not called seq 7 of the group of all; ranks 2 and 3 wait in it, rank 0 in the group with rank 1.
        let states = [
            rank(vec![op(3, 6, Done), op(1, 4, Running)]),
            rank(vec![op(3, 6, Done)]),
            rank(vec![op(3, 7, Running)]),
            rank(vec![op(3, 7, Running)]),
        ];
        let d = diagnose(&states, &groups());
        assert_eq!(d.rank, 1, "{}", d.text);
        assert!(d.text.contains("rank 1 has not called"), "{}", d.text);
    }

    #[test]
    fn a_gpu_that_does_not_reach_the_call_is_named() {
        let states = [
            rank(vec![op(3, 7, Running), op(3, 8, Enqueued)]),
            rank(vec![op(3, 7, Running)]),
            rank(vec![op(3, 7, Running)]),
            rank(vec![op(3, 7, Enqueued), op(3, 8, Enqueued)]),
        ];
        let d = diagnose(&states, &groups());
        assert_eq!(d.rank, 3);
        assert!(
            d.text.contains("the GPU of rank 3 has not reached all-reduce 'sum' (group g, seq 7"),
            "{}",
            d.text
        );
    }

    #[test]
    fn ranks_that_wait_for_each_other_are_listed() {
        let states =
            [rank(vec![op(1, 4, Running)]), rank(vec![op(3, 7, Waiting)]), rank(vec![]), rank(vec![])];
        // Ranks 2 and 3 are missing from group 3.
        assert_eq!(diagnose(&states, &groups()).rank, 2);
        let states = [
            rank(vec![op(1, 4, Running), op(3, 7, Enqueued)]),
            rank(vec![op(3, 7, Running), op(1, 4, Enqueued)]),
            rank(vec![op(3, 7, Running)]),
            rank(vec![op(3, 7, Running)]),
        ];
        let d = diagnose(&states, &groups());
        assert!(d.text.contains("wait for each other"), "{}", d.text);
        let all = || rank(vec![op(3, 7, Running)]);
        let d = diagnose(&[all(), all(), all(), all()], &groups());
        assert!(d.text.contains("does not complete"), "{}", d.text);
    }

    #[test]
    fn a_missing_message_names_its_sender() {
        let message = |status| {
            let mut o = op(3, 2, status);
            let detail = Detail::Route(1, 3);
            o.descriptor = Arc::new(OpDescriptor { detail, ..(*o.descriptor).clone() });
            o.channel = Channel { group: 3, route: Some((1, 3)) };
            o
        };
        let states = [
            rank(vec![op(3, 7, Done)]),
            rank(vec![op(3, 7, Done)]),
            rank(vec![]),
            rank(vec![message(Running)]),
        ];
        let d = diagnose(&states, &groups());
        assert_eq!(d.rank, 1);
        assert!(d.text.contains("1 to 3"), "{}", d.text);
    }
}
