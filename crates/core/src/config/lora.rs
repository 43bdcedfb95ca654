//! LoRA: from the `[lora]` keys to the policy that modules consult, and what is refused.

use super::resolve::Derivations;
use super::{Config, Recipe, Resolved};
use crate::error::Result;
use crate::model::{ModelConfig, ModelOptions};
use ferrotron_engine::lora::{LoraPolicy, LoraTargets};
use std::sync::Arc;

const MAX_RANK: usize = 1 << 16;

impl Config {
    /// Whether adapters are trained, and the base model is frozen.
    pub fn has_lora(&self) -> bool {
        self.lora.rank > 0
    }
}

impl Resolved {
    /// Which linears have adapters.
    pub fn lora(&self) -> LoraPolicy {
        let l = &self.config.lora;
        if l.rank == 0 {
            return LoraPolicy::default();
        }
        let targets = LoraTargets { include: l.targets.0.clone(), exclude: l.exclude.0.clone() };
        let alpha = l.alpha.unwrap_or(l.rank as f64);
        LoraPolicy { rank: l.rank, scale: (alpha / l.rank as f64) as f32, targets, fused: l.fused }
    }

    /// Quantization, adapters, MoE and MTP training, loss and parameter groups of the model.
    pub fn model_options(&self) -> ModelOptions {
        ModelOptions {
            policy: self.policy(),
            lora: self.lora(),
            moe_training: Arc::new(self.moe_training()),
            mtp: self.mtp_training(),
            loss: self.loss_options(),
            groups: self.param_groups(),
        }
    }
}

impl Recipe {
    /// Derives the scale of adapters.
    pub(super) fn derive_lora(&self, c: &mut Config, derived: &mut Derivations) {
        let l = &mut c.lora;
        if l.rank > 0 && l.alpha.is_none() {
            l.alpha =
                Some(derived.add("lora.alpha", l.rank as f64, "the rank: B·A is added with a scale of 1"));
        }
    }

    /// Checks of single values.
    pub(super) fn check_lora(&self) -> Result<()> {
        let l = &self.config.lora;
        self.within("lora.rank", l.rank as f64, 0.0, MAX_RANK as f64)?;
        if let Some(alpha) = l.alpha {
            self.within("lora.alpha", alpha, 1e-6, 1e6)?;
        }
        self.within("lora.b_lr_factor", l.b_lr_factor, 1e-6, 1e6)?;
        if l.rank == 0 {
            let keys = ["lora.alpha", "lora.targets", "lora.exclude", "lora.fused", "lora.b_lr_factor"];
            if let Some(key) = keys.into_iter().find(|key| self.is_set(key)) {
                return self.refuse(key, "there are no adapters; set lora.rank, or leave this out");
            }
        }
        Ok(())
    }

    /// Checks of adapters against the model.
    pub(super) fn check_lora_targets(&self, r: &Resolved) -> Result<()> {
        let l = &r.config.lora;
        if l.rank == 0 {
            return Ok(());
        }
        let modules = linear_modules(&r.model)?;
        let lists = [("lora.targets", &l.targets.0), ("lora.exclude", &l.exclude.0)];
        for (key, name) in lists.into_iter().flat_map(|(key, list)| list.iter().map(move |name| (key, name)))
        {
            if !modules.iter().any(|module| LoraTargets::selects(name, module)) {
                let what = format!(
                    "\"{name}\" names no linear of the model; its linears are called {}",
                    leaves(&modules)
                );
                return self.refuse(key, what);
            }
        }
        let policy = r.lora();
        let chosen: Vec<&String> = modules.iter().filter(|module| policy.covers(module)).collect();
        if chosen.is_empty() {
            return self.refuse("lora.exclude", "leaves no linear to adapt; exclude less");
        }
        let unsupported = |module: &&&String| module.contains(".moe.experts.") || module.ends_with(".router");
        if let Some(module) = chosen.iter().find(unsupported) {
            let what =
                format!("{module}: experts and routers have no adapters; exclude them with lora.exclude");
            return self.refuse("lora.targets", what);
        }
        Ok(())
    }
}

/// Modules of the linears of all layers, such as `layers.3.attn.q`; of experts, those of the first.
fn linear_modules(model: &ModelConfig) -> Result<Vec<String>> {
    let mut modules = Vec::new();
    for i in 0..model.layers {
        modules.extend(model.linears(i)?.into_iter().flat_map(|linear| linear.names));
    }
    Ok(modules)
}

/// The last names of modules, each once.
fn leaves(modules: &[String]) -> String {
    let mut leaves: Vec<&str> = Vec::new();
    for leaf in modules.iter().filter_map(|m| m.rsplit('.').next()) {
        if !leaves.contains(&leaf) {
            leaves.push(leaf);
        }
    }
    leaves.join(", ")
}
