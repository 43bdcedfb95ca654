//! Values of `optimizer.groups`.

use super::{OneOrMany, OptimizerKind, StateDtype};
use crate::config::KeyType;
use serde::{Deserialize, Serialize};

/// One parameter group: which parameters, and what differs for them from the `optimizer` section.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParamGroup {
    /// Kinds (`embedding`, `lm_head`, `router`, `expert`, `matrix`, `adapter`, `bias`, `norm`) and names with `*` for any text.
    pub params: OneOrMany,
    /// Update rule; unset: that of the section.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub optimizer: Option<OptimizerKind>,
    /// Factor on the learning rate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lr_factor: Option<f64>,
    /// Factor on the weight decay, for biases and norms too; unset: 1 for matrices and 0 for the rest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_decay_factor: Option<f64>,
    /// Betas of Adam or Lion.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub betas: Option<[f64; 2]>,
    /// Momentum of SGD.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub momentum: Option<f64>,
    /// Dtype of the moments.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state_dtype: Option<StateDtype>,
    /// Not trained.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub frozen: bool,
}

/// The groups, of which a parameter belongs to the first that selects it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ParamGroupList(pub Vec<ParamGroup>);

impl KeyType for ParamGroupList {
    fn expects() -> String {
        "a list of tables such as { params = [\"norm\", \"layers.0.*\"], lr_factor = 0.5 }, with any of optimizer, lr_factor, \
         weight_decay_factor, betas, momentum, state_dtype and frozen"
            .into()
    }
}
