//! Vocabulary-parallel embedding and cross-entropy, rank by rank.

use super::devices::*;
use super::embedding_loss::expected;
use super::golden::{Area, Tensors, bf16_ulps, bf16s, count, list, number_or, text};
use ferrotron_kernels::{
    CrossEntropy, EmbeddingBackward, EmbeddingForward, IGNORE, LabelSmoothing, VocabParallelCrossEntropy,
    VocabParallelLogits,
};
use ferrotron_tensor::{DType, Tensor, bf16};

/// Filler that must not influence results, exact in every dtype.
const PADDING: f64 = 8192.0;

/// The columns from `first` to `first + local` of rows of `width`; padding beyond.
fn columns(z: &[f64], width: usize, first: usize, local: usize) -> Vec<f64> {
    z.chunks(width).flat_map(|row| (first..first + local).map(|c| *row.get(c).unwrap_or(&PADDING))).collect()
}

/// First column and number of columns of each rank.
fn ranges(widths: &[usize]) -> Vec<(usize, usize)> {
    let starts = widths.iter().scan(0, |next, w| Some(std::mem::replace(next, *next + w)));
    starts.zip(widths.iter().copied()).collect()
}

/// Cross-entropy of `z [rows, vocab]`, over the full vocabulary or over shards.
struct Problem<'a> {
    dtype: DType,
    framed: bool,
    z: &'a [f64],
    vocab: usize,
    labels: &'a [i32],
    weights: &'a [f64],
    smoothing: LabelSmoothing,
}

impl Problem<'_> {
    /// Loss, and the gradient written over the logits, of the kernel on the full vocabulary.
    fn whole(&self, h: &TestDevice, gradient: bool) -> (Vec<f64>, Vec<f64>) {
        let n = self.labels.len();
        let (z, loss) = (h.tensor(self.dtype, &[n, self.vocab], self.z), h.poisoned(DType::F32, &[n]));
        let c = CrossEntropy {
            logits: &z,
            vocab: self.vocab,
            labels: &h.ids(self.labels),
            weights: &h.tensor(DType::F32, &[n], self.weights),
            smoothing: self.smoothing,
            loss: &loss,
            gradient,
        };
        h.k.cross_entropy(&h.s, &c).unwrap();
        (h.host(&loss), h.host(&z))
    }

    /// Logits of each rank, their column ranges, and the statistics of all ranks.
    fn stats(&self, h: &TestDevice, widths: &[usize]) -> (Vec<Framed>, Vec<(usize, usize)>, Tensor) {
        let (n, labels) = (self.labels.len(), h.ids(self.labels));
        let all = h.poisoned(DType::F32, &[widths.len(), n, 4]);
        let ranges = ranges(widths);
        let shards = ranges.iter().enumerate().map(|(rank, &(first, local))| {
            let part = columns(self.z, self.vocab, first, local);
            let z = h.placed(self.framed, self.dtype, &[n, local], &part);
            let x = VocabParallelLogits { logits: &z.view, first, vocab: self.vocab, labels: &labels };
            // An empty shard has no valid offset.
            let stats = if n == 0 { h.poisoned(DType::F32, &[0, 4]) } else { all.select(0, rank).unwrap() };
            h.k.cross_entropy_stats(&h.s, &x, &stats).unwrap();
            assert_eq!(left(h, &z), bits(&part), "the logits changed");
            z
        });
        (shards.collect(), ranges, all)
    }

    /// As [`Problem::whole`], from ranks with `widths` columns each. Every rank must have the same losses, and
    /// padding no gradient.
    fn sharded(&self, h: &TestDevice, widths: &[usize], gradient: bool) -> (Vec<f64>, Vec<f64>) {
        let (n, labels) = (self.labels.len(), h.ids(self.labels));
        let weights = h.tensor(DType::F32, &[n], self.weights);
        let (shards, ranges, all) = self.stats(h, widths);
        let (mut losses, mut result) = (Vec::new(), vec![f64::NAN; n * self.vocab]);
        for (z, &(first, local)) in shards.iter().zip(&ranges) {
            let x = VocabParallelLogits { logits: &z.view, first, vocab: self.vocab, labels: &labels };
            let loss = h.poisoned(DType::F32, &[n]);
            h.k.vocab_parallel_cross_entropy(
                &h.s,
                &VocabParallelCrossEntropy {
                    x: &x,
                    stats: &all,
                    weights: &weights,
                    smoothing: self.smoothing,
                    loss: &loss,
                    gradient,
                },
            )
            .unwrap();
            losses.push(h.host(&loss));
            let part = h.inside(z);
            for (i, value) in part.into_iter().enumerate() {
                let (row, column) = (i / local, first + i % local);
                match column < self.vocab {
                    true => result[row * self.vocab + column] = value,
                    false => assert_eq!(value, if gradient { 0.0 } else { PADDING }, "padding"),
                }
            }
        }
        assert!(losses.iter().all(|l| bits(l) == bits(&losses[0])), "ranks have other losses");
        (losses.swap_remove(0), result)
    }
}

