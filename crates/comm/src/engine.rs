//! What an engine must do. Engines only map calls: arguments are checked, descriptions compared, operations
//! recorded and stalls reported by [`crate::Communicator`] above them.
//!
//! One collective is two calls: [`Engine::meet`] brings this rank's description to the others and theirs here,
//! and, if they agree, [`Engine::run`] moves the data. Messages between two ranks are
//! [`Engine::post`] and [`Engine::collect`], and carry their description with them. Calls of one rank on one group come one at a
//! time, in the order of their sequence numbers. Groups of one rank never reach an engine.

use crate::notice::Notice;
use crate::recorder::{Note, Recorder};
use crate::{Reduce, Result};
use ferrotron_tensor::{Stream, Tensor};
use std::sync::Arc;
use std::time::Instant;

/// One rank's end of the whole job.
pub(crate) trait Hub: Send + Sync {
    /// This rank's number in the job.
    fn rank(&self) -> usize;

    /// Ranks of the job.
    fn size(&self) -> usize;

    /// Makes the group number `index` (0 is the whole job) of `ranks` (numbers in the job, each once, in the
    /// order of the group, legal). Every rank of the job calls it, members or not, with the same arguments in
    /// the same order, so it may be collective over the job; only members get an engine. Ranks that come with
    /// other arguments are [`Trouble::Broken`] where the engine can see it.
    fn group(
        &self,
        index: u64,
        name: &'static str,
        ranks: &[usize],
        deadline: Instant,
    ) -> Result<Option<Arc<dyn Engine>>, Trouble>;

    /// This rank has failed and will not call again: tell the others, as far as the engine can, so that they
    /// give up at once with [`Trouble::Absent`] whose `told` is this. Must not block for long. May be called
    /// more than once; the first report counts.
    fn fail(&self, failure: Failure);

    /// The first failure that is known here.
    fn failure(&self) -> Option<Failure>;

    /// What this rank does is written here; shared with the other ranks where the engine can.
    fn recorder(&self) -> &Arc<Recorder>;

    /// The last operations of a rank of the job, oldest first, as far as known here; `None` is unknown.
    /// Must not block for long: it is asked when that rank does not answer.
    fn notes(&self, rank: usize) -> Option<Vec<Note>>;
}

/// One rank's end of one group. Ranks below are numbers in the group. `deadline` is when to stop waiting for
/// other ranks; an engine that queues work on a card need not wait for that work.
pub(crate) trait Engine: Send + Sync {
    /// Brings `notice` to all ranks of the group and returns when all have come. `job` is what
    /// [`Engine::run`] will be given after this with the same stream, for engines that can bring the data along.
    ///
    /// Returns [`Met::Same`] if the engine compared the notices of all ranks and they are equal (not
    /// allowed for `notice.pairwise()`, which never equal each other), else all notices in the order of ranks,
    /// which are then compared above.
    fn meet(&self, s: Option<&Stream>, notice: &Notice, job: &Job, deadline: Instant)
    -> Result<Met, Trouble>;

    /// Moves the data; all ranks of the group are here and agree. Memory is touched only inside
    /// [`Stream::launch`] on `s` with the kinds of use declared. When it returns, work given to `s` afterwards
    /// finds the result and may overwrite what was sent.
    fn run(&self, s: &Stream, job: &Job, deadline: Instant) -> Result<(), Trouble>;

    /// The first half of messages: what goes out. Waits for nobody: what is sent is copied, or safe until it is
    /// delivered. Messages from one rank to another arrive in the order sent. Each letter's notice travels with it.
    /// Rules for memory as for [`Engine::run`]. An engine whose data can only leave together with what is received
    /// sends the notices alone.
    fn post(&self, s: &Stream, sends: &[Letter], deadline: Instant) -> Result<(), Trouble>;

    /// The second half, with the same `sends` as [`Engine::post`] before: waits for what is received. It must not
    /// matter in which order the ranks list their messages. Each letter's notice is compared by `Notice::conflict`
    /// with the receiver's before data reaches the receiver's tensor; the first difference is [`Trouble::Differs`].
    fn collect(
        &self,
        s: &Stream,
        sends: &[Letter],
        receives: &[Letter],
        deadline: Instant,
    ) -> Result<(), Trouble>;

    /// Host bytes of any lengths from every rank, in the order of ranks. Called after a `meet` of
    /// [`Job::Bytes`].
    fn bytes(&self, mine: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>, Trouble>;
}

/// A collective. Tensors are contiguous, on the device of the stream, of the right lengths; types that are
/// reduced are f32, bf16, f64, i32 or i64. n is the size of the group.
#[derive(Clone, Copy)]
pub(crate) enum Job<'a> {
    /// Nothing moves; there is no `run`.
    Barrier,
    /// `t = reduce over ranks of t`; bf16 is summed in f32 and rounded once where the engine can.
    AllReduce { t: &'a Tensor, op: Reduce },
    /// `all` = every rank's `mine` back to back, of `counts` elements if given, else all equally long.
    /// `mine` may be this rank's own place in `all`; it overlaps `all` nowhere else.
    AllGather { mine: &'a Tensor, all: &'a Tensor, counts: Option<&'a [usize]> },
    /// `mine` = part `rank` of n equal parts of the reduction of `all`. `mine` may be that part of `all`;
    /// what else of `all` holds afterwards is unspecified.
    ReduceScatter { all: &'a Tensor, mine: &'a Tensor, op: Reduce },
    /// Part p of `from` goes to rank p; part p of `to` comes from rank p. Parts have `counts` = (sent,
    /// received) elements if given, else all are equally long. No overlap.
    AllToAll { from: &'a Tensor, to: &'a Tensor, counts: Option<(&'a [usize], &'a [usize])> },
    /// `t` = that of `root`.
    Broadcast { t: &'a Tensor, root: usize },
    /// The lengths of [`Engine::bytes`] may differ; there is no `run`.
    Bytes(&'a [u8]),
}

/// A tensor to or from one other rank (or this one).
pub(crate) struct Letter<'a> {
    /// The other rank.
    pub(crate) peer: usize,
    /// Contiguous, on the device of the stream.
    pub(crate) tensor: &'a Tensor,
    /// What this side believes it is; the sequence number counts messages from sender to receiver.
    pub(crate) notice: Notice,
}

/// What a meeting found.
pub(crate) enum Met {
    /// All notices are equal.
    Same,
    /// What every rank brought, in the order of ranks.
    All(Vec<Arc<Notice>>),
}

/// The report of a rank that gave up.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    /// The rank in the job.
    pub(crate) rank: usize,
    /// It gave up because of ranks that did not come: those who wait too look for themselves.
    pub(crate) stall: bool,
    /// Its error.
    pub(crate) reason: String,
}

/// Why a call ended early. Ranks are numbers in the group.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// Ranks have not come: the deadline passed, or `ended` ones never will, or somebody reported a failure.
    Absent {
        /// Whose part is missing (as far as known; all others of the group if not).
        missing: Vec<usize>,
        /// Those of the missing that are known to have ended, and whether by a panic or a signal.
        ended: Vec<(usize, bool)>,
        /// A failure reported by some rank.
        told: Option<Failure>,
    },
    /// A letter from `peer` is another than expected.
    Differs { peer: usize, mine: Box<Notice>, theirs: Box<Notice> },
    /// The library below failed; says the call and what it said.
    Broken { what: String },
    /// From a launch.
    Tensor(ferrotron_tensor::Error),
}

impl From<ferrotron_tensor::Error> for Trouble {
    fn from(e: ferrotron_tensor::Error) -> Trouble {
        Trouble::Tensor(e)
    }
}
