//! The machine's CPU, memory, disk and CUDA libraries.

mod libraries;
mod system;

pub use libraries::Libraries;
pub use system::{Cpu, Disk, Memory};
