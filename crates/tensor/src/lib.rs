//! Tensors and the devices they live on: element types, memory pools with accounting, strided views, streams, events,
//! CUDA graphs, traces, and a race checker for streams.

mod arena;
mod backing;
mod buffer;
mod cuda;
mod device;
mod dtype;
mod error;
pub mod fp8;
mod free_ranges;
mod graph;
mod host_buffer;
mod host_fault;
mod host_memory;
mod host_pages;
mod launch;
mod memory;
mod peer_waits;
mod pool;
#[cfg(test)]
mod pool_tests;
mod race_checker;
mod segment;
mod shape;
mod stream;
mod tensor;
mod thread_pool;
mod timestamp;
pub mod trace;
mod transfer;

pub use cuda::{AS_VARIABLE, DRIVER as CUDA_DRIVER, GpuInfo, gpus};
pub use device::{Device, DeviceKind, Instrumentation, Profile};
pub use dtype::{DType, Element, Float};
pub use error::{Error, Result, shape_error};
pub use graph::{Graph, GraphMemory};
pub use half::{bf16, f16};
pub use host_buffer::HostBuffer;
pub use host_fault::HostFault;
pub use host_memory::HostMemoryReport;
pub use launch::{Arg, Launch, read, write};
pub use memory::{Category, MemoryReport, format_bytes};
pub use peer_waits::PeerWait;
pub use shape::{Dims, MAX_RANK};
pub use stream::{Event, Stream};
pub use tensor::Tensor;
pub use thread_pool::Threads;
