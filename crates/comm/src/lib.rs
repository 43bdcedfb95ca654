//! Ranks talk to each other: groups of ranks and the collectives on them.
//!
//! A [`World`] is one rank's membership of the job; it makes groups, each a [`Communicator`]. Every call has a
//! group, a sequence number in it, a label, a kind, a shape and a type. Ranks compare these before data moves:
//! a mismatch is an error that names both sides. A rank that does not come within the patience of the others,
//! or ends, is named with what it did last; no call waits for ever.
//!
//! Engines below only map calls: `threads` are ranks of one process, `mpi` are processes with tensors on the
//! host, `nccl` are processes with a card each. Sums are added in the order of ranks, the same bits on all
//! engines, except NCCL's, which have an order of their own.

mod backend;
mod communicator;
mod control;
mod error;
mod flight_recorder;
mod in_flight;
mod launch_env;
mod mpi;
mod nccl;
mod op_descriptor;
mod op_encoding;
mod process;
mod process_group;
mod send_recv;
mod shared_library;
mod tcp_control;
mod threads;
mod validate;
mod volume;
mod watchdog;
mod world;

pub use communicator::Communicator;
pub use error::{Error, Result};
pub use flight_recorder::{OpRecord, OpStatus};
pub use in_flight::InFlight;
pub use launch_env::{LaunchEnv, Launcher};
pub use mpi::mpi_version;
pub use nccl::nccl_version;
pub use op_descriptor::OpKind;
pub use send_recv::SendRecv;
pub use threads::{ReduceKernel, ReduceKernels};
pub use volume::Volume;
pub use world::World;

/// How the values of ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReduceOp {
    /// Their sum, added in the order of ranks where the engine allows it.
    Sum,
    /// The largest; a NaN stays a NaN.
    Max,
}
