//! What mixtures remember besides weights: the bias of choices, and counters of a step. All of it is on the device.

use super::replay::Replay;
use super::{AuxLossKind, MoeTraining, RoutingMethod};
use crate::Rank;
use ferrotron_comm::ReduceOp;
use ferrotron_tensor::{Category, DType, Result, Stream, Tensor};
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A mixture's number among those of its rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoeLayerId(pub(crate) usize);

/// What is declared of a mixture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MoeLayerSpec {
    /// Its name, such as `layers.3.moe`.
    pub name: String,
    /// Experts.
    pub experts: usize,
    /// Is a bias added to scores for the choice?
    pub expert_bias: bool,
    /// Is a quantile subtracted from logits for the choice?
    pub quantiles: bool,
}

/// Numbers of a mixture in a step, in the order of its row of [`MoeState::losses`].
pub(crate) const LOSSES: usize = AuxLossKind::ALL.len();

/// The state of all mixtures of a rank: n mixtures of E experts.
pub struct MoeState {
    specs: Vec<MoeLayerSpec>,
    /// f32 `[n, E]`: added to scores for the choice.
    pub expert_bias: Tensor,
    /// f32 `[n, E]`: subtracted from logits for the choice.
    pub quantiles: Tensor,
    /// f32 `[n, E]`: what the micro-batches of a step say the quantiles are, summed.
    pub(crate) quantile_sums: Tensor,
    /// i64 `[n, E]`: choices of each expert in this step, of this rank's tokens.
    pub(crate) tokens_per_expert: Tensor,
    /// i64 `[n, E]`: the best scores of the step so far, of all ranks' tokens.
    pub(crate) global_tokens_per_expert: Tensor,
    /// f32 `[n]`: micro-batches in that.
    pub(crate) micro_batches: Tensor,
    /// f32 `[n, losses]`: balancing losses of the step, with their factors.
    pub(crate) losses: Tensor,
    /// f64 `[n, 2]`: squares of logsumexp, and rows.
    pub(crate) z: Tensor,
    /// i64 `[n]`: choices beyond the capacity.
    pub(crate) dropped: Tensor,
    /// Of each mixture, what forward decided and a second forward must not decide anew, oldest first.
    decided: Mutex<Vec<VecDeque<SavedRouting>>>,
    pub(super) replay: Mutex<Replay>,
}

/// What a forward pass decided.
#[derive(Clone)]
pub(crate) struct SavedRouting {
    /// i32 `[T, k]`
    pub(crate) index: Tensor,
    /// Weights of balancing losses.
    pub(crate) weights: Vec<Tensor>,
    /// Of the z-loss.
    pub(crate) z: Option<Tensor>,
    /// Which of repeated uses it was.
    pub(crate) repeat: u32,
}

/// The counters of a step, on the device, summed over all ranks that share its tokens.
pub struct MoeCounters {
    /// i64 `[n, E]`
    pub tokens_per_expert: Tensor,
    /// f32 `[n, losses]`
    pub losses: Tensor,
    /// f64 `[n, 2]`
    pub z: Tensor,
    /// i64 `[n]`
    pub dropped: Tensor,
}

impl MoeState {
    /// Memory for what was declared; none where there is no mixture.
    pub(crate) fn new(s: &Stream, specs: Vec<MoeLayerSpec>) -> Result<Option<MoeState>> {
        let Some(e) = specs.iter().map(|m| m.experts).max() else { return Ok(None) };
        let n = specs.len();
        let zeros = |shape: &[usize], dtype| s.zeros(shape, dtype, Category::Optimizer);
        let decided = Mutex::new((0..n).map(|_| VecDeque::new()).collect());
        Ok(Some(MoeState {
            expert_bias: zeros(&[n, e], DType::F32)?,
            quantiles: zeros(&[n, e], DType::F32)?,
            quantile_sums: zeros(&[n, e], DType::F32)?,
            tokens_per_expert: zeros(&[n, e], DType::I64)?,
            global_tokens_per_expert: zeros(&[n, e], DType::I64)?,
            micro_batches: zeros(&[n], DType::F32)?,
            losses: zeros(&[n, LOSSES], DType::F32)?,
            z: zeros(&[n, 2], DType::F64)?,
            dropped: zeros(&[n], DType::I64)?,
            specs,
            decided,
            replay: Mutex::default(),
        }))
    }

