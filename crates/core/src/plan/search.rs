//! Search over every legal layout for the fastest that fits.
//!
//! Layers are costed once for each (tp, cp, ep, micro-batch, recomputation, dtype); a layout's time is composed of them with a
//! closed form of the pipeline's bubble, and its memory of their saved bytes. The best by that are computed exactly: the
//! schedule in time, and the memory estimate that training itself uses.

use super::constraints::Constraints;
use super::hardware::{GemmDtype, Machine};
use super::layer_kinds::LayerKinds;
use super::step_time::{Candidate, StepTime, Workload};
use crate::cost::USABLE_PERCENT;
use crate::cost::memory::MemoryBytes;
use crate::grid::{ModelSizes, RankLayout};
use crate::model::description::StepShape;
use crate::pipeline::ScheduleKind;
use crate::{Error, Result};
use std::collections::HashMap;

/// A candidate with its time and memory.
#[derive(Clone, Debug)]
pub struct LayoutPlan {
    /// How it runs.
    pub candidate: Candidate,
    /// Seconds of a step.
    pub time: StepTime,
    /// Bytes of the pipeline stage that needs most.
    pub memory: MemoryBytes,
}

/// Candidates that were considered, and the best of them.
#[derive(Clone, Debug)]
pub struct SearchResult {
    /// Legal layouts with a micro-batch.
    pub considered: usize,
    /// The fastest that fit, the fastest first.
    pub plans: Vec<LayoutPlan>,
    /// The least memory that any candidate needs, by estimate.
    pub least_memory: Option<f64>,
}

/// Memory by the closed form above which a candidate is not computed exactly.
const TOO_LARGE: f64 = 1.1;
/// Candidates that are computed exactly, at most.
const EXACT: usize = 40;

/// What layers' costs depend on.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct KindKey {
    tp: usize,
    cp: usize,
    ep: usize,
    micro_batch: usize,
    recompute: usize,
    dtype: GemmDtype,
}

struct Search<'a> {
    workload: &'a Workload,
    machine: &'a Machine,
    kinds: HashMap<KindKey, (StepShape, f64, LayerKinds)>,
}

/// The `count` fastest plans that fit.
pub fn search(
    workload: &Workload,
    machine: &Machine,
    limits: &Constraints,
    count: usize,
) -> Result<SearchResult> {
    let mut search = Search { workload, machine, kinds: HashMap::new() };
    let mut found: Vec<(f64, Candidate)> = Vec::new();
    let (mut considered, mut least) = (0, None::<f64>);
    for (candidate, dtype) in candidates(workload, machine, limits)? {
        considered += 1;
        let mut fits = None;
        for (index, recompute) in super::recompute_sets().into_iter().enumerate() {
            if limits.recompute.is_some_and(|r| r != recompute) {
                continue;
            }
            let c = Candidate { recompute, dtype, ..candidate.clone() };
            let (seconds, bytes) = search.quick(&c, index)?;
            least = Some(least.map_or(bytes, |l| l.min(bytes)));
            if bytes <= machine.hardware.memory() as f64 * TOO_LARGE {
                fits = Some((seconds, c));
                break;
            }
        }
        found.extend(fits);
    }
    found.sort_by(|a, b| a.0.total_cmp(&b.0));
    let usable = (machine.hardware.memory() / 100 * USABLE_PERCENT) as f64;
    let mut plans: Vec<LayoutPlan> = Vec::new();
    for (quick, candidate) in found.into_iter().take(EXACT) {
        // The closed form is a lower bound but for imbalance: what is far slower is no rival any more.
        if plans.len() >= count && plans.iter().all(|p| p.time.total < quick) {
            break;
        }
        // Less recomputation than the closed form found room for does not fit.
        let from = super::recompute_sets().into_iter().skip_while(|r| *r != candidate.recompute);
        for recompute in from.filter(|r| limits.recompute.is_none_or(|l| l == *r)) {
            let c = Candidate { recompute, ..candidate.clone() };
            let memory = workload.memory(&c)?;
            if memory.total() as f64 <= usable {
                let time = workload.step_time(&machine.hardware, &c)?;
                plans.push(LayoutPlan { candidate: c, time, memory });
                break;
            }
        }
    }
    plans.sort_by(|a, b| a.time.total.total_cmp(&b.time.total));
    plans.truncate(count);
    Ok(SearchResult { considered, plans, least_memory: least })
}

