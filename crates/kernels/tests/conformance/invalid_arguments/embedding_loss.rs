//! Embedding, cross-entropy, and vocabulary-parallel cross-entropy.

use super::{column, z};
use crate::devices::*;
use ferrotron_kernels::*;
use ferrotron_tensor::DType::{BF16, F32, I32};
use ferrotron_tensor::Tensor;

#[test]
fn embeddings_and_losses() {
    for h in devices() {
        let (k, s) = (&h.k, &h.s);
        let f = |shape: &[usize]| z(&h, F32, shape);
        let (table, y) = (f(&[5, 4]), f(&[2, 4]));
        for ids in [[0, 5], [-1, 0], [IGNORE, 0], [i32::MAX, 0], [i32::MIN, 0]] {
            refused(
                &h,
                "an id outside",
                k.embedding_forward(
                    s,
                    &EmbeddingForward {
                        ids: &h.ids(&ids),
                        table: &table,
                        first: 0,
                        vocab: 5,
                        scale: 1.0,
                        add: false,
                        y: &y,
                    },
                ),
            );
            refused(
                &h,
                "an id outside",
                k.embedding_backward(
                    s,
                    &EmbeddingBackward {
                        ids: &h.ids(&ids),
                        dy: &y,
                        first: 0,
                        vocab: 5,
                        scale: 1.0,
                        accumulate: false,
                        dtable: &table,
                    },
                ),
            );
        }
        // The table holds ids 3..8, but the vocabulary ends at 6.
        for ids in [[0, 6], [7, 0], [-1, 3]] {
            let ids = h.ids(&ids);
            refused(
                &h,
                "an id in no shard",
                k.embedding_forward(
                    s,
                    &EmbeddingForward {
                        ids: &ids,
                        table: &table,
                        first: 3,
                        vocab: 6,
                        scale: 1.0,
                        add: false,
                        y: &y,
                    },
                ),
            );
            refused(
                &h,
                "an id in no shard",
                k.embedding_backward(
                    s,
                    &EmbeddingBackward {
                        ids: &ids,
                        dy: &y,
                        first: 3,
                        vocab: 6,
                        scale: 1.0,
                        accumulate: false,
                        dtable: &table,
                    },
                ),
            );
        }
        let ids = h.ids(&[0, 1]);
        refused(
            &h,
            "width",
            k.embedding_forward(
                s,
                &EmbeddingForward {
                    ids: &ids,
                    table: &table,
                    first: 0,
                    vocab: 5,
                    scale: 1.0,
                    add: false,
                    y: &f(&[2, 3]),
                },
            ),
        );
        refused(
            &h,
            "rows",
            k.embedding_forward(
                s,
                &EmbeddingForward {
                    ids: &ids,
                    table: &table,
                    first: 0,
                    vocab: 5,
                    scale: 1.0,
                    add: false,
                    y: &f(&[3, 4]),
                },
            ),
        );
        refused(
            &h,
            "ids as floats",
            k.embedding_forward(
                s,
                &EmbeddingForward {
                    ids: &f(&[2]),
                    table: &table,
                    first: 0,
                    vocab: 5,
                    scale: 1.0,
                    add: false,
                    y: &y,
                },
            ),
        );
        refused(
            &h,
            "types",
            k.embedding_forward(
                s,
                &EmbeddingForward {
                    ids: &ids,
                    table: &table,
                    first: 0,
                    vocab: 5,
                    scale: 1.0,
                    add: false,
                    y: &z(&h, BF16, &[2, 4]),
                },
            ),
        );
        refused(
            &h,
            "strided",
            k.embedding_forward(
                s,
                &EmbeddingForward {
                    ids: &ids,
                    table: &table,
                    first: 0,
                    vocab: 5,
                    scale: 1.0,
                    add: false,
                    y: &f(&[2, 8]).narrow(1, 0, 4).unwrap(),
                },
            ),
        );
        refused(
            &h,
            "a 16-bit gradient",
            k.embedding_backward(
                s,
                &EmbeddingBackward {
                    ids: &ids,
                    dy: &y,
                    first: 0,
                    vocab: 5,
                    scale: 1.0,
                    accumulate: false,
                    dtable: &z(&h, BF16, &[5, 4]),
                },
            ),
        );

        let (logits, labels, weights, loss) = (f(&[3, 6]), h.ids(&[0, 1, 5]), f(&[3]), f(&[3]));
        for gradient in [false, true] {
            let base = || CrossEntropy {
                logits: &logits,
                vocab: 6,
                labels: &labels,
                weights: &weights,
                smoothing: LabelSmoothing::None,
                loss: &loss,
                gradient,
            };
            let go = |what: &str, c: CrossEntropy| refused(&h, what, k.cross_entropy(s, &c));
            go("more vocabulary than columns", CrossEntropy { vocab: 7, ..base() });
            go("no vocabulary", CrossEntropy { vocab: 0, ..base() });
            go("few labels", CrossEntropy { labels: &h.ids(&[0, 1]), ..base() });
            go("a label outside", CrossEntropy { labels: &h.ids(&[0, 1, 6]), ..base() });
            go("a negative label", CrossEntropy { labels: &h.ids(&[0, 1, -1]), ..base() });
            go("a label in the padding", CrossEntropy { vocab: 5, ..base() });
            go("labels as floats", CrossEntropy { labels: &f(&[3]), ..base() });
            go("few losses", CrossEntropy { loss: &f(&[2]), ..base() });
            go("few weights", CrossEntropy { weights: &f(&[2]), ..base() });
            go("a vector of logits", CrossEntropy { logits: &f(&[18]), ..base() });
            go("integers", CrossEntropy { logits: &z(&h, I32, &[3, 6]), ..base() });
            go("columns apart", CrossEntropy { logits: &f(&[6, 3]).transpose(0, 1).unwrap(), ..base() });
            go("a 16-bit loss", CrossEntropy { loss: &z(&h, BF16, &[3]), ..base() });
        }
    }
}

