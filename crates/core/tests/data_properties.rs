//! Properties of indices, samplers, packing and batches over random inputs.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // clippy takes helpers of tests for production

use std::collections::HashMap;
use std::sync::Arc;

use ferrotron_core::Result;
use ferrotron_core::config::{Packing, Truncation};
use ferrotron_core::data::blend::BlendIndex;
use ferrotron_core::data::digest::order_digest;
use ferrotron_core::data::gpt_index::{GptIndex, IndexSpec};
use ferrotron_core::data::sampler::{Cyclic, Sequential};
use ferrotron_core::data::*;
use proptest::collection::vec;
use proptest::prelude::*;

/// Documents whose tokens are all different, so that each can be traced.
fn numbered(lengths: &[usize]) -> Vec<Vec<i64>> {
    let mut next = 0;
    let mut document = |&length| {
        next += length as i64;
        (next - length as i64..next).collect()
    };
    lengths.iter().map(&mut document).collect()
}

/// The tokens of a sample, walked one by one from its start: the definition.
fn walk(index: &GptIndex, documents: &[Vec<i64>], sample: usize, count: usize) -> Vec<i64> {
    let [position, offset] = index.starts[sample];
    let order = &index.documents[position as usize..];
    let laid_out = order.iter().flat_map(|&d| documents[d as usize].iter().copied());
    laid_out.skip(offset as usize).take(count).collect()
}

fn dataset(documents: &[Vec<i64>], folder: &std::path::Path) -> Arc<IndexedDataset> {
    let mut writer = IndexedWriter::create(folder.join("d"), TokenType::I32, false).unwrap();
    for document in documents {
        writer.push(document.iter().copied(), 0).unwrap();
        writer.end_document().unwrap();
    }
    writer.finish().unwrap();
    Arc::new(IndexedDataset::open(folder.join("d")).unwrap())
}

/// The first epoch again and again.
struct Replayed<'a>(&'a Packed);

