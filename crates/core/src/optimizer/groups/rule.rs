//! The rule of one parameter group: which parameters it selects, and how it updates them.

use super::Refusal;
use crate::config::{MuonAdaptive, OptimizerKind, OptimizerSection, ParamGroup, StateDtype};
use crate::optimizer::MuonRule;
use ferrotron_engine::{ParamKind, ParamSpec, matches_pattern};
use ferrotron_kernels::{Adam, Lion, MomentOrder, Sgd};
use ferrotron_tensor::DType;

/// The update rule and its constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum UpdateRule {
    /// Adam or AdamW.
    Adam(Adam),
    /// SGD with momentum.
    Sgd(Sgd),
    /// Lion.
    Lion(Lion),
    /// Muon.
    Muon(MuonRule),
}

impl UpdateRule {
    /// Names and orders of its moments.
    pub(in crate::optimizer) fn moments(&self) -> &'static [(&'static str, MomentOrder)] {
        match self {
            UpdateRule::Adam(_) => &[("adam.m", MomentOrder::First), ("adam.v", MomentOrder::Second)],
            UpdateRule::Sgd(_) => &[("sgd.momentum", MomentOrder::First)],
            UpdateRule::Lion(_) => &[("lion.m", MomentOrder::First)],
            UpdateRule::Muon(m) if m.adaptive == MuonAdaptive::Adamuon => {
                &[("muon.momentum", MomentOrder::First), ("muon.v", MomentOrder::Second)]
            }
            UpdateRule::Muon(_) => &[("muon.momentum", MomentOrder::First)],
        }
    }

    /// Betas whose powers the rule needs for bias correction.
    pub(in crate::optimizer) fn betas(&self) -> Option<[f32; 2]> {
        match self {
            UpdateRule::Adam(a) => Some([a.beta1, a.beta2]),
            _ => None,
        }
    }
}

/// A group of parameters and what its steps are.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupRule {
    /// As `--dry-run` shows it.
    pub name: String,
    pub(super) selectors: Vec<Selector>,
    /// Only parameters that Muon updates by default, or only the others; for rules that follow `optimizer.kind = "muon"`.
    pub(super) only: Option<bool>,
    /// How it is updated.
    pub rule: UpdateRule,
    /// Factor on the learning rate.
    pub lr: f32,
    /// Factor on the weight decay; none: 1 for matrices, 0 for the rest.
    pub weight_decay: Option<f32>,
    /// Dtype of the moments.
    pub moments: StateDtype,
    /// Not trained.
    pub frozen: bool,
    /// Frozen weights of the base model that adapters are trained for: they have no master weights and are in no checkpoint.
    pub base: bool,
    pub(super) storage: usize,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Selector {
    Kind(ParamKind),
    /// A name, with `*` for any text.
    Name(String),
}

const KINDS: [(&str, ParamKind); 8] = [
    ("embedding", ParamKind::Embedding),
    ("lm_head", ParamKind::LmHead),
    ("router", ParamKind::Router),
    ("expert", ParamKind::Expert),
    ("matrix", ParamKind::Matrix),
    ("adapter", ParamKind::Adapter),
    ("bias", ParamKind::Bias),
    ("norm", ParamKind::Norm),
];

/// Whether Muon updates it by default: every matrix but embeddings and the LM head.
pub(super) fn is_layer_matrix(spec: &ParamSpec) -> bool {
    matches!(spec.kind(), ParamKind::Matrix | ParamKind::Expert | ParamKind::Router)
}

impl GroupRule {
    pub(super) fn of(
        name: String,
        o: &OptimizerSection,
        group: &ParamGroup,
        kind: OptimizerKind,
        only: Option<bool>,
    ) -> Refusal<GroupRule> {
        let moments = group.state_dtype.unwrap_or(o.state_dtype);
        let rule = rule(o, group, kind)?;
        if matches!(rule, UpdateRule::Muon(_)) && !matches!(moments, StateDtype::F32 | StateDtype::Bf16) {
            return Err(format!(
                "\"{name}\": the momentum of Muon is f32 or bf16; set state_dtype = \"bf16\""
            ));
        }
        let factors = [("lr_factor", group.lr_factor), ("weight_decay_factor", group.weight_decay_factor)];
        if let Some((key, x)) =
            factors.iter().find_map(|(k, x)| Some((k, (*x)?)).filter(|(_, x)| !(0.0..=1e6).contains(x)))
        {
            return Err(format!("\"{name}\": {key} = {x} must be at least 0"));
        }
        Ok(GroupRule {
            name,
            selectors: group.params.0.iter().map(|p| Selector::of(p)).collect(),
            only,
            rule,
            lr: group.lr_factor.unwrap_or(1.0) as f32,
            weight_decay: group.weight_decay_factor.map(|x| x as f32),
            moments,
            frozen: group.frozen,
            base: false,
            storage: 0,
        })
    }

