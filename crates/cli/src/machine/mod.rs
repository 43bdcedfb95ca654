//! What the machine has, read from files only: no library is opened and no driver is started.

mod libraries;
mod system;

pub use libraries::{Gpus, Libraries};
pub use system::{Cpu, Disk, Memory};
