//! Errors of tensors, devices and streams.

use crate::{DType, MemoryReport};

/// Errors of tensors, devices and streams. Each names the operation and what was wrong.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A shape does not fit the operation.
    #[error("{op}: {what}")]
    Shape {
        /// The operation or kernel.
        op: &'static str,
        /// The shapes found and the shapes required.
        what: String,
    },
    /// A tensor has another element type than the operation requires.
    #[error("{op}: the tensor is {found}, but {wanted} is required")]
    DType {
        /// The operation or kernel.
        op: &'static str,
        /// The tensor's element type.
        found: DType,
        /// The element type required.
        wanted: DType,
    },
    /// The device is out of memory; carries the usage by category.
    #[error("out of memory: cannot allocate {bytes} bytes for {category}\n{report}")]
    OutOfMemory {
        /// Bytes requested.
        bytes: usize,
        /// Category of the request.
        category: &'static str,
        /// Memory in use by category.
        report: Box<MemoryReport>,
    },
    /// Host memory for tensors cannot be allocated.
    #[error("out of host memory: cannot allocate {bytes} bytes: {why}")]
    HostMemory {
        /// Bytes requested.
        bytes: usize,
        /// The limit, and the way out.
        why: String,
    },
    /// The race checker found two conflicting accesses that no event orders.
    #[error("unordered access: {0}")]
    Race(String),
    /// Two arguments of one launch overlap and at least one of them is written.
    #[error("{op}: argument {a} is written and overlaps argument {b}; pass separate memory")]
    Overlap {
        /// The kernel.
        op: &'static str,
        /// Index of the written argument.
        a: usize,
        /// Index of the argument it overlaps.
        b: usize,
    },
    /// There is no usable CUDA device.
    #[error("no CUDA device: {0}; leave --device out or use --device cpu")]
    NoCuda(String),
    /// A call to a CUDA library failed.
    #[error("CUDA: {op}: {what}")]
    Cuda {
        /// The call.
        op: &'static str,
        /// The library's error message.
        what: String,
    },
    /// A kernel met an invalid value, reported when the host next synchronized.
    #[error("{0}")]
    Fault(&'static str),
    /// Tensors of one launch are on different devices.
    #[error("{op}: argument {arg} is not on the device of the stream; copy it there first")]
    OtherDevice {
        /// The kernel.
        op: &'static str,
        /// Index of the argument.
        arg: usize,
    },
    /// A collective failed; the message names the operation and the ranks.
    #[error("{0}")]
    Communication(String),
    /// This device or build lacks a feature.
    #[error("{op}: {what}")]
    Unsupported {
        /// The operation or kernel.
        op: &'static str,
        /// What is missing, and the alternative.
        what: String,
    },
}

/// Result of tensor operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Shorthand for [`Error::Shape`].
pub fn shape_error<T>(op: &'static str, what: impl Into<String>) -> Result<T> {
    Err(Error::Shape { op, what: what.into() })
}
