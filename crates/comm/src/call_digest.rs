//! Digests of the calls of every channel, compared by rank 0 while training goes on.
//!
//! Backends that only enqueue (NCCL) do not wait until all ranks have described their call. Instead each rank chains a
//! hash of every call onto the hash of the calls before it. The chain after every [`INTERVAL`] calls is a [`Mark`];
//! marks are sent to rank 0 with the heartbeat, and all ranks of a channel must have the same chain at the same sequence
//! number.
//!
//! Splits of an all-to-all differ between ranks that agree. For them each rank adds a hash of (sender, receiver, count)
//! for every part it sends and subtracts one for every part it receives: over all ranks the sum is 0 if they agree.

use crate::flight_recorder::Channel;
use crate::op_descriptor::{Detail, OpDescriptor};
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Mutex, PoisonError};

/// Number of calls from one mark to the next.
const INTERVAL: u64 = 8;
/// Most marks that are kept for a heartbeat, and most comparisons that rank 0 keeps open.
const MAX_MARKS: usize = 1 << 14;
const MAX_OPEN: usize = 1 << 18;

/// The chain of a channel after call `sequence`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    pub(crate) channel: Channel,
    pub(crate) sequence: u64,
    /// Chained hash of all calls so far.
    pub(crate) chain: u64,
    /// Sum over parts sent minus parts received.
    pub(crate) balance: u64,
}

/// The digests of one rank.
#[derive(Default)]
pub(crate) struct CallDigest {
    state: Mutex<DigestState>,
}

#[derive(Default)]
struct DigestState {
    /// Chain and balance.
    channels: HashMap<Channel, (u64, u64)>,
    marks: Vec<Mark>,
}

impl CallDigest {
    /// Adds a call of group `group`, made by rank `me` of it.
    pub(crate) fn add(&self, group: u64, me: usize, descriptor: &OpDescriptor) {
        let channel = Channel::of(group, descriptor);
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (chain, balance) = state.channels.entry(channel).or_default();
        *chain = chained(*chain, descriptor);
        if let Detail::Pairs { sent, received } = &descriptor.detail {
            let part = |from: usize, to: usize, count: u64| hash((descriptor.sequence, from, to, count));
            for (peer, count) in sent.iter().enumerate() {
                *balance = balance.wrapping_add(part(me, peer, *count));
            }
            for (peer, count) in received.iter().enumerate() {
                *balance = balance.wrapping_sub(part(peer, me, *count));
            }
        }
        if (descriptor.sequence + 1).is_multiple_of(INTERVAL) {
            let mark = Mark { channel, sequence: descriptor.sequence, chain: *chain, balance: *balance };
            // Rank 0 does not respond if there are so many; the watchdog reports that.
            if state.marks.len() < MAX_MARKS {
                state.marks.push(mark);
            }
        }
    }

    /// The marks since the last call.
    pub(crate) fn take_marks(&self) -> Vec<Mark> {
        std::mem::take(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner).marks)
    }
}

/// The chain after one more call. The same on all ranks that run the same program.
fn chained(chain: u64, descriptor: &OpDescriptor) -> u64 {
    let OpDescriptor { group, sequence, label, kind, shape, dtype, detail } = descriptor;
    let detail = (!descriptor.is_pairwise()).then_some(detail);
    hash((chain, group, sequence, label, kind, shape, dtype, detail))
}

fn hash(value: impl Hash) -> u64 {
    // Without keys: the same value on every rank.
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// Two ranks whose calls differ at or before a sequence number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Difference {
    pub(crate) channel: Channel,
    pub(crate) sequence: u64,
    /// Ranks of the job; equal if only the sum over all ranks of the channel shows a difference.
    pub(crate) ranks: (usize, usize),
}

/// Rank 0's comparison of all marks.
#[derive(Default)]
pub(crate) struct MarkComparer {
    open: HashMap<(Channel, u64), OpenMark>,
}

struct OpenMark {
    first: usize,
    chain: u64,
    balance: u64,
    /// Ranks that have not sent the mark.
    left: usize,
}

