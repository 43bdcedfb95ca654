//! Learning rate, weight decay and batch size as pure functions of the number of samples consumed.

pub mod batch_size;
pub mod lr;
pub mod wd;

pub use batch_size::{BatchSchedule, MicroBatches, Rampup};
pub use lr::{Decay, LrSchedule, WsdDecay};
pub use wd::{GroupOverride, WdIncrease, WdSchedule};