fn bits(values: &[f64]) -> Vec<u64> {
    values.iter().map(|x| if x.is_nan() { u64::MAX } else { x.to_bits() }).collect()
}

fn left(h: &TestDevice, z: &Framed) -> Vec<u64> {
    bits(&h.inside(z))
}

/// Rows, vocabulary, and columns per rank: uneven, empty, with padding, all padding.
const SHARDS: [(usize, usize, &[usize]); 10] = [
    (1, 2, &[1, 1]),
    (9, 33, &[33]),
    (9, 33, &[20, 13]),
    (6, 50, &[17, 30, 17]),
    (5, 40, &[24, 24, 24]),
    (5, 40, &[13, 27, 0]),
    (7, 30, &[0, 1, 0, 29]),
    (0, 4, &[2, 2]),
    (4, 5000, &[2504, 2504]),
    (3, 32001, &[10, 16_100, 15_900]),
];

#[test]
fn vocab_parallel_loss_matches_the_full_vocabulary() {
    everywhere(|h, dtype| {
        for smoothing in [LabelSmoothing::None, LabelSmoothing::Torch(0.1), LabelSmoothing::Megatron(0.15)] {
            for ((rows, vocab, widths), framed) in SHARDS.into_iter().flat_map(|s| [(s, true), (s, false)]) {
                let labels: Vec<i32> =
                    (0..rows).map(|r| if r % 4 == 2 { IGNORE } else { (r * 7 % vocab) as i32 }).collect();
                let z: Vec<f64> =
                    numbers(dtype, 1, rows * vocab).iter().map(|x| rounded(dtype, 4.0 * x)).collect();
                let weights = numbers(DType::F32, 2, rows);
                let p =
                    Problem { dtype, framed, z: &z, vocab, labels: &labels, weights: &weights, smoothing };
                let what = format!("{} {dtype} {smoothing:?} {rows}x{vocab} {widths:?}", h.name);
                let (loss, grad) = expected(&z, vocab, vocab, &labels, &weights, smoothing);
                let (ours, kept) = p.sharded(h, widths, false);
                close(&what, DType::F32, &ours, &loss, 4e-6);
                assert_eq!(kept, z, "{what}: the logits changed");
                let (again, slopes) = p.sharded(h, widths, true);
                assert_eq!(again, ours, "{what}");
                close(&format!("{what} gradient"), dtype, &slopes, &grad, 1e-6);
                for (i, g) in slopes.iter().enumerate() {
                    assert!(labels[i / vocab] != IGNORE || *g == 0.0, "{what}");
                }
                close(&format!("{what}, whole"), DType::F32, &ours, &p.whole(h, false).0, 4e-6);
            }
        }
    });
}

