//! What an engine must do. Engines only map calls: arguments are checked, descriptions compared, operations
//! recorded and stalls reported by [`crate::Communicator`] above them.
//!
//! One collective is two calls: [`GroupBackend::meet`] brings this rank's description to the others and theirs here,
//! and, if they agree, [`GroupBackend::run`] moves the data. Messages between two ranks are
//! [`GroupBackend::post`] and [`GroupBackend::collect`], and carry their description with them. Calls of one rank on one group come one at a
//! time, in the order of their sequence numbers. Groups of one rank never reach an engine.

use crate::flight_recorder::{FlightRecorder, OpRecord};
use crate::op_descriptor::OpDescriptor;
use crate::{ReduceOp, Result};
use ferrotron_tensor::{Stream, Tensor};
use std::sync::Arc;
use std::time::Instant;

/// One rank's end of the whole job.
pub(crate) trait JobBackend: Send + Sync {
    /// This rank's number in the job.
    fn rank(&self) -> usize;

    /// Ranks of the job.
    fn size(&self) -> usize;

    /// Makes the group number `index` (0 is the whole job) of `ranks` (numbers in the job, each once, in the
    /// order of the group, legal). Every rank of the job calls it, members or not, with the same arguments in
    /// the same order, so it may be collective over the job; only members get an engine. Ranks that come with
    /// other arguments are [`OpError::Backend`] where the engine can see it.
    fn group(
        &self,
        index: u64,
        name: &'static str,
        ranks: &[usize],
        deadline: Instant,
    ) -> Result<Option<Arc<dyn GroupBackend>>, OpError>;

    /// This rank has failed and will not call again: tell the others, as far as the engine can, so that they
    /// give up at once with [`OpError::RanksMissing`] whose `told` is this. Must not block for long. May be called
    /// more than once; the first report counts.
    fn fail(&self, failure: FailureReport);

    /// The first failure that is known here.
    fn failure(&self) -> Option<FailureReport>;

    /// What this rank does is written here; shared with the other ranks where the engine can.
    fn recorder(&self) -> &Arc<FlightRecorder>;

    /// The last operations of a rank of the job, oldest first, as far as known here; `None` is unknown.
    /// Must not block for long: it is asked when that rank does not answer.
    fn notes(&self, rank: usize) -> Option<Vec<OpRecord>>;
}

/// One rank's end of one group. Ranks below are numbers in the group. `deadline` is when to stop waiting for
/// other ranks; an engine that queues work on a card need not wait for that work.
pub(crate) trait GroupBackend: Send + Sync {
    /// Brings `notice` to all ranks of the group and returns when all have come. `job` is what
    /// [`GroupBackend::run`] will be given after this with the same stream, for engines that can bring the data along.
    ///
    /// Returns [`Descriptors::AllEqual`] if the engine compared the notices of all ranks and they are equal (not
    /// allowed for `notice.pairwise()`, which never equal each other), else all notices in the order of ranks,
    /// which are then compared above.
    fn meet(
        &self,
        s: Option<&Stream>,
        descriptor: &OpDescriptor,
        job: &Collective,
        deadline: Instant,
    ) -> Result<Descriptors, OpError>;

    /// Moves the data; all ranks of the group are here and agree. Memory is touched only inside
    /// [`Stream::launch`] on `s` with the kinds of use declared. When it returns, work given to `s` afterwards
    /// finds the result and may overwrite what was sent.
    fn run(&self, s: &Stream, job: &Collective, deadline: Instant) -> Result<(), OpError>;

    /// The first half of messages: what goes out. Waits for nobody: what is sent is copied, or safe until it is
    /// delivered. Messages from one rank to another arrive in the order sent. Each letter's notice travels with it.
    /// Rules for memory as for [`GroupBackend::run`]. An engine whose data can only leave together with what is received
    /// sends the notices alone.
    fn post(&self, s: &Stream, sends: &[P2pOp], deadline: Instant) -> Result<(), OpError>;