impl Search<'_> {
    /// Seconds and bytes by the closed forms.
    fn quick(&mut self, c: &Candidate, recompute: usize) -> Result<(f64, f64)> {
        let key = KindKey {
            tp: c.layout.tp,
            cp: c.layout.cp,
            ep: c.layout.ep,
            micro_batch: c.micro_batch,
            recompute,
            dtype: c.dtype,
        };
        let hw = &self.machine.hardware;
        if !self.kinds.contains_key(&key) {
            let shape = self.workload.shape(c, 0)?;
            let kinds = LayerKinds::of(hw, &shape, c.dtype)?;
            let state = self.workload.state_bytes(&shape);
            self.kinds.insert(key, (shape, state, kinds));
        }
        let Some((shape, state, kinds)) = self.kinds.get(&key) else {
            return Ok((f64::INFINITY, f64::INFINITY));
        };
        self.workload.quick(hw, c, (shape, *state), kinds)
    }
}

/// Every legal layout with every micro-batch and dtype.
fn candidates(
    workload: &Workload,
    machine: &Machine,
    limits: &Constraints,
) -> Result<Vec<(Candidate, GemmDtype)>> {
    let (m, gpus) = (&workload.recipe.model, machine.gpus);
    let (sizes, batch) = (ModelSizes::of(m), workload.recipe.config.train.global_batch);
    let seq = workload.recipe.plan.seq_len;
    let experts = m.moe.as_ref().map_or(1, |moe| moe.experts);
    let mut out = Vec::new();
    let mut refused = None;
    for tp in limits.tp.values(&divisors(gpus, 64)) {
        for cp in limits.cp.values(&divisors(gpus / tp.min(gpus), 64)) {
            if cp > 1 && !seq.is_multiple_of(2 * cp * tp) {
                continue;
            }
            for pp in limits.pp.values(&divisors(gpus / (tp * cp).clamp(1, gpus), m.layers.min(64))) {
                for ep in limits.ep.values(&divisors(experts, experts)) {
                    let layout = RankLayout { tp, cp, pp, ep, etp: Some(1), ..RankLayout::default() };
                    let divides = gpus.is_multiple_of(tp * cp * pp) && gpus.is_multiple_of(ep * pp);
                    if !divides {
                        continue;
                    }
                    if let Err(e) = layout.check_model(&sizes) {
                        refused = Some(e);
                        continue;
                    }
                    let dp = gpus / (tp * cp * pp);
                    for vp in limits.vp.values(&chunks(m.layers, pp)) {
                        for zero in limits.zero.values(if pp == 1 && dp * cp > 1 { &[1, 3] } else { &[1] }) {
                            for micro_batch in limits.micro_batch.values(&[1, 2, 4, 8, 16]) {
                                if !batch.is_multiple_of(micro_batch * dp) {
                                    continue;
                                }
                                // Interleaved schedules take micro-batches in groups of pp.
                                if vp > 1 && !(batch / (micro_batch * dp)).is_multiple_of(pp) {
                                    continue;
                                }
                                for dtype in limits.dtypes.iter().copied() {
                                    let layout = RankLayout { vp, ..layout.clone() };
                                    out.push((Candidate::of(layout, zero, micro_batch), dtype));
                                }
                            }
                        }
                    }
                }
            }
        }
    }
    if out.is_empty() {
        let fixed = |c: super::Choice| c.0.unwrap_or(1);
        let ranks = fixed(limits.tp) * fixed(limits.cp) * fixed(limits.pp);
        if !gpus.is_multiple_of(ranks) {
            let what =
                format!("tp·cp·pp = {ranks} does not divide {gpus} GPUs; take sizes whose product does");
            return Err(Error::Invalid(what));
        }
        return Err(refused.unwrap_or_else(|| {
            Error::Invalid(format!(
                "no layout of {gpus} GPUs divides a global batch of {batch} sequences; change train.global_batch to a multiple of {gpus}, or take fewer GPUs"
            ))
        }));
    }
    Ok(out)
}

impl Candidate {
    fn of(layout: RankLayout, zero: usize, micro_batch: usize) -> Candidate {
        Candidate {
            layout,
            zero,
            micro_batch,
            recompute: ferrotron_engine::Recompute::default(),
            schedule: ScheduleKind::OneForwardOneBackward,
            dtype: GemmDtype::Bf16,
        }
    }
}

/// Divisors of `n` up to `most`.
fn divisors(n: usize, most: usize) -> Vec<usize> {
    (1..=n.min(most)).filter(|d| n.is_multiple_of(*d)).collect()
}

/// Chunks per stage: up to four, and beyond that numbers that divide the layers of a stage.
fn chunks(layers: usize, pp: usize) -> Vec<usize> {
    if pp == 1 {
        return vec![1];
    }
    let each = layers.div_ceil(pp);
    (1..=each.min(12)).filter(|v| layers >= pp * v && (*v <= 4 || each.is_multiple_of(*v))).collect()
}
