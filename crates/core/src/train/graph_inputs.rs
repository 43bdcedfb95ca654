//! Inputs of a replayed step: one device buffer that is filled before every replay.

use super::cuda_graph::StepShape;
use super::execute::{MicroBatch, StepPosition};
use super::global_batch::GlobalBatch;
use super::micro_batch::{sequence_layout, token_indices};
use super::mtp::shifted;
use crate::Result;
use crate::data::Batch;
use crate::model::{Decoder, Input, MtpInput};
use ferrotron_engine::attention::Layout;
use ferrotron_engine::moe::{MoeInput, MoeRows};
use ferrotron_engine::{Rank, Targets, Tokens};
use ferrotron_kernels::{CapturedSequences, IGNORE, scalars};
use ferrotron_tensor::{Category, DType, Tensor};
use std::sync::Arc;

/// Rows start at multiples of this many words, as aligned as separate allocations: kernels choose the same code paths.
const BOUNDARY: usize = 64;

/// Micro-batches and scalars of a step as 4-byte words, copied to the device in one transfer from pinned memory. The copy is
/// ordered after the previous replay on the stream, so the host may run ahead.
pub(super) struct GraphInputs {
    shape: StepShape,
    /// MTP depths.
    depth: usize,
    /// This rank's tokens of a micro-batch.
    tokens: Tokens,
    /// i32 `[words]`: of each micro-batch ids, positions, labels and weights, of the language model and of each MTP depth; then
    /// scalars; then the number of steps done before this one; then, of each micro-batch of packed sequences of a model with MoE
    /// layers, segments, sequence ids and token indices.
    all: Tensor,
    /// What MoE layers need to know of a micro-batch: the same in every step, but for packed sequences.
    moe: Option<MoeInput>,
    /// The packed sequences of each micro-batch.
    sequences: Vec<Arc<CapturedSequences>>,
    /// Of each micro-batch of a model with dropout or MoE layers, i32 `[rows]`: index in the step of each row's token.
    rows: Vec<Tensor>,
    /// Weight of a micro-batch in means over the step.
    share: f32,
    /// Probability that an activation is dropped.
    dropout: f32,
}

impl GraphInputs {
    /// Memory for steps of this shape, of a model with so many MTP depths, and with MoE layers or not.
    pub(super) fn new(rank: &Rank, shape: StepShape, depth: usize, has_moe: bool) -> Result<GraphInputs> {
        let tokens = rank.tokens(&shape.layout())?;
        let words = match shape.sequences {
            Some(_) if has_moe => moe_at(&shape, depth, &tokens, shape.micro_batches),
            _ => scalars_at(&shape, depth, &tokens) + scalars::COUNT + 1,
        };
        let all = Tensor::empty(&rank.compute, &[words], DType::I32, Category::Activations)?;
        let of = |n| Ok(Arc::new(CapturedSequences::new(&rank.compute, shape.tokens, n)?));
        let each = |n| (0..shape.micro_batches).map(|_| of(n)).collect::<Result<_>>();
        let sequences = shape.sequences.map_or(Ok(Vec::new()), each)?;
        let (moe, rows) = (None, Vec::new());
        Ok(GraphInputs { shape, depth, tokens, all, moe, sequences, rows, share: 0.0, dropout: 0.0 })
    }

    /// Adds what MoE layers and dropout need in every step of the shape of `batch`. Collective over a pipeline stage.
    pub(super) fn with_positions(
        self,
        rank: &Rank,
        decoder: &Decoder,
        batch: &GlobalBatch,
        dropout: f32,
    ) -> Result<GraphInputs> {
        let moe = decoder.moe_input(rank, &self.shape.layout(), &self.tokens, None)?;
        let index = |i| token_indices(rank, &self.tokens, batch.first_token(i));
        let count = if moe.is_some() || dropout > 0.0 { self.shape.micro_batches } else { 0 };
        let rows = (0..count).map(index).collect::<Result<_>>()?;
        Ok(GraphInputs { moe, rows, share: batch.micro_batch_share(), dropout, ..self })
    }

