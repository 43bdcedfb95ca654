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
            first_tokens,
            dp_size,
        })
    }

    /// Counts labels over all ranks, from which their weights follow, and agrees on the number of packed sequences.
    pub(super) fn count_labels(&mut self, rank: &Rank, decoder: &Decoder, runner: &StepRunner) -> Result<()> {
        let (mut counts, depths) = (self.labels.clone(), self.labels.len());
        if self.sequences > 0 {
            // A sum shows which powers of two there are, and so the largest.
            counts.extend((0..usize::BITS).map(|bit| f64::from(self.sequences >> bit == 1)));
        }
        let counts = runner.all_reduce(&rank.dp, counts, "labels of the step")?;
        let (labels, powers) = counts.split_at(depths);
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