    /// The mixtures, in order of declaration.
    pub fn specs(&self) -> &[MoeLayerSpec] {
        &self.specs
    }

    /// A mixture's row of one of the tables.
    pub(crate) fn row(&self, table: &Tensor, id: MoeLayerId) -> Result<Tensor> {
        let row = table.narrow(0, id.0, 1)?;
        row.view(&[row.numel()])
    }

    /// Remembers what a pass decided, for the pass that computes it again.
    pub(crate) fn remember(&self, id: MoeLayerId, decided: SavedRouting) {
        self.decided()[id.0].push_back(decided);
    }

    /// What the oldest pass decided that was not computed again yet, of those uses of the mixture.
    pub(crate) fn recall(&self, id: MoeLayerId, repeat: u32) -> Option<SavedRouting> {
        let list = &mut self.decided()[id.0];
        let oldest = list.iter().position(|d| d.repeat == repeat)?;
        list.remove(oldest)
    }

    fn decided(&self) -> MutexGuard<'_, Vec<VecDeque<SavedRouting>>> {
        self.decided.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A step begins: counters start from zero.
    pub fn begin_step(&self, s: &Stream) -> Result<()> {
        self.decided().iter_mut().for_each(VecDeque::clear);
        let all = [
            &self.tokens_per_expert,
            &self.global_tokens_per_expert,
            &self.micro_batches,
            &self.losses,
            &self.z,
            &self.dropped,
            &self.quantile_sums,
        ];
        all.into_iter().try_for_each(|t| s.zero(t))
    }

    /// i64 `[n, E]`: choices of each expert since the step began, of all ranks' tokens. Every rank of a stage calls it.
    pub fn tokens_per_expert(&self, rank: &Rank) -> Result<Tensor> {
        let load = copy(&rank.compute, &self.tokens_per_expert)?;
        rank.tp_dp_cp_group.all_reduce(&rank.compute, &load, ReduceOp::Sum, "loads of experts")?;
        Ok(load)
    }

    /// A step has ended: biases and quantiles move by what all ranks have counted. Every rank of a stage calls it.
    pub fn end_step(&self, rank: &Rank, micro_batches: usize, how: &MoeTraining) -> Result<MoeCounters> {
        let (s, k) = (&rank.compute, &rank.kernels);
        let counters = MoeCounters {
            tokens_per_expert: copy(s, &self.tokens_per_expert)?,
            losses: copy(s, &self.losses)?,
            z: copy(s, &self.z)?,
            dropped: copy(s, &self.dropped)?,
        };
        for t in [&counters.tokens_per_expert, &counters.losses, &counters.z, &counters.dropped] {
            rank.tp_dp_cp_group.all_reduce(s, t, ReduceOp::Sum, "loads of experts")?;
        }
        let used = copy(s, &counters.tokens_per_expert)?;
        for (i, spec) in self.specs.iter().enumerate() {
            let id = MoeLayerId(i);
            if spec.expert_bias {
                k.update_expert_bias(
                    s,
                    how.bias_rate,
                    &self.row(&used, id)?,
                    &self.row(&self.expert_bias, id)?,
                )?;
            }
        }
        if let RoutingMethod::Quantiles { keep } = how.routing_method {
            rank.dp_cp_group.all_reduce(s, &self.quantile_sums, ReduceOp::Sum, "quantiles")?;
            let mean = 1.0 / (micro_batches * rank.dp_cp_group.size()) as f32;
            for (i, _) in self.specs.iter().enumerate().filter(|(_, m)| m.quantiles) {
                let id = MoeLayerId(i);
                let (beta, found) = (self.row(&self.quantiles, id)?, self.row(&self.quantile_sums, id)?);
                k.update_quantiles(s, keep, mean, &found, &beta)?;
            }
        }
        Ok(counters)
    }
}

fn copy(s: &Stream, t: &Tensor) -> Result<Tensor> {
    let new = Tensor::empty(s, t.shape(), t.dtype(), Category::Communication)?;
    s.copy(t, &new)?;
    Ok(new)
}
