//! Values of architecture and MoE keys.

use super::{choice, one_of};
use crate::config::KeyType;
use crate::model::config::{Activation, NormKind};
use crate::model::moe_config::ScoreKind;

choice! {
    /// How positions enter the model.
    PositionKind {
        /// A learned vector per position.
        Learned = "learned",
        /// Rotary embedding of q and k.
        Rope = "rope",
    }
}

choice! {
    /// The type of a router's logits.
    RouterPrecision {
        /// That of the model.
        Model = "model",
        /// f32.
        F32 = "f32",
        /// f64 sums.
        F64 = "f64",
    }
}

choice! {
    /// Which tokens stay within an expert's capacity.
    DropPolicy {
        /// Those whose choice is most probable.
        Probable = "probable",
        /// The first.
        First = "first",
    }
}

choice! {
    /// How tokens come to experts of other ranks.
    DispatcherType {
        /// Each rank gets the tokens of its experts.
        AllToAll = "all_to_all",
        /// Each rank gets all tokens.
        AllGather = "all_gather",
    }
}

impl KeyType for Activation {
    fn expects() -> String {
        one_of(&["silu", "gelu_tanh", "gelu_erf"])
    }
}

impl KeyType for ScoreKind {
    fn expects() -> String {
        one_of(&["softmax", "sigmoid", "sqrt_softplus"])
    }
}

impl KeyType for NormKind {
    fn expects() -> String {
        one_of(&["rmsnorm", "layernorm"])
    }
}
