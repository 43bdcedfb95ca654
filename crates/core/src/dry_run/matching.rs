//! Runs the calls of all ranks against each other, as NCCL would: a collective is complete when every member has reached
//! it, a message when both its ends have, and a rank goes on when its call is complete. Nothing has a duration.

use super::calls::{Call, CallTable, MessageEnd, Program};
use super::groups::GroupTable;
use ferrotron_comm::Detail;
use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

/// Ranks shown of a deadlock.
const SHOWN: usize = 6;

/// The calls of every rank of a job.
#[derive(Clone, Debug)]
pub struct SimulatedJob {
    /// The process groups.
    pub groups: GroupTable,
    /// All distinct calls.
    pub calls: CallTable,
    /// The program of every rank; equal ones are shared.
    pub programs: Vec<Arc<Program>>,
}

impl SimulatedJob {
    /// Runs all ranks to their ends; returns the number of calls of all of them. The error names the ranks and calls that
    /// do not match, or that wait for each other.
    pub fn run(&self) -> Result<u64, String> {
        let mut run = Matching::new(self);
        run.ready.extend(0..self.programs.len());
        while let Some(rank) = run.ready.pop() {
            run.advance(rank)?;
        }
        let at_end = |rank: usize| run.at[rank] >= self.programs[rank].len();
        match (0..self.programs.len()).find(|rank| !at_end(*rank)) {
            Some(stuck) => Err(run.deadlock(stuck)),
            None => Ok(run.at.iter().map(|at| *at as u64).sum()),
        }
    }

    fn describe(&self, rank: usize, at: usize) -> String {
        match self.programs[rank].get(at) {
            Some(call) => {
                format!("rank {rank} in call {at}, {}", self.calls.describe(&self.groups, rank, *call))
            }
            None => format!("rank {rank}, which has made all its {at} calls"),
        }
    }
}

/// The collective that members of a group have reached.
#[derive(Clone, Copy, Default)]
struct OpenCollective {
    arrived: u32,
    /// The first to arrive, and its call.
    first: (u32, u32),
    /// Calls differ, as they may where sizes of parts do.
    differ: bool,
}

/// Messages from one rank to another of which one end has been reached.
#[derive(Default)]
struct Channel {
    /// Rank and shape of each.
    waiting: VecDeque<(u32, u32)>,
    /// Whether the senders wait, or the receivers.
    sends: bool,
}

struct Matching<'a> {
    job: &'a SimulatedJob,
    /// Calls completed by every rank.
    at: Vec<usize>,
    /// Messages of its call that a rank waits for.
    pending: Vec<u32>,
    collectives: Vec<OpenCollective>,
    /// By group, sender's place and receiver's place, of kinds of groups with messages.
    channels: Vec<Channel>,
    /// The first channel of every group.
    first_channel: Vec<usize>,
    /// Pairs of all-to-alls that were compared.
    compared: HashSet<Vec<u32>>,
    ready: Vec<usize>,
}

