//! From a recipe to the data it names.

use super::split::{normalise, split_matrix, split_range};
use super::{Batches, Blend, GptConfig, IndexedDataset, corpus};
use crate::config::Resolved;
use crate::{Error, Result};

/// What a run trains on, and what it is evaluated on.
pub struct Sources {
    /// Training samples.
    pub train: Box<dyn Batches>,
    /// Held-out samples, if the recipe sets some aside.
    pub eval: Option<Box<dyn Batches>>,
    /// Why there are none although the recipe asks for evaluation.
    pub note: Option<String>,
}

/// Opens the data of a recipe: the corpus inside the program, or a blend of `.bin/.idx` pairs.
pub fn open(r: &Resolved) -> Result<Sources> {
    let (d, seq) = (&r.config.data, r.plan.seq_len);
    if d.is_embedded() {
        if r.model.vocab < 256 {
            let what =
                format!("the embedded corpus is bytes, but model.vocab is {}; make it 256", r.model.vocab);
            return Err(Error::Invalid(what));
        }
        let eval = Box::new(corpus::held_out(seq, d.seed)?);
        return Ok(Sources { train: Box::new(corpus::training(seq, d.seed)?), eval: Some(eval), note: None });
    }
    if d.eod.is_none() && (d.reset_at_documents || d.mask_eod_loss) {
        let what = "data.eod is needed to see where documents end; set it to the tokenizer's end-of-text id";
        return Err(Error::Invalid(what.into()));
    }
    let too_large = |what: &str| Error::Invalid(format!("{what} does not fit in 32 bits"));
    let config = GptConfig {
        eod: d.eod.map(i64::from),
        reset_position_ids: d.reset_at_documents,
        reset_attention_mask: d.reset_at_documents,
        eod_mask_loss: d.mask_eod_loss,
        ..GptConfig::new(
            seq,
            u32::try_from(d.seed).map_err(|_| too_large("data.seed"))?,
            u32::try_from(r.model.vocab).map_err(|_| too_large("model.vocab"))?,
        )
    };
    let eval_samples = r.config.eval.batches.saturating_mul(r.config.train.global_batch as u64);
    let samples = [Some(r.plan.samples), Some(eval_samples), Some(0)];
    let weights: Vec<f64> = if d.weights.is_empty() { vec![1.0; d.path.0.len()] } else { d.weights.clone() };
    let shares = normalise(&d.split.0)?;
    let mut note = None;
    // What is not read needs no samples: a small corpus may have none to spare.
    let valid = if r.config.eval.every > 0 { shares[1] } else { 0.0 };
    let mut shares = [shares[0], valid, 0.0];
    if let Some(prefix) = without(&d.path.0, &shares, seq)? {
        note = Some(format!(
            "no evaluation: {prefix} has too few documents for data.split to set some of them aside"
        ));
        shares[1] = 0.0;
    }
    let [train, eval, _] = Blend::gpt(&d.path.0, Some(&weights), &shares, samples, &config)?;
    let Some(train) = train else {
        return Err(Error::Invalid(
            "data.split leaves nothing to train on; give its first share more".into(),
        ));
    };
    Ok(Sources { train: Box::new(train), eval: eval.map(|e| Box::new(e) as Box<dyn Batches>), note })
}

/// The first of the pairs whose part for validation is less than a sample.
fn without(prefixes: &[String], shares: &[f64; 3], seq: usize) -> Result<Option<String>> {
    let Some(fractions) = split_matrix(shares)[1] else { return Ok(None) };
    for prefix in prefixes {
        let data = IndexedDataset::open(prefix)?;
        let mut tokens = 0u64;
        for i in split_range(fractions, data.len()) {
            tokens += data.length(i)? as u64;
        }
        if tokens <= seq as u64 {
            return Ok(Some(prefix.clone()));
        }
    }
    Ok(None)
}
