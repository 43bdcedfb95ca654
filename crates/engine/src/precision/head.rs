//! The output matrix where some of its products have narrow factors: a linear map like those of the layers, whose outputs
//! the loss turns into their gradients where they lie.

use super::operands::Uses;
use super::{Eight, Product, Role, Side};
use crate::head::{Head, HeadSaved, Targets};
use crate::linear::{Linear, LinearSaved};
use crate::{Measured, Pass, Rank, SavedTensor, WeightGrad};
use ferrotron_kernels::ALIGN;
use ferrotron_tensor::{DType, Error, Result, Tensor};

impl Head {
    /// The map, where the recipe holds for it and scales are known. Else notes how large its operands are, if that is what
    /// the pass is for.
    pub(crate) fn map(&self, p: &Pass, x: &Tensor) -> Result<Option<(Linear, Eight)>> {
        let Some(e) = self.eight else { return Ok(None) };
        if p.collects(self.weight, Role::Input, x)?
            && p.collects(self.weight, Role::Weight, p.weight(self.weight)?)?
        {
            return Ok(None);
        }
        Ok(Some((self.linear(p.rank, e), e)))
    }

    fn linear(&self, rank: &Rank, e: Eight) -> Linear {
        // Matrix units read bytes 16 at a time. Columns of other ranks follow on this one's: there it cannot be padded.
        let even = self.even.unwrap_or(if rank.device().card().is_some() { ALIGN } else { 1 });
        Linear::of_rows(self.weight, self.rows, e, if rank.tp.size() > 1 { 1 } else { even })
    }

    /// Does it need the largest magnitude of the hidden states?
    pub fn measures_input(&self, p: &Pass) -> bool {
        self.eight.is_some_and(|e| self.linear(p.rank, e).measures_input(p))
    }

    /// [`Head::loss`].
    pub(crate) fn loss_narrow(
        &self,
        p: &Pass,
        (map, e): (Linear, Eight),
        x: &Measured,
        targets: &Targets,
        train: bool,
    ) -> Result<(Tensor, Option<HeadSaved>)> {
        let tokens = x.values.shape()[0] * p.rank.tp.size();
        if tokens > self.chunk {
            let what = "an output matrix in 8 bits takes all rows at once; leave it in bf16, or chunks out";
            return Err(Error::Unsupported { op: "head", what: what.into() });
        }
        let rows = p.rank.activation(&[tokens], DType::F32)?;
        // Without a backward nothing is kept of the input.
        let (z, saved) = map.forward_narrow(p, e, x, !train)?;
        self.cap(p.rank, &z)?;
        self.row_loss(p.rank, &z, targets, &rows, train)?;
        let saved = HeadSaved::Narrow { dlogits: SavedTensor::activation(&z), x: Box::new(saved) };
        Ok((rows, train.then_some(saved)))
    }

    /// The logits `[rows, V]` of rows that every rank has, of the columns this rank holds.
    pub(crate) fn logits_narrow(&self, p: &Pass, (map, e): (Linear, Eight), x: &Tensor) -> Result<Tensor> {
        let uses = Uses { rows: e.output, cols: false };
        let made = p.narrow(self.weight, Role::Input, x, uses, None, None)?;
        let z =
            p.product(&made.rows.unwrap_or_else(|| Side::rows_of(x)), &map.factor(p, e, Product::Output)?)?;
        self.cap(p.rank, &z)?;
        self.shown(p, &z)
    }

    /// Logits without padding, back to back.
    pub(crate) fn shown(&self, p: &Pass, z: &Tensor) -> Result<Tensor> {
        if z.shape()[1] == self.rows {
            return Ok(z.clone());
        }
        let shown = p.empty(&[z.shape()[0], self.rows])?;
        p.rank.kernels.copy(&p.rank.compute, &z.narrow(1, 0, self.rows)?, &shown)?;
        Ok(shown)
    }

    /// [`Head::backward`].
    pub(crate) fn backward_narrow(
        &self,
        p: &Pass,
        e: Eight,
        dlogits: &Tensor,
        x: LinearSaved,
    ) -> Result<(Tensor, WeightGrad)> {
        self.linear(p.rank, e).backward_narrow(p, e, x, &Measured::from(dlogits))
    }
}
