//! Training: the state of a run, its steps, and the run itself with its folder.

mod ahead;
mod energy;
mod gather;
mod inputs;
mod loads;
mod memory;
mod micro_batch;
mod mixtures;
mod replay;
mod routing;
mod run;
mod scales;
mod state;
mod statistics;
mod trainer;
mod values;

pub use ahead::upload as further_ahead;
pub use gather::all_stages;
pub use loads::Named;
pub use memory::Need;
pub(crate) use memory::weights_in_bytes;
pub(crate) use micro_batch::with_further;
pub use micro_batch::{fetch, layout, targets, weighted};
pub use replay::GraphChoice;
pub use run::{CHECKPOINTS, CONFIG, FirstWeights, Observer, Outcome, Run};
pub use state::{model_of, to_f32, weights_only};
pub use trainer::{Queued, StepReport, Trainer};
pub use values::LogicalValues;
