//! The CPU home of every kernel.

mod amx;
mod isa;

pub use isa::Isa;
pub(crate) use isa::multiversion;
