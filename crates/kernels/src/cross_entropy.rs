//! Softmax cross-entropy, on one rank and vocabulary-parallel.

use crate::checks::{dtypes, rows_of};
use crate::cpu::{rows::Rows, vocab::Shard};
use ferrotron_tensor::{DType, Result, Stream, Tensor, shape_error};

/// Label smoothing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LabelSmoothing {
    /// None: the target is one-hot.
    None,
    /// PyTorch's: `(1−ε)·onehot + ε/V`.
    Torch(f32),
    /// Megatron's: `1−ε` on the label, `ε/(V−1)` elsewhere.
    Megatron(f32),
}

impl LabelSmoothing {
    /// Returns `spread` and `off = spread/V` of the target `(1 − spread)·onehot + off`.
    pub(crate) fn target(self, vocab: usize) -> (f32, f32) {
        let v = vocab as f64;
        let spread = match self {
            LabelSmoothing::None => 0.0,
            LabelSmoothing::Torch(e) => f64::from(e),
            // ε/(V−1) on the other labels equals ε·V/(V−1) spread over all; a vocabulary of one has no other labels.
            LabelSmoothing::Megatron(e) => f64::from(e) * v / (v - 1.0).max(1.0),
        };
        (spread as f32, (spread / v.max(1.0)) as f32)
    }
}

/// Ignored label: its row has neither loss nor gradient.
pub const IGNORE: i32 = -100;

/// Row-wise cross-entropy of `logits [rows, V]` (f32 or bf16) against `labels` i32 `[rows]`.
pub struct CrossEntropy<'a> {
    /// Logits; with `gradient` they are overwritten by `weight·(softmax − target)`.
    pub logits: &'a Tensor,
    /// Size of the vocabulary; columns beyond it are padding with probability and gradient zero.
    pub vocab: usize,
    /// A label, or [`IGNORE`].
    pub labels: &'a Tensor,
    /// f32 `[rows]`: weight of each row in the total loss. It enters the gradient, which is written in the same pass and
    /// rounded once.
    pub weights: &'a Tensor,
    /// Label smoothing.
    pub smoothing: LabelSmoothing,
    /// f32 `[rows]`: loss of each row, without its weight; 0 where ignored.
    pub loss: &'a Tensor,
    /// Overwrite the logits by their gradient.
    pub gradient: bool,
}

impl CrossEntropy<'_> {
    /// Checks all arguments; returns the rows of the logits.
    pub(crate) fn check(&self, op: &'static str) -> Result<Rows> {
        let &[n, width] = self.logits.shape() else {
            return shape_error(op, format!("logits {:?} are not [rows, vocabulary]", self.logits.shape()));
        };
        let vectors = [self.labels, self.weights, self.loss];
        if vectors.iter().any(|t| t.shape() != [n] || !t.is_contiguous()) || self.vocab > width {
            return shape_error(
                op,
                format!("labels, weights and loss must be [{n}], vocabulary at most {width}"),
            );
        }
        dtypes(op, DType::I32, &[self.labels])?;
        dtypes(op, DType::F32, &[self.weights, self.loss])?;
        let [rows] = rows_of(op, [self.logits])?;
        Ok(rows)
    }
}

/// One tensor-parallel rank's columns `first..first + local` of the vocabulary.
///
/// Each rank computes [`CrossEntropyKernels::cross_entropy_stats`], all ranks all-gather them, and each computes the loss and
/// its columns of the gradient by [`CrossEntropyKernels::vocab_parallel_cross_entropy`].
pub struct VocabParallelLogits<'a> {
    /// `[rows, local]`, f32 or bf16.
    pub logits: &'a Tensor,
    /// Id of the first column. A rank may have no columns, or only padding.
    pub first: usize,
    /// Size of the whole vocabulary; columns at or beyond it are padding with probability and gradient zero.
    pub vocab: usize,
    /// i32 `[rows]`: ids in the whole vocabulary, or [`IGNORE`].
    pub labels: &'a Tensor,
}