#[test]
fn row_statistics_of_vocabulary_shards() {
    everywhere(|h, dtype| {
        for (rows, vocab, widths) in SHARDS {
            let labels: Vec<i32> =
                (0..rows).map(|r| if r % 4 == 2 { IGNORE } else { (r * 7 % vocab) as i32 }).collect();
            let z: Vec<f64> =
                numbers(dtype, 3, rows * vocab).iter().map(|x| rounded(dtype, 4.0 * x)).collect();
            let p = Problem {
                dtype,
                framed: true,
                z: &z,
                vocab,
                labels: &labels,
                weights: &[],
                smoothing: LabelSmoothing::None,
            };
            let (_, ranges, all) = p.stats(h, widths);
            let all = h.host(&all);
            for (i, stats) in all.chunks(4).enumerate() {
                let (rank, r) = (i / rows, i % rows);
                let (first, local) = ranges[rank];
                let what = format!("{} {dtype} {rows}x{vocab} {widths:?} rank {rank} row {r}", h.name);
                let here = first.min(vocab)..(first + local).min(vocab);
                let x = &z[r * vocab..][here.clone()];
                if x.is_empty() || labels[r] == IGNORE {
                    assert_eq!(stats, [f64::NEG_INFINITY, 0.0, 0.0, 0.0], "{what}");
                    continue;
                }
                let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let label = labels[r] as usize;
                assert_eq!(stats[0], max, "{what}");
                assert_eq!(
                    stats[2],
                    if here.contains(&label) { z[r * vocab + label] } else { 0.0 },
                    "{what}"
                );
                let sum_exp: f64 = x.iter().map(|x| (x - max).exp()).sum();
                close(&what, DType::F32, &[stats[1] / sum_exp], &[1.0], 2e-6);
                let (sum, n) = (x.iter().sum::<f64>(), x.len() as f64);
                close(&what, DType::F32, &[stats[3] / n], &[sum / n], 1e-6);
            }
        }
    });
}

#[test]
fn infinite_logits_in_vocabulary_shards() {
    const INF: f64 = f64::INFINITY;
    let rows = [
        // All logits of one rank are −∞.
        ([-INF, -INF, 1.0, 2.0, 0.0], 2),
        ([-INF, -INF, 1.0, 2.0, 0.0], 0),
        ([0.0, f64::NAN, 1.0, 2.0, 0.0], 3),
        ([-INF; 5], 1),
        ([0.0, 1.0, INF, 2.0, 0.0], 0),
        ([0.0, 1.0, 2f64.powi(100), 2.0, 0.0], 4),
        ([-INF, -INF, -INF, -INF, 3.0], 4),
    ];
    let z: Vec<f64> = rows.iter().flat_map(|(row, _)| *row).collect();
    let labels: Vec<i32> = rows.iter().map(|(_, label)| *label).collect();
    let weights = vec![1.0; rows.len()];
    everywhere(|h, dtype| {
        let z: Vec<f64> = z.iter().map(|x| rounded(dtype, *x)).collect();
        let p = Problem {
            dtype,
            framed: true,
            z: &z,
            vocab: 5,
            labels: &labels,
            weights: &weights,
            smoothing: LabelSmoothing::None,
        };
        let (loss, grad) = p.whole(h, true);
        for widths in [&[2, 2, 1][..], &[1, 4], &[4, 1, 3]] {
            let (ours, slopes) = p.sharded(h, widths, true);
            for (i, (o, w)) in ours.iter().zip(&loss).chain(slopes.iter().zip(&grad)).enumerate() {
                let same =
                    o == w || (o.is_nan() && w.is_nan()) || (o - w).abs() <= 1e-6 + eps(dtype) * w.abs();
                assert!(same, "{} {dtype} {widths:?} [{i}]: {o} instead of {w}", h.name);
            }
            assert_eq!((ours[1], ours[6]), (INF, 0.0), "{}", h.name);
        }
    });
}

