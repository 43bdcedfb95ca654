//! Sequence parallelism: between blocks, rank r of t tensor-parallel ranks holds rows `r·n/t..(r+1)·n/t` of the residual
//! stream `[n, h]`; inside a block every rank works on all rows with its shard of the weights. With tp = 1 nothing moves.

use crate::StepContext;
use ferrotron_comm::ReduceOp;
use ferrotron_tensor::{Result, Tensor, shape_error};

impl StepContext<'_> {
    /// All-gathers sequence shards: `[n/t, h] → [n, h]`. The backward of [`StepContext::reduce_scatter`].
    pub fn all_gather(&self, x: &Tensor, label: &'static str) -> Result<Tensor> {
        let tp = &self.rank.tp;
        if tp.size() == 1 {
            return Ok(x.clone());
        }
        let mut shape = x.shape().to_vec();
        shape[0] *= tp.size();
        let all = self.rank.activation(&shape, x.dtype())?;
        tp.all_gather(&self.rank.compute, x, &all, label)?;
        Ok(all)
    }

    /// Reduce-scatters partial sums: `[n, h] → [n/t, h]`. The backward of [`StepContext::all_gather`].
    pub(crate) fn reduce_scatter(&self, x: &Tensor, label: &'static str) -> Result<Tensor> {
        let tp = &self.rank.tp;
        if tp.size() == 1 {
            return Ok(x.clone());
        }
        let mut shape = x.shape().to_vec();
        if !shape[0].is_multiple_of(tp.size()) {
            return shape_error(label, format!("{shape:?} does not divide over {} ranks", tp.size()));
        }
        shape[0] /= tp.size();
        let mine = self.rank.activation(&shape, x.dtype())?;
        tp.reduce_scatter(&self.rank.compute, x, &mine, ReduceOp::Sum, label)?;
        Ok(mine)
    }

    /// This rank's sequence shard of a tensor that every rank holds in full.
    pub(crate) fn local_rows(&self, x: &Tensor) -> Result<Tensor> {
        let tp = &self.rank.tp;
        let n = x.shape()[0] / tp.size();
        x.narrow(0, tp.rank() * n, n)
    }
}
