//! What MoE layers keep besides their weights: expert biases and quantiles between steps, and the counters of a step.
//! All of it is on the device.

use super::replay::Replay;
use super::split_sizes::{SplitHeadroom, SplitSizes};
use super::{AuxLossKind, MoeTraining, RoutingMethod};
use crate::{ParamSpec, Rank, UpdateGroup};
use ferrotron_comm::ReduceOp;
use ferrotron_tensor::{Category, DType, Result, Stream, Tensor};
use std::sync::Mutex;

/// Index of an MoE layer among those of its rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoeLayerId(pub(crate) usize);

/// Declaration of an MoE layer's state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MoeLayerSpec {
    /// Name of the layer, such as `layers.3.moe`.
    pub name: String,
    /// Number of experts.
    pub experts: usize,
    /// Whether a bias is added to the scores before selection (aux-loss-free balancing).
    pub expert_bias: bool,
    /// Whether a quantile is subtracted from the logits before selection.
    pub quantiles: bool,
    /// How the router's weight is trained, as its bias and quantiles are: fixed where it is frozen, and not saved where it is
    /// the base model's.
    pub router: UpdateGroup,
}

/// Columns of [`MoeState::losses`]: one for each [`AuxLossKind`].
pub(crate) const LOSSES: usize = AuxLossKind::ALL.len();

/// State of a rank's n MoE layers with (at most) E experts.
pub struct MoeState {
    specs: Vec<MoeLayerSpec>,
    /// f32 `[n, E]`: added to the scores before selection.
    pub expert_bias: Tensor,
    /// f32 `[n, E]`: subtracted from the logits before selection.
    pub quantiles: Tensor,
    /// f32 `[n, E]`: quantiles measured in the micro-batches of the step, summed.
    pub(crate) quantile_sums: Tensor,
    /// i64 `[n, E]`: tokens per expert in this step, of this rank's tokens.
    pub(crate) tokens_per_expert: Tensor,
    /// i64 `[n, E]`: tokens per expert by top-k score in the step so far, of all ranks' tokens (global auxiliary loss).
    pub(crate) global_tokens_per_expert: Tensor,
    /// f32 `[n]`: micro-batches counted in `global_tokens_per_expert`.
    pub(crate) micro_batches: Tensor,
    /// f32 `[n, losses]`: auxiliary losses of the step, coefficients included.
    pub(crate) losses: Tensor,
    /// f64 `[n, 2]`: sum of squared logsumexp, and number of tokens.
    pub(crate) z: Tensor,
    /// i64 `[n]`: tokens dropped over capacity.
    pub(crate) dropped: Tensor,
    pub(super) replay: Mutex<Replay>,
    /// Expected split sizes of all-to-all messages, where training passes use them.
    splits: Option<SplitSizes>,
}

/// Counters of a step on the device, summed over the ranks that share its tokens.
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

impl MoeCounters {
    fn all(&self) -> [&Tensor; 4] {
        [&self.tokens_per_expert, &self.losses, &self.z, &self.dropped]
    }

    /// Copies them to others of the same layers.
    pub fn copy_to(&self, s: &Stream, to: &MoeCounters) -> Result<()> {
        self.all().into_iter().zip(to.all()).try_for_each(|(from, to)| s.copy(from, to))
    }

    /// A copy in new memory.
    pub fn copied(&self, s: &Stream) -> Result<MoeCounters> {
        let [tokens_per_expert, losses, z, dropped] = self.all().map(|t| copy(s, t));
        Ok(MoeCounters { tokens_per_expert: tokens_per_expert?, losses: losses?, z: z?, dropped: dropped? })
    }
}

impl MoeState {
    /// Memory for the counters of a step.
    pub fn empty_counters(&self, s: &Stream) -> Result<MoeCounters> {
        self.counters(|t| Tensor::empty(s, t.shape(), t.dtype(), Category::Communication))
    }

