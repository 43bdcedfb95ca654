//! Training: the state of a run, its steps, and the run itself with its folder.

mod run;
mod state;
mod trainer;

pub use run::{Observer, Outcome, Run};
pub use state::to_f32;
pub use trainer::{StepReport, Trainer, layout, targets, weighted};
