//! Declarations of a model's parameters, collected while it is put together.

use super::{ParamId, ParamSpec, Part};
use crate::moe::{MixtureId, MixtureSpec, MoeTraining};
use crate::precision::{Eight, Policy};
use crate::{Cut, Place, Rank};
use ferrotron_tensor::{Result, shape_error};
use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

/// Collects declarations while a model is put together.
pub struct Declarations {
    specs: Vec<ParamSpec>,
    names: HashSet<String>,
    place: Place,
    experts: ExpertPlace,
    policy: Policy,
    mixtures: Vec<MixtureSpec>,
    mixing: Arc<MoeTraining>,
}

/// Which experts a rank has, and what of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertPlace {
    /// Ranks that share the experts among them, whole ones.
    pub ep: Place,
    /// Ranks that share each expert.
    pub etp: Place,
}

impl ExpertPlace {
    /// All of all.
    pub const ALONE: ExpertPlace = ExpertPlace { ep: Place::ALONE, etp: Place::ALONE };

    /// The experts of `count` that are here.
    pub fn own(&self, count: usize) -> Range<usize> {
        let each = count / self.ep.size;
        self.ep.rank * each..(self.ep.rank + 1) * each
    }
}

impl Default for Declarations {
    fn default() -> Declarations {
        Declarations::at(Place::ALONE)
    }
}

impl Declarations {
    /// For a rank that holds its share of every parameter.
    pub fn at(place: Place) -> Declarations {
        Declarations {
            specs: Vec::new(),
            names: HashSet::new(),
            place,
            experts: ExpertPlace::ALONE,
            policy: Policy::default(),
            mixtures: Vec::new(),
            mixing: Arc::default(),
        }
    }

    /// For a rank of a grid.
    pub fn of(rank: &Rank) -> Declarations {
        let etp = Place { rank: rank.etp.rank(), size: rank.etp.size() };
        Declarations {
            experts: ExpertPlace { ep: rank.expert_place(), etp },
            ..Declarations::at(rank.place())
        }
    }

    /// With narrow products as the policy says.
    pub fn with_policy(self, policy: Policy) -> Declarations {
        Declarations { policy, ..self }
    }

    /// With mixtures that are trained so.
    pub fn with_mixing(self, mixing: &Arc<MoeTraining>) -> Declarations {
        Declarations { mixing: mixing.clone(), ..self }
    }

    /// How mixtures are trained.
    pub(crate) fn mixing(&self) -> &Arc<MoeTraining> {
        &self.mixing
    }

    /// What the policy says of a map to these outputs (logical name, channels), which is noted at its weight.
    pub(crate) fn narrow(&mut self, weight: ParamId, outputs: &[(String, usize)]) -> Option<Eight> {
        let names: Vec<&str> = outputs.iter().map(|(name, _)| name.as_str()).collect();
        let eight = self.policy.of(&names);
        self.specs[weight.0].eight = eight;
        eight
    }

    /// The same of experts' maps to these outputs, all experts alike: one product is of all of them. Each has a matrix of its
    /// own, of as many parts as there are outputs.
    pub(crate) fn narrow_experts(&mut self, weight: ParamId, outputs: &[String]) -> Option<Eight> {
        let names: Vec<&str> = outputs.iter().map(String::as_str).collect();
        let (spec, eight) = (&mut self.specs[weight.0], self.policy.of(&names));
        spec.eight = eight;
        spec.matrices = spec.parts.len() / outputs.len().max(1);
        eight
    }

    /// What the policy says of the output matrix. A table that is looked up in as well stays numbers.
    pub(crate) fn narrow_head(&mut self, weight: ParamId, table: bool) -> Option<Eight> {
        let eight = self.policy.of(&["head"]).map(|e| Eight { stored: e.stored && !table, ..e });
        self.specs[weight.0].eight = eight;
        eight
    }

