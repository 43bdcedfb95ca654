//! Keys that another key switches off: refused, because whoever sets one expects it to do something.

use super::{Config, Decay, DispatcherType, OptimizerKind, QuantRecipe, Recipe, WeightDecayStyle};
use crate::error::Result;

/// Optimizers with `optimizer.betas`.
const WITH_BETAS: [OptimizerKind; 3] = [OptimizerKind::AdamW, OptimizerKind::Adam, OptimizerKind::Lion];

impl Config {
    /// Whether some parameters may be updated by one of these.
    fn updates_by(&self, kinds: &[OptimizerKind]) -> bool {
        let o = &self.optimizer;
        let groups = o.groups.iter().flat_map(|g| &g.0).filter_map(|g| g.optimizer);
        [o.kind, o.rest()].into_iter().chain(groups).any(|kind| kinds.contains(&kind))
    }
}

impl Recipe {
    /// Refuses what has no effect. Defaults may be written out, as in the configuration that a dry run prints; what a built-in
    /// recipe sets may be switched off, and runs of earlier versions stay readable.
    pub(super) fn check_unused(&self) -> Result<()> {
        let (c, d) = (&self.config, &Config::default());
        let (o, s, p) = (&c.optimizer, &c.schedule, &c.precision);
        let sgd =
            (c.updates_by(&[OptimizerKind::Sgd]), "optimizer.kind = \"sgd\" (optimizer.muon has its own)");
        let betas = (c.updates_by(&WITH_BETAS), "optimizer.kind = \"adamw\", \"adam\" or \"lion\"");
        let eps = (
            c.updates_by(&WITH_BETAS[..2]),
            "optimizer.kind = \"adamw\" or \"adam\" (optimizer.muon has its own)",
        );
        let wsd = (s.decay == Decay::Wsd, "schedule.decay = \"wsd\"");
        let grows = (s.weight_decay_style != WeightDecayStyle::Constant, "schedule.weight_decay_style");
        let quantized = (p.recipe != QuantRecipe::None, "precision.recipe");
        let delayed = (p.recipe == QuantRecipe::Fp8Delayed, "precision.recipe = \"fp8-delayed\"");
        let offloads = (c.offload.optimizer != d.offload.optimizer, "offload.optimizer");
        let files = (!c.data.is_embedded(), "data.path: the corpus inside the program is one text");
        let varies = c.moe.dispatcher == DispatcherType::AllToAll && !c.moe.pads_messages();
        for (key, set, (used, needs)) in [
            ("optimizer.momentum", o.momentum != d.optimizer.momentum, sgd),
            ("optimizer.nesterov", o.nesterov == Some(true), sgd),
            ("optimizer.betas", o.betas != d.optimizer.betas, betas),
            ("optimizer.eps", o.eps != d.optimizer.eps, eps),
            ("schedule.wsd_steps", s.wsd_steps.is_some(), wsd),
            ("schedule.wsd_style", s.wsd_style != d.schedule.wsd_style, wsd),
            ("schedule.weight_decay_steps", s.weight_decay_steps.is_some(), grows),
            ("precision.format", p.format.is_some(), quantized),
            ("precision.pow2_scales", p.pow2_scales.is_some(), quantized),
            ("precision.margin", p.margin != d.precision.margin, delayed),
            ("precision.amax_history", p.amax_history != d.precision.amax_history, delayed),
            (
                "offload.optimizer_compute",
                c.offload.optimizer_compute != d.offload.optimizer_compute,
                offloads,
            ),
            ("eval.min_delta", c.eval.min_delta != 0.0, (c.eval.patience > 0, "eval.patience")),
            (
                "moe.split_headroom",
                c.moe.split_headroom != d.moe.split_headroom && c.moe.split_headroom > 0.0,
                (varies, "moe.dispatcher = \"all_to_all\" without moe.pad_to_capacity"),
            ),
            ("fault.shrink", c.fault.shrink, (c.fault.restarts > 0, "fault.restarts")),
            ("data.format", c.data.format != d.data.format, files),
            ("data.field", c.data.field != d.data.field, files),
        ] {
            if set && !used && self.is_users(key) {
                return self.refuse(key, format!("has no effect here; set {needs}, or leave it out"));
            }
        }
        Ok(())
    }
}
