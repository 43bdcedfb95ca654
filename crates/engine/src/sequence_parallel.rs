//! Tokens spread over tensor-parallel ranks. Between blocks, rank r of t holds rows `r·n/t..(r+1)·n/t` of the
//! residual stream `[n, h]`; blocks work on all rows with their share of the weights. Alone, nothing moves.

use crate::StepContext;
use ferrotron_comm::ReduceOp;
use ferrotron_tensor::{Result, Tensor, shape_error};

impl StepContext<'_> {
    /// All rows, from every rank's: `[n/t, h] → [n, h]`. The backward of [`StepContext::reduce_scatter`].
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

    /// This rank's rows of the sum over ranks: `[n, h] → [n/t, h]`. The backward of [`StepContext::all_gather`].
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

    /// This rank's rows of a tensor that every rank has whole.
    pub(crate) fn local_rows(&self, x: &Tensor) -> Result<Tensor> {
        let tp = &self.rank.tp;
        let n = x.shape()[0] / tp.size();
        x.narrow(0, tp.rank() * n, n)
    }
}
