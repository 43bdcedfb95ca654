//! Context parallelism by all-gather: every rank gathers all keys and values; each of its two query chunks attends to a
//! prefix of them.

use super::partial::{KvWidths, OnlineSoftmax, PartialGrads, add};
use super::{ContextParallel, Gradients, Inputs};
use crate::SavedTensor;
use ferrotron_comm::ReduceOp;
use ferrotron_kernels::EmbeddingForward;
use ferrotron_tensor::{Category, Result, Tensor};

impl ContextParallel<'_> {
    /// Reorders rows `[n, width]`: row i of the result is row `order[i]`.
    pub(super) fn reordered(&self, rows: &Tensor, order: &[i32]) -> Result<Tensor> {
        let (rank, n) = (self.rank, rows.shape()[0]);
        let order = rank.compute.constant(order, &[order.len()], Category::Activations)?;
        let out = rank.activation(rows.shape(), rows.dtype())?;
        // Row gathering is an embedding lookup.
        rank.kernels.embedding_forward(
            &rank.compute,
            &EmbeddingForward {
                ids: &order,
                table: rows,
                first: 0,
                vocab: n,
                scale: 1.0,
                add: false,
                y: &out,
            },
        )?;
        Ok(out)
    }

    /// All-gathers keys and values, packed, in natural token order.
    fn gathered(&self, widths: &KvWidths, x: &Inputs, label: &'static str) -> Result<Tensor> {
        let rank = self.rank;
        let mine = widths.pack(rank, x.k, x.v)?;
        let all = rank.activation(&[self.place.size * mine.shape()[0], widths.row()], mine.dtype())?;
        rank.cp.all_gather(&rank.compute, &mine, &all, label)?;
        self.reordered(&all, &self.plan.to_natural()?)
    }

    pub(super) fn all_gather_forward(&self, x: &Inputs, out: &Tensor) -> Result<SavedTensor> {
        let widths = KvWidths::of(x.k, x.v);
        let (k, v) = widths.split(&self.gathered(&widths, x, "keys and values")?)?;
        let mut joined = OnlineSoftmax::new(self, x.q, x.sink, out)?;
        for late in [false, true] {
            joined.attend(&self.plan.prefix(self.scores, late)?, &k, &v)?;
        }
        Ok(SavedTensor::activation(&joined.finish()?))
    }

    pub(super) fn all_gather_backward(&self, lse: &Tensor, x: &Inputs, y: &Gradients) -> Result<()> {
        let rank = self.rank;
        let widths = KvWidths::of(x.k, x.v);
        // Gathered again rather than saved: the gathered tensor is cp times this rank's.
        let (k, v) = widths.split(&self.gathered(&widths, x, "keys and values for backward")?)?;
        let mut gradients = PartialGrads::new(self, x.q, lse, y);
        let mut sums = None;
        for late in [false, true] {
            let dkv = gradients.of(&self.plan.prefix(self.scores, late)?, &k, &v)?;
            sums = Some(add(rank, sums, dkv)?);
        }
        gradients.finish(y.dq)?;
        let Some(sums) = sums else { return Ok(()) };
        let all = self.reordered(&sums, &self.plan.to_ranks()?)?;
        let mine = rank.activation(&[x.k.shape()[0], widths.row()], all.dtype())?;
        rank.cp.reduce_scatter(&rank.compute, &all, &mine, ReduceOp::Sum, "gradients of keys and values")?;
        widths.write_grads(rank, &mine, y.dk, y.dv)
    }
}
