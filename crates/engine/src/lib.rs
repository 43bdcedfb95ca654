//! Modules as pairs of functions. `forward` returns its output and what backward needs; `backward` consumes
//! that and returns the gradient of the input and a [`WeightGrad`], which is run now or later.

pub mod attention;
mod embedding;
pub mod flat;
mod grad;
mod head;
mod linear;
mod measured;
mod mlp;
pub mod moe;
mod norm;
mod overlap;
mod param;
mod pass;
pub mod precision;
mod rank;
mod reduce;
mod saved;
mod shard;
mod spread;
mod tokens;
mod turns;

pub use embedding::{Embedding, EmbeddingSaved};
pub use grad::{GradBuffer, WeightGrad};
pub use head::{Head, HeadSaved, Targets};
pub use linear::{Linear, LinearSaved};
pub use measured::Measured;
pub use mlp::{Mlp, MlpSaved};
pub use norm::{Hidden, NormLayer, NormSaved};
pub use param::{
    Declarations, ExpertPlace, Init, ParamId, ParamSpec, Params, Part, draw_initial, initial_values,
};
pub use pass::{Dropout, Keep, Pass, Recompute};
pub use rank::Rank;
pub use saved::{Class, Saved, SavedTensor};
pub use shard::{Cut, Place, Split};
pub use tokens::Tokens;
pub use turns::{at_once, in_turn, turn};