#[test]
fn embedding_of_vocabulary_shards() {
    everywhere(|h, dtype| {
        let some: Vec<i32> = (0..90).map(|i| (i * 37) % 70).collect();
        // One id of each shard is far more frequent than others.
        let often: Vec<i32> = (0..400).map(|i| [1, 699, i * 37 % 700, 350][i as usize % 4]).collect();
        for (vocab, width, ids, shards) in [
            (5, 3, &[4, 0, 4, 4, 1][..], &[2, 3][..]),
            (70, 33, &some, &[20, 50, 0]),
            (70, 8, &some, &[40, 40, 40]),
            (700, 16, &often, &[300, 420]),
            (4, 6, &[], &[1, 3]),
            (1, 1, &[0], &[0, 1]),
        ] {
            for (rank, (first, local)) in ranges(shards).into_iter().enumerate() {
                let table = numbers(dtype, 1 + rank as u64, local * width);
                let dy = numbers(dtype, 2, ids.len() * width);
                let old = numbers(dtype, 3, ids.len() * width);
                let start = numbers(DType::F32, 4, local * width);
                let (id_t, table_t) = (h.ids(ids), h.tensor(dtype, &[local, width], &table));
                let dy_t = h.tensor(dtype, &[ids.len(), width], &dy);
                let at = |i: usize| {
                    let row = (ids[i / width] as usize).checked_sub(first).filter(|row| *row < local)?;
                    Some(row * width + i % width)
                };
                for add in [false, true] {
                    let what = format!("{} {dtype} {first}+{local} of {vocab}x{width} add {add}", h.name);
                    let shape = [ids.len(), width];
                    let y = if add { h.tensor(dtype, &shape, &old) } else { h.poisoned(dtype, &shape) };
                    h.k.embedding_forward(
                        &h.s,
                        &EmbeddingForward {
                            ids: &id_t,
                            table: &table_t,
                            first,
                            vocab,
                            scale: 1.5,
                            add,
                            y: &y,
                        },
                    )
                    .unwrap();
                    let looked_up = |i| at(i).map_or(0.0, |at| 1.5 * table[at]);
                    let want: Vec<f64> =
                        (0..old.len()).map(|i| looked_up(i) + if add { old[i] } else { 0.0 }).collect();
                    close(&what, dtype, &h.host(&y), &want, 1e-6);
                    let shape = [local, width];
                    let d = match add {
                        true => h.tensor(DType::F32, &shape, &start),
                        false => h.poisoned(DType::F32, &shape),
                    };
                    h.k.embedding_backward(
                        &h.s,
                        &EmbeddingBackward {
                            ids: &id_t,
                            dy: &dy_t,
                            first,
                            vocab,
                            scale: 1.5,
                            accumulate: add,
                            dtable: &d,
                        },
                    )
                    .unwrap();
                    let mut want = if add { start.clone() } else { vec![0.0; start.len()] };
                    for (i, dy) in dy.iter().enumerate() {
                        at(i).into_iter().for_each(|at| want[at] += 1.5 * dy);
                    }
                    close(&format!("{what} gradient"), DType::F32, &h.host(&d), &want, 2e-5);
                }
            }
        }
    });
}

/// Every golden loss with its vocabulary split over one to four ranks and seven: as evenly as possible, and in equal
/// shards of a padded vocabulary.
#[test]
fn golden_loss_over_ranks() {
    let devices = devices();
    for area in Area::all("loss") {
        let (json, golden) = (area.json("loss.json"), area.tensors("loss.safetensors"));
        let mut report = area.report();
        for case in list(&json, "cases") {
            report.case(text(case, "name"), || {
                for ranks in [1, 2, 3, 4, 7] {
                    let vocab = count(case, "vocab");
                    let even: Vec<usize> =
                        (0..ranks).map(|r| vocab * (r + 1) / ranks - vocab * r / ranks).collect();
                    let padded = vec![vocab.next_multiple_of(8 * ranks) / ranks; ranks];
                    for h in &devices {
                        golden_case(h, &golden, case, &even);
                        golden_case(h, &golden, case, &padded);
                    }
                }
            });
        }
        // Includes the splits that the reference implementation has checked.
        for check in list(&json, "vocab_parallel_checks") {
            assert!([2, 4].contains(&count(check, "tp")), "{check}");
            assert!(list(&json, "cases").iter().any(|c| c["name"] == check["case"]), "{check}");
        }
        report.finish();
    }
}

