//! Values of architecture and MoE keys.

use super::{choice, one_of};
use crate::config::KeyType;
use crate::model::config::{Activation, NormKind};
use crate::model::moe_config::ScoreKind;

choice! {
    /// Position embedding.
    PositionKind {
        /// A learned vector per position.
        Learned = "learned",
        /// Rotary embedding of q and k.
        Rope = "rope",
    }
}

choice! {
    /// Dtype of the router's logits.
    RouterPrecision {
        /// The model's dtype.
        Model = "model",
        /// f32.
        F32 = "f32",
        /// f64 accumulation, f32 logits.
        F64 = "f64",
    }
}

choice! {
    /// Which tokens are kept where an expert is over its capacity.
    DropPolicy {
        /// Those with the largest routing probability.
        Probable = "probable",
        /// The first in token order.
        First = "first",
    }
}

choice! {
    /// How tokens reach experts on other ranks.
    DispatcherType {
        /// Every rank receives the tokens of its experts.
        AllToAll = "all_to_all",
        /// Every rank gathers all tokens.
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