    /// Row `row` (ids, positions, labels, weights) of depth `d` (0 is the language model) of micro-batch `i`:
    /// i32 `[tokens of this rank]`.
    fn row(&self, (i, d): (usize, usize), row: usize) -> Result<Tensor> {
        let at = ((i * (1 + self.depth) + d) * 4 + row) * pitch(&self.tokens);
        Ok(self.all.narrow(0, at, self.tokens.rows().len())?)
    }

    /// Labels and weights of depth `d` of micro-batch `i`.
    fn targets(&self, at: (usize, usize)) -> Result<Targets> {
        Ok(Targets { labels: self.row(at, 2)?, weights: self.row(at, 3)?.view_dtype(DType::F32)? })
    }

    /// What MoE layers need to know of micro-batch `i`.
    fn moe(&self, i: usize) -> Result<Option<MoeInput>> {
        let (Some(moe), true) = (&self.moe, self.shape.sequences.is_some()) else {
            return Ok(self.moe.clone());
        };
        let (start, rows) = (moe_at(&self.shape, self.depth, &self.tokens, i), moe.segments.numel());
        let row = |row: usize| self.all.narrow(0, start + row * pitch(&self.tokens), rows);
        Ok(Some(MoeInput { segments: row(0)?, sequence_ids: row(1)?, token_index: row(2)?, ..moe.clone() }))
    }

    /// f32 `[scalars::COUNT]`
    pub(super) fn scalars(&self) -> Result<Tensor> {
        let start = scalars_at(&self.shape, self.depth, &self.tokens);
        Ok(self.all.narrow(0, start, scalars::COUNT)?.view_dtype(DType::F32)?)
    }

    /// i32 `[1]`: steps done before this one.
    fn step(&self) -> Result<Tensor> {
        Ok(self.all.narrow(0, scalars_at(&self.shape, self.depth, &self.tokens) + scalars::COUNT, 1)?)
    }

    /// Micro-batch `i`.
    pub(super) fn micro_batch(&self, rank: &Rank, i: usize) -> Result<MicroBatch> {
        let (ids, positions, tokens) = (self.row((i, 0), 0)?, self.row((i, 0), 1)?, self.tokens.clone());
        let depth = |d: usize| {
            let at = (i, d);
            Ok(MtpInput { ids: self.row(at, 0)?, positions: self.row(at, 1)?, targets: self.targets(at)? })
        };
        let mtp = (1..=self.depth).map(depth).collect::<Result<_>>()?;
        let (layout, rows) = (tokens.layout().clone(), ids.numel() / rank.tp.size());
        let (moe, captured) = (self.moe(i)?, self.sequences.get(i).cloned());
        let input = Input { ids, positions, layout, tokens, rows, moe, mtp, captured };
        let position = |rows: &Tensor| -> Result<StepPosition> {
            let (device_step, rows) = (Some(self.step()?), rows.clone());
            Ok(StepPosition { step: 0, device_step, rows, share: self.share, dropout: self.dropout })
        };
        let position = self.rows.get(i).map(position).transpose()?;
        Ok(MicroBatch { input, targets: Some(self.targets((i, 0))?), position })
    }

    /// Copies the next step's inputs to the device.
    pub(super) fn fill(
        &self,
        rank: &Rank,
        decoder: &Decoder,
        batch: &GlobalBatch,
        step: u64,
        scalars: &[f32; scalars::COUNT],
    ) -> Result<()> {
        for b in &batch.micro_batches {
            decoder.check_input(&b.tokens, &b.positions, &sequence_layout(b, self.shape.seq)?)?;
        }
        let batches = &batch.micro_batches;
        let mut words = words(&self.tokens, (batches, self.shape.seq), &batch.label_weights, scalars, step)?;
        for (b, sequences) in batches.iter().zip(&self.sequences) {
            sequences.fill(&rank.compute, b.cu_seqlens.as_deref().unwrap_or_default())?;
        }
        if self.moe.is_some() && self.shape.sequences.is_some() {
            for (i, b) in batches.iter().enumerate() {
                words.resize(moe_at(&self.shape, self.depth, &self.tokens, i), 0);
                let layout = sequence_layout(b, self.shape.seq)?;
                words.extend(moe_words(rank, &layout, &self.tokens, b.padding.as_deref())?);
            }
        }
        Ok(rank.compute.upload_into(&self.all, &words)?)
    }
}

