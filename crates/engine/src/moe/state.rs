//! What mixtures remember besides weights: the bias of choices, and counters of a step. All of it is on the device.

use super::replay::Replay;
use super::{Balancing, Chooser, MoeTraining};
use crate::Rank;
use ferrotron_comm::Reduce;
use ferrotron_tensor::{Category, DType, Result, Stream, Tensor};
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A mixture's number among those of its rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MixtureId(pub(crate) usize);

/// What is declared of a mixture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MixtureSpec {
    /// Its name, such as `layers.3.moe`.
    pub name: String,
    /// Experts.
    pub experts: usize,
    /// Is a bias added to scores for the choice?
    pub correction: bool,
    /// Is a quantile subtracted from logits for the choice?
    pub quantiles: bool,
}

/// Numbers of a mixture in a step, in the order of its row of [`Mixtures::losses`].
pub(crate) const LOSSES: usize = Balancing::ALL.len();

/// The state of all mixtures of a rank: n mixtures of E experts.
pub struct Mixtures {
    specs: Vec<MixtureSpec>,
    /// f32 `[n, E]`: added to scores for the choice.
    pub bias: Tensor,
    /// f32 `[n, E]`: subtracted from logits for the choice.
    pub quantiles: Tensor,
    /// f32 `[n, E]`: what the micro-batches of a step say the quantiles are, summed.
    pub(crate) estimates: Tensor,
    /// i64 `[n, E]`: choices of each expert in this step, of this rank's tokens.
    pub(crate) load: Tensor,
    /// i64 `[n, E]`: the best scores of the step so far, of all ranks' tokens.
    pub(crate) running: Tensor,
    /// f32 `[n]`: micro-batches in that.
    pub(crate) steps: Tensor,
    /// f32 `[n, losses]`: balancing losses of the step, with their factors.
    pub(crate) losses: Tensor,
    /// f64 `[n, 2]`: squares of logsumexp, and rows.
    pub(crate) z: Tensor,
    /// i64 `[n]`: choices beyond the capacity.
    pub(crate) dropped: Tensor,
    /// Of each mixture, what forward decided and a second forward must not decide anew, oldest first.
    decided: Mutex<Vec<VecDeque<Decided>>>,
    pub(super) replay: Mutex<Replay>,
}

/// What a forward pass decided.
#[derive(Clone)]
pub(crate) struct Decided {
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
pub struct Counters {
    /// i64 `[n, E]`
    pub load: Tensor,
    /// f32 `[n, losses]`
    pub losses: Tensor,
    /// f64 `[n, 2]`
    pub z: Tensor,
    /// i64 `[n]`
    pub dropped: Tensor,
}

impl Mixtures {
    /// Memory for what was declared; none where there is no mixture.
    pub(crate) fn new(s: &Stream, specs: Vec<MixtureSpec>) -> Result<Option<Mixtures>> {
        let Some(e) = specs.iter().map(|m| m.experts).max() else { return Ok(None) };
        let n = specs.len();
        let zeros = |shape: &[usize], dtype| s.zeros(shape, dtype, Category::Optimizer);
        let decided = Mutex::new((0..n).map(|_| VecDeque::new()).collect());
        Ok(Some(Mixtures {
            bias: zeros(&[n, e], DType::F32)?,
            quantiles: zeros(&[n, e], DType::F32)?,
            estimates: zeros(&[n, e], DType::F32)?,
            load: zeros(&[n, e], DType::I64)?,
            running: zeros(&[n, e], DType::I64)?,
            steps: zeros(&[n], DType::F32)?,
            losses: zeros(&[n, LOSSES], DType::F32)?,
            z: zeros(&[n, 2], DType::F64)?,
            dropped: zeros(&[n], DType::I64)?,
            specs,
            decided,
            replay: Mutex::default(),
        }))
    }

    /// The mixtures, in order of declaration.
    pub fn specs(&self) -> &[MixtureSpec] {
        &self.specs
    }

    /// A mixture's row of one of the tables.
    pub(crate) fn row(&self, table: &Tensor, id: MixtureId) -> Result<Tensor> {
        let row = table.narrow(0, id.0, 1)?;
        row.view(&[row.numel()])
    }

    /// Remembers what a pass decided, for the pass that computes it again.
    pub(crate) fn remember(&self, id: MixtureId, decided: Decided) {
        self.decided()[id.0].push_back(decided);
    }

    /// What the oldest pass decided that was not computed again yet, of those uses of the mixture.
    pub(crate) fn recall(&self, id: MixtureId, repeat: u32) -> Option<Decided> {
        let list = &mut self.decided()[id.0];
        let oldest = list.iter().position(|d| d.repeat == repeat)?;
        list.remove(oldest)
    }

    fn decided(&self) -> MutexGuard<'_, Vec<VecDeque<Decided>>> {
        self.decided.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A step begins: counters start from zero.
    pub fn begin_step(&self, s: &Stream) -> Result<()> {
        self.decided().iter_mut().for_each(VecDeque::clear);
        let all =
            [&self.load, &self.running, &self.steps, &self.losses, &self.z, &self.dropped, &self.estimates];
        all.into_iter().try_for_each(|t| s.zero(t))
    }

    /// i64 `[n, E]`: choices of each expert since the step began, of all ranks' tokens. Every rank of a stage calls it.
    pub fn load(&self, rank: &Rank) -> Result<Tensor> {
        let load = copy(&rank.compute, &self.load)?;
        rank.step.all_reduce(&rank.compute, &load, Reduce::Sum, "loads of experts")?;
        Ok(load)
    }

    /// A step has ended: biases and quantiles move by what all ranks have counted. Every rank of a stage calls it.
    pub fn end_step(&self, rank: &Rank, micro_batches: usize, how: &MoeTraining) -> Result<Counters> {
        let (s, k) = (&rank.compute, &rank.kernels);
        let counters = Counters {
            load: copy(s, &self.load)?,
            losses: copy(s, &self.losses)?,
            z: copy(s, &self.z)?,
            dropped: copy(s, &self.dropped)?,
        };
        for t in [&counters.load, &counters.losses, &counters.z, &counters.dropped] {
            rank.step.all_reduce(s, t, Reduce::Sum, "loads of experts")?;
        }
        let used = copy(s, &counters.load)?;
        for (i, spec) in self.specs.iter().enumerate() {
            let id = MixtureId(i);
            if spec.correction {
                k.update_bias(s, how.bias_rate, &self.row(&used, id)?, &self.row(&self.bias, id)?)?;
            }
        }
        if let Chooser::Quantiles { keep } = how.chooser {
            rank.copies.all_reduce(s, &self.estimates, Reduce::Sum, "quantiles")?;
            let mean = 1.0 / (micro_batches * rank.copies.size()) as f32;
            for (i, _) in self.specs.iter().enumerate().filter(|(_, m)| m.quantiles) {
                let id = MixtureId(i);
                let (beta, found) = (self.row(&self.quantiles, id)?, self.row(&self.estimates, id)?);
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
