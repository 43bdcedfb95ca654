//! Inputs of a replayed step: one device buffer that is filled before every replay.

use super::cuda_graph::StepShape;
use super::execute::{MicroBatch, StepPosition};
use super::global_batch::GlobalBatch;
use super::micro_batch::{sequence_layout, token_indices};
use crate::Result;
use crate::data::Batch;
use crate::model::{Decoder, Input};
use ferrotron_engine::moe::MoeInput;
use ferrotron_engine::{Rank, Targets, Tokens};
use ferrotron_kernels::{IGNORE, scalars};
use ferrotron_tensor::{Category, DType, Tensor};

/// Rows start at multiples of this many words, as aligned as separate allocations: kernels choose the same code paths.
const BOUNDARY: usize = 64;

/// Micro-batches and scalars of a step as 4-byte words, copied to the device in one transfer from pinned memory. The copy is
/// ordered after the previous replay on the stream, so the host may run ahead.
pub(super) struct GraphInputs {
    shape: StepShape,
    /// This rank's tokens of a micro-batch.
    tokens: Tokens,
    /// i32 `[words]`: of each micro-batch ids, positions, labels and weights, then scalars.
    all: Tensor,
    /// What MoE layers need to know of a micro-batch: the same in every step.
    moe: Option<MoeInput>,
    /// Of each micro-batch of a model with MoE layers, i32 `[rows]`: index in the step of each row's token.
    rows: Vec<Tensor>,
    /// Weight of a micro-batch in means over the step.
    share: f32,
}

impl GraphInputs {
    /// Memory for steps of this shape.
    pub(super) fn new(rank: &Rank, shape: StepShape) -> Result<GraphInputs> {
        let tokens = rank.tokens(&shape.layout())?;
        let words = shape.micro_batches * 4 * pitch(&tokens) + scalars::COUNT;
        let all = Tensor::empty(&rank.compute, &[words], DType::I32, Category::Activations)?;
        Ok(GraphInputs { shape, tokens, all, moe: None, rows: Vec::new(), share: 0.0 })
    }

    /// Adds what MoE layers need, the same in every step of the shape of `batch`. Collective over a pipeline stage.
    pub(super) fn with_moe(self, rank: &Rank, decoder: &Decoder, batch: &GlobalBatch) -> Result<GraphInputs> {
        let moe = decoder.moe_input(rank, &self.shape.layout(), &self.tokens, None)?;
        let index = |i| token_indices(rank, &self.tokens, batch.first_token(i));
        let count = if moe.is_some() { self.shape.micro_batches } else { 0 };
        let rows = (0..count).map(index).collect::<Result<_>>()?;
        Ok(GraphInputs { moe, rows, share: batch.micro_batch_share(), ..self })
    }

    /// Row `row` (ids, positions, labels, weights) of micro-batch `i`: i32 `[tokens of this rank]`.
    fn row(&self, i: usize, row: usize) -> Result<Tensor> {
        Ok(self.all.narrow(0, (4 * i + row) * pitch(&self.tokens), self.tokens.rows().len())?)
    }

    /// f32 `[scalars::COUNT]`
    pub(super) fn scalars(&self) -> Result<Tensor> {
        let start = self.shape.micro_batches * 4 * pitch(&self.tokens);
        Ok(self.all.narrow(0, start, scalars::COUNT)?.view_dtype(DType::F32)?)
    }

    /// Micro-batch `i`.
    pub(super) fn micro_batch(&self, rank: &Rank, i: usize) -> Result<MicroBatch> {
        let (ids, positions, tokens) = (self.row(i, 0)?, self.row(i, 1)?, self.tokens.clone());
        let targets = Targets { labels: self.row(i, 2)?, weights: self.row(i, 3)?.view_dtype(DType::F32)? };
        let (layout, rows) = (tokens.layout().clone(), ids.numel() / rank.tp.size());
        let input = Input { ids, positions, layout, tokens, rows, moe: self.moe.clone(), mtp: Vec::new() };
        // Nothing that is captured depends on the number of the step.
        let position =
            |rows: &Tensor| StepPosition { step: 0, rows: rows.clone(), share: self.share, dropout: 0.0 };
        Ok(MicroBatch { input, targets: Some(targets), position: self.rows.get(i).map(position) })
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
        let words = words(&self.tokens, batches, weight, scalars, |b| {
            decoder.check_input(&b.tokens, &b.positions, &sequence_layout(b, self.shape.seq)?)?;
            Ok(())
        })?;
        Ok(rank.compute.upload_into(&self.all, &words)?)
    }
}

fn pitch(tokens: &Tokens) -> usize {
    tokens.rows().len().next_multiple_of(BOUNDARY)
}

fn words(
    tokens: &Tokens,
    batches: &[Batch],
    weight: f32,
    scalars: &[f32],
    check: impl Fn(&Batch) -> Result<()>,
) -> Result<Vec<i32>> {
    let (pitch, n) = (pitch(tokens), tokens.rows().len());
    let mut words = vec![0i32; batches.len() * 4 * pitch + scalars.len()];
    let bits = |x: f32| x.to_bits().cast_signed();
    for (batch, rows) in batches.iter().zip(words.chunks_exact_mut(4 * pitch)) {
        check(batch)?;
        let lists = [(&batch.tokens, 0), (&batch.positions, 0), (&batch.labels, IGNORE)];
        for (row, (values, pad)) in lists.into_iter().enumerate() {
            rows[row * pitch..][..n].copy_from_slice(&tokens.take(values, pad)?);
        }
        let (labels, weights) = rows[2 * pitch..].split_at_mut(pitch);
        for (w, label) in weights.iter_mut().zip(&labels[..n]) {
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
    use ferrotron_engine::GroupRank;

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
            varies: false,
        };
        let batches = [batch(10), batch(20)];
        let scalars: [f32; scalars::COUNT] = std::array::from_fn(|i| i as f32 + 0.5);
        let inputs = GraphInputs::new(&rank, shape).unwrap();
        let words = words(&inputs.tokens, &batches, 0.1, &scalars, |_| Ok(())).unwrap();
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

    #[test]
    fn a_context_parallel_rank_gets_its_own_tokens() {
        let layout = StepShape { micro_batches: 1, tokens: 6, seq: 6 }.layout();
        let tokens = Tokens::new(&layout, GroupRank { rank: 1, size: 2 }, 1).unwrap();
        let batch = Batch {
            tokens: (10..16).collect(),
            labels: vec![11, 12, IGNORE, 14, 15, 16],
            positions: (0..6).collect(),
            cu_seqlens: None,
            padding: None,
            varies: false,
        };
        let words = words(&tokens, &[batch], 0.5, &[], |_| Ok(())).unwrap();
        // Six tokens are padded to eight in four chunks; rank 1 of 2 has the second and the third.
        let half = 0.5f32.to_bits().cast_signed();
        let rows = [[12, 13, 14, 15], [2, 3, 4, 5], [IGNORE, 14, 15, 16], [0, half, half, half]];
        for (i, row) in rows.iter().enumerate() {
            assert_eq!(words[i * BOUNDARY..][..4], *row);
        }
    }
}
