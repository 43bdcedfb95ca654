//! Measuring speed: whole training steps, single kernels, and the ceilings both are counted against.

mod cases;
mod ceiling;
mod kernels;
mod train;

pub use ceiling::{memory_ceiling, product_ceiling};
pub use kernels::{KernelBench, Work, kernels, names};
pub use train::{RandomTokens, TrainBench, train};
