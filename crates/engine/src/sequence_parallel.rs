//! Sequence parallelism: between blocks, rank r of t tensor-parallel ranks holds rows `r·n/t..(r+1)·n/t` of the residual
//! stream `[n, h]`; inside a block every rank works on all rows with its shard of the weights. With tp = 1 nothing moves.

use crate::StepContext;
use ferrotron_comm::{InFlight, ReduceOp};
use ferrotron_tensor::{Result, Stream, Tensor, shape_error};

impl StepContext<'_> {
    /// All-gathers sequence shards: `[n/t, h] → [n, h]`. The backward of `reduce_scatter`.
    pub fn all_gather(&self, x: &Tensor, label: &'static str) -> Result<Tensor> {
        let tp = &self.rank.tp;
        if tp.size() == 1 {
            return Ok(x.clone());
        }
        let all = self.empty_for_all(x)?;
        tp.all_gather(&self.rank.compute, x, &all, label)?;
        Ok(all)
    }

    /// Memory for the sequence shards of all ranks.
    fn empty_for_all(&self, x: &Tensor) -> Result<Tensor> {
        let mut shape = x.shape().to_vec();
        shape[0] *= self.rank.tp.size();
        self.rank.activation(&shape, x.dtype())
    }

    /// [`StepContext::all_gather`] of two tensors at once: FP8 values and their scales.
    pub(crate) fn all_gather_pair(
        &self,
        mine: [&Tensor; 2],
        labels: [&'static str; 2],
    ) -> Result<[Tensor; 2]> {
        if self.rank.tp.size() == 1 {
            return Ok(mine.map(Tensor::clone));
        }
        let all = [self.empty_for_all(mine[0])?, self.empty_for_all(mine[1])?];
        self.launch_pair(&self.rank.compute, mine, &all, labels)?;
        Ok(all)
    }

    /// [`StepContext::all_gather_pair`], overlapped with computation.
    pub(crate) fn begin_all_gather_pair(
        &self,
        mine: [&Tensor; 2],
        labels: [&'static str; 2],
    ) -> Result<InFlight<[Tensor; 2]>> {
        if self.rank.tp.size() == 1 || !self.rank.overlap {
            return Ok(InFlight::ready(self.all_gather_pair(mine, labels)?));
        }
        let all = [self.empty_for_all(mine[0])?, self.empty_for_all(mine[1])?];
        let streams = (&self.rank.compute, &self.rank.comm_stream);
        InFlight::launch(streams, all, mine.map(Tensor::clone).into(), |s, all| {
            self.launch_pair(s, mine, all, labels)
        })
    }

    fn launch_pair(
        &self,
        s: &Stream,
        mine: [&Tensor; 2],
        all: &[Tensor; 2],
        labels: [&'static str; 2],
    ) -> Result<()> {
        let calls = [(mine[0], &all[0], labels[0]), (mine[1], &all[1], labels[1])];
        Ok(self.rank.tp.all_gather_coalesced(s, &calls)?)
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
