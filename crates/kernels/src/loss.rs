//! Cross-entropy.

use crate::checks::{dtypes, rows_of};
use crate::cpu::rows::Rows;
use ferrotron_tensor::{DType, Result, Stream, Tensor, shape_error};

/// How a target is softened.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Smoothing {
    /// All weight on the label.
    None,
    /// `(1−ε)·onehot + ε/V`, as PyTorch.
    Torch(f32),
    /// `1−ε` on the label, `ε/(V−1)` elsewhere, as Megatron.
    Megatron(f32),
}

impl Smoothing {
    /// The target as `(1 − spread)·onehot + off` with `off = spread/V`: gives `spread` and `off`.
    pub(crate) fn target(self, vocab: usize) -> (f32, f32) {
        let v = vocab as f64;
        let spread = match self {
            Smoothing::None => 0.0,
            Smoothing::Torch(e) => f64::from(e),
            // ε/(V−1) on the others is ε·V/(V−1) spread over all; a vocabulary of one has no others.
            Smoothing::Megatron(e) => f64::from(e) * v / (v - 1.0).max(1.0),
        };
        (spread as f32, (spread / v.max(1.0)) as f32)
    }
}

/// Label of a row that has no loss and no gradient.
pub const IGNORE: i32 = -100;

/// Row-wise cross-entropy of `logits [rows, V]` (f32 or bf16) against `labels` i32 `[rows]`.
pub struct CrossEntropy<'a> {
    /// Logits; with `gradient` they are overwritten by `weight·(softmax − target)`.
    pub logits: &'a Tensor,
    /// Columns that exist; those beyond are padding and get probability and gradient zero.
    pub vocab: usize,
    /// A label, or [`IGNORE`].
    pub labels: &'a Tensor,
    /// f32 `[rows]`: what each row's loss will be multiplied by later, known now, so that the gradient can
    /// be formed in the same pass and rounded once.
    pub weights: &'a Tensor,
    /// Softening of targets.
    pub smoothing: Smoothing,
    /// f32 `[rows]`: loss of each row, without its weight; 0 where ignored.
    pub loss: &'a Tensor,
    /// Write the gradient over the logits.
    pub gradient: bool,
}

impl CrossEntropy<'_> {
    /// The rows of the logits, after the checks every home makes.
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

/// Losses.
pub trait LossKernels {
    /// See [`CrossEntropy`].
    fn cross_entropy(&self, s: &Stream, c: &CrossEntropy) -> Result<()>;
}