impl VocabParallelLogits<'_> {
    /// Checks the logits and labels; returns the rows of the logits and the vocabulary shard.
    pub(crate) fn check(&self, op: &'static str) -> Result<(Rows, Shard)> {
        let &[n, local] = self.logits.shape() else {
            return shape_error(op, format!("logits {:?} are not [rows, columns]", self.logits.shape()));
        };
        if self.labels.shape() != [n] || !self.labels.is_contiguous() {
            return shape_error(op, format!("labels {:?} must be [{n}]", self.labels.shape()));
        }
        dtypes(op, DType::I32, &[self.labels])?;
        let [rows] = rows_of(op, [self.logits])?;
        Ok((rows, Shard::of_places(self.first, local, self.vocab)))
    }

    /// [`VocabParallelLogits::check`], and that `stats` is f32 `[rows, 4]`.
    pub(crate) fn check_stats(&self, op: &'static str, stats: &Tensor) -> Result<(Rows, Shard)> {
        let (rows, shard) = self.check(op)?;
        let wanted = [self.logits.shape()[0], 4];
        if stats.shape() != wanted || !stats.is_contiguous() {
            return shape_error(op, format!("statistics {:?} must be {wanted:?}", stats.shape()));
        }
        dtypes(op, DType::F32, &[stats])?;
        Ok((rows, shard))
    }

    /// [`VocabParallelLogits::check`], and that `all` is f32 `[ranks, rows, 4]`, weights and loss f32 `[rows]`. Also returns the
    /// number of ranks.
    pub(crate) fn check_all(
        &self,
        op: &'static str,
        all: &Tensor,
        weights: &Tensor,
        loss: &Tensor,
    ) -> Result<(Rows, Shard, usize)> {
        let (rows, shard) = self.check(op)?;
        let n = self.logits.shape()[0];
        let ranks = match all.shape() {
            &[ranks, r, 4] if ranks > 0 && r == n && all.is_contiguous() => ranks,
            found => return shape_error(op, format!("statistics {found:?} are not [ranks, {n}, 4]")),
        };
        if [weights, loss].iter().any(|t| t.shape() != [n] || !t.is_contiguous()) {
            return shape_error(op, format!("weights and loss must be [{n}]"));
        }
        dtypes(op, DType::F32, &[all, weights, loss])?;
        Ok((rows, shard, ranks))
    }
}

/// Cross-entropy from the gathered statistics of all tensor-parallel ranks; the loss of each row has the same bits on every
/// rank.
#[derive(Clone, Copy)]
pub struct VocabParallelCrossEntropy<'a> {
    /// This rank's columns of the logits.
    pub x: &'a VocabParallelLogits<'a>,
    /// f32 `[ranks, rows, 4]`: the [`CrossEntropyKernels::cross_entropy_stats`] of every rank, in rank order.
    pub stats: &'a Tensor,
    /// f32 `[rows]`: weight of each row's loss, as in [`CrossEntropy::weights`].
    pub weights: &'a Tensor,
    /// Label smoothing over the whole vocabulary.
    pub smoothing: LabelSmoothing,
    /// f32 `[rows]`: loss of each row without its weight; 0 where ignored.
    pub loss: &'a Tensor,
    /// Overwrite this rank's logits by `weight·(softmax − target)`, its padding columns by zeros.
    pub gradient: bool,
}

/// Cross-entropy kernels.
pub trait CrossEntropyKernels {
    /// See [`CrossEntropy`].
    fn cross_entropy(&self, s: &Stream, c: &CrossEntropy) -> Result<()>;

    /// Softmax statistics of this rank's columns: `stats` f32 `[rows, 4]` = max, `Σ exp(x − max)`, the label's logit (0 where
    /// another rank holds it) and `Σ x`. Max is −∞ and sums are 0 where the rank has no columns or the label is [`IGNORE`].
    fn cross_entropy_stats(&self, s: &Stream, x: &VocabParallelLogits, stats: &Tensor) -> Result<()>;

    /// See [`VocabParallelCrossEntropy`].
    fn vocab_parallel_cross_entropy(&self, s: &Stream, c: &VocabParallelCrossEntropy) -> Result<()>;
}
