//! The loss of the LM head: chunks of tokens and label smoothing.

use super::resolve::Derivations;
use super::{Config, Recipe, Resolved};
use crate::error::Result;
use crate::model::ModelConfig;
use ferrotron_engine::LossOptions;
use ferrotron_kernels::LabelSmoothing;
use ferrotron_tensor::format_bytes;

/// Logits of a micro-batch up to this size are computed at once: it is faster, and they fit beside a model on one GPU.
const MAX_LOGIT_BYTES: usize = 8 << 30;
/// Size of a derived chunk's logits, large enough for efficient GEMMs.
const CHUNK_BYTES: usize = 1 << 30;

/// Tokens of a chunk for `tokens` rows of logits of `row` bytes; none where all of them are small enough. A power of two, so that
/// chunks divide most sequences.
fn chunk_of(tokens: usize, row: usize) -> Option<usize> {
    (tokens.saturating_mul(row) > MAX_LOGIT_BYTES).then(|| 1 << (CHUNK_BYTES / row.max(1)).max(1).ilog2())
}

impl Recipe {
    /// Derives `train.loss_chunk` where the logits of a micro-batch would take too much memory.
    pub(super) fn derive_loss_chunk(&self, c: &mut Config, m: &ModelConfig, derived: &mut Derivations) {
        // An FP8 LM head quantizes the logits' gradient as a whole.
        if c.train.loss_chunk.is_some() || c.precision.fp8_lm_head {
            return;
        }
        let tokens = c.train.micro_batch.unwrap_or(1).saturating_mul(c.data.seq_len.unwrap_or(0));
        let tokens = tokens / c.parallel.cp.max(1);
        let row = (m.vocab / c.parallel.tp.max(1)).max(1).saturating_mul(c.precision.dtype.dtype().size());
        if let Some(chunk) = chunk_of(tokens, row) {
            let all = format_bytes(tokens.saturating_mul(row));
            let reason = format!("the logits of a micro-batch would take {all}");
            c.train.loss_chunk = Some(derived.add("train.loss_chunk", chunk, reason));
        }
    }

    /// Refuses what the LM head cannot compute.
    pub(super) fn check_loss(&self, r: &Resolved) -> Result<()> {
        let c = &r.config;
        if c.precision.fp8_lm_head && r.loss_options().chunk.is_some() {
            let what =
                "an FP8 LM head computes all logits at once; set it to 0, or leave precision.fp8_lm_head out";
            return self.refuse("train.loss_chunk", what);
        }
        if !(0.0..1.0).contains(&c.train.label_smoothing) {
            return self
                .refuse("train.label_smoothing", "must be at least 0 and below 1; 0 means no smoothing");
        }
        Ok(())
    }
}

impl Resolved {
    /// Tokens of a chunk of the loss with another micro-batch of `tokens` tokens and `tp` ranks; the recipe's own where it sets one.
    pub(crate) fn loss_chunk_with(&self, tokens: usize, tp: usize) -> Option<usize> {
        let c = &self.config;
        let derived = self.derived.iter().any(|d| d.key == "train.loss_chunk");
        if c.train.loss_chunk.is_some() && !derived || c.precision.fp8_lm_head {
            return self.loss_options().chunk;
        }
        chunk_of(tokens, (self.model.vocab / tp.max(1)).max(1) * c.precision.dtype.dtype().size())
    }

    /// How the LM head computes the loss.
    pub fn loss_options(&self) -> LossOptions {
        let t = &self.config.train;
        let label_smoothing = match t.label_smoothing {
            0.0 => LabelSmoothing::None,
            epsilon => LabelSmoothing::Megatron(epsilon as f32),
        };
        LossOptions { chunk: t.loss_chunk.filter(|chunk| *chunk > 0), label_smoothing }
    }
}
