//! What can go wrong below the kernels.

use crate::{DType, MemoryReport};

/// Errors of tensors, devices and streams. Each names the operation and what was wrong with it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An operation met a shape it cannot work on.
    #[error("{op}: {what}")]
    Shape {
        /// The operation or kernel.
        op: &'static str,
        /// The shapes found and the shapes wanted.
        what: String,
    },
    /// A tensor of one element type was used as another.
    #[error("{op}: tensor holds {found}, but {wanted} is needed")]
    DType {
        /// The operation or kernel.
        op: &'static str,
        /// The element type of the tensor.
        found: DType,
        /// The element type asked for.
        wanted: DType,
    },
    /// Memory ran out; carries the table by category.
    #[error("out of memory: {bytes} bytes for {category} could not be had\n{report}")]
    OutOfMemory {
        /// Bytes asked for.
        bytes: usize,
        /// What they were for.
        category: &'static str,
        /// Who holds the memory now.
        report: Box<MemoryReport>,
    },
    /// The checker found two accesses that nothing orders.
    #[error("unordered access: {0}")]
    Race(String),
    /// Two arguments of one launch overlap although one of them is written.
    #[error("{op}: argument {a} is written and overlaps argument {b}; give the kernel separate memory")]
    Overlap {
        /// The kernel.
        op: &'static str,
        /// Index of the written argument.
        a: usize,
        /// Index of the argument it overlaps.
        b: usize,
    },
    /// There is no CUDA device to compute on.
    #[error("no CUDA device: {0}; leave --device out or say --device cpu")]
    NoCuda(String),
    /// A call of a CUDA library failed.
    #[error("CUDA: {op}: {what}")]
    Cuda {
        /// The call.
        op: &'static str,
        /// What the library said.
        what: String,
    },
    /// A kernel met a value it cannot work on; found when the host next waited for it.
    #[error("{0}")]
    Fault(&'static str),
    /// Tensors of one launch live on different devices.
    #[error("{op}: argument {arg} is on another device than the stream; copy it first")]
    OtherDevice {
        /// The kernel.
        op: &'static str,
        /// Index of the argument.
        arg: usize,
    },
    /// Ranks did not come together; the message names operation and ranks.
    #[error("{0}")]
    Communication(String),
    /// A feature this device or build does not have.
    #[error("{op}: {what}")]
    Unsupported {
        /// The operation or kernel.
        op: &'static str,
        /// What is missing and the way out.
        what: String,
    },
}

/// Result of tensor operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Shorthand for a shape error.
pub fn shape_error<T>(op: &'static str, what: impl Into<String>) -> Result<T> {
    Err(Error::Shape { op, what: what.into() })
}
