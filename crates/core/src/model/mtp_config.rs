//! Multi-token prediction (MTP): layers after the decoder that predict tokens further ahead.
//!
//! With h₀ the decoder's output after its final norm, depth d = 1..D embeds the token d places ahead: `h_d =
//! norm(layer(W_eh·[enorm(emb(token d ahead)); hnorm(h_{d−1})]))`, and the model's LM head predicts from h_d the
//! token after that one. Embedding and LM head are shared with the model.
//!
//! Names count from 0: `mtp.<d−1>.{enorm,hnorm,eh,norm}.weight` and `mtp.<d−1>.layer.*`, a decoder layer. Layer
//! numbers continue after the decoder's: layer `L + d − 1`, of the same kind (dense or MoE, local or global) as the
//! decoder's last layer.

use super::config::ModelConfig;
use serde::{Deserialize, Serialize};

/// Multi-token prediction layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MtpConfig {
    /// Depth D: tokens predicted besides the next.
    pub layers: usize,
    /// All depths share one layer.
    #[serde(default, rename = "repeated")]
    pub shared_layer: bool,
}

impl MtpConfig {
    /// Layers with their own weights.
    pub fn modules(&self) -> usize {
        if self.shared_layer { 1 } else { self.layers }
    }
}

/// How MTP layers are trained.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MtpTraining {
    /// Weight of their mean loss, added to the main loss.
    pub loss_weight: f64,
    /// Detach MTP layers: their loss sends no gradient into the decoder, embedding or LM head.
    pub detach: bool,
}

impl Default for MtpTraining {
    fn default() -> MtpTraining {
        MtpTraining { loss_weight: 0.1, detach: false }
    }
}

/// Largest accepted depth.
const MAX_DEPTH: usize = 64;

impl ModelConfig {
    /// Depth D: tokens predicted besides the next.
    pub fn mtp_depth(&self) -> usize {
        self.mtp.map_or(0, |m| m.layers)
    }

    /// MTP layers with their own weights.
    pub(super) fn mtp_modules(&self) -> usize {
        self.mtp.map_or(0, |m| m.modules())
    }

    /// The decoder layer whose kind layer `i` has: itself, or for MTP layers the last.
    pub(super) fn template_layer(&self, i: usize) -> usize {
        i.min(self.layers.saturating_sub(1))
    }

    /// Appends what is wrong with the MTP settings, one sentence each.
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
