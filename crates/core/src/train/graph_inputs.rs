//! Inputs of a replayed step: one device buffer that is filled before every replay.

use super::cuda_graph::StepShape;
use super::execute::MicroBatch;
use super::micro_batch::sequence_layout;
use crate::Result;
use crate::data::Batch;
use crate::model::{Decoder, Input};
use ferrotron_engine::{Rank, Targets};
use ferrotron_kernels::{IGNORE, scalars};
use ferrotron_tensor::{Category, DType, Tensor};

/// Rows start at multiples of this many words, as aligned as separate allocations: kernels choose the same code paths.
const BOUNDARY: usize = 64;

/// Micro-batches and scalars of a step as 4-byte words, copied to the device in one transfer from pinned memory. The copy is
/// ordered after the previous replay on the stream, so the host may run ahead.
pub(super) struct GraphInputs {
    shape: StepShape,
    /// i32 `[words]`: of each micro-batch ids, positions, labels and weights, then scalars.
    all: Tensor,
}

impl GraphInputs {
    pub(super) fn new(rank: &Rank, shape: StepShape) -> Result<GraphInputs> {
        let words = shape.micro_batches * 4 * pitch(shape) + scalars::COUNT;
        let all = Tensor::empty(&rank.compute, &[words], DType::I32, Category::Activations)?;
        Ok(GraphInputs { shape, all })
    }

    /// Row `row` (ids, positions, labels, weights) of micro-batch `i`: i32 `[tokens]`.
    fn row(&self, i: usize, row: usize) -> Result<Tensor> {
        Ok(self.all.narrow(0, (4 * i + row) * pitch(self.shape), self.shape.tokens)?)
    }

    /// f32 `[scalars::COUNT]`
    pub(super) fn scalars(&self) -> Result<Tensor> {
        let start = self.shape.micro_batches * 4 * pitch(self.shape);
        Ok(self.all.narrow(0, start, scalars::COUNT)?.view_dtype(DType::F32)?)
    }

    /// Micro-batch `i`, of rank 1 of 1: every token is a row.
    pub(super) fn micro_batch(&self, rank: &Rank, i: usize) -> Result<MicroBatch> {
        let tokens = rank.tokens(&self.shape.layout())?;
        let (ids, positions, layout) = (self.row(i, 0)?, self.row(i, 1)?, tokens.layout().clone());
        let targets = Targets { labels: self.row(i, 2)?, weights: self.row(i, 3)?.view_dtype(DType::F32)? };
        let input =
            Input { ids, positions, layout, tokens, rows: self.shape.tokens, moe: None, mtp: Vec::new() };
        Ok(MicroBatch { input, targets: Some(targets), position: None })
    }

    /// Copies the next step's inputs to the device.
    pub(super) fn fill(
        &self,
        rank: &Rank,
        decoder: &Decoder,
        batches: &[Batch],
        weight: f32,
        scalars: &[f32; scalars::COUNT],
    ) -> Result<()> {
        let words = words(self.shape, batches, weight, scalars, |b| {
            decoder.check_input(&b.tokens, &b.positions, &sequence_layout(b, self.shape.seq)?)?;
            Ok(())
        })?;
        Ok(rank.compute.upload_into(&self.all, &words)?)
    }
}

fn pitch(shape: StepShape) -> usize {
    shape.tokens.next_multiple_of(BOUNDARY)
}

fn words(
    shape: StepShape,
    batches: &[Batch],
    weight: f32,
    scalars: &[f32],
    check: impl Fn(&Batch) -> Result<()>,
) -> Result<Vec<i32>> {
    let (pitch, tokens) = (pitch(shape), shape.tokens);
    let mut words = vec![0i32; shape.micro_batches * 4 * pitch + scalars.len()];
    let bits = |x: f32| x.to_bits().cast_signed();
    for (batch, rows) in batches.iter().zip(words.chunks_exact_mut(4 * pitch)) {
        check(batch)?;
        for (row, values) in [&batch.tokens, &batch.positions, &batch.labels].into_iter().enumerate() {
            rows[row * pitch..][..tokens].copy_from_slice(values);
        }
        for (w, label) in rows[3 * pitch..].iter_mut().zip(&batch.labels) {
            *w = if *label == IGNORE { 0 } else { bits(weight) };
        }
    }
    let start = words.len() - scalars.len();
    words[start..].iter_mut().zip(scalars).for_each(|(w, x)| *w = bits(*x));
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_what_views_read() {
        let rank = Rank::cpu(1, 1).unwrap();
        let shape = StepShape { micro_batches: 2, tokens: 6, seq: 3 };
        let batch = |n: i32| Batch {
            tokens: (n..n + 6).collect(),
            labels: (0..6).map(|i| if i == 4 { IGNORE } else { n + i + 1 }).collect(),
            positions: (0..6).map(|i| i % 3).collect(),
            cu_seqlens: None,
            padding: None,
        };
        let batches = [batch(10), batch(20)];
        let scalars: [f32; scalars::COUNT] = std::array::from_fn(|i| i as f32 + 0.5);
        let inputs = GraphInputs::new(&rank, shape).unwrap();
        let words = words(shape, &batches, 0.1, &scalars, |_| Ok(())).unwrap();
        rank.compute.upload_into(&inputs.all, &words).unwrap();
        let s = &rank.compute;
        for (i, b) in batches.iter().enumerate() {
            let made = inputs.micro_batch(&rank, i).unwrap();
            // By definition: what an upload of the batch alone holds.
            let targets = made.targets.unwrap();
            let alone = crate::train::upload_targets(&rank, &made.input.tokens, &b.labels, 0.1).unwrap();
            let i32s = |t: &Tensor| s.download::<i32>(t).unwrap();
            let f32s = |t: &Tensor| s.download::<f32>(t).unwrap();
            assert_eq!(i32s(&made.input.ids), b.tokens);
            assert_eq!(i32s(&made.input.positions), b.positions);
            assert_eq!(i32s(&targets.labels), i32s(&alone.labels));
            assert_eq!(f32s(&targets.weights), f32s(&alone.weights));
            assert_eq!(made.input.rows, 6);
            for t in [&made.input.ids, &made.input.positions, &targets.labels, &targets.weights] {
                assert!(t.alignment() >= inputs.all.alignment().min(64));
            }
        }
        assert_eq!(s.download::<f32>(&inputs.scalars().unwrap()).unwrap(), scalars);
    }
}
