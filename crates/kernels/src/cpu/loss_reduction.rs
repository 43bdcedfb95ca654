//! From losses of rows to the loss of a batch.

use super::vocab::Id;

/// How row losses become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// Σ
    Sum,
    /// Σ divided by the number of rows that are not ignored, or by 1 when there are none.
    Mean,
}

/// Rows that are not ignored.
pub fn valid_rows<I: Id>(labels: &[I], ignore: i64) -> usize {
    labels.iter().filter(|id| (**id).into() != ignore).count()
}

/// The reduced loss, summed in f64 in order of the rows.
pub fn reduce_loss(loss: &[f32], valid: usize, reduction: Reduction) -> f32 {
    let sum: f64 = loss.iter().map(|l| f64::from(*l)).sum();
    match reduction {
        Reduction::Sum => sum as f32,
        Reduction::Mean => (sum / valid.max(1) as f64) as f32,
    }
}

/// The weight of every row's gradient when the reduced loss has gradient `dloss`.
pub fn row_weight(dloss: f32, valid: usize, reduction: Reduction) -> f32 {
    match reduction {
        Reduction::Sum => dloss,
        Reduction::Mean => (f64::from(dloss) / valid.max(1) as f64) as f32,
    }
}