fn pitch(tokens: &Tokens) -> usize {
    tokens.rows().len().next_multiple_of(BOUNDARY)
}

/// The first word of the scalars.
fn scalars_at(shape: &StepShape, depth: usize, tokens: &Tokens) -> usize {
    shape.micro_batches * (1 + depth) * 4 * pitch(tokens)
}

/// The first word of what MoE layers need to know of micro-batch `i`.
fn moe_at(shape: &StepShape, depth: usize, tokens: &Tokens, i: usize) -> usize {
    let first = (scalars_at(shape, depth, tokens) + scalars::COUNT + 1).next_multiple_of(BOUNDARY);
    first + i * 3 * pitch(tokens)
}

/// What MoE layers need to know of a micro-batch, three rows: segments, sequence ids, token indices.
fn moe_words(rank: &Rank, layout: &Layout, tokens: &Tokens, padding: Option<&[bool]>) -> Result<Vec<i32>> {
    let (moe, pitch) = (MoeRows::new(rank, layout, tokens, padding)?, pitch(tokens));
    let mut words = Vec::with_capacity(3 * pitch);
    for (i, row) in moe.rows.iter().enumerate() {
        words.extend(row);
        words.resize((i + 1) * pitch, 0);
    }
    Ok(words)
}

/// All words of a step up to those of MoE layers; `weights` are those of a label in the language-modelling loss and at each MTP
/// depth.
fn words(
    tokens: &Tokens,
    (batches, seq): (&[Batch], usize),
    weights: &[f32],
    scalars: &[f32],
    step: u64,
) -> Result<Vec<i32>> {
    let (pitch, n) = (pitch(tokens), tokens.rows().len());
    let mut words = vec![0i32; batches.len() * weights.len() * 4 * pitch];
    let bits = |x: f32| x.to_bits().cast_signed();
    let depths = batches.iter().flat_map(|b| weights.iter().enumerate().map(move |(d, w)| (b, d, *w)));
    for ((batch, depth, weight), rows) in depths.zip(words.chunks_exact_mut(4 * pitch)) {
        let lengths = sequence_layout(batch, seq)?.lengths();
        let lists = [(&batch.tokens, 0), (&batch.positions, 0), (&batch.labels, IGNORE)];
        for (row, (values, pad)) in lists.into_iter().enumerate() {
            let mine = match depth {
                0 => tokens.take(values, pad)?,
                _ => tokens.take(&shifted(values, &lengths, depth, pad), pad)?,
            };
            rows[row * pitch..][..n].copy_from_slice(&mine);
        }
        let (labels, weights) = rows[2 * pitch..].split_at_mut(pitch);
        for (w, label) in weights.iter_mut().zip(&labels[..n]) {
            *w = if *label == IGNORE { 0 } else { bits(weight) };
        }
    }
    words.extend(scalars.iter().map(|x| bits(*x)));
    words.push(step as i32);
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrotron_engine::GroupRank;
    use ferrotron_engine::moe::MoeTraining;

    #[test]
    fn words_are_what_views_read() {
        let rank = Rank::cpu(1, 1).unwrap();
        let shape = StepShape { micro_batches: 2, tokens: 6, seq: 3, sequences: None, splits: None };
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
        let mut inputs = GraphInputs::new(&rank, shape, 2, false).unwrap();
        inputs.rows = (0..2).map(|i| token_indices(&rank, &inputs.tokens, 6 * i).unwrap()).collect();
        let weights = [0.1, 0.2, 0.3];
        let words = words(&inputs.tokens, (&batches, 3), &weights, &scalars, 77).unwrap();
        assert_eq!(words.len(), inputs.all.numel());
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
            assert_eq!(i32s(&made.position.unwrap().device_step.unwrap()), [77]);
            for (d, mtp) in (1..).zip(&made.input.mtp) {
                let expected = |values: &[i32], fill| shifted(values, &[3, 3], d, fill);
                assert_eq!(i32s(&mtp.ids), expected(&b.tokens, 0));
                assert_eq!(i32s(&mtp.positions), expected(&b.positions, 0));
                let labels = expected(&b.labels, IGNORE);
                let alone =
                    crate::train::upload_targets(&rank, &made.input.tokens, &labels, weights[d]).unwrap();
                assert_eq!(i32s(&mtp.targets.labels), labels);
                assert_eq!(f32s(&mtp.targets.weights), f32s(&alone.weights));
            }
            assert_eq!(made.input.mtp.len(), 2);
            for t in [&made.input.ids, &made.input.positions, &targets.labels, &targets.weights] {
                assert!(t.alignment() >= inputs.all.alignment().min(64));
            }
        }
        assert_eq!(s.download::<f32>(&inputs.scalars().unwrap()).unwrap(), scalars);
    }

    /// Of packed sequences with padding, by definition: what an upload of the batch alone holds.
    #[test]
    fn moe_words_are_those_of_the_batch() {
        let rank = Rank::cpu(1, 1).unwrap();
        let shape = StepShape { micro_batches: 2, tokens: 6, seq: 3, sequences: Some(8), splits: None };
        let mut inputs = GraphInputs::new(&rank, shape, 1, true).unwrap();
        let mine = MoeInput::new(&rank, &shape.layout(), &inputs.tokens, None, &MoeTraining::default());
        inputs.moe = Some(mine.unwrap());
        let mut words = vec![0; scalars_at(&shape, 1, &inputs.tokens) + scalars::COUNT + 1];
        let batches = [
            (vec![0, 3, 6], None),
            (vec![0, 1, 3, 5, 6], Some(vec![false, false, true, false, false, true])),
        ];
        let layouts = batches.map(|(offsets, padding)| (Layout::Packed { offsets }, padding));
        for (i, (layout, padding)) in layouts.iter().enumerate() {
            words.resize(moe_at(&shape, 1, &inputs.tokens, i), 0);
            words.extend(moe_words(&rank, layout, &inputs.tokens, padding.as_deref()).unwrap());
        }
        assert_eq!(words.len(), inputs.all.numel());
        rank.compute.upload_into(&inputs.all, &words).unwrap();
        let i32s = |t: &Tensor| rank.compute.download::<i32>(t).unwrap();
        for (i, (layout, padding)) in layouts.iter().enumerate() {
            let made = inputs.micro_batch(&rank, i).unwrap().input;
            assert_eq!(made.captured.unwrap().offsets(), [0, 6, 6, 6, 6, 6, 6, 6, 6]);
            let moe = made.moe.unwrap();
            let tokens = rank.tokens(layout).unwrap();
            let alone =
                MoeInput::new(&rank, layout, &tokens, padding.as_deref(), &MoeTraining::default()).unwrap();
            assert_eq!(i32s(&moe.segments), i32s(&alone.segments));
            assert_eq!(i32s(&moe.sequence_ids), i32s(&alone.sequence_ids));
            assert_eq!(i32s(&moe.token_index), i32s(&alone.token_index));
            assert!(moe.packed && alone.packed);
            assert_eq!(moe.sequences, 8);
        }
    }

    #[test]
    fn a_context_parallel_rank_gets_its_own_tokens() {
        let layout =
            StepShape { micro_batches: 1, tokens: 6, seq: 6, sequences: None, splits: None }.layout();
        let tokens = Tokens::new(&layout, GroupRank { rank: 1, size: 2 }, 1).unwrap();
        let batch = Batch {
            tokens: (10..16).collect(),
            labels: vec![11, 12, IGNORE, 14, 15, 16],
            positions: (0..6).collect(),
            cu_seqlens: None,
            padding: None,
            varies: false,
        };
        let words = words(&tokens, (&[batch], 6), &[0.5], &[], 0).unwrap();
        // Six tokens are padded to eight in four chunks; rank 1 of 2 has the second and the third.
        let half = 0.5f32.to_bits().cast_signed();
        let rows = [[12, 13, 14, 15], [2, 3, 4, 5], [IGNORE, 14, 15, 16], [0, half, half, half]];
        for (i, row) in rows.iter().enumerate() {
            assert_eq!(words[i * BOUNDARY..][..4], *row);
        }
    }
}
