//! What can go wrong between ranks.

/// Errors of collectives. Each names the operation and the ranks (numbers in the job).
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Two ranks met with different operations.
    #[error(
        "ranks differ: rank {rank} calls {call}, rank {other} calls {other_call}; \
         all ranks of a group must make the same calls in the same order"
    )]
    Mismatch {
        /// A rank that does what most do.
        rank: usize,
        /// What it called.
        call: String,
        /// A rank that does something else.
        other: usize,
        /// What that one called.
        other_call: String,
    },
    /// Some ranks did not come in time.
    #[error("stalled: rank {rank} waited {seconds:.1} s in {call} for {}", list(missing))]
    Stall {
        /// The rank that reports.
        rank: usize,
        /// What it called.
        call: String,
        /// How long it waited.
        seconds: f64,
        /// Who did not come, and what each did last.
        missing: Vec<(usize, String)>,
    },
    /// Some ranks will never come.
    #[error("a rank ended: rank {rank} waits in {call} for {}", list(ended))]
    Ended {
        /// The rank that reports.
        rank: usize,
        /// What it called.
        call: String,
        /// Who ended, how, and what each did last.
        ended: Vec<(usize, String)>,
    },
    /// Another rank failed, so this operation can't take place.
    #[error("rank {rank} gave up {call}, because rank {by} failed: {reason}")]
    Abandoned {
        /// The rank that reports.
        rank: usize,
        /// What it called.
        call: String,
        /// The rank that failed first.
        by: usize,
        /// Its error.
        reason: String,
    },
    /// An argument does not fit the operation.
    #[error("{call}: {what}")]
    Argument {
        /// The operation.
        call: String,
        /// What is wrong and the way out.
        what: String,
    },
    /// A group that can't be.
    #[error("group {name} of {ranks:?}: {what}")]
    Group {
        /// Its name.
        name: String,
        /// Its ranks.
        ranks: Vec<usize>,
        /// What is wrong and the way out.
        what: String,
    },
    /// The library below failed.
    #[error("{call}: {what}")]
    Backend {
        /// The operation.
        call: String,
        /// What the library said.
        what: String,
    },
    /// A library that is opened at run time is missing or not the right one.
    #[error("{library} can't be used: {what}")]
    Library {
        /// Its name.
        library: &'static str,
        /// What is wrong and the way out.
        what: String,
    },
    /// The processes of the job can't find each other.
    #[error("can't join the job: {0}")]
    Launch(String),
    /// From the tensors below.
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
