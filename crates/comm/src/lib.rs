//! Process groups and collectives.
//!
//! A [`World`] is one rank's membership of the job; it creates groups, each a [`Communicator`]. Every call has a
//! group, a sequence number in it, a label, a kind, a shape and a dtype. Ranks compare these: before any data moves
//! where hosts wait for each other anyway, by digests in the background over NCCL, whose calls are only enqueued. A
//! mismatch is an error that names both sides. A rank that does not make the call within the timeout, exits, or whose
//! GPU does not get there, is reported with its last operation; no call waits forever.
//!
//! | backend | ranks | tensors | order of sums |
//! |---|---|---|---|
//! | `threads` | threads of one process | host, or one shared GPU | rank order |
//! | `mpi` | processes | host | rank order, same bits as `threads` |
//! | `shm` | processes of one host | host | rank order, same bits as `threads` |
//! | `nccl` | processes with one GPU each | GPU | NCCL's own, fixed for a given machine and size |
//!
//! [`InFlight`] holds the buffers of communication that overlaps computation.

mod backend;
mod call_digest;
mod coalesced;
mod communicator;
mod control;
mod diagnosis;
mod error;
mod flight_recorder;
mod hmac_sha256;
mod host_cost;
mod host_group;
mod in_flight;
mod launch_env;
mod membership;
mod monitor;
mod mpi;
mod nccl;
#[cfg(any(test, fuzzing))]
mod network_input;
mod op_descriptor;
mod op_encoding;
mod payloads;
mod peer_memory;
mod process;
mod process_backend;
mod process_group;
mod recording;
mod rendezvous;
mod send_recv;
mod shared_library;
#[cfg(target_os = "linux")]
mod shm;
mod snapshot;
mod tcp_control;
mod threads;
mod timeout;
mod validate;
mod volume;
mod watchdog;
mod world;

pub use backend::SplitSizes;
pub use communicator::Communicator;
pub use error::{Error, Result};
pub use flight_recorder::{OpRecord, OpStatus};
pub use host_cost::HostCost;
pub use in_flight::InFlight;
pub use launch_env::{LaunchEnv, Launcher};
pub use membership::{Ended, Generation, Left, Membership, RestartPolicy, Seat, TEMPORARY_FAILURE};
pub use mpi::mpi_version;
pub use nccl::nccl_version;
#[doc(hidden)]
#[cfg(fuzzing)]
pub use network_input::read_network_input;
pub use op_descriptor::{Detail, OpDescriptor, OpKind};
pub use payloads::{DigestKernel, PayloadCall, Payloads};
pub use peer_memory::{PeerAddress, PeerKey, PeerMemory, SNAPSHOTS_KEPT};
pub use recording::{CallLog, RecordedCall, RecordedGroup};
pub use send_recv::SendRecv;
pub use threads::{ReduceKernel, ReduceKernels};
pub use volume::Volume;
pub use world::World;

/// How the values of all ranks are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReduceOp {
    /// The sum, added in rank order where the backend allows it.
    Sum,
    /// The maximum; NaN if any value is NaN.
    Max,
}

#[cfg(not(target_os = "linux"))]
impl World {
    /// Processes of one host share memory as only Linux provides it.
    pub fn one_host(_: &LaunchEnv, _: std::time::Duration) -> Result<World> {
        let what = "processes on the CPU need Linux or MPI; use --ranks N, or Open MPI's mpirun";
        Err(Error::Launch(what.into()))
    }
}