#[test]
fn vocab_parallel_losses() {
    for h in devices() {
        let (k, s) = (&h.k, &h.s);
        let f = |shape: &[usize]| z(&h, F32, shape);
        // Columns 4 to 10 of 8.
        let (logits, labels, weights, loss) = (f(&[3, 6]), h.ids(&[0, 7, IGNORE]), f(&[3]), f(&[3]));
        let (stats, all) = (f(&[3, 4]), f(&[2, 3, 4]));
        let base = || VocabParallelLogits { logits: &logits, first: 4, vocab: 8, labels: &labels };
        let both = |what: &str, x: VocabParallelLogits| {
            refused(&h, what, k.cross_entropy_stats(s, &x, &stats));
            for gradient in [false, true] {
                let done = k.vocab_parallel_cross_entropy(
                    s,
                    &VocabParallelCrossEntropy {
                        x: &x,
                        stats: &all,
                        weights: &weights,
                        smoothing: LabelSmoothing::None,
                        loss: &loss,
                        gradient,
                    },
                );
                refused(&h, what, done);
            }
        };
        both("few labels", VocabParallelLogits { labels: &h.ids(&[0, 1]), ..base() });
        both("a label outside", VocabParallelLogits { labels: &h.ids(&[0, 1, 12]), ..base() });
        both("a label in the padding", VocabParallelLogits { labels: &h.ids(&[0, 1, 8]), ..base() });
        both("a negative label", VocabParallelLogits { labels: &h.ids(&[0, 1, -1]), ..base() });
        both("no vocabulary", VocabParallelLogits { vocab: 0, ..base() });
        both("labels as floats", VocabParallelLogits { labels: &f(&[3]), ..base() });
        both("strided labels", VocabParallelLogits { labels: &column(&h, I32, 3), ..base() });
        both("a vector of logits", VocabParallelLogits { logits: &f(&[18]), ..base() });
        both("integers", VocabParallelLogits { logits: &z(&h, I32, &[3, 6]), ..base() });
        both("columns apart", VocabParallelLogits { logits: &f(&[6, 3]).transpose(0, 1).unwrap(), ..base() });

        let stat = |what: &str, t: &Tensor| refused(&h, what, k.cross_entropy_stats(s, &base(), t));
        stat("few statistics", &f(&[2, 4]));
        stat("short statistics", &f(&[3, 3]));
        stat("16-bit statistics", &z(&h, BF16, &[3, 4]));
        stat("strided statistics", &f(&[3, 5]).narrow(1, 0, 4).unwrap());
        for gradient in [false, true] {
            let go = |what: &str, all: &Tensor, weights: &Tensor, loss: &Tensor| {
                let none = LabelSmoothing::None;
                refused(
                    &h,
                    what,
                    k.vocab_parallel_cross_entropy(
                        s,
                        &VocabParallelCrossEntropy {
                            x: &base(),
                            stats: all,
                            weights,
                            smoothing: none,
                            loss,
                            gradient,
                        },
                    ),
                );
            };
            go("statistics of no rank", &f(&[0, 3, 4]), &weights, &loss);
            go("statistics of one rank alone", &stats, &weights, &loss);
            go("statistics of other rows", &f(&[2, 2, 4]), &weights, &loss);
            go("short statistics", &f(&[2, 3, 3]), &weights, &loss);
            go("16-bit statistics", &z(&h, BF16, &[2, 3, 4]), &weights, &loss);
            go("strided statistics", &f(&[3, 2, 4]).transpose(0, 1).unwrap(), &weights, &loss);
            go("few weights", &all, &f(&[2]), &loss);
            go("16-bit weights", &all, &z(&h, BF16, &[3]), &loss);
            go("few losses", &all, &weights, &f(&[2]));
            go("a 16-bit loss", &all, &weights, &z(&h, BF16, &[3]));
        }
    }
}
