//! LoRA: from the `[lora]` keys to the policy that modules consult, and what is refused.

use super::resolve::Derivations;
use super::{Config, LoraSection, QuantRecipe, Recipe, Resolved};
use crate::error::Result;
use crate::model::{ModelConfig, ModelOptions, logical_specs};
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
        let scale = (alpha / l.rank as f64) as f32;
        LoraPolicy { rank: l.rank, scale, targets, fused: l.fused, dora: l.dora }
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
        if c.lora.rank == 0 {
            return;
        }
        let rank = c.lora.rank as f64;
        let scale = || derived.add("lora.alpha", rank, "the rank: B·A is added with a scale of 1");
        c.lora.alpha.get_or_insert_with(scale);
        let scaled_once = matches!(c.precision.recipe, QuantRecipe::Fp8Current | QuantRecipe::Fp8Block);
        if scaled_once && !self.is_set("precision.fp8_params") {
            let reason = "frozen weights are quantized once and stay in FP8";
            c.precision.fp8_params = derived.add("precision.fp8_params", true, reason);
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
            // A stored configuration has defaults written out.
            let none = LoraSection::default();
            let differs = [
                ("lora.alpha", l.alpha != none.alpha),
                ("lora.targets", l.targets != none.targets),
                ("lora.exclude", l.exclude != none.exclude),
                ("lora.fused", l.fused != none.fused),
                ("lora.dora", l.dora != none.dora),
                ("lora.b_lr_factor", l.b_lr_factor != none.b_lr_factor),
            ];
            if let Some((key, _)) = differs.into_iter().find(|(_, differs)| *differs) {
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
        let p = &r.config.precision;
        if p.fp8_params && p.recipe == QuantRecipe::Fp8Delayed {
            let what = "frozen weights have no amax history; set precision.recipe = \"fp8-current\", or leave this out";
            return self.refuse("precision.fp8_params", what);
        }
        let specs = logical_specs(&r.model, &r.model_options())?;
        if let Some(spec) = specs.iter().find(|s| s.quant.is_some() && !s.group.frozen) {
            let name = spec.parts.first().map_or("", |p| &p.name);
            let what = format!(
                "{name} is trained, but the base model of adapters is quantized once; leave it frozen, or set \
                 precision.recipe = \"none\""
            );
            return self.refuse("optimizer.groups", what);
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
        if let Some(module) = chosen.iter().find(|module| module.ends_with(".router")) {
            let what = format!("{module}: routers have no adapters; leave them out");
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
pub(super) fn leaves(modules: &[String]) -> String {
    let mut leaves: Vec<&str> = Vec::new();
    for leaf in modules.iter().filter_map(|m| m.rsplit('.').next()) {
        if !leaves.contains(&leaf) {
            leaves.push(leaf);
        }
    }
    leaves.join(", ")
}
