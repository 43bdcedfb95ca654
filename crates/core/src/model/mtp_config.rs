//! Multi-token prediction in an architecture: layers after the decoder that predict tokens further ahead.
//!
//! With h₀ the decoder's output after its final norm, depth d = 1..D looks at the token d places ahead:
//! `h_d = norm(layer(W_eh·[enorm(emb(id of the token d ahead)); hnorm(h_{d−1})]))`, and the model's own output matrix
//! turns h_d into a prediction of the token after that one. Embedding and output matrix are those of the model.
//!
//! Names count from 0: `mtp.<d−1>.{enorm,hnorm,eh,norm}.weight` and `mtp.<d−1>.layer.*`, with the parts of a decoder
//! layer. Numbers of layers go on where the decoder's end: layer `L + d − 1`, of the kind of the decoder's last.

use super::config::ModelConfig;
use serde::{Deserialize, Serialize};

/// Layers that predict further tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MtpConfig {
    /// Tokens predicted besides the next (D).
    pub layers: usize,
    /// Is one module used for all of them?
    #[serde(default, rename = "repeated")]
    pub shared_layer: bool,
}

impl MtpConfig {
    /// Modules with weights of their own.
    pub fn modules(&self) -> usize {
        if self.shared_layer { 1 } else { self.layers }
    }
}

/// How they are trained.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MtpTraining {
    /// Weight of the mean of their losses beside the model's own loss.
    pub loss_weight: f64,
    /// Do decoder, embedding and output matrix get no gradient of them?
    pub detach: bool,
}

impl Default for MtpTraining {
    fn default() -> MtpTraining {
        MtpTraining { loss_weight: 0.1, detach: false }
    }
}

/// Depths beyond this are refused.
const MAX_DEPTH: usize = 64;

impl ModelConfig {
    /// Tokens predicted besides the next (D).
    pub fn mtp_depth(&self) -> usize {
        self.mtp.map_or(0, |m| m.layers)
    }

    /// Prediction modules with weights of their own.
    pub(super) fn mtp_modules(&self) -> usize {
        self.mtp.map_or(0, |m| m.modules())
    }

    /// The decoder layer that layer `i` is like: itself; the last, for layers that come after it.
    pub(super) fn template_layer(&self, i: usize) -> usize {
        i.min(self.layers.saturating_sub(1))
    }

    /// What is wrong with the prediction layers, one sentence each.
    pub(super) fn check_mtp(&self, bad: &mut Vec<String>) {
        if let Some(m) = &self.mtp
            && !(1..=MAX_DEPTH).contains(&m.layers)
        {
            bad.push(format!(
                "mtp.layers is {}, it must be 1 to {MAX_DEPTH}; leave it out for none",
                m.layers
            ));
        }
    }
}
