//! Quantization as a policy that modules consult: which GEMMs of a model have FP8 operands, how they are scaled, and
//! the state that needs.
//!
//! | file | what |
//! |---|---|
//! | `recipe.rs` | recipes (current, delayed, block scaling, MXFP8, NVFP4) and the policy that says where they apply |
//! | `quantize.rs`, `operand.rs` | quantizing operands; a GEMM operand in bf16 or FP8 |
//! | `linear.rs`, `lm_head.rs`, `experts.rs` | the FP8 GEMMs of linears, the LM head and grouped experts |
//! | `state.rs`, `calibrate.rs`, `stats.rs` | delayed scales, cached FP8 weights, calibration, operand statistics |
//! | `fp8_params.rs`, `quantize_params.rs`, `precomputed.rs` | FP8-resident weights, and quantizing them in the optimizer step |

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
pub(crate) use fp8_params::{Fp8Params, dequantized_matrix};
pub(crate) use operand::{GemmOperand, GemmOptions, SavedOperand};
pub use precomputed::Precomputed;
pub(crate) use quantize::{Orientations, QuantInput};
pub use recipe::{Exception, LinearGemm, LinearQuant, Method, Policy, Recipe, Role};
pub use state::{DelayedState, QuantState, ScaleSlot};
pub use stats::OperandStats;
