//! The CPU home of every kernel.

pub(crate) mod amx;
pub mod gemm;
mod isa;

pub use isa::Isa;
pub(crate) use isa::multiversion;
