//! Time by kernel family, next to the least time its FLOPs and bytes allow.

use super::Measurement;
use crate::Result;
use crate::bench::category_of;
use crate::config::Resolved;
use crate::cost::roofline::{Ceilings, KernelCategory, floors};
use serde::{Serialize, Serializer};
use std::collections::BTreeMap;

/// Kernels of one kind, in seconds of a step and rank.
#[derive(Clone, Debug, Serialize)]
pub struct Family {
    /// Which kernels.
    #[serde(rename = "name", serialize_with = "by_name")]
    pub category: KernelCategory,
    /// Time in its kernels.
    pub measured_s: f64,
    /// The least time for its FLOPs or bytes at the measured ceilings; none for kernels without a floor.
    pub floor_s: Option<f64>,
    /// Its kernels, longest first.
    pub kernels: Vec<KernelRow>,
}

/// One kernel of a family, per step and rank.
#[derive(Clone, Debug, Serialize)]
pub struct KernelRow {
    /// Its name in traces.
    pub name: String,
    /// Number of calls.
    pub calls: f64,
    /// Seconds.
    pub seconds: f64,
}

fn by_name<S: Serializer>(category: &KernelCategory, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_str(category.name())
}

impl Family {
    /// The least time over the measured one.
    pub fn of_roofline(&self) -> Option<f64> {
        self.floor_s.filter(|_| self.measured_s > 0.0).map(|floor| floor / self.measured_s)
    }
}

/// Least seconds of a step on one rank: the work of the whole step, split evenly over the ranks. Every replica updates all
/// parameters of its stage where the optimizer is not sharded.
pub(super) fn rank_floors(
    r: &Resolved,
    tokens: u64,
    context: usize,
    c: Ceilings,
) -> Result<Vec<(KernelCategory, f64)>> {
    let p = &r.config.parallel;
    let world = p.layout().world()?.max(1) as f64;
    let model_ranks = (p.tp * p.pp).max(1) as f64;
    let of_rank = |(category, seconds): (KernelCategory, f64)| match category {
        KernelCategory::Optimizer if p.zero == 0 => (category, seconds / model_ranks),
        _ => (category, seconds / world),
    };
    Ok(floors(r, tokens, context, c)?.into_iter().map(of_rank).collect())
}

/// The families of a trace, longest first; `share` turns sums over steps and ranks into means.
pub(super) fn families(m: &Measurement, share: f64) -> Result<Vec<Family>> {
    let floors = match &m.rates {
        Some(rates) => rank_floors(m.resolved, m.tokens, m.context, rates.ceilings)?,
        None => Vec::new(),
    };
    let mut kernels: BTreeMap<&'static str, (KernelCategory, Vec<KernelRow>)> = BTreeMap::new();
    for k in m.trace.by_kernel() {
        let category = category_of(&k.name);
        let row = KernelRow { name: k.name, calls: k.calls as f64 * share, seconds: k.seconds * share };
        kernels.entry(category.name()).or_insert((category, Vec::new())).1.push(row);
    }
    let family = |(category, kernels): (KernelCategory, Vec<KernelRow>)| {
        let floor = floors.iter().find(|(c, seconds)| *c == category && *seconds > 0.0);
        let measured_s = kernels.iter().map(|k| k.seconds).sum();
        Family { category, measured_s, floor_s: floor.map(|(_, seconds)| *seconds), kernels }
    };
    let mut families: Vec<Family> = kernels.into_values().map(family).collect();
    families.sort_by(|a, b| b.measured_s.total_cmp(&a.measured_s));
    Ok(families)
}
