//! Inputs and labels of multi-token prediction: the global batch is shifted here, before ranks take their tokens of it, so
//! that every layout sees the same values.

use super::micro_batch::{sequence_layout, upload_targets};
use crate::Result;
use crate::data::Batch;
use crate::model::{Decoder, Input, MtpInput};
use ferrotron_engine::Rank;
use ferrotron_kernels::IGNORE;
use ferrotron_tensor::Category;

/// `values` shifted left by `by` within each sequence; `fill` after its end.
pub(super) fn shifted(values: &[i32], lengths: &[usize], by: usize, fill: i32) -> Vec<i32> {
    let mut out = vec![fill; values.len()];
    let mut start = 0;
    for len in lengths {
        let n = len.saturating_sub(by);
        if let (Some(to), Some(from)) =
            (out.get_mut(start..start + n), values.get(start + len - n..start + len))
        {
            to.copy_from_slice(from);
        }
        start += len;
    }
    out
}

/// Number of labels of a batch in the language-modelling loss and at each of `depth` MTP depths.
pub(super) fn labels(batch: &Batch, seq: usize, depth: usize) -> Result<Vec<f64>> {
    let lengths = sequence_layout(batch, seq)?.lengths();
    let count = |list: &[i32]| list.iter().filter(|l| **l != IGNORE).count() as f64;
    let of = |by| {
        if by == 0 { count(&batch.labels) } else { count(&shifted(&batch.labels, &lengths, by, IGNORE)) }
    };
    Ok((0..=depth).map(of).collect())
}

/// Weight of a label, given the number n of labels: `1/n` in the language-modelling loss, `loss_weight/(D·n)` at an MTP depth.
pub(super) fn weights(counts: &[f64], factor: f64) -> Vec<f32> {
    let depth = counts.len().saturating_sub(1) as f64;
    let of = |(d, n): (usize, &f64)| match d {
        0 => 1.0 / n.max(1.0) as f32,
        _ => (factor / depth / n.max(1.0)) as f32,
    };
    counts.iter().enumerate().map(of).collect()
}

/// Copies the inputs of the MTP layers to the device: for each depth, this rank's rows of the shifted tokens, and labels
/// with `weights`. Nothing on ranks without the last stage.
pub fn upload(
    rank: &Rank,
    decoder: &Decoder,
    batch: &Batch,
    (seq, input): (usize, &Input),
    weights: &[f32],
) -> Result<Vec<MtpInput>> {
    if !decoder.chunks().iter().any(|c| c.is_last()) {
        return Ok(Vec::new());
    }
    let lengths = sequence_layout(batch, seq)?.lengths();
    let depth = |(d, weight): (usize, &f32)| {
        let shifted = |values: &[i32], fill| shifted(values, &lengths, d + 1, fill);
        let upload = |values: &[i32]| {
            let mine = input.tokens.take(&shifted(values, 0), 0)?;
            rank.compute.upload(&mine, &[mine.len()], Category::Activations)
        };
        Ok(MtpInput {
            ids: upload(&batch.tokens)?,
            positions: upload(&batch.positions)?,
            targets: upload_targets(rank, &input.tokens, &shifted(&batch.labels, IGNORE), *weight)?,
        })
    };
    weights.iter().enumerate().map(depth).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shifts_stay_inside_sequences() {
        let values: Vec<i32> = (1..=9).collect();
        let lengths = [4, 1, 0, 4];
        assert_eq!(shifted(&values, &lengths, 0, -1), values);
        assert_eq!(shifted(&values, &lengths, 1, -1), [2, 3, 4, -1, -1, 7, 8, 9, -1]);
        assert_eq!(shifted(&values, &lengths, 3, -1), [4, -1, -1, -1, -1, 9, -1, -1, -1]);
        assert_eq!(shifted(&values, &lengths, 5, 0), [0; 9]);
    }

    #[test]
    fn labels_are_counted_by_depth() {
        let batch = Batch {
            tokens: (0..8).collect(),
            labels: vec![1, 2, IGNORE, 4, 5, 6, 7, IGNORE],
            positions: vec![0, 1, 2, 3, 0, 1, 2, 3],
            cu_seqlens: None,
            padding: None,
            varies: false,
        };
        assert_eq!(labels(&batch, 4, 2).unwrap(), [6.0, 4.0, 2.0]);
        let packed = Batch { cu_seqlens: Some(vec![0, 1, 4, 8]), ..batch };
        assert_eq!(labels(&packed, 4, 2).unwrap(), [6.0, 3.0, 2.0]);
        assert_eq!(weights(&[6.0, 3.0, 0.0], 0.5), [1.0 / 6.0, 0.25 / 3.0, 0.25]);
    }
}
