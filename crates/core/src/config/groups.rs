//! Parameter groups and Muon: from the `[optimizer]` keys to update rules, and what is refused.

use super::resolve::Derivations;
use super::{Config, MasterDtype, MuonAdaptive, MuonDecay, MuonTpMode, OptimizerKind, Recipe, Resolved};
use crate::error::Result;
use crate::model::logical_specs;
use crate::optimizer::{ParamGroups, UpdateRule};
use std::sync::Arc;

/// Betas that Lion's authors recommend for language models.
const LION_BETAS: [f64; 2] = [0.95, 0.98];
const MOST_STEPS: usize = 100;

impl Resolved {
    /// Update rule, rates and state dtype of every parameter. Invalid keys were refused before.
    pub fn param_groups(&self) -> Arc<ParamGroups> {
        Arc::new(ParamGroups::of(&self.config).unwrap_or_default())
    }

    /// Each rule of the optimizer with its number of parameters (elements), where there are several.
    pub fn group_sizes(&self) -> Result<Vec<(String, String, usize)>> {
        let groups = self.param_groups();
        if !groups.differ() {
            return Ok(Vec::new());
        }
        let specs = logical_specs(&self.model, &self.model_options())?;
        let size =
            |index: usize| specs.iter().filter(|s| s.group.index == index).map(|s| s.numel()).sum::<usize>();
        let rows = groups.rules().iter().enumerate().map(|(i, r)| (r.name.clone(), r.describe(), size(i)));
        Ok(rows.filter(|(_, _, n)| *n > 0).collect())
    }
}

impl Config {
    fn uses_muon(&self) -> bool {
        let o = &self.optimizer;
        let mut groups = o.groups.iter().flat_map(|g| &g.0);
        o.kind == OptimizerKind::Muon || groups.any(|g| g.optimizer == Some(OptimizerKind::Muon))
    }
}

impl Recipe {
    /// Derives the constants of Lion and writes out those of Muon.
    pub(super) fn derive_optimizer(&self, c: &mut Config, derived: &mut Derivations) {
        let muon = c.uses_muon();
        let o = &mut c.optimizer;
        if o.rest() == OptimizerKind::Lion && !self.is_set("optimizer.betas") {
            o.betas = derived.add("optimizer.betas", LION_BETAS, "as recommended for Lion");
        }
        if muon {
            o.muon.get_or_insert_default();
        }
    }

    /// Checks of single values.
    pub(super) fn check_groups(&self) -> Result<()> {
        let o = &self.config.optimizer;
        if let Some(m) = &o.muon {
            if !self.config.uses_muon() {
                let what =
                    "no parameter is updated by Muon; set optimizer.kind = \"muon\", or leave this out";
                return self.refuse("optimizer.muon", what);
            }
            let below_one = |x: f64| (0.0..1.0).contains(&x);
            let bad = if !below_one(m.momentum) || !below_one(m.beta2) {
                "momentum and beta2 must be at least 0 and below 1"
            } else if m.steps == 0 || m.steps > MOST_STEPS {
                "steps must be 1 to 100; 5 are usual"
            } else if m.eps <= 0.0 || m.extra_scale <= 0.0 {
                "eps and extra_scale must be above 0"
            } else if m.adaptive == MuonAdaptive::Normuon && !m.split_qkv {
                "normuon has second moments of q, k and v each; set split_qkv = true"
            } else if m.rest == OptimizerKind::Muon {
                "rest updates what is no matrix; use \"adamw\" or \"lion\""
            } else {
                ""
            };
            if !bad.is_empty() {
                return self.refuse("optimizer.muon", bad);
            }
        }
        match ParamGroups::of(&self.config) {
            Ok(_) => Ok(()),
            Err(what) => {
                let key = if o.groups.is_some() { "optimizer.groups" } else { "optimizer.state_dtype" };
                self.refuse(key, what)
            }
        }
    }

    /// Checks of groups against the model and the layout.
    pub(super) fn check_group_members(&self, r: &Resolved) -> Result<()> {
        let (groups, o) = (r.param_groups(), &r.config.optimizer);
        if groups.differ() {
            let specs = logical_specs(&r.model, &r.model_options())?;
            if let Err(what) = groups.check(&specs) {
                return self.refuse("optimizer.groups", what);
            }
        }
        let Some(m) = o.muon.filter(|_| groups.rules().iter().any(|g| matches!(g.rule, UpdateRule::Muon(_))))
        else {
            return Ok(());
        };
        if m.weight_decay == MuonDecay::L2 && o.master_dtype == MasterDtype::Remainder {
            let what = "weight_decay = \"l2\" reads f32 master weights; set optimizer.master_dtype = \"f32\", or weight_decay = \"decoupled\"";
            return self.refuse("optimizer.muon", what);
        }
        let p = &r.config.parallel;
        let split = p.tp.max(p.etp.unwrap_or(p.tp)) > 1;
        if m.adaptive == MuonAdaptive::Normuon && split && m.tp_mode != MuonTpMode::Duplicated {
            let what =
                "normuon needs whole rows and columns; set tp_mode = \"duplicated\", or parallel.tp = 1";
            return self.refuse("optimizer.muon", what);
        }
        Ok(())
    }
}
