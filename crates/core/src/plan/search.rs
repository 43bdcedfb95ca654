//! Search over every legal layout for the fastest that fits.
//!
//! Layers are costed once for each (tp, cp, ep, etp, micro-batch, recomputation, dtype). A candidate's lower bound of time and closed form
//! of memory are composed of them ([`super::quick`]). Candidates are taken in the order of their bounds and timed exactly, with the
//! schedule in time; the fastest by that are held against the memory estimate that training itself uses. The search ends when
//! enough fit and every bound that is left is slower: no candidate that it did not time can be faster.

use super::candidates::each_candidate;
use super::constraints::Constraints;
use super::hardware::{GemmDtype, Machine};
use super::host_memory::HostMemory;
use super::layer_kinds::LayerKinds;
use super::quick::StageTypes;
use super::step_time::{Candidate, StepTime, Workload};
use crate::Result;
use crate::cost::USABLE_PERCENT;
use crate::cost::memory::MemoryBytes;
use crate::model::description::StepShape;
use ferrotron_engine::ParamSpec;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// A candidate with its time and memory.
#[derive(Clone, Debug)]
pub struct LayoutPlan {
    /// How it runs.
    pub candidate: Candidate,
    /// Seconds of a step.
    pub time: StepTime,
    /// Bytes of the pipeline stage that needs most.
    pub memory: MemoryBytes,
    /// What it keeps in host memory.
    pub host: HostMemory,
}

/// Candidates that were considered, and the best of them.
#[derive(Clone, Debug)]
pub struct SearchResult {
    /// Legal layouts with a micro-batch and schedule.
    pub considered: usize,
    /// The fastest that fit, the fastest first.
    pub plans: Vec<LayoutPlan>,
    /// The least memory that any candidate needs, by estimate; of static state alone where nothing else was considered.
    pub least_memory: Option<f64>,
}

/// Of the device's memory by the closed form: more does not fit, less does, and between them the exact estimate decides.
const TOO_LARGE: f64 = 1.1;
const FITS: f64 = 0.85;

/// What layers' costs depend on.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct KindKey {
    tp: usize,
    cp: usize,
    ep: usize,
    etp: usize,
    micro_batch: usize,
    recompute: usize,
    /// Weight gradients are added up over micro-batches.
    accumulates: bool,
}

/// Costs of layers, with a step they were computed for and the bytes of optimizer state of a parameter.
struct CostedKinds {
    shape: StepShape,
    state: f64,
    kinds: LayerKinds,
}

struct Search<'a> {
    workload: &'a Workload,
    machine: &'a Machine,
    dtype: GemmDtype,
    kinds: HashMap<KindKey, CostedKinds>,
    /// Parameters of one layer of each kind, by tp, ep and etp.
    params: HashMap<[usize; 3], Vec<ParamSpec>>,
    /// By pp and vp.
    stages: HashMap<[usize; 2], StageTypes>,
}

/// A candidate with a lower bound of its time.
struct Bounded {
    seconds: f64,
    candidate: Candidate,
}

/// The `count` fastest plans that fit.
pub fn search(
    workload: &Workload,
    machine: &Machine,
    limits: &Constraints,
    count: usize,
) -> Result<SearchResult> {
    let mut out = SearchResult { considered: 0, plans: Vec::new(), least_memory: None };
    for dtype in limits.dtypes.iter().copied() {
        let (kinds, params, stages) = Default::default();
        let mut search = Search { workload, machine, dtype, kinds, params, stages };
        let found = search.bounded(limits, &mut out)?;
        out.plans.extend(search.fastest(found, count)?);
    }
    out.plans.sort_by(|a, b| a.time.total.total_cmp(&b.time.total));
    out.plans.truncate(count);
    Ok(out)
}

