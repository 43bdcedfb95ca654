//! What can go wrong between ranks.

/// Errors of collectives. Each names the operation and the ranks.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Two ranks met in one place with different operations.
    #[error(
        "collective {sequence}: rank {rank} calls {call}, rank {other} calls {other_call}; all ranks must make the same calls in the same order"
    )]
    Mismatch {
        /// How many collectives came before.
        sequence: u64,
        /// The rank that came later.
        rank: usize,
        /// What it called.
        call: String,
        /// The rank that was there.
        other: usize,
        /// What that one called.
        other_call: String,
    },
    /// Some rank did not come.
    #[error("collective {sequence} ({call}): rank {rank} waited {seconds} s for rank(s) {missing:?}")]
    Stall {
        /// How many collectives came before.
        sequence: u64,
        /// The rank that reports.
        rank: usize,
        /// What it called.
        call: String,
        /// Its patience.
        seconds: u64,
        /// Who is missing.
        missing: Vec<usize>,
    },
    /// From the tensors below.
    #[error(transparent)]
    Tensor(#[from] ferrotron_tensor::Error),
}

/// Result of collectives.
pub type Result<T, E = Error> = std::result::Result<T, E>;