    /// Does the policy have forward attention of a module in eight bits?
    pub(crate) fn narrow_attention(&self, name: &str) -> bool {
        self.policy.narrows_attention(name)
    }

    /// The rank's place.
    pub fn place(&self) -> Place {
        self.place
    }

    /// Where the rank's experts are.
    pub fn experts(&self) -> ExpertPlace {
        self.experts
    }

    /// Declares a parameter made of `parts`, which agree in all axes but the first.
    pub fn declare(&mut self, parts: Vec<Part>) -> Result<ParamId> {
        self.declare_at(self.place, false, parts)
    }

    /// Declares a parameter of the rank's experts.
    pub fn declare_experts(&mut self, parts: Vec<Part>) -> Result<ParamId> {
        self.declare_at(self.experts.etp, true, parts)
    }

    fn declare_at(&mut self, place: Place, experts: bool, parts: Vec<Part>) -> Result<ParamId> {
        let Some(mut shape) = parts.first().map(|p| p.shape.clone()).filter(|s| !s.is_empty()) else {
            return shape_error("declare", "a parameter needs a part with at least one axis");
        };
        if parts.iter().any(|p| p.shape.len() != shape.len() || p.shape[1..] != shape[1..]) {
            return shape_error("declare", format!("parts do not stack: {parts:?}"));
        }
        let cuts: Vec<Cut> = parts.iter().map(|p| p.cut(place)).collect();
        let local: Vec<Vec<usize>> = parts.iter().zip(&cuts).map(|(p, c)| c.shape(&p.shape)).collect();
        if local.iter().any(|s| s[1..] != local[0][1..]) {
            return shape_error("declare", format!("shares do not stack: {parts:?}"));
        }
        shape.clone_from(&local[0]);
        shape[0] = local.iter().map(|s| s[0]).sum();
        if let Some(twice) = parts.iter().find(|p| !self.names.insert(p.name.clone())) {
            return shape_error("declare", format!("'{}' is declared twice", twice.name));
        }
        let most = Place { rank: 0, ..place };
        let widest = parts.iter().map(|p| p.cut(most).shape(&p.shape).iter().product::<usize>()).sum();
        self.specs.push(ParamSpec {
            parts,
            cuts,
            shape,
            uses: 1,
            widest,
            mirror: false,
            tied_over_ends: false,
            eight: None,
            experts,
            matrices: 1,
        });
        Ok(ParamId(self.specs.len() - 1))
    }

    /// A declaration.
    pub fn spec(&self, id: ParamId) -> &ParamSpec {
        &self.specs[id.0]
    }

    /// Declares a mixture, which has state besides its parameters.
    pub fn mixture(&mut self, spec: MixtureSpec) -> MixtureId {
        self.mixtures.push(spec);
        MixtureId(self.mixtures.len() - 1)
    }

    /// The mixtures declared, in order.
    pub fn mixtures(&self) -> &[MixtureSpec] {
        &self.mixtures
    }

    /// One more module uses a declared parameter.
    pub fn share(&mut self, id: ParamId) {
        self.specs[id.0].uses += 1;
    }

    /// So many modules use a declared parameter.
    pub fn set_uses(&mut self, id: ParamId, uses: u32) {
        self.specs[id.0].uses = uses;
    }

    /// The parameters declared after the first `from`.
    pub fn since(&self, from: usize) -> impl Iterator<Item = ParamId> + use<> {
        (from..self.specs.len()).map(ParamId)
    }

    /// Parameters declared so far.
    pub fn count(&self) -> usize {
        self.specs.len()
    }

    /// The first and the last stage of the pipeline both have the parameter; `mirror` on the one that has the copy.
    pub fn mark_tied(&mut self, id: ParamId, mirror: bool) {
        self.specs[id.0].tied_over_ends = true;
        self.specs[id.0].mirror = mirror;
    }

    /// The declarations, in order.
    pub fn finish(self) -> Vec<ParamSpec> {
        self.specs
    }
}
