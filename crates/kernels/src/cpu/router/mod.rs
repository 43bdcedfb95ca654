//! MoE router on slices. Rows are tokens; chunks of rows are sized by the number of experts.

mod aux_loss;
mod capacity;
mod gate;
mod probs;
mod quantile;
mod scores;
mod sinkhorn;
mod top_k;
mod z_loss;

pub use aux_loss::{
    ExpertStats, Statistics, aux_loss_backward, aux_loss_weights, balance, update_expert_bias,
};
pub use capacity::{count_tokens, drop_over_capacity};
pub use gate::{gate, gate_dw, gate_dx};
pub use probs::{probabilities, probabilities_backward};
pub use quantile::quantiles;
pub use sinkhorn::sinkhorn;
pub use top_k::{choose, top_k};
pub use z_loss::{z_loss, z_loss_backward};

use super::rows::PIECE;
use crate::RouterParams;
use ferrotron_tensor::{Float, Result, shape_error};

/// A router of E experts with top-k selection.
#[derive(Clone, Copy, Debug)]
pub struct Router {
    /// Score function, groups and scale.
    pub params: RouterParams,
    /// E
    pub experts: usize,
    /// k
    pub topk: usize,
}

/// Rows per chunk.
fn grain(experts: usize) -> usize {
    (PIECE / experts.max(1)).max(1)
}

/// Row `t` of `x [T, E]` in f32.
fn take_row<T: Float>(x: &[T], t: usize, to: &mut [f32]) {
    let from = &x[t * to.len()..][..to.len()];
    to.iter_mut().zip(from).for_each(|(to, x)| *to = x.to_f32());
}

/// Checks that every index is below `below`; negative ones mean none.
fn check_below(op: &'static str, what: &str, numbers: &[i32], below: usize) -> Result<()> {
    match numbers.iter().position(|i| *i >= 0 && *i as usize >= below) {
        None => Ok(()),
        Some(at) => shape_error(op, format!("{what} {} at position {at} is outside 0..{below}", numbers[at])),
    }
}
