//! What a step costs: memory, communication volume, FLOPs and the roofline, all summed from
//! [`ModelDescription`](crate::model::description::ModelDescription).

pub mod flops;
pub mod memory;
mod memory_advice;
mod offload;
mod pass_peak;
pub mod roofline;
mod step;
pub mod summary;
mod unit_gathers;
pub mod volume;

pub use flops::TokenFlops;
pub use memory::MemoryEstimate;
pub(crate) use memory_advice::advise;
pub use memory_advice::check_fits;
pub(crate) use offload::USABLE_PERCENT;
pub use offload::{derived_state_offload, with_state_offload};
pub(crate) use step::MoeLayers;
pub use step::derived_comm_unit;
pub use summary::{CostSummary, StageCost};
pub use volume::{ByGroup, Traffic, step_volume};
