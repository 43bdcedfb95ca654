//! Cross-entropy.

use ferrotron_tensor::{Result, Stream, Tensor};

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

/// Losses.
pub trait LossKernels {
    /// See [`CrossEntropy`].
    fn cross_entropy(&self, s: &Stream, c: &CrossEntropy) -> Result<()>;
}