fn golden_case(h: &TestDevice, golden: &Tensors, case: &serde_json::Value, widths: &[usize]) {
    let (name, tokens, vocab) = (text(case, "name"), count(case, "tokens"), count(case, "vocab"));
    let get = |part: &str| -> Vec<f64> {
        golden.f32(&format!("{name}/{part}")).into_iter().map(f64::from).collect()
    };
    let (dtype, z) = match case["dtype"].as_str() {
        None | Some("f32") => (DType::F32, get("logits")),
        Some("bf16") => {
            let z = bf16s(golden, &format!("{name}/logits"));
            (DType::BF16, z.into_iter().map(|x| x.to_f64()).collect())
        }
        Some(other) => panic!("the format has no dtype {other}"),
    };
    // The case's own ignored label, which may lie inside the vocabulary, becomes ours.
    let ignored = case["ignore_index"].as_i64();
    let label = |l: i64| if Some(l) == ignored { IGNORE } else { i32::try_from(l).unwrap() };
    let labels: Vec<i32> = golden.i64(&format!("{name}/labels")).into_iter().map(label).collect();
    let smooth = number_or(case, "label_smoothing", 0.0) as f32;
    let smoothing = match (case["smoothing_convention"].as_str(), smooth) {
        (None | Some("torch" | "megatron"), 0.0) => LabelSmoothing::None,
        (None | Some("torch"), _) => LabelSmoothing::Torch(smooth),
        (Some("megatron"), _) => LabelSmoothing::Megatron(smooth),
        (Some(other), _) => panic!("the format has no smoothing_convention {other}"),
    };
    let (dloss, valid) = (get("dloss"), labels.iter().filter(|l| **l != IGNORE).count());
    let reduction = text(case, "reduction");
    let weights = match reduction {
        "none" => dloss.clone(),
        "sum" => vec![dloss[0]; tokens],
        "mean" => vec![rounded(DType::F32, dloss[0] / valid.max(1) as f64); tokens],
        other => panic!("the format has no reduction {other}"),
    };
    let p = Problem { dtype, framed: false, z: &z, vocab, labels: &labels, weights: &weights, smoothing };
    let (loss, slopes) = p.sharded(h, widths, true);
    let what = format!("{} {name} {widths:?}", h.name);
    let near = |part: &str, ours: f64, wanted: f64| {
        let room = if dtype == DType::F32 { 1e-6 * wanted.abs().max(1.0) } else { 1e-5 * wanted.abs() };
        assert!((ours - wanted).abs() <= room, "{what} {part}: {ours} instead of {wanted}");
    };
    loss.iter().zip(get("loss_per_token")).for_each(|(o, w)| near("loss per token", *o, w));
    let (reduced, sum) = (get("loss"), loss.iter().sum::<f64>());
    match reduction {
        "none" => loss.iter().zip(reduced).for_each(|(o, w)| near("loss", *o, w)),
        "mean" if valid == 0 => assert_eq!(sum, 0.0, "{what}"),
        "mean" => near("loss", sum / valid as f64, reduced[0]),
        _ => near("loss", sum, reduced[0]),
    }
    let room = 1e-6 * dloss.iter().fold(1f64, |a, d| a.max(d.abs()));
    for (i, (ours, wanted)) in slopes.iter().zip(get("dlogits")).enumerate() {
        let wanted = if labels[i / vocab] == IGNORE { 0.0 } else { wanted };
        let round = |x: f64| bf16::from_f32(x as f32);
        let same = match dtype {
            DType::F32 => (ours - wanted).abs() <= room,
            _ => bf16_ulps(round(*ours), round(wanted)) <= 1,
        };
        assert!(same, "{what} dlogits[{i}]: {ours} instead of {wanted}");
    }
}
