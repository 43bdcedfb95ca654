//! What the machine has, read from files only.

mod libraries;
mod system;

pub use libraries::Libraries;
pub use system::{Cpu, Disk, Memory};