    /// Whether the states of both can lie in one bucket.
    pub(super) fn stored_like(&self, other: &GroupRule) -> bool {
        let states = |r: &GroupRule| (r.states(), r.moments);
        self.frozen == other.frozen
            && (self.frozen || states(self) == states(other))
            && self.needs_whole() == other.needs_whole()
    }

    pub(super) fn needs_whole(&self) -> bool {
        matches!(self.rule, UpdateRule::Muon(_)) && !self.frozen
    }

    /// Whether it selects a parameter; none where it selects a part of it.
    pub(super) fn selects(&self, spec: &ParamSpec) -> Option<bool> {
        let kind = |s: &Selector| matches!(s, Selector::Kind(k) if *k == spec.kind());
        if self.selectors.iter().any(kind) {
            return Some(true);
        }
        let named = |name: &str| {
            self.selectors
                .iter()
                .any(|s| matches!(s, Selector::Name(pattern) if matches_pattern(pattern, name)))
        };
        match spec.parts.iter().filter(|p| named(&p.name)).count() {
            0 => Some(false),
            n if n == spec.parts.len() => Some(true),
            _ => None,
        }
    }

    /// Names and orders of its moments, none where it is frozen.
    pub(in crate::optimizer) fn states(&self) -> &'static [(&'static str, MomentOrder)] {
        if self.frozen { &[] } else { self.rule.moments() }
    }

    /// Dtype of a moment. Second moments of orthogonalized updates are f32.
    pub(in crate::optimizer) fn state_dtype(&self, name: &str) -> DType {
        if name == "muon.v" { DType::F32 } else { self.moments.dtype() }
    }

    /// Bytes of the moments of one element, stored as they are or as another dtype.
    pub fn moment_bytes_as(&self, dtype: Option<StateDtype>) -> f64 {
        let bytes = |name: &str| if name == "muon.v" { 4.0 } else { dtype.unwrap_or(self.moments).bytes() };
        self.states().iter().map(|s| bytes(s.0)).sum()
    }

    /// Factor on the weight decay of a parameter.
    pub(in crate::optimizer) fn weight_decay_of(&self, spec: &ParamSpec) -> f32 {
        self.weight_decay.unwrap_or(if spec.decays() { 1.0 } else { 0.0 })
    }

    /// Update rule, factors and dtype in words.
    pub fn describe(&self) -> String {
        if self.frozen {
            return "frozen".into();
        }
        let name = match &self.rule {
            UpdateRule::Adam(a) if a.decoupled => "adamw",
            UpdateRule::Adam(_) => "adam",
            UpdateRule::Sgd(_) => "sgd",
            UpdateRule::Lion(_) => "lion",
            UpdateRule::Muon(_) => "muon",
        };
        let mut out = format!("{name}, moments {}", self.moments);
        if self.lr != 1.0 {
            out += &format!(", lr x {}", self.lr);
        }
        if let Some(factor) = self.weight_decay {
            out += &format!(", weight decay x {factor}");
        }
        out
    }
}

impl OptimizerSection {
    /// The optimizer of what Muon does not update: of everything, where that is not the kind.
    pub(crate) fn rest(&self) -> OptimizerKind {
        match self.kind {
            OptimizerKind::Muon => self.muon.unwrap_or_default().rest,
            kind => kind,
        }
    }
}

/// The rule of a kind of optimizer in a group.
fn rule(o: &OptimizerSection, group: &ParamGroup, kind: OptimizerKind) -> Refusal<UpdateRule> {
    // A group of another kind than the section's does not inherit constants that were meant for that.
    let betas = group.betas.unwrap_or(match [o.rest(), kind].map(|k| k == OptimizerKind::Lion) {
        [false, true] => [0.95, 0.98],
        [true, false] => OptimizerSection::default().betas,
        _ => o.betas,
    });
    let momentum = group.momentum.unwrap_or(o.momentum);
    if betas.iter().chain([&momentum]).any(|b| !(0.0..1.0).contains(b)) {
        return Err("betas and momentum of a group must be at least 0 and below 1".into());
    }
    let [beta1, beta2] = betas.map(|b| b as f32);
    let adam = |decoupled| UpdateRule::Adam(Adam { beta1, beta2, eps: o.eps as f32, decoupled });
    Ok(match kind {
        OptimizerKind::AdamW => adam(true),
        OptimizerKind::Adam => adam(false),
        OptimizerKind::Sgd => UpdateRule::Sgd(Sgd {
            momentum: momentum as f32,
            dampening: 0.0,
            nesterov: o.nesterov.unwrap_or(false),
        }),
        OptimizerKind::Lion => UpdateRule::Lion(Lion { beta1, beta2 }),
        OptimizerKind::Muon => UpdateRule::Muon(MuonRule::of(&o.muon.unwrap_or_default())),
    })
}

impl Selector {
    fn of(text: &str) -> Selector {
        let kind = KINDS.iter().find(|(name, _)| *name == text);
        kind.map_or_else(|| Selector::Name(text.into()), |(_, kind)| Selector::Kind(*kind))
    }
}
