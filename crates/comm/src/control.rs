//! Small messages between the processes of a job, on the host: what MPI and TCP each can do, and what
//! meetings, failure reports and questions are built on.

use std::collections::{HashMap, VecDeque};

/// What a message is about; messages of one topic from one rank arrive in the order sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Topic(pub(crate) u64);

impl Topic {
    /// Notices of the collectives of group `index`.
    pub(crate) fn meeting(index: u64) -> Topic {
        Topic(index << 4)
    }
    /// Notices of messages between two ranks of group `index`.
    pub(crate) fn ops(index: u64) -> Topic {
        Topic(index << 4 | 1)
    }
    /// Host bytes in group `index`.
    pub(crate) fn bytes(index: u64) -> Topic {
        Topic(index << 4 | 2)
    }
    /// Who is in group `index`.
    pub(crate) fn making(index: u64) -> Topic {
        Topic(index << 4 | 3)
    }
    /// "What did you do last?"
    pub(crate) const QUESTION: Topic = Topic(u64::MAX - 8);
    /// The answer to it.
    pub(crate) const ANSWER: Topic = Topic(u64::MAX - 7);
    /// The sender has failed.
    pub(crate) const FAILURE: Topic = Topic(u64::MAX - 6);
    /// The sender has nothing more to do.
    pub(crate) const GOODBYE: Topic = Topic(u64::MAX - 5);
}

/// A way to carry messages.
pub(crate) trait ControlTransport: Send + Sync {
    /// This rank's number.
    fn rank(&self) -> usize;

    /// Ranks of the job.
    fn size(&self) -> usize;

    /// Sends `bytes` on their way, also to itself; does not wait for anybody to take them.
    fn send(&self, to: usize, topic: Topic, bytes: Vec<u8>) -> crate::Result<()>;

    /// The oldest message of `from` on `topic` that was not taken yet, if it is here.
    fn take(&self, from: usize, topic: Topic) -> Option<Vec<u8>>;

    /// Waits a little for something to arrive; `idle` counts the pauses in a row that brought nothing. Never
    /// spins: other ranks may need the core.
    fn pause(&self, idle: u32);

    /// Is the rank known to have ended?
    fn gone(&self, rank: usize) -> bool;

    /// Every rank has said goodbye: lets go of the others.
    fn close(&self);

    /// RankBackends every process of the job that it can reach, this one included. May return where it can't.
    fn abort(&self);
}

/// Messages that arrived, until they are taken.
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
