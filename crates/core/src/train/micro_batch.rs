//! Copies micro-batches to the device, and losses back to the host.

use super::execute::{MicroBatch, StepPosition};
use super::mtp;
use crate::Result;
use crate::data::Batch;
use crate::model::{Decoder, InputOptions};

use ferrotron_engine::attention::Layout;
use ferrotron_engine::{Rank, Targets, Tokens};
use ferrotron_kernels::IGNORE;
use ferrotron_tensor::{Category, DType, Stream, Tensor};

/// The place of a micro-batch in its training step.
#[derive(Clone, Copy)]
pub(super) struct MicroBatchPosition {
    /// Steps done before this one.
    pub(super) step: u64,
    /// Index in the step of its first token.
    pub(super) first: u64,
    /// Its weight in means over the step.
    pub(super) share: f32,
    /// Probability that an activation is dropped.
    pub(super) dropout: f32,
}

/// Copies a micro-batch to the device. `weights` are those of a label in the language-modelling loss and in the loss of
/// each MTP depth; `step` is given in training.
pub(super) fn upload(
    rank: &Rank,
    decoder: &Decoder,
    batch: &Batch,
    seq: usize,
    weights: &[f32],
    step: Option<MicroBatchPosition>,
) -> Result<MicroBatch> {
    let (positions, layout) = (Some(&batch.positions[..]), sequence_layout(batch, seq)?);
    let options = InputOptions { padding: batch.padding.as_deref(), varies: batch.varies };
    let mut input = decoder.input_with(rank, &batch.tokens, positions, layout, options)?;
    // Only dropout and MoE layers ask where a token lies in the step.
    let position = step.filter(|s| s.dropout > 0.0 || input.moe.is_some());
    let position = match position {
        None => None,
        Some(MicroBatchPosition { step, first, share, dropout }) => {
            let rows = token_indices(rank, &input.tokens, first)?;
            Some(StepPosition { step, device_step: None, rows, share, dropout })
        }
    };
    let (weight, mtp_weights) = weights.split_first().map_or((1.0, &[][..]), |(w, rest)| (*w, rest));
    input.mtp = mtp::upload(rank, decoder, batch, (seq, &input), mtp_weights)?;
    let targets = Some(upload_targets(rank, &input.tokens, &batch.labels, weight)?);
    Ok(MicroBatch { input, targets, position })
}

/// The sequences of a batch: rows of `seq` tokens, or packed documents.
pub fn sequence_layout(batch: &Batch, seq: usize) -> Result<Layout> {
    Ok(match &batch.cu_seqlens {
        Some(offsets) => Layout::Packed { offsets: offsets.clone() },
        None => Layout::Rows { count: batch.tokens.len() / seq.max(1), len: seq },
    })
}

/// Copies this rank's labels and loss weights to the device: `weight` where there is a label, else 0.
pub fn upload_targets(rank: &Rank, tokens: &Tokens, labels: &[i32], weight: f32) -> Result<Targets> {
    let labels = tokens.take(labels, IGNORE)?;
    let weights: Vec<f32> = labels.iter().map(|l| if *l == IGNORE { 0.0 } else { weight }).collect();
    Ok(Targets {
        labels: rank.compute.upload(&labels, &[labels.len()], Category::Activations)?,
        weights: rank.compute.upload(&weights, &[weights.len()], Category::Activations)?,
    })
}

/// i32 `[rows]`: index in the step of each token whose row this rank holds; the micro-batch starts at index `first`.
pub(super) fn token_indices(rank: &Rank, tokens: &Tokens, first: u64) -> Result<Tensor> {
    let n = tokens.rows().len() / rank.tp.size();
    let mine = tokens.rows().iter().skip(rank.tp.rank() * n).take(n);
    let indices: Vec<i32> = mine.map(|row| row.map_or(0, |i| (first + i as u64) as i32)).collect();
    Ok(rank.compute.upload(&indices, &[n], Category::Activations)?)
}

/// `Σ weight·loss` f32 `[1]`, on the device.
pub fn weighted_loss(rank: &Rank, rows: &Tensor, t: &Targets) -> Result<Tensor> {
    let sum = rank.activation(&[1], DType::F32)?;
    rank.kernels.dot(&rank.compute, rows, &t.weights, &sum)?;
    Ok(sum)
}

/// Appends the losses of the MTP depths to that of the language model: f32 `[1 + D]`.
pub(super) fn with_mtp_losses(rank: &Rank, own: Tensor, mtp: Option<&Tensor>) -> Result<Tensor> {
    let Some(mtp) = mtp else { return Ok(own) };
    let all = rank.activation(&[1 + mtp.numel()], DType::F32)?;
    rank.compute.copy(&own, &all.narrow(0, 0, 1)?)?;
    rank.compute.copy(mtp, &all.narrow(0, 1, mtp.numel())?)?;
    Ok(all)
}

/// Reads the sum of a small f32 tensor. Waits for all work on the compute stream.
pub fn read_scalar(rank: &Rank, t: &Tensor) -> Result<f64> {
    read(&rank.compute, t)
}

pub(super) fn read(s: &Stream, t: &Tensor) -> Result<f64> {
    Ok(read_all(s, t)?.iter().sum())
}

/// Reads all values of an f32 tensor.
pub(super) fn read_all(s: &Stream, t: &Tensor) -> Result<Vec<f64>> {
    Ok(s.download::<f32>(t)?.iter().map(|x| f64::from(*x)).collect())
}
