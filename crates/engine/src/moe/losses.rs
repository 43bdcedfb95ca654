//! Losses of the router: balancing, and the z-loss. They enter the gradient of its logits, and nothing else.
//!
//! A balancing loss over a set of N tokens is `coefficient·E/(k·N²)·Σ_e P_e·c_e`, where P_e is the sum over the tokens of
//! expert e's score and c_e counts tokens with e among their k best scores: equal to the coefficient where loads are even.
//! The mean over the micro-batches of a step (of all data-parallel ranks) is added to the loss of the step.

use super::router::table;
use super::state::{LOSSES, MixtureId, Mixtures};
use super::{Balancing, Chooser, MoeTraining};
use crate::Pass;
use ferrotron_comm::Reduce;
use ferrotron_kernels::{Balance, Score};
use ferrotron_tensor::{Category, DType, Result, Tensor};

/// What the losses are of.
#[derive(Clone, Copy)]
pub(super) struct Of {
    pub(super) score: Score,
    pub(super) topk: usize,
    pub(super) experts: usize,
}

/// What backward needs of the losses: f32 `[segments, E]` for each, and f64 `[2]` of the z-loss.
#[derive(Default)]
pub(super) struct BalanceSaved {
    pub(super) weights: Vec<Tensor>,
    pub(super) z: Option<Tensor>,
}

/// The part of a step's mean that a micro-batch is, of a rank's tokens.
fn share(p: &Pass, training: &MoeTraining, kind: Balancing) -> f32 {
    let Some(mix) = p.mix else { return 0.0 };
    let dp = p.rank.dp.size() as f32;
    match kind {
        // Its counts are those of all data-parallel ranks: the sum over those is the whole loss already.
        Balancing::Global if !training.global_over_dp => mix.share * dp,
        _ => mix.share,
    }
}

/// Statistics of a micro-batch, agreed on by the ranks that share it.
pub(super) fn forward(
    p: &Pass,
    state: &Mixtures,
    id: MixtureId,
    training: &MoeTraining,
    of: Of,
    logits: &Tensor,
) -> Result<BalanceSaved> {
    let (k, s) = (&p.rank.kernels, &p.rank.compute);
    let mut weights = Vec::new();
    for (kind, coefficient) in &training.balance {
        let (segments, count) = segments(p, *kind, logits.shape()[0])?;
        let b = Balance { logits, score: of.score, k: of.topk, segments: &segments };
        let (sums, counts) =
            (table(p, &[count, of.experts], DType::F32)?, table(p, &[count, of.experts], DType::I64)?);
        k.balance(s, &b, &sums, &counts)?;
        let group = if *kind == Balancing::Global { &p.rank.step } else { &p.rank.batch };
        group.all_reduce(s, &counts, Reduce::Sum, "tokens of experts")?;
        // The mean over sequences.
        let factor = coefficient * share(p, training, *kind) / count as f32;
        let place = Balancing::ALL.iter().position(|b| b == kind).unwrap_or(LOSSES);
        let loss = state.row(&state.losses, id)?.narrow(0, place, 1)?;
        let w = table(p, &[count, of.experts], DType::F32)?;
        if *kind == Balancing::Global {
            let (total, steps) = (state.row(&state.running, id)?, state.row(&state.steps, id)?);
            k.add_counts(s, &counts, &total, &steps)?;
            let total = total.view(counts.shape())?;
            k.balance_weights(s, factor, of.topk, &sums, &total, Some(&steps), &w, &loss)?;
        } else {
            k.balance_weights(s, factor, of.topk, &sums, &counts, None, &w, &loss)?;
        }
        weights.push(w);
    }
    let z = if training.z_loss > 0.0 {
        let sums = s.zeros(&[2], DType::F64, Category::Workspace)?;
        k.z_loss(s, logits, &p.segments(logits.shape()[0])?, &sums)?;
        k.add_totals(s, &sums, &state.row(&state.z, id)?)?;
        p.rank.batch.all_reduce(s, &sums, Reduce::Sum, "logits of the router")?;
        Some(sums)
    } else {
        None
    };
    if let Chooser::Quantiles { .. } = training.chooser {
        let [t, e] = [logits.shape()[0], of.experts];
        let group = &p.rank.batch;
        let all = p.rank.activation(&[t * group.size(), e], logits.dtype())?;
        group.all_gather(s, logits, &all, "logits of all tokens")?;
        k.quantiles(s, of.topk, &all, &state.row(&state.quantiles, id)?, &state.row(&state.estimates, id)?)?;
    }
    Ok(BalanceSaved { weights, z })
}

/// Adds the gradients of the losses to that of the logits.
pub(super) fn backward(
    p: &Pass,
    training: &MoeTraining,
    of: Of,
    saved: BalanceSaved,
    logits: &Tensor,
    dlogits: &Tensor,
) -> Result<()> {
    let (k, s) = (&p.rank.kernels, &p.rank.compute);
    for ((kind, _), weights) in training.balance.iter().zip(&saved.weights) {
        let (segments, _) = segments(p, *kind, logits.shape()[0])?;
        let b = Balance { logits, score: of.score, k: of.topk, segments: &segments };
        k.balance_backward(s, &b, weights, dlogits)?;
    }
    if let (Some(rows), Some(mix)) = (&saved.z, p.mix) {
        k.z_loss_backward(
            s,
            training.z_loss * mix.share,
            rows,
            logits,
            &p.segments(logits.shape()[0])?,
            dlogits,
        )?;
    }
    Ok(())
}

/// Segments of a loss, and how many there are.
fn segments(p: &Pass, kind: Balancing, rows: usize) -> Result<(Tensor, usize)> {
    match p.mix {
        Some(mix) if kind == Balancing::Sequence => {
            Ok((mix.input.sequences_of.clone(), mix.input.sequences.max(1)))
        }
        _ => Ok((p.segments(rows)?, 1)),
    }
}
