//! Expert capacity: a bound on the tokens of each expert; tokens over it are dropped.

use super::Capacity;
use super::router::TopK;
use super::state::{MoeLayerId, MoeState};
use crate::StepContext;
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
    if c.per_rank || group.size() == 1 {
        let bound = capacity(if c.per_rank { t } else { tokens }, n, experts, c.factor);
        k.drop_over_capacity(
            s,
            &CapacityDrop {
                capacity: bound,
                experts,
                by_probability: c.by_probability,
                index: &index,
                probs: &probs,
                dropped,
            },
        )?;
        return Ok(TopK { index, probs });
    }
    // The bound is over the tokens of all tp×cp ranks in token order: gather the routing, drop, keep the own rows.
    const LABEL: &str = "routing of all tokens";
    let empty = |mine: &Tensor| p.rank.activation(&[t * group.size(), n], mine.dtype());
    let (all_index, all_probs) = (empty(&index)?, empty(&probs)?);
    group.all_gather_coalesced(s, &[(&index, &all_index, LABEL), (&probs, &all_probs, LABEL)])?;
    let Some(order) = p.moe.and_then(|m| m.input.order.as_ref()) else {
        return shape_error(
            "capacity",
            "with tp or cp, MoE capacity needs a description of the micro-batch (StepContext::moe)",
        );
    };
    let (sorted_index, sorted_probs) = (
        p.rank.activation(all_index.shape(), DType::I32)?,
        p.rank.activation(all_probs.shape(), DType::F32)?,
    );
    // A gather of 4-byte values; the dtype does not matter.
    let bits = |t: &Tensor| t.view_dtype(DType::F32);
    k.gather_rows(s, &bits(&all_index)?, &order.to_tokens, 1, &bits(&sorted_index)?)?;
    k.gather_rows(s, &all_probs, &order.to_tokens, 1, &sorted_probs)?;
    // Every rank sees all drops; one counts them.
    let dropped = if group.rank() == 0 { dropped } else { &fresh };
    let bound = capacity(tokens, n, experts, c.factor);
    k.drop_over_capacity(
        s,
        &CapacityDrop {
            capacity: bound,
            experts,
            by_probability: c.by_probability,
            index: &sorted_index,
            probs: &sorted_probs,
            dropped,
        },
    )?;
    k.gather_rows(s, &bits(&sorted_index)?, &order.mine, 1, &bits(&index)?)?;
    k.gather_rows(s, &sorted_probs, &order.mine, 1, &probs)?;
    Ok(TopK { index, probs })
}

fn copy(p: &StepContext, t: &Tensor) -> Result<Tensor> {
    let new = p.rank.activation(t.shape(), t.dtype())?;
    p.rank.compute.copy(t, &new)?;
    Ok(new)
}