    /// The second half, with the same `sends` as [`GroupBackend::post`] before: waits for what is received. It must not
    /// matter in which order the ranks list their messages. Each letter's notice is compared by `OpDescriptor::conflict`
    /// with the receiver's before data reaches the receiver's tensor; the first difference is [`OpError::Mismatch`].
    fn collect(
        &self,
        s: &Stream,
        sends: &[P2pOp],
        receives: &[P2pOp],
        deadline: Instant,
    ) -> Result<(), OpError>;

    /// Host bytes of any lengths from every rank, in the order of ranks. Called after a `meet` of
    /// [`Collective::AllGatherBytes`].
    fn bytes(&self, mine: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>, OpError>;
}

/// A collective. Tensors are contiguous, on the device of the stream, of the right lengths; types that are
/// reduced are f32, bf16, f64, i32 or i64. n is the size of the group.
#[derive(Clone, Copy)]
pub(crate) enum Collective<'a> {
    /// Nothing moves; there is no `run`.
    Barrier,
    /// `t = reduce over ranks of t`; bf16 is summed in f32 and rounded once where the engine can.
    AllReduce { t: &'a Tensor, op: ReduceOp },
    /// `all` = every rank's `mine` back to back, of `counts` elements if given, else all equally long.
    /// `mine` may be this rank's own place in `all`; it overlaps `all` nowhere else.
    AllGather { mine: &'a Tensor, all: &'a Tensor, counts: Option<&'a [usize]> },
    /// `mine` = part `rank` of n equal parts of the reduction of `all`. `mine` may be that part of `all`;
    /// what else of `all` holds afterwards is unspecified.
    ReduceScatter { all: &'a Tensor, mine: &'a Tensor, op: ReduceOp },
    /// Part p of `from` goes to rank p; part p of `to` comes from rank p. Parts have `counts` = (sent,
    /// received) elements if given, else all are equally long. No overlap.
    AllToAll { from: &'a Tensor, to: &'a Tensor, counts: Option<(&'a [usize], &'a [usize])> },
    /// `t` = that of `root`.
    Broadcast { t: &'a Tensor, root: usize },
    /// The lengths of [`GroupBackend::bytes`] may differ; there is no `run`.
    AllGatherBytes(&'a [u8]),
}

/// A tensor to or from one other rank (or this one).
pub(crate) struct P2pOp<'a> {
    /// The other rank.
    pub(crate) peer: usize,
    /// Contiguous, on the device of the stream.
    pub(crate) tensor: &'a Tensor,
    /// What this side believes it is; the sequence number counts messages from sender to receiver.
    pub(crate) descriptor: OpDescriptor,
}

/// What a meeting found.
pub(crate) enum Descriptors {
    /// All notices are equal.
    AllEqual,
    /// What every rank brought, in the order of ranks.
    PerRank(Vec<Arc<OpDescriptor>>),
}

/// The report of a rank that gave up.
#[derive(Clone, Debug)]
pub(crate) struct FailureReport {
    /// The rank in the job.
    pub(crate) rank: usize,
    /// It gave up because of ranks that did not come: those who wait too look for themselves.
    pub(crate) stall: bool,
    /// Its error.
    pub(crate) reason: String,
}

/// Why a call ended early. Ranks are numbers in the group.
#[derive(Debug)]
pub(crate) enum OpError {
    /// Ranks have not come: the deadline passed, or `ended` ones never will, or somebody reported a failure.
    RanksMissing {
        /// Whose part is missing (as far as known; all others of the group if not).
        missing: Vec<usize>,
        /// Those of the missing that are known to have ended, and whether by a panic or a signal.
        ended: Vec<(usize, bool)>,
        /// A failure reported by some rank.
        failure: Option<FailureReport>,
    },
    /// A letter from `peer` is another than expected.
    Mismatch { peer: usize, mine: Box<OpDescriptor>, theirs: Box<OpDescriptor> },
    /// The library below failed; says the call and what it said.
    Backend { what: String },
    /// From a launch.
    Tensor(ferrotron_tensor::Error),
}

impl From<ferrotron_tensor::Error> for OpError {
    fn from(e: ferrotron_tensor::Error) -> OpError {
        OpError::Tensor(e)
    }
}