impl Search<'_> {
    /// Candidates that may fit, with their bounds.
    fn bounded(&mut self, limits: &Constraints, out: &mut SearchResult) -> Result<Vec<Bounded>> {
        let (workload, machine, dtype) = (self.workload, self.machine, self.dtype);
        let memory = machine.hardware.memory() as f64;
        let mut all = Vec::new();
        let mut least = f64::INFINITY;
        let mut least_static = f64::INFINITY;
        let mut statics: HashMap<[usize; 3], [[f64; 2]; 2]> = HashMap::new();
        let mut pruned = 0;
        let mut of_weight: Option<(f64, f64)> = None;
        // The mean over stages bounds the largest from below.
        let fits = |c: &Candidate| -> Result<bool> {
            let key = [c.layout.tp, c.layout.ep, c.layout.etp()];
            let totals = match statics.entry(key) {
                Entry::Occupied(known) => *known.get(),
                Entry::Vacant(new) => *new.insert(workload.whole_model_params(c)?),
            };
            let weight = match of_weight {
                Some(known) => known,
                None => {
                    let shape = workload.shape(c, 0)?;
                    *of_weight.insert((shape.dtype.size() as f64, workload.state_bytes(&shape)))
                }
            };
            let bytes = workload.mean_static_bytes(c, totals, weight);
            let fits = bytes <= memory * TOO_LARGE;
            least_static = least_static.min(bytes);
            pruned += usize::from(!fits);
            Ok(fits)
        };
        each_candidate(workload, machine, limits, dtype, fits, |c| {
            all.push(c);
            Ok(())
        })?;
        out.considered += all.len() + pruned;
        let mut found = Vec::new();
        for candidate in all {
            for (index, recompute) in super::recompute_sets().into_iter().enumerate() {
                if limits.recompute.is_some_and(|r| r != recompute) {
                    continue;
                }
                let c = Candidate { recompute, ..candidate.clone() };
                let (seconds, bytes) = self.bounds(&c, index)?;
                least = least.min(bytes);
                if bytes <= memory * TOO_LARGE {
                    found.push(Bounded { seconds, candidate: c });
                }
                // More recomputation is slower, and not needed.
                if bytes <= memory * FITS {
                    break;
                }
            }
        }
        let least = if least.is_finite() { least } else { least_static };
        out.least_memory = Some(out.least_memory.map_or(least, |l| l.min(least)));
        Ok(found)
    }

    /// The fastest that fit, in order.
    fn fastest(&self, mut found: Vec<Bounded>, count: usize) -> Result<Vec<LayoutPlan>> {
        found.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        let usable = self.machine.hardware.memory() / 100 * USABLE_PERCENT;
        let mut plans: Vec<LayoutPlan> = Vec::new();
        // Timed exactly, the fastest last.
        let mut timed: Vec<(StepTime, Candidate)> = Vec::new();
        let mut rest = found.into_iter().peekable();
        while plans.len() < count {
            let bound = rest.peek().map_or(f64::INFINITY, |b| b.seconds);
            if timed.last().is_some_and(|(t, _)| t.total <= bound) {
                let Some((time, candidate)) = timed.pop() else { break };
                let memory = self.workload.memory(&candidate)?;
                if memory.total() <= usable {
                    let host = HostMemory::of(&self.workload.recipe);
                    plans.push(LayoutPlan { candidate, time, memory, host });
                }
            } else if let Some(next) = rest.next() {
                let time = self.time(&next.candidate)?;
                let at = timed.partition_point(|(t, _)| t.total > time.total);
                timed.insert(at, (time, next.candidate));
            } else {
                break;
            }
        }
        Ok(plans)
    }

    fn key(&self, c: &Candidate, recompute: usize) -> KindKey {
        let l = &c.layout;
        let (micro_batch, accumulates) = (c.micro_batch, self.workload.micro_batches(c) > 1);
        KindKey { tp: l.tp, cp: l.cp, ep: l.ep, etp: l.etp(), micro_batch, recompute, accumulates }
    }

    /// A lower bound of seconds, and bytes by the closed form.
    fn bounds(&mut self, c: &Candidate, recompute: usize) -> Result<(f64, f64)> {
        let (key, hw) = (self.key(c, recompute), &self.machine.hardware);
        let costed = match self.kinds.entry(key) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => {
                let shape = self.workload.shape(c, 0)?;
                let params = match self.params.entry([key.tp, key.ep, key.etp]) {
                    Entry::Occupied(known) => known.into_mut(),
                    Entry::Vacant(new) => new.insert(LayerKinds::params(&shape)?),
                };
                let kinds = LayerKinds::of_params(hw, &shape, self.dtype, params)?;
                let state = self.workload.state_bytes(&shape);
                new.insert(CostedKinds { shape, state, kinds })
            }
        };
        let stages = match self.stages.entry([c.layout.pp, c.layout.vp]) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(StageTypes::of(
                &self.workload.recipe.model,
                &costed.kinds,
                c.layout.pp,
                c.layout.vp,
            )?),
        };
        self.workload.quick(hw, c, (&costed.shape, costed.state), &costed.kinds, stages)
    }

    fn time(&self, c: &Candidate) -> Result<StepTime> {
        let hw = &self.machine.hardware;
        let recompute = super::recompute_sets().iter().position(|r| *r == c.recompute).unwrap_or(0);
        match self.kinds.get(&self.key(c, recompute)) {
            Some(costed) => self.workload.step_time_of(hw, c, &self.workload.shape(c, 0)?, &costed.kinds),
            None => self.workload.step_time(hw, c),
        }
    }
}
