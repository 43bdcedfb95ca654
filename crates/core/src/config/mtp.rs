//! Multi-token prediction: from the `[mtp]` section to an architecture and to how it is trained.

use super::{Config, KEYS, MtpSection, Recipe, Resolved};
use crate::error::Result;
use crate::model::{ModelConfig, MtpConfig, MtpTraining};

impl Recipe {
    /// Applies the keys of `[mtp]` to an architecture.
    pub(super) fn apply_mtp(&self, c: &mut ModelConfig) -> Result<()> {
        let m = &self.config.mtp;
        match (m.layers, c.mtp) {
            (0, None) => return self.reject_mtp_keys(),
            (0, Some(_)) => {}
            (_, None) if self.config.model.hf.is_some() && self.config.model.preset.is_none() => {
                let what = "the weights of model.hf have no MTP layers; leave the key out";
                return self.refuse("mtp.layers", what);
            }
            (layers, Some(theirs)) if theirs != (MtpConfig { layers, shared_layer: m.shared_layer }) => {
                let what = format!(
                    "the weights of model.hf were made for mtp.layers = {} and mtp.shared_layer = {}; leave the keys out",
                    theirs.layers, theirs.shared_layer
                );
                return self.refuse("mtp.layers", what);
            }
            (layers, _) => c.mtp = Some(MtpConfig { layers, shared_layer: m.shared_layer }),
        }
        if !(m.loss_weight > 0.0 && m.loss_weight.is_finite()) {
            return self.refuse("mtp.loss_weight", "must be above 0; set mtp.layers to 0 for no MTP");
        }
        Ok(())
    }

    /// Refuses keys of `[mtp]` without MTP layers.
    fn reject_mtp_keys(&self) -> Result<()> {
        let default = Config::default();
        let set = KEYS
            .iter()
            .filter(|k| k.section == "mtp")
            .find(|k| self.config.get("mtp", k.name) != default.get("mtp", k.name));
        match set {
            None => Ok(()),
            Some(key) => self.refuse(key.key, "there are no MTP layers; set mtp.layers as well"),
        }
    }

    /// Refuses combinations that cannot work.
    pub(super) fn check_mtp(&self, r: &Resolved) -> Result<()> {
        let Some(m) = r.model.mtp else { return Ok(()) };
        if m.layers >= r.plan.seq_len {
            let what =
                format!("no token has {} after it in a sequence of {}; use fewer", m.layers, r.plan.seq_len);
            return self.refuse("mtp.layers", what);
        }
        let quantile = self.config.moe.balance.0.iter().any(|b| b == "quantile");
        if m.shared_layer && m.layers > 1 && quantile && r.model.moe_layer(r.model.layers).is_some() {
            let what = "a shared MoE layer has one table of quantiles for all MTP depths; leave moe.balance = \"quantile\" or this out";
            return self.refuse("mtp.shared_layer", what);
        }
        Ok(())
    }
}

/// The `[mtp]` section of an architecture.
pub(super) fn section(from: &MtpSection, c: &ModelConfig) -> MtpSection {
    match c.mtp {
        None => from.clone(),
        Some(m) => MtpSection { layers: m.layers, shared_layer: m.shared_layer, ..from.clone() },
    }
}

impl Resolved {
    /// How MTP layers are trained.
    pub fn mtp_training(&self) -> MtpTraining {
        MtpTraining { loss_weight: self.config.mtp.loss_weight, detach: self.config.mtp.detach }
    }
}
