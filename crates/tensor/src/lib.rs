//! Tensors and what they live on: element types, memory with accounting, views, streams, events, and the
//! checker that finds accesses nothing orders.

mod dtype;
mod error;
pub mod fp8;
mod memory;
mod threads;

pub use dtype::{DType, Element, Float};
pub use error::{Error, Result, shape_error};
pub use half::{bf16, f16};
pub use memory::{Category, MemoryReport, human};
pub use threads::Threads;
