//! Errors of collectives.

/// Errors of collectives. Each names the operation and the ranks, numbered within the job.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Two ranks called different operations.
    #[error(
        "ranks differ: rank {rank} calls {call}, rank {other} calls {other_call}; \
         all ranks of a group must make the same calls in the same order"
    )]
    Mismatch {
        /// A rank that agrees with most others.
        rank: usize,
        /// Its call.
        call: String,
        /// A rank that differs.
        other: usize,
        /// That rank's call.
        other_call: String,
    },
    /// Some ranks did not make the call before the timeout.
    #[error("stalled: rank {rank} waited {seconds:.1} s in {call} for {}", list(missing))]
    Stall {
        /// The reporting rank.
        rank: usize,
        /// Its call.
        call: String,
        /// Time it waited.
        seconds: f64,
        /// The missing ranks, and the last operation of each.
        missing: Vec<(usize, String)>,
    },
    /// Some ranks have exited and will never make the call.
    #[error("a rank exited: rank {rank} was waiting in {call} for {}", list(ended))]
    Ended {
        /// The reporting rank.
        rank: usize,
        /// Its call.
        call: String,
        /// The ranks that exited, how, and the last operation of each.
        ended: Vec<(usize, String)>,
    },
    /// Another rank failed, so this operation cannot complete.
    #[error("rank {rank} aborted {call} because rank {by} failed: {reason}")]
    Abandoned {
        /// The reporting rank.
        rank: usize,
        /// Its call.
        call: String,
        /// The rank that failed first.
        by: usize,
        /// That rank's error.
        reason: String,
    },
    /// An argument does not fit the operation.
    #[error("{call}: {what}")]
    Argument {
        /// The operation.
        call: String,
        /// What is wrong and how to fix it.
        what: String,
    },
    /// A group that cannot be created.
    #[error("group {name} of {ranks:?}: {what}")]
    Group {
        /// Its name.
        name: String,
        /// Its ranks.
        ranks: Vec<usize>,
        /// What is wrong and how to fix it.
        what: String,
    },
    /// The library below failed.
    #[error("{call}: {what}")]
    Backend {
        /// The operation.
        call: String,
        /// The library's error message.
        what: String,
    },
    /// A library opened at run time is missing or incompatible.
    #[error("{library} cannot be used: {what}")]
    Library {
        /// Its name.
        library: &'static str,
        /// What is wrong and how to fix it.
        what: String,
    },
    /// The processes of the job cannot connect.
    #[error("cannot join the job: {0}")]
    Launch(String),
    /// This process must not take part in the job any more.
    #[error("{0}")]
    Excluded(String),
    /// From a tensor operation.
    #[error(transparent)]
    Tensor(#[from] ferrotron_tensor::Error),
}

fn list(ranks: &[(usize, String)]) -> String {
    let parts: Vec<String> = ranks.iter().map(|(r, last)| format!("rank {r} ({last})")).collect();
    parts.join(", ")
}

/// Result of collectives.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl From<Error> for ferrotron_tensor::Error {
    fn from(e: Error) -> ferrotron_tensor::Error {
        match e {
            Error::Tensor(e) => e,
            other => ferrotron_tensor::Error::Communication(other.to_string()),
        }
    }
}
