//! Training: the state of a run, its steps, and the run itself with its folder.

mod cuda_graph;
mod energy;
mod execute;
mod fp8_scales;
mod gather;
mod global_batch;
mod graph_inputs;
mod hooks;
mod micro_batch;
mod model_state;
mod moe_metrics;
mod moe_state;
mod mtp;
mod operand_stats;
mod routing_replay;
mod run;
mod state;
mod step_runner;
mod trainer;
mod values;

pub use crate::tensorfile::to_f32;
pub use cuda_graph::CudaGraphDecision;
pub use execute::{MicroBatch, MicroBatchLoader, StepMode, StepPosition, execute};
pub use gather::gather_all_stages;
pub use micro_batch::{read_scalar, sequence_layout, upload_targets, weighted_loss};
pub use model_state::ModelState;
pub use moe_metrics::StepMetrics;
pub use mtp::upload as upload_mtp_inputs;
pub use run::{CHECKPOINTS, CONFIG, InitialWeights, Observer, Outcome, Run};
pub use state::{model_of, weights_only};
pub use step_runner::Progress;
pub use trainer::{InFlightStep, StepReport, Trainer};
pub use values::LogicalValues;
