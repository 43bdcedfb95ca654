//! Expert capacity: a bound on the tokens of each expert; tokens over it are dropped.

use super::Capacity;
use super::router::TopK;
use super::state::{MoeLayerId, MoeState};
use crate::{Rank, StepContext};
use ferrotron_kernels::{CapacityDrop, capacity};
use ferrotron_tensor::{Category, DType, Result, Tensor, shape_error};

/// Drops tokens over capacity, counted over the micro-batch or, with `per_rank`, over this rank's tokens.
pub(super) fn apply(
    p: &StepContext,
    (state, id): (&MoeState, MoeLayerId),
    c: Capacity,
    experts: usize,
    topk: TopK,
) -> Result<TopK> {
    let (k, s) = (&p.rank.kernels, &p.rank.compute);
    let [t, n] = [topk.index.shape()[0], topk.index.shape()[1]];
    let (index, probs) = (copy(p, &topk.index)?, copy(p, &topk.probs)?);
    // A recomputation drops the same tokens again; they are counted once.
    let fresh = s.zeros(&[1], DType::I64, Category::Workspace)?;
    let row = state.row(&state.dropped, id)?;
    let dropped = if p.recomputing { &fresh } else { &row };
    let (group, tokens) = (&p.rank.tp_cp_group, p.moe.map_or(t, |m| m.input.tokens));
    let drop = |index: &Tensor, probs: &Tensor, dropped: &Tensor| {
        let capacity = capacity(if c.per_rank { t } else { tokens }, n, experts, c.factor);
        let by_probability = c.by_probability;
        k.drop_over_capacity(s, &CapacityDrop { capacity, experts, by_probability, index, probs, dropped })
    };
    let order = p.moe.and_then(|m| m.input.order.as_ref());
    let (order, all_index, all_probs) = match (order, is_of_rank(c, p.rank)) {
        (None, true) => {
            drop(&index, &probs, dropped)?;
            return Ok(TopK { index, probs });
        }
        (Some(order), true) => (order, index.clone(), probs.clone()),
        (Some(order), false) => {
            const LABEL: &str = "routing of all tokens";
            let empty = |mine: &Tensor| p.rank.activation(&[t * group.size(), n], mine.dtype());
            let (all_index, all_probs) = (empty(&index)?, empty(&probs)?);
            group.all_gather_coalesced(s, &[(&index, &all_index, LABEL), (&probs, &all_probs, LABEL)])?;
            (order, all_index, all_probs)
        }
        (None, false) => {
            return shape_error(
                "capacity",
                "with tp or cp, MoE capacity needs a description of the micro-batch (StepContext::moe)",
            );
        }
    };
    // Put the routing in token order, drop, take the own rows back.
    let (sorted_index, sorted_probs) = (
        p.rank.activation(all_index.shape(), DType::I32)?,
        p.rank.activation(all_probs.shape(), DType::F32)?,
    );
    // A gather of 4-byte values; the dtype does not matter.
    let bits = |t: &Tensor| t.view_dtype(DType::F32);
    k.gather_rows(s, &bits(&all_index)?, &order.to_tokens, 1, &bits(&sorted_index)?)?;
    k.gather_rows(s, &all_probs, &order.to_tokens, 1, &sorted_probs)?;
    // Where every rank sees all drops, one counts them.
    let counts = is_of_rank(c, p.rank) || group.rank() == 0;
    drop(&sorted_index, &sorted_probs, if counts { dropped } else { &fresh })?;
    k.gather_rows(s, &bits(&sorted_index)?, &order.mine, 1, &bits(&index)?)?;
    k.gather_rows(s, &sorted_probs, &order.mine, 1, &probs)?;
    Ok(TopK { index, probs })
}

/// Whether each rank drops tokens by itself, without the routing of others.
pub(super) fn is_of_rank(c: Capacity, rank: &Rank) -> bool {
    c.per_rank || rank.tp_cp_group.size() == 1
}

fn copy(p: &StepContext, t: &Tensor) -> Result<Tensor> {
    let new = p.rank.activation(t.shape(), t.dtype())?;
    p.rank.compute.copy(t, &new)?;
    Ok(new)
}
