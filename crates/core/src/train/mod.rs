//! Training: the state of a run, its steps, and the run itself with its folder.

mod memory;
mod run;
mod state;
mod trainer;

pub use memory::Need;
pub use run::{CHECKPOINTS, CONFIG, FirstWeights, Observer, Outcome, Run};
pub use state::{model_of, to_f32, weights_only};
pub use trainer::{LogicalValues, StepReport, Trainer, fetch, layout, targets, weighted};
