//! Training: the state of a run, its steps, and the run itself with its folder.

mod cuda_graph;
mod energy;
mod fp8_scales;
mod gather;
mod graph_inputs;
mod micro_batch;
mod moe_metrics;
mod moe_state;
mod mtp;
mod operand_stats;
mod routing_replay;
mod run;
mod state;
mod trainer;
mod values;

pub use cuda_graph::CudaGraphDecision;
pub use gather::gather_all_stages;
pub(crate) use micro_batch::with_mtp_losses;
pub use micro_batch::{read_scalar, sequence_layout, upload_targets, weighted_loss};
pub use moe_metrics::StepMetrics;
pub use mtp::upload as upload_mtp_inputs;
pub use run::{CHECKPOINTS, CONFIG, InitialWeights, Observer, Outcome, Run};
pub use state::{model_of, to_f32, weights_only};
pub use trainer::{InFlightStep, StepReport, Trainer};
pub use values::LogicalValues;
