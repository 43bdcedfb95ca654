//! Micro-batches on their way to the device, and the numbers that come back.

use super::mtp;
use crate::Result;
use crate::data::Batch;
use crate::model::Decoder;
use crate::pipeline::{DropoutRows, MicroBatch, StepPosition};
use ferrotron_engine::attention::Layout;
use ferrotron_engine::{Rank, Targets, Tokens};
use ferrotron_kernels::IGNORE;
use ferrotron_tensor::{Category, DType, Stream, Tensor};

/// A micro-batch in its step.
#[derive(Clone, Copy)]
pub(super) struct MicroBatchPosition {
    /// Step of the run.
    pub(super) step: u64,
    /// The number of its first token in the step.
    pub(super) first: u64,
    /// Its share in means over the step.
    pub(super) share: f32,
    /// Chance that an activation is dropped.
    pub(super) dropout: f32,
}

/// A micro-batch on the device; of a step, where it is one of training. `weights`: of each label in the loss, and in the
/// losses of predictions further ahead.
pub(super) fn upload(
    rank: &Rank,
    decoder: &Decoder,
    batch: &Batch,
    seq: usize,
    weights: &[f32],
    step: Option<MicroBatchPosition>,
) -> Result<MicroBatch> {
    let (positions, layout) = (Some(&batch.positions[..]), sequence_layout(batch, seq)?);
    let mut input = decoder.input_with(rank, &batch.tokens, positions, layout, batch.padding.as_deref())?;
    let (mut dropout, mut position) = (None, None);
    if let Some(s) = step.filter(|s| s.dropout > 0.0 || input.moe.is_some()) {
        let rows = token_indices(rank, &input.tokens, s.first)?;
        dropout = (s.dropout > 0.0).then(|| DropoutRows { p: s.dropout, step: s.step, rows: rows.clone() });
        position = Some(StepPosition { step: s.step, rows, share: s.share });
    }
    let (own, further) = weights.split_first().map_or((1.0, &[][..]), |(own, rest)| (*own, rest));
    input.mtp = mtp::upload(rank, decoder, batch, (seq, &input), further)?;
    let targets = Some(upload_targets(rank, &input.tokens, &batch.labels, own)?);
    Ok(MicroBatch { input, targets, dropout, position })
}

/// Which tokens see each other in a batch of rows of `seq` tokens, or of packed documents.
pub fn sequence_layout(batch: &Batch, seq: usize) -> Result<Layout> {
    Ok(match &batch.cu_seqlens {
        Some(offsets) => Layout::Packed { offsets: offsets.clone() },
        None => Layout::Rows { count: batch.tokens.len() / seq.max(1), len: seq },
    })
}

/// Labels and row weights of this rank's tokens on the device: `weight` where there is a label.
pub fn upload_targets(rank: &Rank, tokens: &Tokens, labels: &[i32], weight: f32) -> Result<Targets> {
    let labels = tokens.take(labels, IGNORE)?;
    let weights: Vec<f32> = labels.iter().map(|l| if *l == IGNORE { 0.0 } else { weight }).collect();
    Ok(Targets {
        labels: rank.compute.upload(&labels, &[labels.len()], Category::Activations)?,
        weights: rank.compute.upload(&weights, &[weights.len()], Category::Activations)?,
    })
}

/// Numbers in the step of the tokens whose rows this rank holds, of a micro-batch that begins with number `first`.
fn token_indices(rank: &Rank, tokens: &Tokens, first: u64) -> Result<Tensor> {
    let n = tokens.rows().len() / rank.tp.size();
    let mine = tokens.rows().iter().skip(rank.tp.rank() * n).take(n);
    let numbers: Vec<i32> = mine.map(|row| row.map_or(0, |i| (first + i as u64) as i32)).collect();
    Ok(rank.compute.upload(&numbers, &[n], Category::Activations)?)
}

/// `Σ weight·loss` f32 `[1]`, on the device.
pub fn weighted_loss(rank: &Rank, rows: &Tensor, t: &Targets) -> Result<Tensor> {
    let sum = rank.activation(&[1], DType::F32)?;
    rank.kernels.dot(&rank.compute, rows, &t.weights, &sum)?;
    Ok(sum)
}

/// That and, behind it, the sums of predictions further ahead, if there are any: f32 `[1 + D]`.
pub(crate) fn with_mtp_losses(rank: &Rank, own: Tensor, further: Option<&Tensor>) -> Result<Tensor> {
    let Some(further) = further else { return Ok(own) };
    let all = rank.activation(&[1 + further.numel()], DType::F32)?;
    rank.compute.copy(&own, &all.narrow(0, 0, 1)?)?;
    rank.compute.copy(further, &all.narrow(0, 1, further.numel())?)?;
    Ok(all)
}

/// One number from the device. Waits for it, and for all work given before.
pub fn read_scalar(rank: &Rank, t: &Tensor) -> Result<f64> {
    read(&rank.compute, t)
}

pub(super) fn read(s: &Stream, t: &Tensor) -> Result<f64> {
    Ok(read_all(s, t)?.iter().sum())
}

/// All numbers of a tensor.
pub(super) fn read_all(s: &Stream, t: &Tensor) -> Result<Vec<f64>> {
    Ok(s.download::<f32>(t)?.iter().map(|x| f64::from(*x)).collect())
}