impl MarkComparer {
    /// Adds a mark of `rank`; `size` is the number of ranks of its group.
    pub(crate) fn add(&mut self, rank: usize, mark: Mark, size: usize) -> Option<Difference> {
        let Mark { channel, sequence, chain, balance } = mark;
        let members = match channel.route {
            Some((from, to)) if from == to => return None,
            Some(_) => 2,
            None => size,
        };
        let key = (channel, sequence);
        if self.open.len() >= MAX_OPEN && !self.open.contains_key(&key) {
            return None;
        }
        let entry = self.open.entry(key).or_insert_with(|| OpenMark {
            first: rank,
            chain,
            balance: 0,
            left: members,
        });
        entry.balance = entry.balance.wrapping_add(balance);
        entry.left = entry.left.saturating_sub(1);
        let (first, same, done, balanced) =
            (entry.first, entry.chain == chain, entry.left == 0, entry.balance == 0);
        if done {
            self.open.remove(&key);
        }
        let differs = |ranks| Some(Difference { channel, sequence, ranks });
        match (same, done, balanced) {
            (false, ..) => differs((first, rank)),
            (true, true, false) => differs((rank, rank)),
            _ => None,
        }
    }
}

impl Mark {
    /// Encoded size in bytes.
    pub(crate) const BYTES: usize = 48;

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        let (from, to) = self.channel.route.unwrap_or((u64::MAX, u64::MAX));
        for word in [self.channel.group, from, to, self.sequence, self.chain, self.balance] {
            out.extend(word.to_le_bytes());
        }
    }

    pub(crate) fn decode(bytes: &[u8; Mark::BYTES]) -> Mark {
        let word = |i: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[i * 8..i * 8 + 8]);
            u64::from_le_bytes(word)
        };
        let route = (word(1) != u64::MAX).then(|| (word(1), word(2)));
        Mark {
            channel: Channel { group: word(0), route },
            sequence: word(3),
            chain: word(4),
            balance: word(5),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::op_descriptor::OpKind;
    use ferrotron_tensor::DType;

    fn call(sequence: u64, len: u64) -> OpDescriptor {
        let mut d = OpDescriptor::new("tp", OpKind::AllReduce, "sum");
        (d.sequence, d.shape, d.dtype) = (sequence, vec![len], Some(DType::F32));
        d
    }

    fn compare(digests: &[CallDigest]) -> Vec<Difference> {
        let mut comparer = MarkComparer::default();
        let marks =
            digests.iter().enumerate().flat_map(|(r, d)| d.take_marks().into_iter().map(move |m| (r, m)));
        let found = marks.filter_map(|(r, m)| {
            let mut bytes = Vec::new();
            m.encode(&mut bytes);
            assert_eq!(Mark::decode(bytes.as_slice().try_into().unwrap()), m);
            comparer.add(r, m, digests.len())
        });
        let found = found.collect();
        assert!(comparer.open.is_empty());
        found
    }

    #[test]
    fn equal_calls_agree_and_one_other_call_is_found() {
        let digests: Vec<CallDigest> = (0..3).map(|_| CallDigest::default()).collect();
        for i in 0..100 {
            digests.iter().enumerate().for_each(|(r, d)| d.add(1, r, &call(i, 4)));
        }
        assert_eq!(compare(&digests), []);
        for i in 100..200 {
            let other = |r| if r == 2 && i == 150 { 5 } else { 4 };
            digests.iter().enumerate().for_each(|(r, d)| d.add(1, r, &call(i, other(r))));
        }
        let found = compare(&digests);
        assert_eq!((found[0].sequence, found[0].ranks), (151, (0, 2)));
        // The chain never recovers.
        assert_eq!(found.last().unwrap().sequence, 199);
    }

    #[test]
    fn splits_of_all_to_all_are_compared_as_a_sum() {
        let run = |wrong: bool| {
            let digests: Vec<CallDigest> = (0..3).map(|_| CallDigest::default()).collect();
            let count = |i: u64, from: usize, to: usize| i * 10 + (from * 3 + to) as u64;
            for i in 0..INTERVAL {
                for (me, d) in digests.iter().enumerate() {
                    let mut c = call(i, 0);
                    c.shape = vec![];
                    let mut sent: Vec<u64> = (0..3).map(|p| count(i, me, p)).collect();
                    if wrong && me == 1 && i == 3 {
                        sent[2] += 1;
                    }
                    let received = (0..3).map(|p| count(i, p, me)).collect();
                    c.detail = Detail::Pairs { sent, received };
                    d.add(2, me, &c);
                }
            }
            compare(&digests)
        };
        assert_eq!(run(false), []);
        assert_eq!(run(true).len(), 1);
    }

    #[test]
    fn messages_are_compared_by_sender_and_receiver() {
        let digests: Vec<CallDigest> = (0..4).map(|_| CallDigest::default()).collect();
        for i in 0..INTERVAL {
            for r in [1, 2] {
                let c = OpDescriptor { detail: Detail::Route(1, 2), ..call(i, 4) };
                digests[r].add(5, r, &c);
            }
        }
        assert_eq!(compare(&digests), []);
    }
}
