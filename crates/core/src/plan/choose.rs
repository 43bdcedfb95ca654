//! A plan as keys of a recipe, and what to do where a recipe does not fit.

use super::{
    Constraints, GemmDtype, Hardware, HostMemory, LayoutPlan, Machine, Workload, recompute_sets, search,
};
use crate::Result;
use crate::config::Resolved;
use crate::cost::{MemoryEstimate, USABLE_PERCENT};
use crate::pipeline::ScheduleKind;
use ferrotron_tensor::format_bytes;

/// Machines that are tried for a model that does not fit are at most so many times larger.
const LARGEST: usize = 1024;
/// A plan after an out-of-memory error needs at most this percentage of what the estimate said of the recipe: it was too low.
const LESS_PERCENT: usize = 90;

impl LayoutPlan {
    /// Every key that makes a recipe run this plan on `gpus` GPUs, whatever its own layout: `parallel.tp=4`.
    pub fn settings(&self, gpus: usize) -> Vec<String> {
        let (c, l) = (&self.candidate, &self.candidate.layout);
        let dp = gpus / (l.tp * l.cp * l.pp).max(1);
        let recompute = match recompute_sets().iter().position(|r| *r == c.recompute) {
            Some(1) => "[\"norm\",\"activation\"]",
            Some(2) => "[\"norm\",\"activation\",\"mlp\"]",
            Some(3) => "full",
            _ => "none",
        };
        let schedule = match c.schedule {
            ScheduleKind::ZeroBubble => "zero-bubble",
            ScheduleKind::Paired => "paired",
            ScheduleKind::OneForwardOneBackward | ScheduleKind::ForwardOnly => "1f1b",
        };
        let sizes = [
            ("parallel.tp", l.tp),
            ("parallel.cp", l.cp),
            ("parallel.pp", l.pp),
            ("parallel.vp", l.vp),
            ("parallel.ep", l.ep),
            ("parallel.etp", l.etp()),
            ("parallel.dp", dp),
            ("parallel.zero", c.zero),
            ("train.micro_batch", c.micro_batch),
        ];
        let mut out: Vec<String> = sizes.iter().map(|(key, n)| format!("{key}={n}")).collect();
        out.push(format!("parallel.schedule={schedule}"));
        out.push(format!("train.recompute={recompute}"));
        out.extend(self.host.settings());
        out
    }

    /// Those of [`LayoutPlan::settings`] that the recipe does not have, as options of the command line.
    pub fn changes(&self, r: &Resolved, gpus: usize) -> Vec<String> {
        let p = &r.config.parallel;
        let same = |key: &str, value: &str| match key {
            "parallel.tp" => value == p.tp.to_string(),
            "parallel.cp" => value == p.cp.to_string(),
            "parallel.pp" => value == p.pp.to_string(),
            "parallel.vp" => value == p.vp.to_string(),
            "parallel.ep" => value == p.ep.to_string(),
            "parallel.etp" => {
                r.model.moe.is_none() || value == p.etp.unwrap_or(self.candidate.layout.tp).to_string()
            }
            "parallel.dp" => value == p.dp.to_string(),
            "parallel.zero" => gpus == 1 || value == p.zero.to_string(),
            "train.micro_batch" => value == r.plan.micro_batch.to_string(),
            "offload.activations" | "offload.optimizer" => self.host == HostMemory::of(r),
            "parallel.schedule" => p.schedule.schedule_kind() == self.candidate.schedule,
            _ => r.config.train.recompute.modules() == self.candidate.recompute,
        };
        let changed = self.settings(gpus).into_iter().filter_map(|setting| {
            let (key, value) = setting.split_once('=')?;
            let quoted = if value.contains('"') { format!("'{setting}'") } else { setting.clone() };
            (!same(key, value)).then(|| format!("--set {quoted}"))
        });
        changed.collect()
    }
}

/// What the planner takes of a recipe: the workload, and everything free but the operands of its GEMMs.
pub fn workload_of(r: &Resolved, gpus: usize) -> (Workload, Constraints) {
    let dtype = GemmDtype::of(r.config.precision.recipe);
    let workload = Workload { recipe: r.clone(), gpus, gradient_bytes: 4.0, overlap_param_gather: true };
    (workload, Constraints::free(vec![dtype]))
}

/// The smallest machine of twice, four times, … as many GPUs on which some plan fits.
pub fn gpus_that_fit(workload: &Workload, machine: &Machine, limits: &Constraints) -> Option<usize> {
    let more = std::iter::successors(machine.gpus.checked_mul(2), |n| n.checked_mul(2));
    more.take_while(|n| *n <= machine.gpus.saturating_mul(LARGEST)).find(|gpus| {
        let (gpus, hardware) = (*gpus, machine.hardware.clone());
        let larger = Machine { gpus, hardware };
        let found = search(&Workload { gpus, ..workload.clone() }, &larger, limits, 1);
        found.is_ok_and(|found| !found.plans.is_empty())
    })
}

/// What to change so that a recipe which does not fit on a machine does, in one sentence: the fastest plan that fits, else the
/// cheapest offloading and the number of GPUs that need none.
pub fn advice(r: &Resolved, machine: &Machine) -> Result<String> {
    let (estimate, capacity) = (MemoryEstimate::of(r)?, machine.hardware.memory());
    let needed = estimate.largest()?.total();
    let needs = format!("this recipe needs about {} of {}", format_bytes(needed), format_bytes(capacity));
    let (workload, limits) = workload_of(r, machine.gpus);
    let least = (needed / 100 * LESS_PERCENT).min(machine.hardware.usable_memory());
    let memory_gib = least as f64 * 100.0 / USABLE_PERCENT as f64 / f64::from(1 << 30);
    let smaller =
        Machine { gpus: machine.gpus, hardware: Hardware { memory_gib, ..machine.hardware.clone() } };
    let plans = search(&workload, &smaller, &limits, 1).map_or(Vec::new(), |found| found.plans);
    if let Some(best) = plans.first() {
        let set = best.changes(r, machine.gpus).join(" ");
        let about = format_bytes(best.memory.total());
        return Ok(format!("{needs}; the fastest plan that fits is {set} (about {about})"));
    }
    let (gpus, name) = (machine.gpus, &machine.hardware.name);
    let needs = format!("{needs}, and no plan fits on {gpus} {name}");
    let change = estimate.cheapest_change(capacity)?;
    Ok(match (change, gpus_that_fit(&workload, machine, &limits)) {
        (Some(change), Some(more)) => format!("{needs}; {change}; without offloading {more} {name} would do"),
        (Some(change), None) => format!("{needs}; {change}"),
        (None, Some(more)) => format!("{needs}; {more} would do"),
        (None, None) => format!("{needs} or more; take a smaller model or a shorter data.seq_len"),
    })
}
