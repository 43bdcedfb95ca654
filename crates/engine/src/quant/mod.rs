//! Precision as a policy: which products of a model are made of narrow factors, and what that needs.

mod calibrate;
mod experts;
mod fp8_params;
mod linear;
mod lm_head;
mod operand;
mod precomputed;
mod quantize;
mod quantize_params;
mod recipe;
mod runs;
mod state;
mod stats;

pub(crate) use experts::WgradOperand;
pub(crate) use fp8_params::Fp8Params;
pub(crate) use operand::{GemmOperand, GemmOptions, SavedOperand};
pub use precomputed::Precomputed;
pub(crate) use quantize::Orientations;
pub use recipe::{Exception, LinearGemm, LinearQuant, Method, Policy, Recipe, Role};
pub use state::{DelayedState, QuantState, ScaleSlot};
pub use stats::OperandStats;
