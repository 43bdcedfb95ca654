//! Evaluation of a model: losses of text (perplexity) and of the choices of questions.

mod documents;
mod questions;
mod score;
mod windows;

pub use documents::{Document, documents};
pub use questions::{Accuracy, PROMPT, Question, QuestionScores, accuracy, questions, requests};
pub use score::{SequenceLoss, score};
pub use windows::{continuation, rolling};

/// What the losses of a dataset add up to.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Perplexity {
    /// Documents.
    pub documents: u64,
    /// Scored tokens.
    pub tokens: u64,
    /// Mean of `−ln p` over them.
    pub loss: f64,
    /// `e^loss`
    pub perplexity: f64,
    /// `Σ −log₂ p` per byte of text; absent where not all of the text is scored.
    pub bits_per_byte: Option<f64>,
}

impl Perplexity {
    /// Of documents and the losses of their windows.
    pub fn of(documents: &[Document], losses: &[SequenceLoss]) -> Perplexity {
        let tokens: u64 = losses.iter().map(|l| l.tokens).sum();
        let sum: f64 = losses.iter().map(|l| l.sum).sum();
        let loss = if tokens == 0 { 0.0 } else { sum / tokens as f64 };
        let bytes = documents.iter().map(|d| d.bytes).sum::<Option<u64>>().filter(|n| *n > 0);
        Perplexity {
            documents: documents.len() as u64,
            tokens,
            loss,
            perplexity: loss.exp(),
            bits_per_byte: bytes.map(|n| sum / n as f64 / std::f64::consts::LN_2),
        }
    }
}
