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
    /// Asks a rank for its last operations.
    pub(crate) const QUESTION: Topic = Topic(u64::MAX - 8);
    /// The reply to [`Topic::QUESTION`].
    pub(crate) const ANSWER: Topic = Topic(u64::MAX - 7);
    /// The sender has failed.
    pub(crate) const FAILURE: Topic = Topic(u64::MAX - 6);
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

    /// Closes the connections, after every rank has said goodbye.
    fn close(&self);

    /// Terminates every process of the job that it can reach, including this one. May return if it cannot.
    fn abort(&self);
}

/// Messages that have arrived and were not taken yet.
#[derive(Default)]
pub(crate) struct Mailbox(HashMap<(usize, Topic), VecDeque<Vec<u8>>>);

impl Mailbox {
    pub(crate) fn put(&mut self, from: usize, topic: Topic, bytes: Vec<u8>) {
        self.0.entry((from, topic)).or_default().push_back(bytes);
    }

    pub(crate) fn take(&mut self, from: usize, topic: Topic) -> Option<Vec<u8>> {
        self.0.get_mut(&(from, topic))?.pop_front()
    }
}
