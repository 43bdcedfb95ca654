//! Tensors and what they live on: element types, memory with accounting, views, streams, events, and the
//! checker that finds accesses nothing orders.

mod arena;
mod buffer;
mod checker;
mod clock;
mod cuda;
mod device;
mod dtype;
mod error;
pub mod fp8;
mod graph;
mod launch;
mod memory;
mod shape;
mod stream;
mod tensor;
mod threads;
pub mod trace;
mod transfer;

pub use cuda::{CardInfo, DRIVER as CUDA_DRIVER, cards};
pub use device::{Device, DeviceKind, Profile, Watch};
pub use dtype::{DType, Element, Float};
pub use error::{Error, Result, shape_error};
pub use graph::Graph;
pub use half::{bf16, f16};
pub use launch::{Arg, Launch, read, write};
pub use memory::{Category, MemoryReport, human};
pub use shape::{Dims, MAX_RANK};
pub use stream::{Event, Stream};
pub use tensor::Tensor;
pub use threads::Threads;
