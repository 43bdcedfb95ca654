//! Benchmarks: training steps, single kernels and collectives, and the ceilings they are compared with.

mod calibrate;
mod cases;
mod ceiling;
mod comm;
mod custom;
mod gpus;
mod kernels;
mod link;
mod relative;
mod roofline;
mod train;
mod yardsticks;

pub use crate::cost::roofline::Ceilings;
pub use calibrate::{Calibration, GpuMeasurements, MeasuredGemm, calibrate, measure_gpu};
pub use ceiling::{
    attention_ceiling, ceilings, fp8_gemm_ceiling, gemm_ceiling, gemm_ceiling_size, memory_ceiling,
};
pub use comm::{COLLECTIVES, CommBench, FORMULA, comm, max_over_ranks, sizes};
pub use gpus::gpus_of_all_ranks;
pub use kernels::{KernelBench, KernelWork, kernels, names};
pub use link::{LinkRates, link_rates};
pub use relative::{RelativeTime, reference_seconds, relative_times};
pub use roofline::{RooflinePart, category_of, roofline};
pub use train::{RandomTokens, RoutingReport, TrainBench, train, train_with_observer};
pub use yardsticks::{fixes_batch, workload};
