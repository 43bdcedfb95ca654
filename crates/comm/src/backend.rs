//! The interface of communication backends. A backend only transports: [`crate::Communicator`] above it validates
//! arguments, compares the ranks' op descriptors, fills the flight recorder and reports stalls.
//!
//! A collective is two calls: [`GroupBackend::exchange_descriptors`] sends this rank's descriptor to the others and
//! collects theirs (or leaves that to [`crate::call_digest`]), and, if they agree, [`GroupBackend::run`] moves the data. Sends and receives are
//! [`GroupBackend::post_sends`] and [`GroupBackend::complete_receives`]; each message carries its descriptor. Calls
//! of one rank on one group are serialized and come in the order of their sequence numbers. Groups of one rank never
//! reach a backend.

use crate::flight_recorder::{FlightRecorder, OpRecord};
use crate::host_cost::HostCost;
use crate::op_descriptor::OpDescriptor;
use crate::{ReduceOp, Result};
use ferrotron_tensor::{Event, Stream, Tensor};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// One rank's connection to the job.
pub(crate) trait JobBackend: Send + Sync {
    /// Its name for people: `nccl`.
    fn name(&self) -> &'static str;

    /// This rank in the job.
    fn rank(&self) -> usize;

    /// Number of ranks in the job.
    fn size(&self) -> usize;

    /// Creates group `index` (0 is the whole job) of `ranks`: distinct, valid ranks of the job, in group order. Every
    /// rank of the job calls it, member or not, with the same arguments in the same order, so it may be collective
    /// over the job; only members get a backend. Differing arguments are [`OpError::Backend`] where the backend can
    /// detect them.
    fn group(
        &self,
        index: u64,
        name: &'static str,
        ranks: &[usize],
        deadline: Instant,
    ) -> Result<Option<Arc<dyn GroupBackend>>, OpError>;

    /// Reports that this rank has failed and will make no further calls, so that the others fail at once with
    /// [`OpError::RanksMissing`] carrying this report. Must not block for long. If called more than once, the first
    /// report counts.
    fn fail(&self, failure: FailureReport);

    /// The first failure known to this rank.
    fn failure(&self) -> Option<FailureReport>;

    /// True if collectives are enqueued on a stream without waiting for other hosts, so that a CUDA graph can hold them.
    fn only_enqueues(&self) -> bool {
        false
    }

    /// This rank's flight recorder; visible to other ranks where the backend allows it.
    fn flight_recorder(&self) -> &Arc<FlightRecorder>;

    /// How long the monitor of this process waits for others from now on; nothing where there is none.
    fn set_timeout(&self, _timeout: Duration) {}

    /// The last operations of a rank, oldest first; `None` if unknown. Must not block for long: it is called when
    /// that rank does not respond.
    fn last_ops(&self, rank: usize) -> Option<Vec<OpRecord>>;

    /// The rank that forwards control messages between the others, if it does not respond. Must not block for long.
    fn silent_relay(&self) -> Option<usize> {
        None
    }

    /// What communication has cost this rank's host; nothing between threads.
    fn host_cost(&self) -> HostCost {
        HostCost::default()
    }
}

/// One rank's connection to one group. Ranks are numbered within the group. `deadline` bounds the wait for other
/// ranks; a backend that enqueues work on a GPU need not wait for that work.
pub(crate) trait GroupBackend: Send + Sync {
    /// Sends `descriptor` to all ranks of the group and returns once all have called. `collective` is what
    /// [`GroupBackend::run`] will get next on the same stream, for backends that can send the data along.
    ///
    /// Returns [`Descriptors::AllEqual`] if the backend has compared all descriptors (not allowed for pairwise ones,
    /// which never equal each other); otherwise all descriptors in rank order, to be compared by the caller.
    fn exchange_descriptors(
        &self,
        s: Option<&Stream>,
        descriptor: &OpDescriptor,
        collective: &Collective,
        deadline: Instant,
    ) -> Result<Descriptors, OpError>;

    /// Moves the data, after all ranks have agreed. Memory is accessed only inside [`Stream::launch`] on `s` with its
    /// accesses declared. Work given to `s` after this returns sees the result and may overwrite the inputs.
    fn run(&self, s: &Stream, collective: &Collective, deadline: Instant) -> Result<Completion, OpError>;

    /// Whether [`GroupBackend::run_coalesced`] moves the data of several collectives at once. Otherwise they run one after
    /// another.
    fn coalesces(&self) -> bool {
        false
    }

    /// [`GroupBackend::run`] of several collectives whose tensors do not overlap, after all ranks have agreed to every one.
    fn run_coalesced(
        &self,
        s: &Stream,
        collectives: &[Collective],
        deadline: Instant,
    ) -> Result<Completion, OpError> {
        let mut last = Completion::Done;
        for collective in collectives {
            last = self.run(s, collective, deadline)?;
        }
        Ok(last)
    }

    /// Posts the sends. Waits for nobody: data is copied, or kept safe until delivered. Messages from one rank to
    /// another arrive in the order sent, each with its descriptor. Memory rules as for [`GroupBackend::run`]. A
    /// backend that can only send together with receiving (NCCL groups) sends the descriptors alone.
    fn post_sends(&self, s: &Stream, sends: &[P2pOp], deadline: Instant) -> Result<(), OpError>;