    fn counters(&self, make: impl Fn(&Tensor) -> Result<Tensor>) -> Result<MoeCounters> {
        Ok(MoeCounters {
            tokens_per_expert: make(&self.tokens_per_expert)?,
            losses: make(&self.losses)?,
            z: make(&self.z)?,
            dropped: make(&self.dropped)?,
        })
    }

    /// State for the declared layers, whose parameters are among `params`; None where there are no layers.
    pub(crate) fn new(
        s: &Stream,
        mut specs: Vec<MoeLayerSpec>,
        params: &[ParamSpec],
    ) -> Result<Option<MoeState>> {
        let Some(e) = specs.iter().map(|m| m.experts).max() else { return Ok(None) };
        for spec in &mut specs {
            // Update groups are assigned after the declaration of layers.
            let weight = format!("{}.router.weight", spec.name);
            let router = params.iter().find(|p| p.parts.iter().any(|part| part.name == weight));
            spec.router = router.map_or(spec.router, |p| p.group);
        }
        let n = specs.len();
        let zeros = |shape: &[usize], dtype| s.zeros(shape, dtype, Category::Optimizer);
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
            replay: Mutex::default(),
            splits: None,
        }))
    }

    /// The layers, in order of declaration.
    pub fn specs(&self) -> &[MoeLayerSpec] {
        &self.specs
    }

    /// A layer's row of one of the tables.
    pub(crate) fn row(&self, table: &Tensor, id: MoeLayerId) -> Result<Tensor> {
        let row = table.narrow(0, id.0, 1)?;
        row.view(&[row.numel()])
    }

    /// Resets the counters for a new step.
    pub fn begin_step(&self, s: &Stream) -> Result<()> {
        let all = [
            &self.tokens_per_expert,
            &self.global_tokens_per_expert,
            &self.micro_batches,
            &self.losses,
            &self.z,
            &self.dropped,
            &self.quantile_sums,
        ];
        all.into_iter().try_for_each(|t| s.zero(t))?;
        self.splits.as_ref().map_or(Ok(()), |splits| splits.begin_step(s))
    }

    /// From now on training passes with the all-to-all dispatcher use expected split sizes. All ranks of a stage do.
    pub fn expect_split_sizes(&mut self, rank: &Rank, headroom: SplitHeadroom) -> Result<()> {
        self.splits = Some(SplitSizes::new(rank, self.specs.len(), headroom)?);
        Ok(())
    }

    /// Expected split sizes, where they are used.
    pub fn split_sizes(&self) -> Option<&SplitSizes> {
        self.splits.as_ref()
    }

    /// i64 `[n, E]`: tokens per expert since the step began, of all ranks' tokens. Collective over a pipeline stage.
    pub fn tokens_per_expert(&self, rank: &Rank) -> Result<Tensor> {
        let load = copy(&rank.compute, &self.tokens_per_expert)?;
        rank.tp_dp_cp_group.all_reduce(&rank.compute, &load, ReduceOp::Sum, "tokens per expert")?;
        Ok(load)
    }

    /// Ends a step: updates expert biases and quantiles from the counters of all ranks, except those of frozen routers, such as
    /// a base model's: whoever uses adapters has the base's biases. Collective over a pipeline stage.
    pub fn end_step(&self, rank: &Rank, micro_batches: usize, how: &MoeTraining) -> Result<MoeCounters> {
        let (s, k) = (&rank.compute, &rank.kernels);
        let counters = self.counters(|t| copy(s, t))?;
        let all = counters.all().map(|t| (t, "tokens per expert"));
        rank.tp_dp_cp_group.all_reduce_coalesced(s, &all, ReduceOp::Sum)?;
        let used = copy(s, &counters.tokens_per_expert)?;
        for (i, spec) in self.specs.iter().enumerate() {
            let id = MoeLayerId(i);
            if spec.expert_bias && !spec.router.frozen {
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
            let trained = |m: &MoeLayerSpec| m.quantiles && !m.router.frozen;
            for (i, _) in self.specs.iter().enumerate().filter(|(_, m)| trained(m)) {
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
