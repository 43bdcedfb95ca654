//! The control plane between the processes of a job: small host messages over MPI or TCP. Descriptor exchange,
//! failure reports and flight-recorder queries are built on it.

use std::collections::{HashMap, VecDeque};

/// The channel of a message; messages of one topic from one rank arrive in the order sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Topic(pub(crate) u64);

impl Topic {
    /// Descriptors of collectives of group `index`.
    pub(crate) fn collective(index: u64) -> Topic {
        Topic(index << 4)
    }
    /// Descriptors of sends between two ranks of group `index`.
    pub(crate) fn p2p(index: u64) -> Topic {
        Topic(index << 4 | 1)
    }
    /// Host bytes in group `index`.
    pub(crate) fn bytes(index: u64) -> Topic {
        Topic(index << 4 | 2)
    }
    /// Membership of group `index`.
    pub(crate) fn group_setup(index: u64) -> Topic {
        Topic(index << 4 | 3)
    }
    /// Shared memory of group `index`.
    pub(crate) fn segments(index: u64) -> Topic {
        Topic(index << 4 | 4)
    }
    /// A message of [`Topic::p2p`] was taken.
    pub(crate) fn p2p_taken(index: u64) -> Topic {
        Topic(index << 4 | 5)
    }
    /// Asks a rank for its last operations.
    pub(crate) const QUESTION: Topic = Topic(u64::MAX - 8);
    /// The reply to [`Topic::QUESTION`].
    pub(crate) const ANSWER: Topic = Topic(u64::MAX - 7);
    /// The sender has failed.
    pub(crate) const FAILURE: Topic = Topic(u64::MAX - 6);
    /// What the sender is doing, and its marks ([`crate::call_digest`]).
    pub(crate) const HEARTBEAT: Topic = Topic(u64::MAX - 4);
    /// The sender waits in an operation that does not complete.
    pub(crate) const STALLED: Topic = Topic(u64::MAX - 3);
    /// The sender has finished its work.
    pub(crate) const GOODBYE: Topic = Topic(u64::MAX - 5);
}

/// A transport of control messages.
pub(crate) trait ControlTransport: Send + Sync {
    /// This rank.
    fn rank(&self) -> usize;

    /// Number of ranks in the job.
    fn size(&self) -> usize;

    /// Sends `bytes`, also to this rank itself, without waiting for the receiver.
    fn send(&self, to: usize, topic: Topic, bytes: Vec<u8>) -> crate::Result<()>;

    /// Takes the oldest message of `from` on `topic`, if one has arrived.
    fn try_receive(&self, from: usize, topic: Topic) -> Option<Vec<u8>>;

    /// Waits briefly for something to arrive. `idle` counts consecutive calls without progress. Never spins: other
    /// ranks may need the core.
    fn back_off(&self, idle: u32);

    /// True if the rank is known to have exited.
    fn has_exited(&self, rank: usize) -> bool;

    /// The rank by which the transport broke, and how it broke the protocol (or sent more than may wait); `None` if all
    /// messages went through that rank and it has exited. The job is over then.
    fn broken(&self) -> Option<(usize, Option<String>)>;

    /// The rank that forwards messages between the others: without it nothing is heard of anybody.
    fn relay(&self) -> Option<usize> {
        None
    }

    /// Number of frames sent to other ranks so far, with those forwarded for others.
    fn frames(&self) -> u64;

    /// Closes the connections, after every rank has said goodbye.
    fn close(&self);

    /// Terminates every process of the job that it can reach, including this one. May return if it cannot.
    fn abort(&self);
}

/// Bytes that may wait for this rank from one other, so that no rank can fill another's memory.
pub(crate) const MAX_WAITING: usize = 1 << 29;
/// What a message costs beside its bytes.
const OVERHEAD: usize = 64;

/// Messages that have arrived and were not taken yet.
#[derive(Default)]
pub(crate) struct Mailbox {
    messages: HashMap<(usize, Topic), VecDeque<Vec<u8>>>,
    /// Bytes waiting, by sender.
    waiting: HashMap<usize, usize>,
}

impl Mailbox {
    /// Keeps a message; if too much of `from` is waiting already, drops it and says so.
    pub(crate) fn put(&mut self, from: usize, topic: Topic, bytes: Vec<u8>) -> Result<(), String> {
        let waiting = self.waiting.entry(from).or_default();
        let more = *waiting + bytes.len() + OVERHEAD;
        if more > MAX_WAITING {
            return Err(format!("more than {} MiB of its messages were waiting", MAX_WAITING >> 20));
        }
        *waiting = more;
        self.messages.entry((from, topic)).or_default().push_back(bytes);
        Ok(())
    }

    pub(crate) fn take(&mut self, from: usize, topic: Topic) -> Option<Vec<u8>> {
        let queue = self.messages.get_mut(&(from, topic))?;
        let bytes = queue.pop_front()?;
        if queue.is_empty() {
            self.messages.remove(&(from, topic));
        }
        if let Some(waiting) = self.waiting.get_mut(&from) {
            *waiting = waiting.saturating_sub(bytes.len() + OVERHEAD);
        }
        Some(bytes)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_mailbox_is_bounded_by_sender() {
        let mut mailbox = Mailbox::default();
        let quarter = || vec![0; MAX_WAITING / 4];
        (0..3).for_each(|i| mailbox.put(1, Topic(i), quarter()).unwrap());
        assert!(mailbox.put(1, Topic(9), quarter()).unwrap_err().contains("512 MiB"));
        mailbox.put(2, Topic(9), quarter()).unwrap();
        assert_eq!(mailbox.take(1, Topic(2)).map(|b| b.len()), Some(MAX_WAITING / 4));
        mailbox.put(1, Topic(9), quarter()).unwrap();
        // Empty messages count too.
        let mut mailbox = Mailbox::default();
        let held = (0..).find(|_| mailbox.put(1, Topic(0), Vec::new()).is_err());
        assert_eq!(held, Some(MAX_WAITING / OVERHEAD));
        assert!(mailbox.take(1, Topic(0)).is_some() && mailbox.take(1, Topic(1)).is_none());
    }
}
