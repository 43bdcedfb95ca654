//! One step's share of the global batch: the micro-batches of this data-parallel rank.

use super::execute::MicroBatch;
use super::micro_batch::{MicroBatchPosition, upload};
use super::mtp;
use super::step_runner::StepRunner;
use crate::Result;
use crate::data::{Batch, Batches};
use crate::model::Decoder;
use ferrotron_engine::Rank;

/// Smallest number of packed sequences that steps are told apart by.
const MIN_SEQUENCES: usize = 8;

/// The micro-batches that this data-parallel rank computes in one step, on the host.
pub(super) struct GlobalBatch {
    pub(super) micro_batches: Vec<Batch>,
    /// Tokens of a sequence; of the longest, where their lengths vary.
    pub(super) seq: usize,
    /// Sequences of the step over all data-parallel ranks.
    pub(super) samples: u64,
    /// Tokens of the step over all data-parallel ranks.
    pub(super) tokens: u64,
    /// Labels of this rank's micro-batches, of the language model and of each MTP depth.
    labels: Vec<f64>,
    /// Weight of a label: `1/n` in the language-modelling loss of n labels, then `loss_weight/(D·n)` at each MTP depth.
    pub(super) label_weights: Vec<f32>,
    /// Packed sequences of a micro-batch at most, over all data-parallel ranks and rounded up to a power of two; 0 where each
    /// sample is one.
    pub(super) sequences: usize,
    /// A micro-batch has padding; after [`GlobalBatch::count_labels`], one of any data-parallel rank.
    pub(super) is_padded: bool,
    /// Index in the step of the first token of each micro-batch of this rank.
    first_tokens: Vec<u64>,
    dp_size: u64,
}

impl GlobalBatch {
    /// Reads the samples that follow the `consumed` first ones of `data`. Changes nothing and communicates with nobody, so
    /// that a rank whose data cannot be read leaves the state of the last step; [`GlobalBatch::count_labels`] is to follow.
    ///
    /// Data-parallel ranks take micro-batches in turn: micro-batch i of rank r starts at sample `(i·dp + r)·micro`.
    pub(super) fn read(
        rank: &Rank,
        decoder: &Decoder,
        runner: &StepRunner,
        data: &dyn Batches,
    ) -> Result<GlobalBatch> {
        let (dp_rank, dp_size) = (rank.dp.rank() as u64, rank.dp.size() as u64);
        let (schedule, consumed) = (&runner.schedules.batch, runner.progress.samples);
        let count = schedule.at(consumed, dp_size)?.count;
        let micro = schedule.micro;
        let micro_batches = (0..count)
            .map(|i| data.batch(consumed + (i * dp_size + dp_rank) * micro, micro as usize))
            .collect::<Result<Vec<_>>>()?;
        let packed = micro_batches.iter().filter_map(|b| b.cu_seqlens.as_ref());
        let held = |offsets: &Vec<i32>| offsets.len().saturating_sub(1).max(MIN_SEQUENCES);
        let sequences = packed.map(|offsets| held(offsets).next_power_of_two()).max();
        let is_padded = micro_batches.iter().any(|b| b.padding.is_some());
        let (seq, depth) = (data.seq(), decoder.config().mtp_depth());
        let mut labels = vec![0.0; 1 + depth];
        for batch in &micro_batches {
            let counts = mtp::labels(batch, seq, depth)?;
            labels.iter_mut().zip(counts).for_each(|(all, n)| *all += n);
        }
        // Tokens are numbered in the order of samples, whichever rank computes them.
        let (mut first_tokens, mut tokens) = (Vec::new(), 0);
        for m in 0..count * dp_size {
            if m % dp_size == dp_rank {
                first_tokens.push(tokens);
            }
            tokens += data.tokens(consumed + m * micro, micro)?;
        }
        Ok(GlobalBatch {
            micro_batches,
            seq,
            samples: micro * count * dp_size,
            tokens,
            labels,
            label_weights: Vec::new(),
            sequences: sequences.unwrap_or(0),
            is_padded,
            first_tokens,
            dp_size,
        })
    }

