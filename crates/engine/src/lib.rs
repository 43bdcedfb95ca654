//! Modules as pairs of functions. `forward` returns its output and what backward needs; `backward` consumes
//! that and returns the gradient of the input and a [`WeightGrad`], which is run now or later.

pub mod attention;
pub mod data_parallel;
mod embedding;
mod grad;
mod interleave;
mod linear;
mod lm_head;
mod mlp;
pub mod moe;
mod norm;
mod param;
pub mod quant;
mod rank;
mod reduce;
mod saved;
mod sequence_parallel;
mod shard;
mod step_context;
mod tensor_parallel;
mod tokens;
mod with_amax;

pub use embedding::{Embedding, EmbeddingSaved};
pub use grad::{GradBuffer, WeightGrad};
pub use interleave::{interleave, run_to_completion, yield_now};
pub use linear::{Linear, LinearSaved};
pub use lm_head::{LmHead, LmHeadSaved, Targets};
pub use mlp::{Mlp, MlpSaved};
pub use norm::{HiddenStates, NormLayer, NormSaved};
pub use param::{
    Declarations, ExpertParallelRank, Init, ParamId, ParamSpec, Params, Part, draw_initial, initial_values,
};
pub use rank::Rank;
pub use saved::{OffloadClass, Saved, SavedTensor};
pub use shard::{GroupRank, Shard, Split};
pub use step_context::{Checkpointed, Dropout, Recompute, StepContext};
pub use tokens::Tokens;
pub use with_amax::WithAmax;
