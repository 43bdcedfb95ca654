//! The CPU home of every kernel.

pub mod activation;
mod amx;
pub mod elementwise;
mod isa;
pub mod math;
pub mod norm;
pub mod norm_backward;
pub mod reduce;
pub mod rows;

pub use isa::Isa;
pub(crate) use isa::multiversion;