impl Batches for Replayed<'_> {
    fn seq(&self) -> usize {
        self.0.seq()
    }
    fn samples(&self) -> u64 {
        self.0.samples()
    }
    fn resets(&self) -> bool {
        true
    }
    fn row(&self, n: u64, row: &mut Row) -> Result<()> {
        self.0.row(n % self.samples(), row)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn samples_tile_the_documents(
        lengths in vec(0usize..30, 1..20), seq in 1usize..12, seed: u32, extra: bool, epochs in 1u64..4,
    ) {
        let documents = numbered(&lengths);
        let tokens: usize = lengths.iter().sum();
        let x = usize::from(extra);
        prop_assume!(tokens > x + seq);
        let samples = ((epochs as usize * tokens - x) / seq) as u64;
        let spec = IndexSpec { seq, seed, samples: Some(samples), extra, drop_last: true };
        let index = GptIndex::build(0..lengths.len() as u32, |d| Ok(lengths[d as usize]), &spec, "t").unwrap();
        prop_assert_eq!(index.len() as u64, samples);

        // Concatenated, the inputs are the documents in order: each token once per epoch except for the tail.
        let laid_out: Vec<i64> =
            index.documents.iter().flat_map(|&d| documents[d as usize].iter().copied()).collect();
        let inputs: Vec<i64> = (0..index.len()).flat_map(|j| walk(&index, &documents, j, seq)).collect();
        prop_assert_eq!(&inputs[..], &laid_out[..inputs.len()]);
        prop_assert!(laid_out.len() - inputs.len() < seq + x);

        let mut drawn = index.shuffle.clone();
        drawn.sort_unstable();
        prop_assert!(drawn.into_iter().eq(0..index.len() as u32));
        let mut used: HashMap<u32, u64> = HashMap::new();
        index.documents.iter().for_each(|&d| *used.entry(d).or_default() += 1);
        prop_assert!(used.values().all(|&n| n == epochs));
    }

    #[test]
    fn items_equal_the_definition(
        lengths in vec(0usize..20, 1..12), seq in 1usize..12, seed: u32, extra: bool, drop_last: bool,
    ) {
        let documents = numbered(&lengths);
        let x = usize::from(extra);
        let tokens: usize = lengths.iter().sum();
        prop_assume!(tokens > x + seq);
        let folder = tempfile::tempdir().unwrap();
        let data = dataset(&documents, folder.path());
        let config = GptConfig {
            extra_token: extra,
            drop_last_partial_validation: drop_last,
            ..GptConfig::new(seq, seed, tokens as u32)
        };
        let it = GptDataset::new(data, 0..documents.len(), None, Split::Valid, config).unwrap();
        let samples = if drop_last { (tokens - x) / seq } else { (tokens - x).div_ceil(seq) };
        prop_assert_eq!(it.samples(), samples as u64);
        for n in 0..it.samples() {
            let row = it.batch(n, 1).unwrap();
            let text = walk(it.index(), &documents, it.index().shuffle[n as usize] as usize, seq + x);
            for i in 0..seq {
                prop_assert_eq!(i64::from(row.tokens[i]), text.get(i).copied().unwrap_or(0));
                let label = text.get(i + 1).copied().unwrap_or(i64::from(IGNORE));
                prop_assert_eq!(i64::from(row.labels[i]), label);
            }
        }
    }

    #[test]
    fn packing_keeps_every_label_and_crosses_no_document(
        lengths in vec(0usize..40, 1..30), seq in 1usize..17, seed: Option<u32>,
    ) {
        let documents = numbered(&lengths);
        prop_assume!(lengths.iter().any(|&l| l > 1));
        let tokens: usize = lengths.iter().sum();
        let packed = Packed::new(Box::new(documents.clone()), seq, tokens as u32, seed).unwrap();
        let rows = packed.samples() as usize;
        let batch = packed.batch(0, rows).unwrap();
        let cu = batch.cu_seqlens.clone().unwrap();
        prop_assert_eq!((cu[0], cu[cu.len() - 1]), (0, (rows * seq) as i32));
        prop_assert!((0..=rows).all(|r| cu.contains(&((r * seq) as i32))));
        let mut pairs = Vec::new();
        for piece in cu.windows(2) {
            prop_assert!(piece[0] < piece[1]);
            let piece = piece[0] as usize..piece[1] as usize;
            for (k, i) in piece.clone().enumerate() {
                prop_assert_eq!(batch.positions[i], k as i32);
                if batch.labels[i] != IGNORE {
                    pairs.push((i64::from(batch.tokens[i]), i64::from(batch.labels[i])));
                    // Within a document the next input is this label.
                    let inside = i + 1 < piece.end;
                    prop_assert!(!inside || batch.tokens[i + 1] == batch.labels[i]);
                }
            }
        }
        let mut expected: Vec<(i64, i64)> =
            documents.iter().flat_map(|d| d.windows(2).map(|w| (w[0], w[1]))).collect();
        pairs.sort_unstable();
        expected.sort_unstable();
        prop_assert_eq!(&pairs, &expected);
        // Padding is exactly the positions without a label.
        let padding = batch.padding.clone().unwrap_or_else(|| vec![false; rows * seq]);
        prop_assert!(padding.iter().zip(&batch.labels).all(|(p, label)| *p == (*label == IGNORE)));
        prop_assert_eq!(batch.padding.is_none(), pairs.len() == rows * seq);
        let fill = pairs.len() as f64 / (rows * seq) as f64;
        prop_assert!((packed.fill() - fill).abs() < 1e-12);
    }

    /// Later epochs have the same rows in another order each, and without a seed in the same.
    #[test]
    fn packed_rows_come_in_another_order_in_every_epoch(
        lengths in vec(10usize..40, 30..60), seq in 4usize..9, seed: Option<u32>, padding_free: bool,
    ) {
        let documents = numbered(&lengths);
        let vocab = lengths.iter().sum::<usize>() as u32;
        let packing = if padding_free { Packing::PaddingFree } else { Packing::Documents };
        let options = RowOptions { seq, vocab, seed, truncation: Truncation::Split, packing };
        let packed = Packed::with(Box::new(documents), options).unwrap().unwrap();
        let rows = packed.samples();
        let epoch = |e: u64| -> Vec<Batch> {
            (e * rows..(e + 1) * rows).map(|n| packed.batch(n, 1).unwrap()).collect()
        };
        let epochs = [epoch(0), epoch(1), epoch(2)];
        for (i, later) in epochs.iter().enumerate().skip(1) {
            prop_assert!(epochs[0].iter().all(|row| later.contains(row)));
            prop_assert!(epochs[..i].iter().all(|e| (e == later) == seed.is_none()));
        }
        // A run that has replayed the first epoch is told: its samples so far are others now.
        let replayed = Replayed(&packed);
        let [same, other] = [rows, rows + rows / 2].map(|n| order_digest(&packed, n) == order_digest(&replayed, n));
        prop_assert!(same && other == seed.is_none());
    }

    #[test]
    fn sequential_ranks_partition_every_step(
        total in 0u64..200, consumed in 0u64..220, micro_batch in 1u64..6, ranks in 1u64..6, drop_last: bool,
    ) {
        let sampler = Sequential { total, micro_batch, ranks, drop_last };
        let step = micro_batch * ranks;
        let mut seen = Vec::new();
        let mut at = consumed;
        while let Some(first) = sampler.micro_batch(at, 0) {
            seen.extend(first);
            (1..ranks).for_each(|r| seen.extend(sampler.micro_batch(at, r).unwrap()));
            at += step;
        }
        let left = total.saturating_sub(consumed);
        let end = consumed + if drop_last { left / step * step } else { left };
        prop_assert!(seen.into_iter().eq(consumed..end));
    }

    #[test]
    fn cyclic_epochs_contain_each_sample_once(
        steps in 1u64..20, rest in 0u64..30, micro_batch in 1u64..5, ranks in 1u64..5, sharded: bool,
        epoch in 0u64..3, done in 0u64..20,
    ) {
        let step = micro_batch * ranks;
        let total = steps * step + rest % step;
        let sampler = Cyclic { total, micro_batch, ranks, sharded };
        let all = |consumed| -> Vec<u64> {
            (0..ranks).flat_map(|r| sampler.rest_of_epoch(consumed, r).unwrap().concat()).collect()
        };
        let mut whole = all(epoch * steps * step);
        whole.sort_unstable();
        let count = whole.len();
        whole.dedup();
        prop_assert_eq!(count, whole.len());
        prop_assert!(count as u64 >= steps * step && whole.iter().all(|&i| i < total));
        // Resuming inside the epoch continues it.
        let done = done % steps;
        for r in 0..ranks {
            let full = sampler.rest_of_epoch(epoch * steps * step, r).unwrap();
            let resumed = sampler.rest_of_epoch((epoch * steps + done) * step, r).unwrap();
            prop_assert_eq!(&resumed[..], &full[done as usize..]);
        }
        if step > 1 {
            prop_assert!(sampler.rest_of_epoch(1, 0).is_err());
        }
    }

    #[test]
    fn blends_follow_their_weights(weights in vec(0.01f64..1.0, 1..8), size in 1u64..500) {
        let weights = split::normalize(&weights).unwrap();
        let index = BlendIndex::weighted(&weights, size).unwrap();
        for (m, w) in weights.iter().enumerate() {
            let own: Vec<u64> = index.member.iter().zip(&index.sample)
                .filter(|(member, _)| usize::from(**member) == m).map(|(_, s)| *s).collect();
            prop_assert!(own.iter().copied().eq(0..own.len() as u64));
            prop_assert!((own.len() as f64 - w * size as f64).abs() <= weights.len() as f64);
        }
    }

    #[test]
    fn exhaustive_blends_use_every_sample_once(sizes in vec(0u64..50, 1..8)) {
        prop_assume!(sizes.iter().sum::<u64>() > 0);
        let index = BlendIndex::exhaustive(&sizes).unwrap();
        for (m, &size) in sizes.iter().enumerate() {
            let own = index.member.iter().zip(&index.sample).filter(|(member, _)| usize::from(**member) == m);
            prop_assert!(own.map(|(_, s)| *s).eq(0..size));
        }
    }

    #[test]
    fn batches_concatenate_their_rows(first in 0u64..1000, count in 0usize..6, seq in 1usize..9, seed: u64) {
        let stream = |random: bool| {
            let tokens = (0..100).collect();
            if random { Stream::random(tokens, seq, seed) } else { Stream::sequential(tokens, seq) }.unwrap()
        };
        let documents = numbered(&[3, 9, 1, 20, 5]);
        let packed = Packed::new(Box::new(documents), seq, 64, Some(1)).unwrap();
        let mixed = Interleave::new(vec![Box::new(stream(true)), Box::new(packed)]).unwrap();
        for source in [&stream(false) as &dyn Batches, &stream(true), &mixed] {
            let whole = source.batch(first, count).unwrap();
            let single: Vec<Batch> = (0..count as u64).map(|k| source.batch(first + k, 1).unwrap()).collect();
            let join = |f: fn(&Batch) -> &Vec<i32>| single.iter().flat_map(f).copied().collect::<Vec<i32>>();
            prop_assert_eq!(&whole.tokens, &join(|b| &b.tokens));
            prop_assert_eq!(&whole.labels, &join(|b| &b.labels));
            prop_assert_eq!(&whole.positions, &join(|b| &b.positions));
            if let Some(cu) = &whole.cu_seqlens {
                let mut expected = Vec::new();
                for (k, b) in single.iter().enumerate() {
                    let starts = b.cu_seqlens.as_ref().unwrap();
                    expected.extend(starts[..starts.len() - 1].iter().map(|s| s + (k * seq) as i32));
                }
                expected.push((count * seq) as i32);
                prop_assert_eq!(cu, &expected);
            }
        }
    }
}