impl<'a> Matching<'a> {
    fn new(job: &'a SimulatedJob) -> Matching<'a> {
        let ranks = job.programs.len();
        let mut has_messages = vec![false; job.groups.kinds().len()];
        for call in job.calls.calls() {
            let Call::Messages(ends) = call else { continue };
            ends.iter().for_each(|end| has_messages[end.group] = true);
        }
        let (mut first_channel, mut count) = (Vec::with_capacity(job.groups.len()), 0);
        for group in 0..job.groups.len() {
            first_channel.push(count);
            if has_messages[job.groups.kind_of(group)] {
                count += job.groups.members(group).len().pow(2);
            }
        }
        Matching {
            job,
            at: vec![0; ranks],
            pending: vec![0; ranks],
            collectives: vec![OpenCollective::default(); job.groups.len()],
            channels: (0..count).map(|_| Channel::default()).collect(),
            first_channel,
            compared: HashSet::new(),
            ready: Vec::with_capacity(ranks),
        }
    }

    /// Runs a rank until it has to wait.
    fn advance(&mut self, rank: usize) -> Result<(), String> {
        let job = self.job;
        let program = &job.programs[rank];
        while let Some(number) = program.get(self.at[rank]) {
            let complete = match job.calls.call(*number) {
                Call::Collective { group, .. } => self.collective(rank, *group, *number)?,
                Call::Messages(ends) => self.messages(rank, ends)?,
            };
            if !complete {
                break;
            }
            self.at[rank] += 1;
        }
        Ok(())
    }

    fn collective(&mut self, rank: usize, kind: usize, number: u32) -> Result<bool, String> {
        let job = self.job;
        let Some((group, _)) = job.groups.group_of(kind, rank) else {
            return Err(format!("{}: it is in no such group", job.describe(rank, self.at[rank])));
        };
        let open = &mut self.collectives[group];
        if open.arrived == 0 {
            (open.first, open.differ) = ((rank as u32, number), false);
        } else if open.first.1 != number {
            let (first, other) = open.first;
            if !may_differ(&job.calls, number, other) {
                let first = first as usize;
                return Err(format!(
                    "the {} ranks of a {} group make different calls: {}, and {}",
                    job.groups.members(group).len(),
                    job.groups.kinds()[kind].name,
                    job.describe(first, self.at[first]),
                    job.describe(rank, self.at[rank])
                ));
            }
            open.differ = true;
        }
        open.arrived += 1;
        let members = job.groups.members(group);
        if (open.arrived as usize) < members.len() {
            return Ok(false);
        }
        open.arrived = 0;
        let differ = open.differ;
        self.compare_parts(members, number, differ)?;
        for other in members.iter().filter(|other| **other != rank) {
            self.at[*other] += 1;
            self.ready.push(*other);
        }
        Ok(true)
    }

    /// What each rank of an all-to-all sends to another must be what that one receives.
    fn compare_parts(&mut self, members: &[usize], number: u32, differ: bool) -> Result<(), String> {
        let job = self.job;
        let parts = |number: u32| match job.calls.call(number) {
            Call::Collective { shape, .. } => match &job.calls.shape(*shape).detail {
                Detail::Pairs { sent, received } => Some((sent, received)),
                _ => None,
            },
            Call::Messages(_) => None,
        };
        if parts(number).is_none() {
            return Ok(());
        }
        let call_of = |rank: &usize| job.programs[*rank][self.at[*rank]];
        let calls: Vec<u32> = match differ {
            true => members.iter().map(call_of).collect(),
            false => vec![number],
        };
        if !self.compared.insert(calls.clone()) {
            return Ok(());
        }
        let all: Vec<_> = (0..members.len()).filter_map(|i| parts(calls[i % calls.len()])).collect();
        for (from, (sent, _)) in all.iter().enumerate() {
            for (to, (_, received)) in all.iter().enumerate() {
                let ends = (sent.get(to), received.get(from));
                if ends.0 != ends.1 {
                    let count = |n: Option<&u64>| n.map_or("nothing".into(), u64::to_string);
                    return Err(format!(
                        "parts of an all-to-all do not match: {} sends {} elements to rank {}, which expects {}",
                        job.describe(members[from], self.at[members[from]]),
                        count(ends.0),
                        members[to],
                        count(ends.1)
                    ));
                }
            }
        }
        Ok(())
    }

    fn messages(&mut self, rank: usize, ends: &[MessageEnd]) -> Result<bool, String> {
        let job = self.job;
        let mut open = 0;
        for end in ends {
            let Some((group, place)) = job.groups.group_of(end.group, rank) else {
                return Err(format!("{}: it is in no such group", job.describe(rank, self.at[rank])));
            };
            let index = self.channel(group, place, end);
            let channel = &mut self.channels[index];
            match channel.waiting.front() {
                Some(&(other, shape)) if channel.sends != end.sends => {
                    let other = other as usize;
                    if shape as usize != end.shape {
                        return Err(format!(
                            "the two ends of a message differ: {}, and {}",
                            job.describe(rank, self.at[rank]),
                            job.describe(other, self.at[other])
                        ));
                    }
                    channel.waiting.pop_front();
                    // Its own other end, where a rank sends to itself.
                    if other == rank {
                        open -= 1;
                        continue;
                    }
                    self.pending[other] -= 1;
                    if self.pending[other] == 0 {
                        self.at[other] += 1;
                        self.ready.push(other);
                    }
                }
                _ => {
                    channel.waiting.push_back((rank as u32, end.shape as u32));
                    channel.sends = end.sends;
                    open += 1;
                }
            }
        }
        self.pending[rank] = open;
        Ok(open == 0)
    }

    /// The channel of a message of the rank at `place` of a group.
    fn channel(&self, group: usize, place: usize, end: &MessageEnd) -> usize {
        let size = self.job.groups.members(group).len();
        let peer = (place + end.offset) % size;
        let (from, to) = if end.sends { (place, peer) } else { (peer, place) };
        self.first_channel[group] + from * size + to
    }

    /// The ranks that a rank waits for.
    fn waits_for(&self, rank: usize) -> Vec<usize> {
        let job = self.job;
        let Some(number) = job.programs[rank].get(self.at[rank]) else { return Vec::new() };
        match job.calls.call(*number) {
            Call::Collective { group, .. } => {
                let Some((group, _)) = job.groups.group_of(*group, rank) else { return Vec::new() };
                let here = |other: &usize| {
                    let call = job.programs[*other].get(self.at[*other]).map(|n| job.calls.call(*n));
                    matches!(call, Some(Call::Collective { group: kind, .. })
                        if job.groups.group_of(*kind, *other).is_some_and(|(g, _)| g == group))
                };
                job.groups.members(group).iter().copied().filter(|other| !here(other)).collect()
            }
            Call::Messages(ends) => {
                let open = |end: &&MessageEnd| {
                    let Some((group, place)) = job.groups.group_of(end.group, rank) else { return true };
                    let channel = &self.channels[self.channel(group, place, end)];
                    channel.sends == end.sends && !channel.waiting.is_empty()
                };
                let peers = ends.iter().filter(open).filter_map(|e| job.calls.peer(&job.groups, rank, e));
                peers.collect()
            }
        }
    }

    /// The ranks that wait for each other, from a rank that waits.
    fn deadlock(&self, stuck: usize) -> String {
        let mut chain = vec![stuck];
        while let Some(next) = chain.last().and_then(|r| self.waits_for(*r).first().copied()) {
            if let Some(start) = chain.iter().position(|r| *r == next) {
                chain.drain(..start);
                break;
            }
            chain.push(next);
        }
        let waiting = (0..self.at.len()).filter(|r| self.at[*r] < self.job.programs[*r].len()).count();
        let lines = chain.iter().take(SHOWN).map(|rank| {
            let awaited: Vec<String> =
                self.waits_for(*rank).iter().take(4).map(|r| format!("rank {r}")).collect();
            let awaited = if awaited.is_empty() { "nobody".into() } else { awaited.join(", ") };
            format!("\n  {} waits for {awaited}", self.job.describe(*rank, self.at[*rank]))
        });
        let lines: String = lines.collect();
        let more = chain.len().saturating_sub(SHOWN);
        let more = if more > 0 { format!("\n  and {more} more ranks") } else { String::new() };
        format!("deadlock: {waiting} ranks wait forever{lines}{more}")
    }
}

/// Whether two ranks may make these calls together: all-to-alls whose parts differ.
fn may_differ(calls: &CallTable, a: u32, b: u32) -> bool {
    let pairwise = |number: u32| match calls.call(number) {
        Call::Collective { group, shape } => {
            let shape = calls.shape(*shape);
            matches!(shape.detail, Detail::Pairs { .. }).then_some((
                group,
                shape.kind,
                &shape.label,
                &shape.shape,
                shape.dtype,
            ))
        }
        Call::Messages(_) => None,
    };
    pairwise(a).is_some() && pairwise(a) == pairwise(b)
}
