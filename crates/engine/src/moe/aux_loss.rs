//! Auxiliary losses of the router: load balancing and z-loss. Only the gradient of the router's logits sees them.
//!
//! A load-balancing loss over a set of N tokens is `coefficient·E/(k·N²)·Σ_e P_e·c_e`, where P_e is the sum over the
//! tokens of expert e's score and c_e the number of tokens with e among their top-k scores; it equals the coefficient
//! where the experts are balanced. Its mean over the micro-batches of a step (of all data-parallel ranks) is added to
//! the loss of the step.
//!
//! The loss per sequence is a mean over the sequences of the micro-batch. Rows of a batch count alike and share one N, the mean of
//! their tokens that are not padding, as in Megatron Core. Packed documents differ in length by a factor of hundreds: each has its
//! own N and weighs by its tokens, so that the loss is the coefficient here too where the experts are balanced.

use super::router::{SavedRouting, table};
use super::state::{LOSSES, MoeLayerId, MoeState};
use super::{AuxLossKind, MoeTraining, RoutingMethod};
use crate::{SavedTensor, StepContext};
use ferrotron_comm::ReduceOp;
use ferrotron_kernels::{AuxLoss, AuxLossWeights, ScoreFunction, ZLossBackward};
use ferrotron_tensor::{Category, DType, Result, Tensor};

/// Score function, k and E of the router, and the uses of its layer.
#[derive(Clone, Copy)]
pub(super) struct RouterDims {
    pub(super) score: ScoreFunction,
    pub(super) topk: usize,
    pub(super) experts: usize,
    /// How often the layer runs in a pass: once for each depth of a shared MTP layer.
    pub(super) uses: u32,
}

/// Weight of a micro-batch's loss in the mean over the step.
fn micro_batch_weight(p: &StepContext, training: &MoeTraining, kind: AuxLossKind) -> f32 {
    let Some(moe) = p.moe else { return 0.0 };
    let dp = p.rank.dp.size() as f32;
    match kind {
        // Its counts cover all data-parallel ranks, so the sum over ranks is the full loss already.
        AuxLossKind::Global if !training.global_over_dp => moe.micro_batch_weight * dp,
        _ => moe.micro_batch_weight,
    }
}

