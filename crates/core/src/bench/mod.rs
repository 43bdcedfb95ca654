//! Measuring speed: whole training steps, single kernels, and the ceilings both are counted against.

mod cases;
mod ceiling;
mod comm;
mod custom;
mod kernels;
mod mixtures;
mod roofline;
mod train;
mod yardsticks;

pub use ceiling::{attention_ceiling, memory_ceiling, narrow_ceiling, product_ceiling, product_size};
pub use comm::{COLLECTIVES, CommBench, FORMULA, comm, sizes};
pub use kernels::{KernelBench, Work, kernels, names};
pub use roofline::{Ceilings, Part, roofline};
pub use train::{RandomTokens, Routing, TrainBench, observed, train};
pub use yardsticks::work;
