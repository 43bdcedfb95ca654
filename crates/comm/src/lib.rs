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

mod arguments;
mod circle;
mod communicator;
mod engine;
mod error;
mod job;
mod messages;
mod mpi;
mod nccl;
mod notice;
mod post;
mod process;
mod recorder;
mod shared_library;
mod tcp;
mod threads;
mod volume;
mod watchdog;
mod wire;
mod world;

pub use communicator::Communicator;
pub use error::{Error, Result};
pub use job::{Job, Launcher};
pub use messages::Lane;
pub use mpi::mpi_version;
pub use nccl::nccl_version;
pub use notice::Kind;
pub use recorder::{Note, Progress};
pub use threads::{Add, Arithmetic};
pub use volume::Volume;
pub use world::World;

/// How the values of ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduce {
    /// Their sum, added in the order of ranks where the engine allows it.
    Sum,
    /// The largest; a NaN stays a NaN.
    Max,
}