    /// Counts labels over all ranks, from which their weights follow, and agrees on the number of packed sequences and on
    /// whether there is padding, by which all ranks launch the step alike.
    pub(super) fn count_labels(&mut self, rank: &Rank, decoder: &Decoder, runner: &StepRunner) -> Result<()> {
        let (mut counts, depths) = (self.labels.clone(), self.labels.len());
        counts.push(f64::from(u8::from(self.is_padded)));
        if self.sequences > 0 {
            // A sum shows which powers of two there are, and so the largest.
            counts.extend((0..usize::BITS).map(|bit| f64::from(self.sequences >> bit == 1)));
        }
        let counts = runner.all_reduce(&rank.dp, counts, "labels of the step")?;
        let (labels, rest) = counts.split_at(depths);
        let (padded, powers) = rest.split_at(1);
        self.is_padded = padded.iter().any(|ranks| *ranks > 0.0);
        self.sequences = powers.iter().rposition(|ranks| *ranks > 0.0).map_or(0, |bit| 1 << bit);
        self.label_weights = mtp::weights(labels, decoder.mtp().loss_weight);
        Ok(())
    }

    /// Index in the step of the first token of micro-batch `i`.
    pub(super) fn first_token(&self, i: usize) -> u64 {
        self.first_tokens[i]
    }

    /// Weight of a micro-batch in means over the step.
    pub(super) fn micro_batch_share(&self) -> f32 {
        1.0 / (self.micro_batches.len() as u64 * self.dp_size).max(1) as f32
    }

    /// Copies micro-batch `i` to the device.
    pub(super) fn upload(
        &self,
        rank: &Rank,
        decoder: &Decoder,
        i: usize,
        at: StepSeed,
    ) -> Result<MicroBatch> {
        let position = MicroBatchPosition {
            step: at.step,
            first: self.first_token(i),
            share: self.micro_batch_share(),
            dropout: at.dropout,
        };
        upload(rank, decoder, &self.micro_batches[i], self.seq, &self.label_weights, Some(position))
    }

    /// For each token of the step, whether this rank computes it: padding and other ranks' tokens are not.
    pub(super) fn local_tokens(&self) -> Vec<bool> {
        let mut local = vec![false; self.tokens as usize];
        for (i, batch) in self.micro_batches.iter().enumerate() {
            let is_token = |t: usize| batch.padding.as_ref().is_none_or(|p| !p[t]);
            let here = local.iter_mut().skip(self.first_token(i) as usize).take(batch.tokens.len());
            here.enumerate().for_each(|(t, n)| *n = is_token(t));
        }
        local
    }
}

/// What random draws of a step depend on besides the token.
#[derive(Clone, Copy)]
pub(super) struct StepSeed {
    /// Steps done before this one.
    pub(super) step: u64,
    /// Probability that an activation is dropped.
    pub(super) dropout: f32,
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::config::Recipe;
    use crate::data::Row;
    use crate::ranks::on_threads_with;
    use crate::train::Trainer;
    use std::time::Duration;

    /// Rows of one document each; samples of the first rank are shorter and padded.
    struct Documents;

    impl Batches for Documents {
        fn seq(&self) -> usize {
            8
        }

        fn samples(&self) -> u64 {
            64
        }

        fn resets(&self) -> bool {
            true
        }

        fn row(&self, n: u64, row: &mut Row) -> Result<()> {
            row.padding = if n == 0 { 3 } else { 0 };
            let tokens = 8 - row.padding;
            row.starts.extend([0, tokens].iter().take(1 + usize::from(row.padding > 0)));
            row.tokens.extend(0..8);
            row.labels.extend((0..8).map(|i| if i < tokens { i as i32 } else { crate::data::IGNORE }));
            row.positions.extend(0..8);
            Ok(())
        }
    }

    /// Every rank knows of padding that one rank has: by it steps are captured, which all ranks must do together.
    #[test]
    fn ranks_agree_on_padding() {
        let mut recipe = Recipe::named("tiny").unwrap();
        for set in ["train.global_batch=4", "train.micro_batch=1", "parallel.dp=2", "data.seq_len=8"] {
            recipe.set(set).unwrap();
        }
        let resolved = recipe.resolve(None).unwrap();
        let layout = resolved.config.parallel.layout();
        let agreed = on_threads_with(
            &layout,
            Duration::from_secs(20),
            Default::default(),
            || Ok(Rank::cpu(1, 1)?),
            |rank| {
                let t = Trainer::new(rank, &resolved)?;
                let mut batch = GlobalBatch::read(&t.rank, &t.model.decoder, &t.runner, &Documents)?;
                let before = batch.is_padded;
                batch.count_labels(&t.rank, &t.model.decoder, &t.runner)?;
                assert_eq!(batch.label_weights, [1.0 / 29.0]);
                Ok([before, batch.is_padded])
            },
        );
        assert_eq!(agreed.unwrap(), [[true, true], [false, true]]);
    }
}
