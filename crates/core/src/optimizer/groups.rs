//! Parameter groups: which update rule, rates and state dtype each parameter has.

mod rule;

use super::OptimizerState;
use crate::config::{Config, OptimizerKind, ParamGroup};
use ferrotron_engine::lora::LORA_B;
use ferrotron_engine::{ParamKind, ParamSpec, UpdateGroup};
use ferrotron_kernels::MomentOrder;
use ferrotron_tensor::DType;
use rule::is_layer_matrix;
pub use rule::{GroupRule, UpdateRule};

/// All groups of a recipe; every parameter is in the first that selects it. The default has no rule and is for models
/// without an optimizer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ParamGroups {
    rules: Vec<GroupRule>,
    lora: Option<LoraRules>,
}

/// Rules of parameters that no group selects, where adapters are trained.
#[derive(Clone, Copy, Debug, PartialEq)]
struct LoraRules {
    base: usize,
    b: usize,
}

/// What is wrong with groups, without the key.
type Refusal<T> = std::result::Result<T, String>;

impl ParamGroups {
    /// The groups of a recipe; the error says what is wrong with `optimizer.groups`. With adapters, everything else is frozen
    /// unless a group selects it.
    pub fn of(c: &Config) -> Refusal<ParamGroups> {
        let o = &c.optimizer;
        let muon = o.kind == OptimizerKind::Muon;
        let rest = o.rest();
        let none = ParamGroup::default();
        // By default every parameter is in rule 0, or with Muon its matrices in rule 1.
        let mut rules = vec![GroupRule::of("others".into(), o, &none, rest, None)?];
        if muon {
            let only = Some(true);
            rules.push(GroupRule::of("matrices of layers".into(), o, &none, OptimizerKind::Muon, only)?);
        }
        for group in o.groups.iter().flat_map(|g| &g.0) {
            let name = group.params.0.join(", ");
            if group.params.0.is_empty() {
                return Err(
                    "a group selects nothing; give it params such as \"norm\" or \"layers.0.*\"".into()
                );
            }
            match group.optimizer {
                Some(kind) => rules.push(GroupRule::of(name, o, group, kind, None)?),
                None if muon => {
                    let matrices = format!("{name} (matrices)");
                    rules.push(GroupRule::of(matrices, o, group, OptimizerKind::Muon, Some(true))?);
                    rules.push(GroupRule::of(name, o, group, rest, Some(false))?);
                }
                None => rules.push(GroupRule::of(name, o, group, o.kind, None)?),
            }
        }
        let lora = c.has_lora().then_some(LoraRules { base: rules.len(), b: 0 });
        let lora = match lora {
            None => None,
            Some(mut lora) => {
                let frozen = ParamGroup { frozen: true, ..ParamGroup::default() };
                rules.push(GroupRule::of("base model".into(), o, &frozen, rest, None)?);
                if c.lora.b_lr_factor != 1.0 {
                    lora.b = rules.len();
                    let faster = ParamGroup { lr_factor: Some(c.lora.b_lr_factor), ..ParamGroup::default() };
                    rules.push(GroupRule::of("LoRA B".into(), o, &faster, rest, None)?);
                }
                rules.iter_mut().for_each(|r| r.base = r.frozen);
                Some(lora)
            }
        };
        for i in 0..rules.len() {
            rules[i].storage = (0..i).find(|j| rules[*j].stored_like(&rules[i])).unwrap_or(i);
        }
        Ok(ParamGroups { rules, lora })
    }

    /// The rules, by index of [`UpdateGroup`].
    pub fn rules(&self) -> &[GroupRule] {
        &self.rules
    }

    /// The rule of a storage ([`UpdateGroup::storage`]).
    pub fn storage(&self, storage: usize) -> &GroupRule {
        &self.rules[storage]
    }

    /// The group of a parameter.
    pub fn assign(&self, spec: &ParamSpec) -> UpdateGroup {
        let index = self.selected(spec).unwrap_or_else(|| {
            if let Some(lora) = self.lora {
                let b = spec.parts.first().is_some_and(|p| p.name.ends_with(LORA_B));
                return match spec.kind() {
                    ParamKind::Adapter if b => lora.b,
                    ParamKind::Adapter => 0,
                    _ => lora.base,
                };
            }
            let muon = self.rules.get(1).is_some_and(|r| r.selectors.is_empty()) && is_layer_matrix(spec);
            usize::from(muon)
        });
        match self.rules.get(index) {
            None => UpdateGroup::default(),
            Some(rule) => UpdateGroup {
                index,
                storage: rule.storage,
                frozen: rule.frozen,
                base: rule.base,
                whole: rule.needs_whole(),
            },
        }
    }

    fn selected(&self, spec: &ParamSpec) -> Option<usize> {
        let selects = |r: &GroupRule| {
            r.only.is_none_or(|only| only == is_layer_matrix(spec)) && r.selects(spec) == Some(true)
        };
        self.rules.iter().position(|r| !r.selectors.is_empty() && selects(r))
    }

