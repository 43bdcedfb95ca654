//! The CPU home of every kernel.

mod amx;
pub mod attention;
mod isa;

pub use isa::Isa;
pub(crate) use isa::multiversion;
