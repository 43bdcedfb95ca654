//! How tokens are sampled: options of `generate` and `chat`.

use crate::output::UsageError;
use ferrotron_core::model::generate::Sampling;

/// Sampling options.
#[derive(Clone, Debug, clap::Args)]
pub struct SamplingArgs {
    /// Sampling temperature; 0 is greedy decoding
    #[arg(long, value_name = "T", default_value_t = 0.8)]
    pub temperature: f64,
    /// Sample from the K most likely tokens; 0 means all
    #[arg(long, value_name = "K", default_value_t = 0)]
    pub top_k: usize,
    /// Nucleus sampling: sample from the most likely tokens whose probabilities sum to P
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    pub top_p: f64,
    /// Random seed; the same seed gives the same text
    #[arg(long, value_name = "N", default_value_t = 1234)]
    pub seed: u64,
}

impl SamplingArgs {
    /// The options, checked.
    pub fn sampling(&self) -> Result<Sampling, UsageError> {
        let sampling = Sampling {
            temperature: self.temperature as f32,
            top_k: self.top_k,
            top_p: self.top_p as f32,
            seed: self.seed,
        };
        sampling.check().map_err(|e| UsageError::new(e.to_string()))?;
        Ok(sampling)
    }
}
