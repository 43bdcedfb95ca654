//! Losses of given tokens, for evaluation: one forward pass over sequences side by side, without padding.

use super::{ForwardMode, Model};
use crate::train::upload_targets;
use crate::{Error, Result};
use ferrotron_engine::StepContext;
use ferrotron_engine::attention::Layout;

/// A sequence and the token that each of its positions is to predict.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sequence {
    /// Token ids; at least one.
    pub tokens: Vec<i32>,
    /// As many: the next token, or [`ferrotron_kernels::IGNORE`] where nothing is scored.
    pub labels: Vec<i32>,
}

impl Model {
    /// `−ln p(label)` of every position of every sequence, 0 where nothing is scored. Tensor-parallel ranks call it
    /// together and get the same losses; the layout has neither pipeline stages nor context parallelism.
    pub fn token_losses(&self, sequences: &[Sequence]) -> Result<Vec<Vec<f32>>> {
        let [whole] = self.decoder.chunks() else {
            return Err(Error::Invalid("scoring needs the whole model on a rank; use pp=1".into()));
        };
        if self.rank.cp.size() > 1 {
            return Err(Error::Invalid("scoring needs whole sequences on a rank; use cp=1".into()));
        }
        let mut offsets = vec![0];
        let (mut ids, mut labels) = (Vec::new(), Vec::new());
        for s in sequences {
            ids.extend_from_slice(&s.tokens);
            labels.extend_from_slice(&s.labels);
            offsets.push(
                i32::try_from(ids.len()).map_err(|_| Error::Invalid("too many tokens for a pass".into()))?,
            );
        }
        // This is no part of a training step, and quantized weights stay valid.
        let pass = StepContext { train: false, ..self.pass() };
        pass.state.begin_evaluation();
        let losses: Result<Vec<f32>> = (|| {
            let input = self.decoder.input(&self.rank, &ids, None, Layout::Packed { offsets })?;
            let targets = upload_targets(&self.rank, &input.tokens, &labels, 1.0)?;
            let (rows, _) = whole.forward(&pass, &input, None, ForwardMode::Loss(&targets))?;
            let rows: Vec<f32> = self.rank.compute.download(&rows)?;
            let mut all = vec![0f32; ids.len()];
            input.tokens.put(&rows, 1, &mut all)?;
            Ok(all)
        })();
        pass.state.end_evaluation();
        let mut rest = losses?.into_iter();
        Ok(sequences.iter().map(|s| rest.by_ref().take(s.tokens.len()).collect()).collect())
    }
}
