//! Modules with forward and backward: linear, norm, attention, MLP, MoE, embedding, LM head with its loss.
//!
//! There is no autograd tape. `forward` returns the output and the saved activations; `backward` consumes them and returns
//! the gradient of the input and a [`WeightGrad`], which runs now or later. Parallelism and precision are not forks of
//! modules: [`Declarations`] place parameters, `tensor_parallel.rs` and `sequence_parallel.rs` communicate, [`quant`]
//! quantizes, [`data_parallel`] reduces gradients and gathers weights.

pub mod attention;
pub mod data_parallel;
mod embedding;
mod error;
mod interleave;
mod linear;
mod lm_head;
pub mod lora;
mod mlp;
pub mod moe;
mod norm;
pub mod offload;
mod param;
mod pattern;
pub mod quant;
mod rank;
mod saved;
mod sequence_parallel;
mod shard;
mod step_context;
mod step_state;
mod tensor_parallel;
mod tokens;
mod weight_grad;
mod with_amax;

pub use data_parallel::{GradBuffer, UnitGuard};
pub use embedding::{Embedding, EmbeddingConfig, EmbeddingSaved};
pub use error::missing_activation;
pub use interleave::{interleave, run_to_completion, yield_now};
pub use linear::{Linear, LinearSaved};
pub use lm_head::{LmHead, LmHeadConfig, LmHeadSaved, LossOptions, Targets};
pub use mlp::{Mlp, MlpConfig, MlpSaved};
pub use norm::{HiddenStates, NormLayer, NormSaved};
pub use param::{
    Declarations, ExpertParallelRank, Init, ParamId, ParamKind, ParamLayout, ParamSpec, Params, Part, UnitId,
    UpdateGroup, Weight, draw_initial, initial_values,
};
pub use pattern::matches_pattern;
pub use rank::Rank;
pub use saved::{Module, OffloadClass, Saved, SavedTensor};
pub use shard::{GroupRank, Shard, Split};
pub use step_context::{Checkpointed, Dropout, Recompute, StepContext, StepNumber};
pub use step_state::StepState;
pub use tokens::Tokens;
pub use weight_grad::WeightGrad;
pub use with_amax::WithAmax;
