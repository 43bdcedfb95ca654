//! Planning: what fits on a machine, how fast, and why, before anything runs.

mod candidates;
mod choose;
mod constraints;
pub mod hardware;
mod host_memory;
mod kernel_time;
mod layer_kinds;
mod layer_time;
mod network;
mod of_recipe;
pub mod published;
mod quick;
mod search;
mod step_time;
mod step_trace;
mod svg;

pub use choose::{advice, gpus_that_fit, workload_of};
pub use constraints::{Choice, Constraints};
pub use hardware::{AttentionRates, GemmCurve, GemmDtype, Hardware, Machine};
pub use host_memory::HostMemory;
pub use kernel_time::GemmShape;
pub use layer_time::Seconds;
pub use network::GroupSpan;
pub use of_recipe::of_recipe;
pub use search::{LayoutPlan, SearchResult, search};
pub use step_time::{Candidate, StepTime, Workload};
pub use step_trace::{MemoryPoint, RankTrace, StepTrace, TracedOp};
pub use svg::draw_step;

use ferrotron_engine::Recompute;

/// What backward may recompute, from nothing to everything: each saves more memory than the one before and costs more.
pub fn recompute_sets() -> [Recompute; 4] {
    let none = Recompute::default();
    let cheap = Recompute { norm: true, activation: true, ..none };
    [none, cheap, Recompute { mlp: true, ..cheap }, Recompute { layer: true, ..none }]
}
