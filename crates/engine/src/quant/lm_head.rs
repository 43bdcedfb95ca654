//! FP8 LM head: a column-parallel FP8 linear whose outputs the loss overwrites with their gradients.

use super::quantize::Orientations;
use super::{GemmOperand, LinearGemm, LinearQuant, Role};
use crate::linear::{Linear, LinearSaved};
use crate::lm_head::{LmHead, LmHeadSaved, Targets};
use crate::{Rank, SavedTensor, StepContext, WeightGrad, WithAmax};
use ferrotron_kernels::ALIGN;
use ferrotron_tensor::{DType, Error, Result, Tensor};

impl LmHead {
    /// The head as a linear, where it is quantized and scales are known. None in a calibration pass, which measures
    /// the operands instead.
    pub(crate) fn fp8_linear(&self, p: &StepContext, x: &Tensor) -> Result<Option<(Linear, LinearQuant)>> {
        let Some(e) = self.quant else { return Ok(None) };
        if p.calibrates(self.weight, Role::Input, x)?
            && p.calibrates(self.weight, Role::Weight, &*p.weight(self.weight)?)?
        {
            return Ok(None);
        }
        Ok(Some((self.linear(p.rank, e), e)))
    }

    fn linear(&self, rank: &Rank, e: LinearQuant) -> Linear {
        // FP8 GEMMs need 16-byte rows. With tp the next rank's vocabulary follows this one's, so it cannot be padded.
        let pad = self.pad_vocab_to.unwrap_or(if rank.device().gpu().is_some() { ALIGN } else { 1 });
        Linear::column_parallel(self.weight, self.rows, e, if rank.tp.size() > 1 { 1 } else { pad })
    }

    /// Whether the caller should pass the amax of the hidden states along with them.
    pub fn needs_input_amax(&self, p: &StepContext) -> bool {
        self.quant.is_some_and(|e| self.linear(p.rank, e).needs_input_amax(p))
    }

    /// [`LmHead::loss`].
    pub(crate) fn loss_fp8(
        &self,
        p: &StepContext,
        (map, e): (Linear, LinearQuant),
        x: &WithAmax,
        targets: &Targets,
        train: bool,
    ) -> Result<(Tensor, Option<LmHeadSaved>)> {
        let tokens = x.values.shape()[0] * p.rank.tp.size();
        if tokens > self.chunk() {
            let what = "an FP8 LM head cannot compute the loss in chunks; keep it in bf16, or unset train.loss_chunk";
            return Err(Error::Unsupported { op: "LM head", what: what.into() });
        }
        let rows = p.rank.activation(&[tokens], DType::F32)?;
        // Without a backward pass nothing is saved of the input.
        let (z, saved) = map.forward_fp8(p, e, x, (!train, None))?;
        self.cap(p.rank, &z)?;
        self.row_loss(p.rank, &z, targets, &rows, train)?;
        let saved = LmHeadSaved::Quantized { dlogits: SavedTensor::activation(&z), x: Box::new(saved) };
        Ok((rows, train.then_some(saved)))
    }

    /// Logits `[tokens, V]` of hidden states that every tensor-parallel rank has, of this rank's vocabulary entries.
    pub(crate) fn logits_fp8(
        &self,
        p: &StepContext,
        (map, e): (Linear, LinearQuant),
        x: &Tensor,
    ) -> Result<Tensor> {
        let orientations = Orientations { rows: e.fprop, cols: false };
        let quantized = p.quantize(self.weight, Role::Input, x, orientations)?;
        let z = p.gemm(
            &quantized.rows.unwrap_or_else(|| GemmOperand::rowwise(x)),
            &map.factor(p, e, LinearGemm::Fprop)?,
        )?;
        self.cap(p.rank, &z)?;
        self.unpadded(p, &z)
    }

    /// Logits without vocabulary padding, contiguous.
    pub(crate) fn unpadded(&self, p: &StepContext, z: &Tensor) -> Result<Tensor> {
        if z.shape()[1] == self.rows {
            return Ok(z.clone());
        }
        let unpadded = p.empty(&[z.shape()[0], self.rows])?;
        p.rank.kernels.copy(&p.rank.compute, &z.narrow(1, 0, self.rows)?, &unpadded)?;
        Ok(unpadded)
    }

    /// [`LmHead::backward`].
    pub(crate) fn backward_fp8(
        &self,
        p: &StepContext,
        e: LinearQuant,
        dlogits: &Tensor,
        x: LinearSaved,
    ) -> Result<(Tensor, WeightGrad)> {
        self.linear(p.rank, e).backward_fp8(p, e, x, &WithAmax::from(dlogits))
    }
}
