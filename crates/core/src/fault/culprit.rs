//! Which rank computed something else the second time.
//!
//! A rank whose results differ either computed wrongly or received something that differed. What ranks receive was sent by
//! others, so the payload that differed first, in the order of cause and effect, came from the rank at fault. That order is
//! given by Lamport's clocks: a collective takes place after everything its members called before, a message is received
//! after it was sent. Where nothing that was sent differs, a rank whose own state does is at fault itself.

use serde::{Deserialize, Serialize};
use std::collections::{HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};

/// A call of a rank, with the digest of what it sent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// Number of the group, the same on all ranks.
    pub group: u64,
    /// Its number in the group, or among the messages from one rank to another; other in every run.
    pub sequence: u64,
    /// Sender and receiver of a message, as ranks of the group.
    pub route: Option<(u64, u64)>,
    /// What it is, for people: `all-reduce 'gradients' of group dp`.
    pub what: String,
    /// Digest of what was sent; none where this rank only receives.
    pub digest: Option<u64>,
}

impl Call {
    /// Whether two runs made the same call with the same payload.
    fn same_as(&self, other: &Call) -> bool {
        (self.group, self.route, &self.what, self.digest)
            == (other.group, other.route, &other.what, other.digest)
    }
}

/// The calls of one step on one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepCalls {
    /// The step, from 1.
    pub step: u64,
    /// In program order.
    pub calls: Vec<Call>,
}

/// What a rank sent in some steps, and its state after them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// The calls of each step.
    pub steps: Vec<StepCalls>,
    /// Digests of the tensors that persist, by name.
    pub state: Vec<(String, u64)>,
}

/// Where two runs of a rank differ first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Difference {
    /// In what was sent.
    Sent {
        /// The step.
        step: u64,
        /// Index of the call in the step.
        call: usize,
        /// The call.
        what: String,
    },
    /// Only in the state after the last step.
    State {
        /// The first tensor that differs.
        tensor: String,
    },
}

impl Record {
    /// Where this record and another one of the same steps differ first.
    pub fn difference(&self, other: &Record) -> Option<Difference> {
        for (a, b) in self.steps.iter().zip(&other.steps) {
            let same = a.calls.iter().zip(&b.calls).take_while(|(a, b)| a.same_as(b)).count();
            if same < a.calls.len().max(b.calls.len()) {
                let what = a.calls.get(same).or(b.calls.get(same)).map(|c| c.what.clone());
                return Some(Difference::Sent { step: a.step, call: same, what: what.unwrap_or_default() });
            }
        }
        let differs = self.state.iter().zip(&other.state).find(|(a, b)| a != b);
        differs.map(|((tensor, _), _)| Difference::State { tensor: tensor.clone() })
    }

    /// A digest of each step's calls, and one of the state: equal for equal records.
    pub fn digests(&self) -> Vec<u64> {
        let hash = |value: &dyn Fn(&mut DefaultHasher)| {
            let mut hasher = DefaultHasher::new();
            value(&mut hasher);
            hasher.finish()
        };
        let step = |s: &StepCalls| {
            hash(&|h| s.calls.iter().for_each(|c| (c.group, c.route, &c.what, c.digest).hash(h)))
        };
        let state = hash(&|h| self.state.hash(h));
        self.steps.iter().map(step).chain([state]).collect()
    }
}

impl Difference {
    /// The call or the tensor.
    pub fn what(self) -> String {
        match self {
            Difference::Sent { what, .. } => what,
            Difference::State { tensor } => tensor,
        }
    }
}

/// The rank at fault, given where each rank's runs differ first, and the calls that each rank made in the first step in which
/// any payload differs.
pub fn culprit(differences: &[Option<Difference>], calls: &[StepCalls]) -> Option<usize> {
    let first_step = first_step(differences);
    let Some(step) = first_step else { return differences.iter().position(Option::is_some) };
    let times = lamport_times(calls);
    let first = |rank: usize| match &differences[rank] {
        Some(Difference::Sent { step: s, call, .. }) if *s == step => {
            Some(times.as_ref().map_or(*call as u64, |t| t[rank].get(*call).copied().unwrap_or(u64::MAX)))
        }
        _ => None,
    };
    (0..differences.len()).filter_map(|rank| Some((first(rank)?, rank))).min().map(|(_, rank)| rank)
}

/// The first step in which a payload of any rank differs.
pub fn first_step(differences: &[Option<Difference>]) -> Option<u64> {
    let sent = |d: &Difference| match d {
        Difference::Sent { step, .. } => Some(*step),
        Difference::State { .. } => None,
    };
    differences.iter().flatten().filter_map(sent).min()
}

/// Lamport's clock at each call of each rank; none if the calls do not match.
fn lamport_times(ranks: &[StepCalls]) -> Option<Vec<Vec<u64>>> {
    // Members of each collective that make it, and those that have not reached it yet.
    let mut members: HashMap<(u64, u64), Vec<usize>> = HashMap::new();
    for (rank, list) in ranks.iter().enumerate() {
        for call in list.calls.iter().filter(|c| c.route.is_none()) {
            members.entry((call.group, call.sequence)).or_default().push(rank);
        }
    }
    let mut times: Vec<Vec<u64>> = ranks.iter().map(|list| Vec::with_capacity(list.calls.len())).collect();
    let mut arrived: HashMap<(u64, u64), Vec<usize>> = HashMap::new();
    // By group, sequence, and route, whose ranks are those of the group; several groups have one number on no rank.
    let mut sent: HashMap<(u64, u64, (u64, u64)), u64> = HashMap::new();
    let mut waiting: HashMap<(u64, u64, (u64, u64)), usize> = HashMap::new();
    let now = |times: &[Vec<u64>], rank: usize| times[rank].last().copied().unwrap_or(0);
    let mut ready: VecDeque<usize> = (0..ranks.len()).collect();
    while let Some(rank) = ready.pop_front() {
        while let Some(call) = ranks[rank].calls.get(times[rank].len()) {
            let Some(route) = call.route else {
                let key = (call.group, call.sequence);
                let here = arrived.entry(key).or_default();
                here.push(rank);
                let all = &members[&key];
                if here.len() == all.len() {
                    let time = all.iter().map(|r| now(&times, *r)).max().unwrap_or(0) + 1;
                    all.iter().for_each(|r| times[*r].push(time));
                    ready.extend(all.iter().filter(|r| **r != rank));
                    continue;
                }
                break;
            };
            let key = (call.group, call.sequence, route);
            let own = now(&times, rank);
            if call.digest.is_some() {
                times[rank].push(own + 1);
                sent.insert(key, own + 1);
                ready.extend(waiting.remove(&key));
            } else if let Some(time) = sent.get(&key) {
                times[rank].push(own.max(*time) + 1);
            } else {
                waiting.insert(key, rank);
                break;
            }
        }
    }
    let complete = times.iter().zip(ranks).all(|(t, list)| t.len() == list.calls.len());
    complete.then_some(times)
}
