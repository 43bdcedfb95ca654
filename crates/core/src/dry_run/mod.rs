//! Dry runs of a whole job: every rank's groups, schedule, communication calls and memory, without tensors.
//!
//! [`build()`] runs the trainer itself on a [meta device](ferrotron_tensor::Device::meta), rank after rank, and records what
//! each calls; [`SimulatedJob::run`] runs the calls of all ranks against each other. So what is checked is the program that
//! would run, and not a description of it. Samples have their full length and MoE tokens spread evenly over experts.

mod build;
mod calls;
mod groups;
mod matching;
mod report;

pub use build::{BuiltJob, BuiltProgram, build};
pub use calls::{Call, CallShape, CallTable, MessageEnd, Program};
pub use groups::{GroupKind, GroupTable};
pub use matching::SimulatedJob;
pub use report::{DryRunReport, GroupSummary, RankMemory, dry_run};
