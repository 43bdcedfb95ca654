//! Every legal way to run a recipe on a machine, as far as static memory allows.

use super::constraints::Constraints;
use super::hardware::{GemmDtype, Machine};
use super::step_time::{Candidate, Workload};
use crate::grid::{ModelSizes, RankLayout};
use crate::pipeline::ScheduleKind;
use crate::{Error, Result};

/// Sequences of a micro-batch that are tried.
const MICRO_BATCHES: [usize; 5] = [1, 2, 4, 8, 16];

/// Calls `take` with every legal layout, ZeRO stage, micro-batch and schedule, without recomputation. `fits` says of a layout and ZeRO
/// stage, before the rest is chosen, whether its static state leaves room.
pub(super) fn each_candidate(
    workload: &Workload,
    machine: &Machine,
    limits: &Constraints,
    dtype: GemmDtype,
    mut fits: impl FnMut(&Candidate) -> Result<bool>,
    mut take: impl FnMut(Candidate) -> Result<()>,
) -> Result<()> {
    let (m, gpus) = (&workload.recipe.model, machine.gpus);
    let (sizes, batch) = (ModelSizes::of(m), workload.recipe.config.train.global_batch);
    let seq = workload.recipe.plan.seq_len;
    let experts = m.moe.as_ref().map_or(1, |moe| moe.experts);
    let (mut any, mut refused) = (false, None);
    for tp in limits.tp.values(&divisors(gpus, 64)) {
        for cp in limits.cp.values(&divisors(gpus / tp.min(gpus), 64)) {
            if cp > 1 && !seq.is_multiple_of(2 * cp * tp) {
                continue;
            }
            for pp in limits.pp.values(&divisors(gpus / (tp * cp).clamp(1, gpus), m.layers.min(64))) {
                for (ep, etp) in expert_sizes(limits, experts, tp) {
                    let layout = RankLayout { tp, cp, pp, ep, etp: Some(etp), ..RankLayout::default() };
                    if !gpus.is_multiple_of(tp * cp * pp) || !gpus.is_multiple_of(etp * ep * pp) {
                        continue;
                    }
                    if let Err(e) = layout.check_model(&sizes) {
                        refused = Some(e);
                        continue;
                    }
                    let dp = gpus / (tp * cp * pp);
                    let steps: Vec<usize> = limits.micro_batch.values(&MICRO_BATCHES);
                    let steps: Vec<usize> =
                        steps.into_iter().filter(|n| batch.is_multiple_of(n * dp)).collect();
                    for zero in limits.zero.values(zero_stages(pp, dp * cp)) {
                        let of = |vp, micro_batch, schedule| Candidate {
                            layout: RankLayout { vp, ..layout.clone() },
                            zero,
                            micro_batch,
                            recompute: ferrotron_engine::Recompute::default(),
                            schedule,
                            dtype,
                        };
                        let legal = !steps.is_empty();
                        any |= legal;
                        if !legal || !fits(&of(1, 1, ScheduleKind::default()))? {
                            continue;
                        }
                        for vp in limits.vp.values(&chunks(m.layers, pp)) {
                            for micro_batch in steps.iter().copied() {
                                // Interleaved schedules take micro-batches in groups of pp.
                                if vp > 1 && !(batch / (micro_batch * dp)).is_multiple_of(pp) {
                                    continue;
                                }
                                for schedule in schedules(limits, pp) {
                                    take(of(vp, micro_batch, schedule))?;
                                }
                            }
                        }
                    }
                }
            }
        }
    }
    if any { Ok(()) } else { Err(no_layout(limits, gpus, batch, refused)) }
}

fn no_layout(limits: &Constraints, gpus: usize, batch: usize, refused: Option<Error>) -> Error {
    let fixed = |c: super::Choice| c.0.unwrap_or(1);
    let ranks = fixed(limits.tp) * fixed(limits.cp) * fixed(limits.pp);
    if !gpus.is_multiple_of(ranks) {
        let what = format!("tp·cp·pp = {ranks} does not divide {gpus} GPUs; take sizes whose product does");
        return Error::Invalid(what);
    }
    refused.unwrap_or_else(|| {
        Error::Invalid(format!(
            "no layout of {gpus} GPUs divides a global batch of {batch} sequences; change train.global_batch to a multiple of {gpus}, or take fewer GPUs"
        ))
    })
}

/// Sizes of expert parallelism, and of tensor parallelism inside an expert: none, or that of attention. A dense model has neither.
fn expert_sizes(limits: &Constraints, experts: usize, tp: usize) -> Vec<(usize, usize)> {
    let inside: &[usize] = if experts > 1 && tp > 1 { &[1, tp] } else { &[1] };
    let all = limits.ep.values(&divisors(experts, experts));
    all.iter().flat_map(|ep| limits.etp.values(inside).into_iter().map(move |etp| (*ep, etp))).collect()
}

/// ZeRO stages that differ: replicas shard optimizer state at no cost; without a pipeline weights, too.
fn zero_stages(pp: usize, replicas: usize) -> &'static [usize] {
    match (pp, replicas) {
        (_, 1) => &[1],
        (1, _) => &[1, 2, 3],
        _ => &[1, 2],
    }
}

fn schedules(limits: &Constraints, pp: usize) -> Vec<ScheduleKind> {
    match limits.schedule {
        Some(kind) => vec![kind],
        None if pp > 1 => vec![ScheduleKind::OneForwardOneBackward, ScheduleKind::ZeroBubble],
        None => vec![ScheduleKind::OneForwardOneBackward],
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