/// Computes the losses of a micro-batch, with counts all-reduced over the ranks that share it, and what their backward
/// needs: the per-expert weights of each loss, and the sums of the z-loss.
pub(super) fn forward(
    p: &StepContext,
    (state, id): (&MoeState, MoeLayerId),
    training: &MoeTraining,
    of: RouterDims,
    logits: &Tensor,
) -> Result<(Vec<SavedTensor>, Option<SavedTensor>)> {
    let (k, s) = (&p.rank.kernels, &p.rank.compute);
    let mut stats = Vec::new();
    for (kind, _) in &training.balance {
        let (segments, count) = segments(p, *kind, logits.shape()[0])?;
        let b = AuxLoss { logits, score: of.score, k: of.topk, segments: &segments };
        let (sums, counts) =
            (table(p, &[count, of.experts], DType::F32)?, table(p, &[count, of.experts], DType::I64)?);
        k.aux_loss_stats(s, &b, &sums, &counts)?;
        stats.push((count, sums, counts));
    }
    let z = match training.z_loss > 0.0 {
        true => {
            let sums = s.zeros(&[2], DType::F64, Category::Workspace)?;
            k.z_loss(s, logits, &p.segments(logits.shape()[0])?, &sums)?;
            k.accumulate_f64(s, &sums, &state.row(&state.z, id)?)?;
            Some(sums)
        }
        false => None,
    };
    for (group, global) in [(&p.rank.tp_dp_cp_group, true), (&p.rank.tp_cp_group, false)] {
        let of_group = training.balance.iter().map(|(kind, _)| (*kind == AuxLossKind::Global) == global);
        let counts = stats.iter().zip(of_group).filter(|(_, here)| *here);
        let counts = counts.map(|((.., counts), _)| (counts, "tokens of experts"));
        let z = z.as_ref().filter(|_| !global).map(|sums| (sums, "logits of the router"));
        group.all_reduce_coalesced(s, &counts.chain(z).collect::<Vec<_>>(), ReduceOp::Sum)?;
    }
    let mut weights = Vec::new();
    for ((kind, coefficient), (count, sums, counts)) in training.balance.iter().zip(stats) {
        let by_tokens = *kind == AuxLossKind::Sequence && p.moe.is_some_and(|m| m.input.packed);
        // A layer that runs several times has the mean of its losses, so that its loss is as strong as that of others.
        let coefficient = coefficient * micro_batch_weight(p, training, *kind) / of.uses as f32;
        let factor = if by_tokens { coefficient } else { coefficient / count as f32 };
        let place = AuxLossKind::ALL.iter().position(|b| b == kind).unwrap_or(LOSSES);
        let loss = state.row(&state.losses, id)?.narrow(0, place, 1)?;
        let w = table(p, &[count, of.experts], DType::F32)?;
        if *kind == AuxLossKind::Global {
            let (total, steps) =
                (state.row(&state.global_tokens_per_expert, id)?, state.row(&state.micro_batches, id)?);
            k.accumulate_counts(s, &counts, &total, &steps)?;
            let total = total.view(counts.shape())?;
            k.aux_loss_weights(
                s,
                &AuxLossWeights {
                    coefficient: factor,
                    k: of.topk,
                    sums: &sums,
                    counts: &total,
                    steps: Some(&steps),
                    by_tokens,
                    weights: &w,
                    loss: &loss,
                },
            )?;
        } else {
            k.aux_loss_weights(
                s,
                &AuxLossWeights {
                    coefficient: factor,
                    k: of.topk,
                    sums: &sums,
                    counts: &counts,
                    steps: None,
                    by_tokens,
                    weights: &w,
                    loss: &loss,
                },
            )?;
        }
        weights.push(SavedTensor::small(&w));
    }
    if let RoutingMethod::Quantiles { keep } = training.routing_method
        && keep < 1.0
    {
        let [t, e] = [logits.shape()[0], of.experts];
        let group = &p.rank.tp_cp_group;
        let all = p.rank.activation(&[t * group.size(), e], logits.dtype())?;
        group.all_gather(s, logits, &all, "logits of all tokens")?;
        k.quantiles(
            s,
            of.topk,
            &all,
            &state.row(&state.quantiles, id)?,
            &state.row(&state.quantile_sums, id)?,
        )?;
    }
    Ok((weights, z.as_ref().map(SavedTensor::small)))
}

/// Adds the gradients of the losses to `dlogits`.
pub(super) fn backward(
    p: &StepContext,
    training: &MoeTraining,
    of: RouterDims,
    routing: &SavedRouting,
    (logits, dlogits): (&Tensor, &Tensor),
) -> Result<()> {
    let (k, s) = (&p.rank.kernels, &p.rank.compute);
    for ((kind, _), weights) in training.balance.iter().zip(&routing.aux_weights) {
        let (segments, _) = segments(p, *kind, logits.shape()[0])?;
        let b = AuxLoss { logits, score: of.score, k: of.topk, segments: &segments };
        k.aux_loss_backward(s, &b, weights, dlogits)?;
    }
    if let (Some(rows), Some(moe)) = (&routing.z_sums, p.moe) {
        k.z_loss_backward(
            s,
            &ZLossBackward {
                coefficient: training.z_loss * moe.micro_batch_weight,
                sums: rows,
                logits,
                segments: &p.segments(logits.shape()[0])?,
                dlogits,
            },
        )?;
    }
    Ok(())
}

/// Token sets of a loss: the segment of each row, and the number of segments.
fn segments(p: &StepContext, kind: AuxLossKind, rows: usize) -> Result<(Tensor, usize)> {
    match p.moe {
        Some(moe) if kind == AuxLossKind::Sequence => {
            Ok((moe.input.sequence_ids.clone(), moe.input.sequences.max(1)))
        }
        _ => Ok((p.segments(rows)?, 1)),
    }
}
