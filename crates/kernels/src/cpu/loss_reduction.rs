//! Reduction of per-row losses to a batch loss.

use super::vocab::Id;

/// Reduction of row losses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// Sum.
    Sum,
    /// Sum divided by the number of rows that are not ignored, at least 1.
    Mean,
}

/// Number of rows that are not ignored.
pub fn valid_rows<I: Id>(labels: &[I], ignore: i64) -> usize {
    labels.iter().filter(|id| (**id).into() != ignore).count()
}

/// Reduced loss, summed in f64 in row order.
pub fn reduce_loss(loss: &[f32], valid: usize, reduction: Reduction) -> f32 {
    let sum: f64 = loss.iter().map(|l| f64::from(*l)).sum();
    match reduction {
        Reduction::Sum => sum as f32,
        Reduction::Mean => (sum / valid.max(1) as f64) as f32,
    }
}

/// Weight of every row's gradient for a gradient `dloss` of the reduced loss.
pub fn row_weight(dloss: f32, valid: usize, reduction: Reduction) -> f32 {
    match reduction {
        Reduction::Sum => dloss,
        Reduction::Mean => (f64::from(dloss) / valid.max(1) as f64) as f32,
    }
}