    /// Completes the receives, and the sends posted before with the same `sends`. The order in which ranks list their
    /// messages must not matter. Each descriptor is compared with the receiver's before data reaches its tensor; the
    /// first difference is [`OpError::Mismatch`].
    fn complete_receives(
        &self,
        s: &Stream,
        sends: &[P2pOp],
        receives: &[P2pOp],
        deadline: Instant,
    ) -> Result<Completion, OpError>;

    /// Host bytes of any length from every rank, in rank order. Called after the descriptors of
    /// [`Collective::AllGatherBytes`] were exchanged.
    fn all_gather_bytes(&self, mine: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>, OpError>;
}

/// Elements that an all-to-all sends to and receives from each rank.
#[derive(Clone, Copy, Debug)]
pub struct SplitSizes<'a> {
    /// `sent[p]` elements go to rank p.
    pub sent: &'a [usize],
    /// `received[p]` elements come from rank p.
    pub received: &'a [usize],
}

/// A collective on n ranks. Tensors are contiguous, on the stream's device and of matching sizes; reductions are on
/// f32, bf16, f16, f64, i32 or i64.
#[derive(Clone, Copy)]
pub(crate) enum Collective<'a> {
    /// Moves no data; `run` is not called.
    Barrier,
    /// `t` = reduction of `t` over ranks; bf16 and f16 are summed in f32 and rounded once where the backend allows
    /// it.
    AllReduce { t: &'a Tensor, op: ReduceOp },
    /// `all` = concatenation of every rank's `mine`, of `counts[r]` elements if given, else of equal size. `mine` may
    /// be this rank's slot of `all`, and overlaps `all` nowhere else.
    AllGather { mine: &'a Tensor, all: &'a Tensor, counts: Option<&'a [usize]> },
    /// `mine` = part `rank` of n equal parts of the reduction of `all`. `mine` may be that part of `all`; the rest of
    /// `all` is unspecified afterwards.
    ReduceScatter { all: &'a Tensor, mine: &'a Tensor, op: ReduceOp },
    /// Part p of `from` goes to rank p; part p of `to` comes from rank p. Parts have the given sizes, or
    /// else equal size. `from` and `to` do not overlap.
    AllToAll { from: &'a Tensor, to: &'a Tensor, splits: Option<SplitSizes<'a>> },
    /// `t` = the root's `t`.
    Broadcast { t: &'a Tensor, root: usize },
    /// Sizes may differ between ranks; `run` is not called, see [`GroupBackend::all_gather_bytes`].
    AllGatherBytes(&'a [u8]),
}

/// One send to, or receive from, another rank or this one.
pub(crate) struct P2pOp<'a> {
    /// The other rank.
    pub(crate) peer: usize,
    /// Contiguous, on the stream's device.
    pub(crate) tensor: &'a Tensor,
    /// This side's description; its sequence number counts messages from sender to receiver.
    pub(crate) descriptor: OpDescriptor,
}

/// The outcome of exchanging descriptors.
pub(crate) enum Descriptors {
    /// All descriptors are equal.
    AllEqual,
    /// They are compared later, by digests; the backend has waited for nobody.
    Deferred,
    /// Every rank's descriptor, in rank order.
    PerRank(Vec<Arc<OpDescriptor>>),
}

/// How far an operation has come when the backend returns.
#[derive(Default)]
pub(crate) enum Completion {
    /// Complete on the host, or ordered by the stream without events (a captured stream has none).
    #[default]
    Done,
    /// Enqueued on a stream between two events, recorded just before and after it.
    Enqueued { start: Event, done: Event },
}

/// The report of a rank that failed.
#[derive(Clone, Debug)]
pub(crate) struct FailureReport {
    /// The rank in the job.
    pub(crate) rank: usize,
    /// True if it failed because other ranks did not respond; ranks that are waiting too then look for the cause
    /// themselves.
    pub(crate) stall: bool,
    /// True if a monitor found the failure from outside, see [`crate::monitor`]: `rank` itself may not know of it.
    pub(crate) diagnosis: bool,
    /// True if the job cannot go on, whoever replaces the rank: its error is that of the work, not of the machine.
    pub(crate) is_final: bool,
    /// Its error message.
    pub(crate) reason: String,
}

/// Why an operation ended early. Ranks are numbered within the group.
#[derive(Debug)]
pub(crate) enum OpError {
    /// Ranks are missing: the deadline passed, a rank has exited, or a failure was reported.
    RanksMissing {
        /// The ranks that are missing, as far as known; all others of the group if not.
        missing: Vec<usize>,
        /// Those of the missing ranks known to have exited, and whether by a panic or signal.
        ended: Vec<(usize, bool)>,
        /// A failure reported by some rank.
        failure: Option<FailureReport>,
    },
    /// A message from `peer` does not match what this rank expects.
    Mismatch { peer: usize, mine: Box<OpDescriptor>, theirs: Box<OpDescriptor> },
    /// The library below failed; names the call and its error.
    Backend { what: String },
    /// From a launch.
    Tensor(ferrotron_tensor::Error),
}

impl From<ferrotron_tensor::Error> for OpError {
    fn from(e: ferrotron_tensor::Error) -> OpError {
        OpError::Tensor(e)
    }
}