    /// Refuses groups that do not fit the parameters of the whole model.
    pub fn check(&self, specs: &[ParamSpec]) -> Refusal<()> {
        for rule in self.rules.iter().filter(|r| !r.selectors.is_empty()) {
            for spec in specs {
                if rule.selects(spec).is_none() {
                    let names: Vec<&str> = spec.parts.iter().take(3).map(|p| p.name.as_str()).collect();
                    return Err(format!(
                        "\"{}\" selects a part of a parameter that holds {}; select all of it",
                        rule.name,
                        names.join(", ")
                    ));
                }
            }
            if !specs.iter().any(|s| rule.selects(s) == Some(true)) {
                return Err(format!(
                    "\"{}\" selects no parameter; `ferrotron explain optimizer.groups` lists the kinds",
                    rule.name
                ));
            }
        }
        for spec in specs {
            let rule = &self.rules[self.assign(spec).index];
            let matrix = spec.parts.iter().all(|p| p.shape.len() == 2);
            if matches!(rule.rule, UpdateRule::Muon(_)) && !matrix && !rule.frozen {
                let name = spec.parts.first().map_or("", |p| &p.name);
                return Err(format!(
                    "\"{}\": Muon updates matrices, which {name} is not; choose another optimizer",
                    rule.name
                ));
            }
        }
        match specs.iter().all(|s| self.assign(s).frozen) {
            true => Err("every parameter is frozen; leave one to train".into()),
            false => Ok(()),
        }
    }

    /// Names and orders of the moments of all groups.
    pub(super) fn states(&self) -> Vec<(&'static str, MomentOrder)> {
        let mut out: Vec<(&'static str, MomentOrder)> = Vec::new();
        for state in self.rules.iter().flat_map(|r| r.states()) {
            if !out.iter().any(|(name, _)| *name == state.0) {
                out.push(*state);
            }
        }
        out
    }

    /// Dtype of a parameter's `state` in checkpoints; none where its group has no such state.
    pub(crate) fn saved(&self, state: &OptimizerState, spec: &ParamSpec) -> Option<DType> {
        let rule = &self.rules[spec.group.index];
        if state.is_masters() {
            return (!rule.base).then_some(DType::F32);
        }
        let has = rule.states().iter().any(|s| s.0 == state.name());
        has.then(|| state.saved_as(rule.state_dtype(state.name())))
    }

    /// Pairs of betas of all groups; the first is for the rule of ungrouped parameters, where it needs one or not.
    pub(super) fn betas(&self) -> Vec<[f32; 2]> {
        let mut out = vec![self.rules.first().and_then(|r| r.rule.betas()).unwrap_or_default()];
        for betas in self.rules.iter().filter_map(|r| r.rule.betas()) {
            if !out.contains(&betas) {
                out.push(betas);
            }
        }
        out
    }

    /// Whether Adam updates everything, and so can quantize new weights in its pass.
    pub(super) fn all_adam(&self) -> bool {
        self.rules.iter().all(|r| matches!(r.rule, UpdateRule::Adam(_)) && !r.frozen)
    }

    /// Whether groups or Muon make parameters differ.
    pub fn differ(&self) -> bool {
        self.rules.len() > 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::UpdateRule;
    use ferrotron_kernels::Lion;

    fn section(toml: &str) -> Config {
        Config { optimizer: toml::from_str(toml).unwrap(), ..Config::default() }
    }

    #[test]
    fn groups_that_only_scale_share_the_storage_of_the_rest() {
        let o = section(
            "groups = [{ params = \"norm\", lr_factor = 0.5 }, { params = \"bias\", state_dtype = \"bf16\" }, { params = \"router\", frozen = true }]",
        );
        let groups = ParamGroups::of(&o).unwrap();
        let storages: Vec<usize> = groups.rules().iter().map(|r| r.storage).collect();
        assert_eq!(storages, [0, 0, 2, 3]);
        assert_eq!(groups.rules()[1].describe(), "adamw, moments f32, lr x 0.5");
        assert!(!groups.all_adam() && groups.differ());
        let none = ParamGroups::of(&section("")).unwrap();
        assert!(none.all_adam() && !none.differ());
    }

    #[test]
    fn betas_of_the_section_are_those_of_its_own_rule() {
        let betas = |toml: &str| -> Vec<[f32; 2]> {
            let groups = ParamGroups::of(&section(toml)).unwrap();
            let of = |r: &GroupRule| match r.rule {
                UpdateRule::Lion(Lion { beta1, beta2 }) => Some([beta1, beta2]),
                _ => r.rule.betas(),
            };
            groups.rules().iter().filter_map(of).collect()
        };
        const LION: &str = "groups = [{ params = \"norm\", optimizer = \"lion\" }]";
        const ADAM: &str = "groups = [{ params = \"norm\", optimizer = \"adamw\" }]";
        for (kind, other, derived) in [
            ("kind = \"adamw\"", LION, [0.95, 0.98]),
            ("kind = \"muon\"", LION, [0.95, 0.98]),
            ("kind = \"lion\"", ADAM, [0.9, 0.95]),
            ("kind = \"muon\"\nmuon = { rest = \"lion\" }", ADAM, [0.9, 0.95]),
        ] {
            let found = betas(&format!("{kind}\nbetas = [0.5, 0.6]\n{other}"));
            assert_eq!(found, [[0.5, 0.6], derived], "{kind}");
        }
    }

    #[test]
    fn bad_groups_are_refused() {
        for (toml, words) in [
            ("groups = [{ params = [] }]", "selects nothing"),
            ("groups = [{ params = \"norm\", lr_factor = -1.0 }]", "lr_factor = -1"),
            ("groups = [{ params = \"norm\", betas = [0.9, 1.0] }]", "below 1"),
            (
                "groups = [{ params = \"matrix\", optimizer = \"muon\", state_dtype = \"fp8\" }]",
                "f32 or bf16",
            ),
        ] {
            let error = ParamGroups::of(&section(toml)).unwrap_err();
            assert!(error.contains(words), "{toml}: {error}");
        }
    }
}
